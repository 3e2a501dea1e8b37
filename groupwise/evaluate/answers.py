"""Sample completions of held-out rows and grade them: every grade as a share with its confidence interval.

With one completion per row the interval is Wilson's; with several, they are averaged per row and the rows are
resampled (bootstrap). A completion without an answer counts as wrong, and its share is reported too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.data import Prompt, decode_completions, reward_inputs, where_of
from groupwise.data.prompts import Message
from groupwise.data.rows import name_completion
from groupwise.errors import ConfigError, RewardError
from groupwise.generate.types import Generator, Sampling, Stop
from groupwise.rewards import Scorer, weighted_total
from groupwise.stats import Interval, bootstrap_interval, mean_interval, scale_of
from groupwise.tasks.base import Grade, TaskRow
from groupwise.text import plural
from groupwise.user_code import failures_named

REWARD = "reward"
CHUNK = 512  # rows sampled at a time, between two calls of `progress`


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name, and one record per completion."""

    metrics: dict[str, float]
    answers: list[dict[str, Any]] = field(default_factory=list)

    def interval(self, name: str) -> Interval:
        return Interval(self.metrics[name], self.metrics[f"{name}_low"], self.metrics[f"{name}_high"])


class SampledAnswers(NamedTuple):
    """What was sampled for some rows, one entry per completion."""

    texts: list[str]
    ids: list[list[int]]
    stop_reasons: list[str]
    rows: list[TaskRow]  # as rewards get them
    conversations: list[list[Message]] | None = None  # the completions, if they have several turns


Sample = Callable[[Sequence[TaskRow], Sequence[Prompt], Sequence[int]], SampledAnswers]
"""Samples completions of rows with these prompts and keys."""


