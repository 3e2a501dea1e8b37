"""A rollout function: the model is asked twice, and what a game says in between is masked with env_mask."""

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def sample(model, tokenizer, ids, limit):
    inputs = torch.tensor([ids], device=model.device)
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=limit,
        do_sample=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    sampled = output.sequences[0, len(ids) :]
    logprobs = torch.stack(output.logits, 1)[0].float().log_softmax(-1).gather(1, sampled[:, None])[:, 0]
    return sampled.tolist(), logprobs.tolist()


def play(prompts, trainer):
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    output = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "env_reward": []}
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        guess, guess_logprobs = sample(model, tokenizer, ids, 4)
        answer = tokenizer(" Wrong, again: ")["input_ids"]
        second, second_logprobs = sample(model, tokenizer, ids + guess + answer, 4)
        output["prompt_ids"].append(ids)
        output["completion_ids"].append(guess + answer + second)
        output["logprobs"].append(guess_logprobs + [0.0] * len(answer) + second_logprobs)
        output["env_mask"].append([1] * len(guess) + [0] * len(answer) + [1] * len(second))
        output["env_reward"].append(sum(second) % 10 / 10)
    return output


def reward_from_env(completions, env_reward, **kwargs):
    return env_reward


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=reward_from_env,
    args=GRPOConfig(
        output_dir="game",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=32,
        max_steps=2,
        logging_steps=1,
        bf16=False,
    ),
    train_dataset=Dataset.from_dict({"prompt": [f"Guess {n}: " for n in range(8)]}),
    rollout_func=play,
)
trainer.train()
