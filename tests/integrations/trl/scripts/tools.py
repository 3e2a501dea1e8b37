"""Tools: functions that the model may call, one of them async."""

import asyncio

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    await asyncio.sleep(0)
    return a + b


def accuracy(completions, answer, **kwargs):
    last = [completion[-1].get("content") or "" for completion in completions]
    return [float(str(gold) in text) - 0.01 * len(text) for text, gold in zip(last, answer, strict=True)]


dataset = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"What is {n} * 3 + 1?"}], "answer": 3 * n + 1} for n in range(8)]
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy,
    args=GRPOConfig(
        output_dir="tools",
        max_tool_calling_iterations=3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        max_steps=2,
        logging_steps=1,
        bf16=False,
    ),
    train_dataset=dataset,
    tools=[multiply, async_add],
)
trainer.train()
