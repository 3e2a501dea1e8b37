"""The shortest script: a model by its name, a data set, and one reward function."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/tldr", split="train")


def reward_num_unique_letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


training_args = GRPOConfig(
    output_dir="Qwen3-0.6B-GRPO",
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=6,
    max_steps=2,
    logging_steps=1,
    bf16=False,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=reward_num_unique_letters,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
