"""Scoring that is divided among the ranks of a run: each calls the rewards with complete prompts of its share.

A call gets all completions of its prompts, but not those of the other ranks. Every rank gets all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from groupwise.distributed.ranks import Ranks
from groupwise.distributed.split import split_by_cost
from groupwise.rewards.contract import RewardFunction, RowFailure, Scores
from groupwise.rewards.scorer import Scorer


class ShardedScorer(Scorer):
    """A `Scorer` that all ranks call with the complete batch."""

    def __init__(
        self,
        functions: Iterable[RewardFunction | Callable[..., Any]],
        ranks: Ranks,
        *,
        timeout: float | None = 60.0,
        on_error: str = "stop",
    ) -> None:
        super().__init__(functions, timeout=timeout, on_error=on_error)
        self.ranks = ranks

    def score_batch(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[Any] | None = None,
        trainer_state: Any = None,
        places: Sequence[str] | None = None,
    ) -> Scores:
        groups = [list(rows) for _, rows in groupby(range(len(completions)), key=lambda row: _key(prompts[row]))]
        shares = split_by_cost([len(rows) for rows in groups], self.ranks.size)
        by_rank = [[row for group in share for row in groups[group]] for share in shares]
        own = by_rank[self.ranks.rank]

        def taken(values: Sequence[Any]) -> list[Any]:
            return [values[row] for row in own]

        with self.ranks.stage("scoring"):
            scores = super().score_batch(
                taken(prompts),
                taken(completions),
                {name: taken(values) for name, values in columns.items()},
                completion_ids=None if completion_ids is None else taken(completion_ids),
                trainer_state=trainer_state,
                places=taken(places or [f"row {number}" for number in range(1, len(completions) + 1)]),
            )
        return _joined(self.ranks.gather(_message(scores, own)), by_rank, len(completions))


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else repr(prompt)


def _message(scores: Scores, rows: Sequence[int]) -> dict[str, Any]:
    return {
        "rewards": scores.rewards,
        "dropped": scores.dropped,
        "failures": [[f.function, None if f.row is None else rows[f.row], f.reason] for f in scores.failures],
        "extra": {name: [plain_value(value) for value in values] for name, values in scores.extra.items()},
        "metrics": {name: [value, scores.metric_counts[name]] for name, value in scores.metrics.items()},
    }


def plain_value(value: Any) -> Any:
    """A value of an extra column as the rollout files would have it: a number or a text."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _joined(parts: Sequence[dict[str, Any]], by_rank: Sequence[Sequence[int]], rows: int) -> Scores:
    order = torch.tensor([row for numbers in by_rank for row in numbers], dtype=torch.long).argsort()
    extra: dict[str, list[Any]] = {}
    metrics: dict[str, float] = {}
    counts: dict[str, int] = {}
    for part, numbers in zip(parts, by_rank, strict=True):
        for name, values in part["extra"].items():
            column = extra.setdefault(name, [None] * rows)
            for row, value in zip(numbers, values, strict=True):
                column[row] = value
        for name, (mean, count) in part["metrics"].items():
            before = counts.get(name, 0)
            counts[name] = before + count
            metrics[name] = (metrics.get(name, 0.0) * before + mean * count) / counts[name]
    failures = [RowFailure(*entry) for part in parts for entry in part["failures"]]
    return Scores(
        torch.cat([part["rewards"] for part in parts])[order],
        torch.cat([part["dropped"] for part in parts])[order],
        tuple(sorted(failures, key=lambda failure: -1 if failure.row is None else failure.row)),
        extra,
        metrics,
        counts,
    )
