"""A model that has an adapter already; with beta its start is the reference."""

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM"))


def letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=letters,
    args=GRPOConfig(
        output_dir="adapter",
        learning_rate=1e-3,
        beta=0.04,
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
