"""`rollout_func` of `GRPOTrainer`: what it gets, what rewards get of its result, and results that are no rollouts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from datasets import Dataset

from groupwise.errors import ConfigError
from groupwise.trl import GRPOConfig, GRPOTrainer
from tests.integrations.trl.fixtures import POLICY, models, workplace
from tests.integrations.trl.test_flow import DATA, SMALL, letters

__all__ = ["models", "workplace"]

END = 258
CONVERSATIONS = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in DATA]


def rollouts(prompts: Any, trainer: Any) -> dict[str, Any]:
    """Two sampled tokens, two of an environment, and the end."""
    ids = [[97 + number, 98, 60, 62, END] for number in range(len(prompts))]
    texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    return {
        "prompt_ids": [trainer.processing_class(text)["input_ids"] for text in texts],
        "completion_ids": ids,
        "logprobs": [[-5.5, -5.5, 0.0, 0.0, -5.5]] * len(prompts),
        "env_mask": [[1, 1, 0, 0, 1]] * len(prompts),
        "score": [number / 8 for number in range(len(prompts))],
    }


def make(function: Any = rollouts, reward: Any = letters, data: Any = DATA, **options: Any) -> GRPOTrainer:
    given = {name: options.pop(name) for name in ("tools", "environment_factory", "eval_dataset") if name in options}
    return GRPOTrainer(POLICY, reward, GRPOConfig(**{**SMALL, **options}), data, rollout_func=function, **given)


@pytest.mark.parametrize("data", [DATA, Dataset.from_list(CONVERSATIONS)], ids=["texts", "messages"])
def test_what_the_function_and_rewards_get(workplace, data):
    calls: list[dict[str, Any]] = []

    def function(prompts: Any, trainer: Any) -> dict[str, Any]:
        calls.append({"prompts": prompts, "step": trainer.state.global_step, "grad": torch.is_grad_enabled()})
        assert trainer.num_generations == 4
        return rollouts(prompts, trainer)

    def reward(completions: Any, completion_ids: Any, score: Any, answer: Any, **columns: Any) -> list[float]:
        calls[-1] |= {"completions": completions, "ids": completion_ids, "score": score, "columns": set(columns)}
        return score

    trainer = make(function, reward, data, shuffle_dataset=False)
    trainer.train()
    first = calls[0]
    assert first["prompts"] == [data[0]["prompt"]] * 4
    assert (first["step"], calls[1]["step"], first["grad"]) == (0, 1, False)
    texts = ["ab<>", "bb<>", "cb<>", "db<>"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert first["completions"] == (texts if data is DATA else messages)
    assert first["ids"] == [[97 + number, 98, 60, 62, END] for number in range(4)]
    assert first["score"] == [0.0, 0.125, 0.25, 0.375]
    assert not {"env_mask", "conversation", "environments"} & first["columns"]
    log = trainer.state.log_history[0]
    assert log["completions/mean_length"] == 3.0  # without what the environment said
    assert log["completions/clipped_ratio"] == 0.0
    assert log["num_tokens"] == 4 * (len(data[0]["prompt"] if data is DATA else DATA[0]["prompt"]) + 3)
    assert not any(name.startswith("tools/") for name in log)


def test_tensors_are_taken_and_evaluation_asks_the_function(workplace):
    def function(prompts: Any, trainer: Any) -> dict[str, Any]:
        output = rollouts(prompts, trainer)
        tensors = {name: torch.tensor(output[name]) for name in ("completion_ids", "logprobs", "env_mask")}
        arrays = [numpy.array(ids) for ids in output["prompt_ids"]]
        return {**output, **tensors, "prompt_ids": arrays}

    metrics = make(function, eval_dataset=DATA.select([0, 1])).evaluate()
    assert metrics["eval_completions/mean_length"] == 3.0
    assert metrics["eval_reward"] == pytest.approx(
        (4 + 3 + 4 + 4) / 4
    )  # of the completions, the second has the letters b, <, >


def test_the_policy_can_be_asked(workplace):
    weights: list[float] = []

    def function(prompts: Any, trainer: Any) -> dict[str, Any]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        weights.append(float(model.get_input_embeddings().weight.double().sum()))
        inputs = trainer.processing_class(prompts, return_tensors="pt", padding=True, padding_side="left")
        inputs = {name: value.to(model.device) for name, value in inputs.items() if name != "token_type_ids"}
        output = model.generate(
            **inputs, max_new_tokens=trainer.args.max_completion_length, do_sample=True,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        sampled = output.sequences[:, inputs["input_ids"].shape[1] :]
        logps = torch.stack(output.logits, 1).log_softmax(-1).gather(2, sampled[:, :, None])[:, :, 0]
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": prompt_ids, "completion_ids": sampled, "logprobs": logps}

    trainer = make(function, lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids])
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(set(weights)) == 2  # it samples with the weights of the last update
    row = json.loads(Path("out/metrics.jsonl").read_text().splitlines()[0])
    assert row["sampler/logp_difference_mean"] < 1e-5


def changed(**changes: Any) -> Any:
    return lambda prompts, trainer: {**rollouts(prompts, trainer), **changes}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda prompts, trainer: [], "returned \\[\\].* dict with prompt_ids, completion_ids, logprobs"),
        (lambda prompts, trainer: {"prompt_ids": [], "completion_ids": []}, r"must return keys \['logprobs'\]"),
        (changed(logprobs=None), r"must return keys \['logprobs'\]"),
        (changed(prompt_ids=None), r"must return keys \['prompt_ids'\]"),
        (changed(completion_ids=[[1]]), "completion_ids has 1 entries for 4 prompts"),
        (changed(score=[1.0]), "score has 1 entries for 4 prompts"),
        (changed(completion_ids=3), "completion_ids has 3 for 4 prompts"),
        (changed(completion_ids=[[]] * 4), r"completion 1: its completion_ids is \[\]"),
        (changed(prompt_ids=["text"] * 4), "completion 1: its prompt_ids is 'text', not a list of token ids"),
        (changed(completion_ids=[[1.5] * 5] * 4), "completion_ids has 1.5; a token is an integer from 0 to 258"),
        (changed(completion_ids=[[259] * 5] * 4), "completion_ids has 259"),
        (changed(prompt_ids=[[-1]] * 4), "prompt_ids has -1"),
        (changed(logprobs=[[-1.0]] * 4), "completion 1: its logprobs has 1 numbers for 5 tokens"),
        (changed(logprobs=[["a"] * 5] * 4), "logprobs has 'a', which is not a number"),
        (changed(logprobs=[[math.nan] * 5] * 4), "the log-prob of token 1 is nan"),
        (changed(logprobs=[[-1.0, -math.inf, 0, 0, 0]] * 4), "the log-prob of token 2 is -inf"),
        (changed(env_mask=[[1, 1, 0]] * 4), "env_mask has 3 numbers for 5 tokens"),
        (changed(env_mask=[[2, 1, 0, 0, 1]] * 4), "env_mask has 2.0; it is 0 or 1"),
        (changed(env_mask=[[0] * 5] * 4), "env_mask is 0 for all tokens"),
        (changed(prompt_ids=[[1] * 4096] * 4), "4101 tokens, more than the model's window of 4096"),
    ],
)
def test_results_that_are_no_rollouts(workplace, function, words):
    with pytest.raises(ValueError, match=words):
        make(function).train()


def test_an_error_of_the_function_ends_the_run_and_keeps_its_steps(workplace):
    def function(prompts: Any, trainer: Any) -> dict[str, Any]:
        if trainer.state.global_step:
            raise ConnectionError("the game is over")
        return rollouts(prompts, trainer)

    with pytest.raises(ConnectionError, match="the game is over") as caught:
        make(function, save_strategy="steps", save_steps=1).train()
    assert "rollout_func" in caught.value.__notes__[0]
    assert Path("out/checkpoint-1/model.safetensors").is_file()
    trainer = make(save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2


def test_log_probs_of_what_was_given_may_be_anything(workplace):
    make(changed(logprobs=[[-1.0, -1.0, math.nan, -math.inf, -1.0]] * 4), max_steps=1).train()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"function": 3}, "rollout_func is 3"),
        ({"tools": [print]}, "cannot be combined with tools"),
        ({"environment_factory": dict}, "cannot be combined with tools or environment_factory"),
    ],
)
def test_what_is_refused(workplace, options, words):
    with pytest.raises((ConfigError, TypeError), match=words):
        make(**options)
