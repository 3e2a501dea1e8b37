"""GSPO: ratios of sequences, four updates per rollout."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=letters,
    args=GRPOConfig(
        output_dir="gspo",
        importance_sampling_level="sequence",
        loss_type="grpo",
        beta=0.0,
        epsilon=3e-4,
        epsilon_high=4e-4,
        steps_per_generation=4,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        logging_steps=1,
        bf16=False,
    ),
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
)
trainer.train()
