"""The result of one update: objective terms, statistics, masked samples, and the mismatch with the sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from groupwise.core.losses import MAX_LOG_RATIO
from groupwise.distributed.ranks import Ranks
from groupwise.model.device import float64_device
from groupwise.model.precision import MasterWeights
from groupwise.training.update.objective import TERMS


@dataclass
class LogProbMismatch:
    """Differences between the trainer's log-probs and the sampler's, d = log π_trainer − log π_sampler.

    Tokens without a log-prob of the sampler (NaN) are left out, and the sequences with such tokens.
    """

    tokens: int = 0
    total: float = 0.0  # Σ |d|
    largest: float = 0.0
    kl: float = 0.0  # Σ e^d − d − 1, the k3 estimate of KL(π_sampler ‖ π_trainer)
    sequences: int = 0
    ratios: float = 0.0  # Σ e^Σd, the ratio of a sequence
    largest_ratio: float = 0.0

    def add(self, logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> None:
        known = mask & ~sampler_logps.isnan()
        difference = torch.where(known, logps.detach() - sampler_logps, 0.0)
        difference = difference.to(float64_device(difference.device)).double()
        self.tokens += int(known.sum())
        self.total += float(difference.abs().sum())
        self.largest = max(self.largest, float(difference.abs().max()))
        self.kl += float((difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() - difference).sum())
        complete = (known == mask).all(1) & mask.any(1)
        ratios = difference.sum(1)[complete].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        self.sequences += len(ratios)
        self.ratios += float(ratios.sum())
        self.largest_ratio = max([self.largest_ratio, *ratios.tolist()])

    def metrics(self) -> dict[str, float]:
        """The metrics of a step; NaN where nothing was measured."""
        tokens, sequences = self.tokens or math.nan, self.sequences or math.nan
        return {
            "sampler/logp_difference_mean": self.total / tokens,
            "sampler/logp_difference_max": self.largest if self.tokens else math.nan,
            "sampler/kl": self.kl / tokens,
            "sampler/sequence_ratio_mean": self.ratios / sequences,
            "sampler/sequence_ratio_max": self.largest_ratio if self.sequences else math.nan,
        }


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
    samples: dict[str, Tensor] = field(default_factory=dict)  # (n,) statistics of each sample, with local batches

    def add_samples(self, statistics: Mapping[str, Tensor], rows: Tensor, count: int) -> None:
        """Remember the statistics of some of ``count`` samples."""
        for name, values in statistics.items():
            complete = self.samples.setdefault(name, values.new_zeros(count))
            complete[rows.to(values.device)] = values

    def add_up(self, ranks: Ranks, rows: Tensor, count: int) -> None:
        """Add up the values, statistics and differences of all ranks. Each had a share, ``rows``, of the ``count``
        samples."""
        mismatch = self.mismatch
        own = {
            "values": {name: float(value) for name, value in self.values.items()},
            "statistics": {name: float(value) for name, value in self.statistics.items()},
            "mismatch": None if mismatch is None else asdict(mismatch),
            "samples": {name: values.tolist() for name, values in self.samples.items()},
            "rows": rows.tolist() if self.samples else [],
        }
        parts = ranks.gather(own)
        self.values, self.statistics, self.samples = {}, {}, {}
        for part in parts:
            for name, values in part["samples"].items():
                complete = self.samples.setdefault(name, torch.zeros(count, dtype=torch.float64))
                complete[part["rows"]] = torch.tensor(values, dtype=torch.float64)
            for sums, shares in ((self.values, part["values"]), (self.statistics, part["statistics"])):
                for name, value in shares.items():
                    sums[name] = sums[name] + value if name in sums else value
        if mismatch is not None:
            for name in asdict(mismatch):
                shares = [part["mismatch"][name] for part in parts]
                setattr(mismatch, name, max(shares) if name.startswith("largest") else sum(shares))


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
