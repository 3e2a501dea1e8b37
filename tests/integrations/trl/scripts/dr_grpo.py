"""Dr. GRPO: a constant denominator, and advantages that are not scaled."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=letters,
    args=GRPOConfig(
        output_dir="dr-grpo",
        loss_type="dr_grpo",
        scale_rewards=False,
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
