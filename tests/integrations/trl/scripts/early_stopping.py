"""transformers' early stopping, and the best model at the end."""

from datasets import load_dataset
from transformers import EarlyStoppingCallback
from trl import GRPOConfig, GRPOTrainer


def constant_in_evaluation(completions, **kwargs):
    return [float(len(set(completion)) > 2) for completion in completions]


tldr = load_dataset("trl-lib/tldr", split="train")
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=constant_in_evaluation,
    args=GRPOConfig(
        output_dir="early",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=8,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_completions/mean_length",
        greater_is_better=True,
        logging_steps=1,
        bf16=False,
    ),
    train_dataset=tldr,
    eval_dataset=tldr.select([0, 1]),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
trainer.train()
