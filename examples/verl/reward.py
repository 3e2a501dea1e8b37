"""A reward for creative writing in verl: three rules, and optionally a language model as a judge.

    reward.custom_reward_function.path=reward.py
    reward.custom_reward_function.name=score
    +reward.custom_reward_function.reward_kwargs.judge_endpoint=http://127.0.0.1:8000/v1
    +reward.custom_reward_function.reward_kwargs.judge_model=Qwen/Qwen3-32B

The rules are cheap checks against answers that repeat themselves, leave the subject or have a wrong length; they do not
measure quality, which the judge does. Only the text after the last </think> counts. The judge is any endpoint with
OpenAI's chat API; its key is read from the environment variable named in judge_key_env.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from groupwise.errors import ConfigError, InputError
from groupwise.rewards.judge import judge as make_judge
from groupwise.rewards.writing import keywords, length_band, repetition

RULES = {  # weight and function
    "keywords": (1.0, keywords(least=0.4)),  # words of the request, without copied passages
    "repetition": (1.0, repetition(n=3, most=0.25)),
    "length": (0.5, length_band(low=150, high=1500, soft=150)),
}
JUDGE_WEIGHT = 4.0
RUBRIC = """Judge a piece of creative writing. The request:

{prompt}

The text:

{answer}

How good is it, as an editor of a literary magazine would judge it? Consider whether it does what was asked, its voice
and imagery, whether it surprises without losing its thread, and how it ends. Length is no merit. Do not prefer one
style or genre over another: very different texts can be equally good.
End with a line "Score: N", where N is a number from {low} (poor) to {high} (excellent)."""


async def score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    judge_endpoint: str | None = None,
    judge_model: str | None = None,
    judge_key_env: str | None = None,
    **_: Any,
) -> dict[str, float]:
    """The reward of an answer, and its parts, which verl logs.

    An answer that the judge could not score is an error, not a low reward: verl then leaves out the prompt in this step
    and counts it in training/rollout_failure/evicted_samples.
    """
    request = (extra_info or {}).get("request")
    if not isinstance(request, str):
        raise InputError("extra_info has no request; make the data with to_parquet.py, which adds the prompt's text")
    weights, parts = {}, {}
    for name, (weight, rule) in RULES.items():
        value = rule([request], [solution_str])[0]
        weights[name], parts[name] = weight, 1.0 if value is None else value  # a request without key words
    if judge_endpoint is not None:
        if judge_model is None:
            raise ConfigError("judge_endpoint is set without judge_model; set reward_kwargs.judge_model too")
        (verdict,) = await _judge(judge_endpoint, judge_model, judge_key_env)([request], [solution_str])
        weights["judge"], parts["judge"] = JUDGE_WEIGHT, verdict
    total = sum(weights[name] * value for name, value in parts.items()) / sum(weights.values())
    return {"score": total, **parts}


@functools.cache
def _judge(endpoint: str, model: str, key_env: str | None) -> Any:
    return make_judge(
        model=model,
        endpoint=endpoint,
        api_key_env=key_env,
        rubric=RUBRIC,
        concurrency=32,
        max_tokens=1024,
        on_failure="raise",
    )
