"""Completions are printed and written, with a column and a metric of the reward's own."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def letters(completions, log_extra=None, log_metric=None, **kwargs):
    counts = [len(set(completion)) for completion in completions]
    if log_extra:
        log_extra("first_letter", [completion[:1] for completion in completions])
    if log_metric:
        log_metric("most_letters", max(counts))
    return counts


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=letters,
    args=GRPOConfig(
        output_dir="completions",
        log_completions=True,
        num_completions_to_print=2,
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
