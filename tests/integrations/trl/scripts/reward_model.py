"""A reward model by its name beside a function."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def short(completions, **kwargs):
    return [-0.1 * len(completion) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=["Skywork/Skywork-Reward-V2-Qwen3-0.6B", short],
    args=GRPOConfig(
        output_dir="reward-model",
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
