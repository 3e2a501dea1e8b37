"""Several rewards with weights; one of them is made with a partial."""

from functools import partial

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def contains(completions, letter, **kwargs):
    return [float(letter in completion) for completion in completions]


def short(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]


class Digits:
    def __call__(self, completions, **kwargs):
        return [sum(map(str.isdigit, completion)) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=[partial(contains, letter="e"), short, Digits()],
    args=GRPOConfig(
        output_dir="several",
        reward_weights=[1.0, 0.1, 0.5],
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
