"""Rewards that apply to some rows only return None for the others."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def math_reward(completions, task, **kwargs):
    return [
        float(sum(map(str.isdigit, completion))) if kind == "math" else None
        for completion, kind in zip(completions, task, strict=True)
    ]


def coding_reward(completions, task, **kwargs):
    return [
        float(len(set(completion))) if kind == "code" else None
        for completion, kind in zip(completions, task, strict=True)
    ]


dataset = Dataset.from_list(
    [{"prompt": "What is 2+2?", "task": "math"}, {"prompt": "Write a function", "task": "code"}] * 4
)
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=[math_reward, coding_reward],
    args=GRPOConfig(
        output_dir="tasks",
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        logging_steps=1,
        bf16=False,
    ),
    train_dataset=dataset,
)
trainer.train()
