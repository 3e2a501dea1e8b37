"""What comes of one update: the values of its terms, what the policy's masks took, how far it is from the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PREFERENCE = "preference"  # the name of its term


@dataclass
class LogProbMismatch:
    """How far the trainer's log-probs are from the sampler's."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> None:
        difference = torch.where(mask, (logps.detach() - sampler_logps).abs(), 0.0)
        self.tokens += int(mask.sum())
        self.total += float(difference.double().sum())
        self.largest = max(self.largest, float(difference.max()))

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)


@dataclass
class UpdateResult:
    """What came of one update."""

    values: dict[str, Any] = field(default_factory=dict)  # objective terms
    statistics: dict[str, Any] = field(default_factory=dict)
    grad_norm: float = 0.0
    skipped: bool = False  # not finite, and told to go on
    masked_out: dict[str, list[int]] = field(
        default_factory=dict
    )  # which samples a mask of the policy's log-probs took
    mismatch: LogProbMismatch | None = None
    terms: dict[str, float] = field(default_factory=dict)  # gradient norms and cosines, on request


def gradient_statistics(gradients: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """The norm of each term's gradient, and the cosine between each two.

    Beside a preference term, ``grpo`` is all the others together: do the two pull the same way?
    """
    names = list(gradients)
    found = {f"grad_norm/{name}": _norm(gradients[name]) for name in names}
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            found[f"grad_cosine/{one}_{other}"] = _cosine(gradients[one], gradients[other])
    others = [gradients[name] for name in names if name != PREFERENCE]
    if PREFERENCE in gradients and others:
        whole = [torch.stack(shares).sum(0) for shares in zip(*others, strict=True)]
        found["grad_norm/grpo"] = _norm(whole)
        found[f"grad_cosine/grpo_{PREFERENCE}"] = _cosine(whole, gradients[PREFERENCE])
    return found


def _norm(gradient: Sequence[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(list(gradient)))


def _cosine(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    product = sum(float((a * b).sum()) for a, b in zip(one, other, strict=True))
    scale = _norm(one) * _norm(other)
    return product / scale if scale else 0.0
