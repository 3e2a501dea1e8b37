"""Conversations with a system message, made by ``map``, and arguments of the chat template."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

SYSTEM = "Answer in one word."


def make_conversation(example):
    return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["question"]}]}


dataset = load_dataset("openai/gsm8k", "main", split="train").map(make_conversation)


def roles(prompts, completions, **kwargs):
    assert [message["role"] for message in prompts[0]] == ["system", "user"]
    return [float(len(completion[0]["content"])) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=roles,
    args=GRPOConfig(
        output_dir="chat",
        chat_template_kwargs={"enable_thinking": False},
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
