"""An environment that gives the reward itself, beside a reward function that looks at the environments."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


class IncrementEnv:
    def reset(self, start: int, **kwargs) -> str:
        self.counter = start
        return f"The counter is {start}. Bring it to 5."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return -abs(self.counter - 5) / 10


def brevity(completions, environments, **kwargs):
    assert all(isinstance(environment, IncrementEnv) for environment in environments)
    return [-len(completion[-1].get("content") or "") / 100 for completion in completions]


dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "Play. "}], "start": n} for n in range(8)])
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=brevity,
    args=GRPOConfig(
        output_dir="environment",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        max_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
        bf16=False,
    ),
    train_dataset=dataset,
    eval_dataset=dataset.select([0, 1]),
    environment_factory=IncrementEnv,
)
trainer.train()
