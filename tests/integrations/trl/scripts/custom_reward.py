"""A reward of the token ids, and one that depends on how far training has come."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def reward_length(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def reward_harder_later(prompts, completions, trainer_state, **kwargs):
    share = trainer_state.global_step / trainer_state.max_steps
    return [share * len(set(completion)) for completion in completions]


dataset = Dataset.from_list([{"prompt": f"Count to {number}:"} for number in range(8)])
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=[reward_length, reward_harder_later],
    args=GRPOConfig(
        output_dir="custom",
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
