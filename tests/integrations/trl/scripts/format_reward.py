"""A regular expression checks the format of a conversational completion."""

import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

PATTERN = re.compile(r"^<think>.*?</think><answer>.*?</answer>$", re.DOTALL)


def format_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if PATTERN.match(content) else -0.01 * len(content) for content in contents]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=format_reward,
    args=GRPOConfig(
        output_dir="format",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        logging_steps=1,
        bf16=False,
    ),
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
)
trainer.train()
