"""How good a model is on held-out rows: every grade with its interval, and what went wrong with the rest.

An accuracy of one answer per row comes with Wilson's interval; with several answers per row they are averaged first,
and rows are resampled (bootstrap). A row without a findable answer counts as wrong, and is counted by itself too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from groupwise.data import Prompt, completion_for_reward
from groupwise.errors import ConfigError
from groupwise.generate.types import Generator, Sampling, Stop
from groupwise.rewards import Scorer
from groupwise.stats import Interval, bootstrap_interval, proportion_interval
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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Answer every row and grade the answers. Without grades the mean reward is what is measured."""
    if not rows:
        raise ConfigError("there is nothing to evaluate on: give held-out rows (data.held_out)")
    if not grades and scorer is None:
        raise ConfigError("there is nothing to evaluate by: the task has neither grades nor rewards")
    texts: list[str] = []
    lengths: list[int] = []
    reasons: list[str] = []
    for start in range(0, len(rows), CHUNK):
        part = [prompt.ids for prompt in prompts[start : start + CHUNK]]
        keys = range(start, start + len(part))
        rollout = generator.generate(part, samples, sampling, stop=stop, keys=list(keys))
        each = rollout.lengths.tolist()
        texts += tokenizer.batch_decode(
            [ids[:length] for ids, length in zip(rollout.ids, each, strict=True)], skip_special_tokens=True
        )
        lengths += each
        reasons += rollout.stop_reasons
        progress(start + len(part), len(rows))
    asked = [row for row in rows for _ in range(samples)]
    metrics: dict[str, float] = {}
    answers: list[dict[str, Any]] = [
        {"row": number // samples, "sample": number % samples, "answer": text, "tokens": length, "stop_reason": reason}
        for number, (text, length, reason) in enumerate(zip(texts, lengths, reasons, strict=True))
    ]
    for name, grade in grades.items():
        results = [grade(row, text) for row, text in zip(asked, texts, strict=True)]
        _add(metrics, name, [bool(result) for result in results], samples)
        metrics[f"{name}_no_answer"] = sum(result is None for result in results) / len(results)
        for record, result in zip(answers, results, strict=True):
            record[name] = result
    if scorer is not None:
        _add(metrics, REWARD, _rewards(scorer, asked, texts, prompt_column, answers), samples)
    metrics["mean_length"] = sum(lengths) / len(lengths)
    metrics["truncated"] = sum(reason == "length" for reason in reasons) / len(reasons)
    return Evaluation(metrics, answers)


def _rewards(
    scorer: Scorer, rows: Sequence[Row], texts: Sequence[str], prompt_column: str, answers: list[dict[str, Any]]
) -> list[float]:
    asked = [row[prompt_column] for row in rows]
    columns = {
        name: [row.get(name) for row in rows]
        for name in dict.fromkeys(key for row in rows for key in row)
        if name != prompt_column
    }
    given = [completion_for_reward(prompt, text) for prompt, text in zip(asked, texts, strict=True)]
    table = scorer.score(asked, given, columns).rewards.nan_to_num(0.0)
    total = (table * table.new_tensor([function.weight for function in scorer.functions])).sum(1).tolist()
    for record, reward in zip(answers, total, strict=True):
        record[REWARD] = reward
    return [float(reward) for reward in total]


def _add(metrics: dict[str, float], name: str, values: Sequence[float], samples: int) -> None:
    """A mean over rows and its interval."""
    by_row = np.asarray(values, dtype=np.float64).reshape(-1, samples).mean(1)
    if samples == 1 and set(by_row.tolist()) <= {0.0, 1.0}:
        found = proportion_interval(int(by_row.sum()), len(by_row))
    else:
        found = bootstrap_interval(by_row)
    metrics |= {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}
