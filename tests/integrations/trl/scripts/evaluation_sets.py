"""Several evaluation sets during training, and another one afterwards."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


tldr = load_dataset("trl-lib/tldr", split="train")
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=letters,
    args=GRPOConfig(
        output_dir="evaluations",
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        logging_steps=1,
        bf16=False,
    ),
    train_dataset=tldr,
    eval_dataset={"first": tldr.select([0, 1]), "second": tldr.select([2, 3])},
)
trainer.train()
metrics = trainer.evaluate(tldr.select([4, 5]), metric_key_prefix="test")
trainer.log_metrics("test", metrics)
trainer.save_metrics("test", metrics)
