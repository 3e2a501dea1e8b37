"""The result of one update: objective terms, statistics, masked samples, and the mismatch with the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from groupwise.distributed.ranks import Ranks
from groupwise.model.device import float64_device
from groupwise.model.precision import MasterWeights
from groupwise.training.update.objective import TERMS


@dataclass
class LogProbMismatch:
    """Absolute differences between the trainer's log-probs and the sampler's."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> None:
        difference = torch.where(mask, (logps.detach() - sampler_logps).abs(), 0.0)
        self.tokens += int(mask.sum())
        self.total += float(difference.to(float64_device(difference.device)).double().sum())
        self.largest = max(self.largest, float(difference.max()))

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)


@dataclass
class UpdateResult:
    """What `Updater.update` returns."""

    values: dict[str, Any] = field(default_factory=dict)  # objective terms
    statistics: dict[str, Any] = field(default_factory=dict)
    grad_norm: float = 0.0
    skipped: bool = False  # NaN or inf, and train.on_non_finite is "skip"
    masked_out: dict[str, list[int]] = field(default_factory=dict)  # samples dropped by masks of current log-probs
    mismatch: LogProbMismatch | None = None
    term_gradients: dict[str, float] = field(default_factory=dict)  # norms and cosines, on request

    def add_up(self, ranks: Ranks) -> None:
        """Add up the values, statistics and differences of all ranks, each of which had a share of the samples."""
        mismatch = self.mismatch
        own = {
            "values": {name: float(value) for name, value in self.values.items()},
            "statistics": {name: float(value) for name, value in self.statistics.items()},
            "mismatch": None if mismatch is None else [mismatch.tokens, mismatch.total, mismatch.largest],
        }
        parts = ranks.gather(own)
        self.values, self.statistics = {}, {}
        for part in parts:
            for sums, shares in ((self.values, part["values"]), (self.statistics, part["statistics"])):
                for name, value in shares.items():
                    sums[name] = sums[name] + value if name in sums else value
        if mismatch is not None:
            tokens, totals, largest = zip(*(part["mismatch"] for part in parts), strict=True)
            mismatch.tokens, mismatch.total, mismatch.largest = sum(tokens), sum(totals), max(largest)


def gradient_statistics(gradients: Mapping[str, Sequence[Tensor]], masters: MasterWeights) -> dict[str, float]:
    """The norm of each term's gradient, and the cosine between each two.

    If there is a preference term, ``grpo`` is the sum of the other terms, to see whether the two agree.
    """

    def norm(gradient: Sequence[Tensor]) -> float:
        return float(masters.norm(gradient))

    def cosine(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
        product, scale = masters.dot(first, second), norm(first) * norm(second)
        return product / scale if scale else 0.0

    names = list(gradients)
    statistics = {f"grad_norm/{name}": norm(gradients[name]) for name in names}
    for first, second in combinations(names, 2):
        statistics[f"grad_cosine/{first}_{second}"] = cosine(gradients[first], gradients[second])
    from_pairs = [name for name in names if TERMS[name].from_pairs]
    others = [gradients[name] for name in names if name not in from_pairs]
    if from_pairs and others:
        total = [torch.stack(shares).sum(0) for shares in zip(*others, strict=True)]
        statistics["grad_norm/grpo"] = norm(total)
        for name in from_pairs:
            statistics[f"grad_cosine/grpo_{name}"] = cosine(total, gradients[name])
    return statistics
