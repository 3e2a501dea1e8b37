"""A callback that sees every log, asks for a checkpoint, and stops the run."""

from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StopAtThree(TrainerCallback):
    def __init__(self):
        self.rewards = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.rewards.append(logs["reward"])

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        assert model is not None
        assert lr_scheduler.get_last_lr()[0] >= 0
        control.should_save = state.global_step == 2
        control.should_training_stop = state.global_step == 3
        return control


def letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


recorder = StopAtThree()
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=letters,
    args=GRPOConfig(
        output_dir="callbacks",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=20,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
    ),
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
    callbacks=[recorder],
)
trainer.train()
