"""How good a model is on held-out rows: every grade with its interval, and what went wrong with the rest.

An accuracy of one answer per row comes with Wilson's interval; with several answers per row they are averaged first,
and rows are resampled (bootstrap). A row without a findable answer counts as wrong, and is counted by itself too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from groupwise.data import Prompt, columns_of, completion_for_reward
from groupwise.errors import ConfigError, RewardError
from groupwise.generate.types import Generator, Sampling, Stop
from groupwise.rewards import Scorer, weighted_total
from groupwise.stats import Interval, bootstrap_interval, mean_interval
from groupwise.tasks.base import Grade, Row

REWARD = "reward"
CHUNK = 512  # rows whose answers are sampled at a time, so that a display can move


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name, and one record per answer to look at."""

    metrics: dict[str, float]
    answers: list[dict[str, Any]] = field(default_factory=list)

    def interval(self, name: str) -> Interval:
        return Interval(self.metrics[name], self.metrics[f"{name}_low"], self.metrics[f"{name}_high"])


def evaluate(
    generator: Generator,
    tokenizer: Any,
    rows: Sequence[Row],
    prompts: Sequence[Prompt],
    *,
    grades: Mapping[str, Grade],
    scorer: Scorer | None = None,
    sampling: Sampling,
    samples: int = 1,
    stop: Stop | None = None,
    prompt_column: str = "prompt",
    trainer_state: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Answer every row and grade the answers. Without grades the mean reward is what is measured.

    trainer_state: what reward functions that ask for it are given.
    """
    if not rows:
        raise ConfigError("there is nothing to evaluate on: give held-out rows (data.held_out)")
    if not grades and scorer is None:
        raise ConfigError("there is nothing to evaluate by: the task has neither grades nor rewards")
    texts: list[str] = []
    tokens: list[list[int]] = []
    reasons: list[str] = []
    for start in range(0, len(rows), CHUNK):
        part = [prompt.ids for prompt in prompts[start : start + CHUNK]]
        keys = range(start, start + len(part))
        rollout = generator.generate(part, samples, sampling, stop=stop, keys=list(keys))
        ids = [row[:length].tolist() for row, length in zip(rollout.ids, rollout.lengths.tolist(), strict=True)]
        texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
        tokens += ids
        reasons += rollout.stop_reasons
        progress(start + len(part), len(rows))
    asked = [row for row in rows for _ in range(samples)]
    lengths = [len(ids) for ids in tokens]
    metrics: dict[str, float] = {}
    answers: list[dict[str, Any]] = [
        {"row": number // samples, "sample": number % samples, "answer": text, "tokens": length, "stop_reason": reason}
        for number, (text, length, reason) in enumerate(zip(texts, lengths, reasons, strict=True))
    ]
    for name, grade in grades.items():
        results = [grade(row, text) for row, text in zip(asked, texts, strict=True)]
        _add(metrics, name, [float(bool(result)) for result in results], samples)
        metrics[f"{name}_no_answer"] = sum(result is None for result in results) / len(results)
        for record, result in zip(answers, results, strict=True):
            record[name] = result
    if scorer is not None:
        rewards = _rewards(scorer, asked, texts, tokens, prompt_column, trainer_state)
        _add(metrics, REWARD, rewards, samples)
        metrics[f"{REWARD}_unscored"] = sum(map(math.isnan, rewards)) / len(rewards)
        for record, reward in zip(answers, rewards, strict=True):
            record[REWARD] = None if math.isnan(reward) else reward
    metrics["mean_length"] = sum(lengths) / len(lengths)
    metrics["truncated"] = sum(reason == "length" for reason in reasons) / len(reasons)
    return Evaluation(metrics, answers)


def _rewards(
    scorer: Scorer,
    rows: Sequence[Row],
    texts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    prompt_column: str,
    state: Any,
) -> list[float]:
    """The weighted sum for every answer; NaN where no function had anything to say, or one failed and may."""
    asked = [row[prompt_column] for row in rows]
    given = [completion_for_reward(prompt, text) for prompt, text in zip(asked, texts, strict=True)]
    columns = columns_of(rows, without=prompt_column)
    scores = scorer.score(asked, given, columns, completion_ids=tokens, trainer_state=state)
    weights = [function.weight for function in scorer.functions]
    total: list[float] = weighted_total(scores.rewards, weights).tolist()
    if all(map(math.isnan, total)):
        reason = f" ({scores.failures[0].reason})" if scores.failures else ": they returned None for every one"
        raise RewardError(f"the rewards scored none of the {len(total)} answers to the held-out rows{reason}")
    return total


def _add(metrics: dict[str, float], name: str, values: Sequence[float], samples: int) -> None:
    """A mean over rows and its interval. What is NaN counts nowhere."""
    table = np.asarray(values, dtype=np.float64).reshape(-1, samples)
    table = table[~np.isnan(table).all(1)]
    by_row = np.nanmean(table, axis=1)
    found = mean_interval(by_row) if samples == 1 else bootstrap_interval(by_row)
    metrics |= {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}
