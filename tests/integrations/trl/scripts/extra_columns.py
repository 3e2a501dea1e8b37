"""Other columns of the data set reach the reward."""

import re

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def accuracy(completions, ground_truth, **kwargs):
    matches = [re.search(r"\d", completion) for completion in completions]
    return [
        1.0 if match and match.group(0) == truth else -0.01 * len(completion)
        for match, truth, completion in zip(matches, ground_truth, completions, strict=True)
    ]


dataset = Dataset.from_dict(
    {"prompt": [f"What is {n} plus 1?" for n in range(8)], "ground_truth": [str(n + 1) for n in range(8)]}
)
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=accuracy,
    args=GRPOConfig(
        output_dir="columns",
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