def evaluate(
    generator: Generator,
    tokenizer: Any,
    rows: Sequence[TaskRow],
    prompts: Sequence[Prompt],
    *,
    grades: Mapping[str, Grade],
    scorer: Scorer | None = None,
    sampling: Sampling,
    samples: int = 1,
    stop: Stop | None = None,
    prompt_column: str = "prompt",
    score_batch: int = CHUNK,
    trainer_state: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    each_reward: bool = False,
    sample: Sample | None = None,
) -> Evaluation:
    """Sample ``samples`` completions of every row; grade them, and score them if there is a ``scorer``.

    ``sample`` replaces the generator, for completions that are conversations.
    ``each_reward``: also report the mean and the standard deviation of each reward function, and of their sum.
    Rewards are computed for ``score_batch`` completions at a time, so that their time limit is that of a batch.
    ``trainer_state`` is passed to the reward functions that take it.
    """
    if not rows:
        raise ConfigError(
            "there is nothing to evaluate on: give held-out rows (data.held_out, data.held_out_from_train)"
        )
    if not grades and scorer is None:
        raise ConfigError("there is nothing to evaluate by: the task has neither grades nor rewards")
    sample = sample or partial(_sample, generator, tokenizer, samples, sampling, stop)
    parts: list[SampledAnswers] = []
    for start in range(0, len(rows), CHUNK):
        chunk = slice(start, min(start + CHUNK, len(rows)))
        parts.append(sample(rows[chunk], prompts[chunk], range(chunk.start, chunk.stop)))
        progress(chunk.stop, len(rows))
    texts, tokens, reasons, scored_rows = (
        [value for part in parts for value in getattr(part, name)] for name in ("texts", "ids", "stop_reasons", "rows")
    )
    conversations = None
    if parts[0].conversations is not None:
        conversations = [messages for part in parts for messages in part.conversations or ()]
    row_of_each = [row for row in rows for _ in range(samples)]
    lengths = list(map(len, tokens))
    metrics: dict[str, float] = {}
    answers: list[dict[str, Any]] = [
        {
            "row": number // samples,
            "where": where_of(row, number // samples),
            "prompt": row.get(prompt_column),
            "sample": number % samples,
            "answer": text,
            "tokens": length,
            "stop_reason": reason,
        }
        for number, (row, text, length, reason) in enumerate(zip(row_of_each, texts, lengths, reasons, strict=True))
    ]
    for name, grade in grades.items():
        with failures_named(f"the grade {name!r}"):
            results = [grade(row, text) for row, text in zip(row_of_each, texts, strict=True)]
        _add_mean(metrics, name, [float(bool(result)) for result in results], samples)
        metrics[f"{name}_no_answer"] = sum(result is None for result in results) / len(results)
        for record, result in zip(answers, results, strict=True):
            record[name] = result
    if scorer is not None:
        places = [name_completion(record["where"], record["sample"], samples) for record in answers]
        completions = reward_inputs(scored_rows, texts, prompt_column, conversations)
        columns = _rewards(scorer, *completions, tokens, score_batch, trainer_state, places)
        rewards = weighted_total(columns, [function.weight for function in scorer.functions]).tolist()
        _add_mean(metrics, REWARD, rewards, samples)
        metrics[f"{REWARD}_unscored"] = sum(map(math.isnan, rewards)) / len(rewards)
        if each_reward:
            metrics[f"{REWARD}_std"] = _std(rewards)
            for function, column in zip(scorer.functions, columns.T.tolist(), strict=True):
                scored = [value for value in column if not math.isnan(value)]
                metrics[f"rewards/{function.name}/mean"] = sum(scored) / len(scored) if scored else 0.0
                metrics[f"rewards/{function.name}/std"] = _std(scored)
        for record, reward in zip(answers, rewards, strict=True):
            record[REWARD] = None if math.isnan(reward) else reward
    metrics["mean_length"] = sum(lengths) / len(lengths)
    metrics["truncated"] = sum(reason == "length" for reason in reasons) / len(reasons)
    return Evaluation(metrics, answers)


def _sample(
    generator: Generator,
    tokenizer: Any,
    samples: int,
    sampling: Sampling,
    stop: Stop | None,
    rows: Sequence[TaskRow],
    prompts: Sequence[Prompt],
    keys: Sequence[int],
) -> SampledAnswers:
    rollout = generator.generate([prompt.ids for prompt in prompts], samples, sampling, stop=stop, keys=keys)
    completions = decode_completions(tokenizer, rollout.ids, rollout.lengths)
    repeated = [row for row in rows for _ in range(samples)]
    return SampledAnswers(completions.texts, completions.ids, list(rollout.stop_reasons), repeated)


def _rewards(
    scorer: Scorer,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    tokens: Sequence[Sequence[int]],
    score_batch: int,
    trainer_state: Any,
    places: Sequence[str],
) -> Tensor:
    """The rewards ``(B, K)`` of each completion; NaN where a function skipped it, and in the row of one that failed."""
    parts: list[Tensor] = []
    failures: list[str] = []
    for start in range(0, len(prompts), score_batch):
        batch = slice(start, start + score_batch)
        scores = scorer.score(
            prompts[batch],
            completions[batch],
            {name: column[batch] for name, column in columns.items()},
            completion_ids=tokens[batch],
            trainer_state=trainer_state,
            places=places[batch],
        )
        parts.append(scores.rewards)
        failures += [failure.reason for failure in scores.failures]
    rewards = torch.cat(parts)
    if bool(rewards.isnan().all()):
        reason = f" ({failures[0]})" if failures else ": they returned None for every one"
        raise RewardError(
            f"the rewards scored none of the {plural(len(rewards), 'completion')} of the held-out rows{reason}"
        )
    return rewards


def _std(values: Sequence[float]) -> float:
    """With n − 1, ignoring NaN; 0 for fewer than two values."""
    scored = np.asarray([value for value in values if not math.isnan(value)])
    return float(scored.std(ddof=1)) if len(scored) > 1 else 0.0


def _add_mean(metrics: dict[str, float], name: str, values: Sequence[float], samples: int) -> None:
    """Add the mean over rows and its interval, ignoring NaN."""
    table = np.asarray(values, dtype=np.float64).reshape(-1, samples)
    table = table[~np.isnan(table).all(1)]
    scale = scale_of(table)
    by_row = scale * np.nanmean(table / scale, axis=1)
    interval = mean_interval(by_row) if samples == 1 else bootstrap_interval(by_row)
    metrics |= {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
