"""Async rewards are awaited together."""

import asyncio

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


async def judge(prompts, completions, **kwargs):
    async def score(completion):
        await asyncio.sleep(0.001)
        return float(len(set(completion)))

    return await asyncio.gather(*(score(completion) for completion in completions))


def short(completions, **kwargs):
    return [-0.1 * len(completion) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=[judge, short],
    args=GRPOConfig(
        output_dir="async",
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
