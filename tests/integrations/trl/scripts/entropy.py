"""Only tokens of high entropy are trained, in batches of all rewards."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=letters,
    args=GRPOConfig(
        output_dir="entropy",
        top_entropy_quantile=0.2,
        scale_rewards="batch",
        delta=4.0,
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
