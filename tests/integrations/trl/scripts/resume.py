"""A run that ends early is continued by a second trainer."""

from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            control.should_save = control.should_training_stop = True


def make_trainer(callbacks=None):
    args = GRPOConfig(
        output_dir="resume",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        learning_rate=1e-3,
        bf16=False,
    )
    data = load_dataset("trl-lib/tldr", split="train")
    return GRPOTrainer("Qwen/Qwen3-0.6B", letters, args, data, callbacks=callbacks)


make_trainer([Interrupt()]).train()
trainer = make_trainer()
trainer.train(resume_from_checkpoint=True)
