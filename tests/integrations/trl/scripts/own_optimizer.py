"""An optimizer and a scheduler of the script's own."""

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=letters,
    args=GRPOConfig(
        output_dir="optimizer",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        logging_steps=1,
        bf16=False,
    ),
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
    optimizers=(optimizer, scheduler),
)
trainer.train()
