"""The result of one update: objective terms, statistics, masked samples, and the mismatch with the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from groupwise.model.device import float64_device
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


def gradient_statistics(gradients: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """The norm of each term's gradient, and the cosine between each two.

    If there is a preference term, ``grpo`` is the sum of the other terms, to see whether the two agree.
    """
    names = list(gradients)
    statistics = {f"grad_norm/{name}": _norm(gradients[name]) for name in names}
    for first, second in combinations(names, 2):
        statistics[f"grad_cosine/{first}_{second}"] = _cosine(gradients[first], gradients[second])
    from_pairs = [name for name in names if TERMS[name].from_pairs]
    others = [gradients[name] for name in names if name not in from_pairs]
    if from_pairs and others:
        total = [torch.stack(shares).sum(0) for shares in zip(*others, strict=True)]
        statistics["grad_norm/grpo"] = _norm(total)
        for name in from_pairs:
            statistics[f"grad_cosine/grpo_{name}"] = _cosine(total, gradients[name])
    return statistics


def _norm(gradient: Sequence[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(list(gradient)))


def _cosine(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    product = sum(float((a * b).sum()) for a, b in zip(first, second, strict=True))
    scale = _norm(first) * _norm(second)
    return product / scale if scale else 0.0
