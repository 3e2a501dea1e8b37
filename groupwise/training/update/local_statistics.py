"""Statistics of an update as means over its local batches (``train.local_batch_size``), as TRL reports them.

TRL logs the mean over micro-batches of the mean of each, and the smallest and largest share of clipped tokens of a
completion in each. Packs are no micro-batches, so the statistics of each sample are kept until the update is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core import kl_estimate
from groupwise.core.losses import Loss, clipped_loss, log_ratio
from groupwise.training.update.minibatch import MiniBatch
from groupwise.training.update.objective import MicroBatch, Objective


@torch.no_grad()
def sample_statistics(objective: Objective, micro_batch: MicroBatch) -> dict[str, Tensor]:
    """The mean entropy and KL of each sample's tokens, and the share of them that the loss would clip, ``(b,)``.

    Policy masks are ignored: what they leave out has a ratio, too.
    """
    recipe, mask, logps = objective.recipe, micro_batch.mask, micro_batch.logps.detach()
    level = _ratio_level(recipe, objective.loss)
    per_token: dict[str, Tensor] = {}
    if micro_batch.entropy is not None:
        per_token["entropy"] = micro_batch.entropy
    if recipe.loss.kl_coef and micro_batch.exact_kl is not None:
        per_token["kl"] = micro_batch.exact_kl[1]
    elif recipe.loss.kl_coef and micro_batch.ref_logps is not None:
        per_token["kl"] = kl_estimate(
            logps,
            micro_batch.ref_logps,
            estimator=recipe.loss.kl,
            old_logps=micro_batch.old_logps,
            mask=mask,
            ratio=level,
        )
    if (bounds := _clip_bounds(objective)) is not None and micro_batch.advantages is not None:
        low, high, advantages = *bounds, micro_batch.advantages
        advantages = advantages[:, None] if advantages.dim() == 1 else advantages
        old = logps if micro_batch.old_logps is None else micro_batch.old_logps
        ratio = log_ratio(logps, old, mask, level).exp().expand_as(logps)
        per_token["clip_fraction_low"] = (ratio < low) & (advantages < 0)
        per_token["clip_fraction_high"] = (ratio > high) & (advantages > 0)
    lengths = mask.sum(1).clamp(min=1)
    return {name: torch.where(mask, values, 0).sum(1) / lengths for name, values in per_token.items()}


def _ratio_level(recipe: Recipe, loss: Loss) -> str:
    """The level of the loss's ratio, such as "token"."""
    return recipe.loss.ratio or loss.ratios[0]


def _clip_bounds(objective: Objective) -> tuple[float, float] | None:
    """The ratios beyond which the loss clips; None if it does not, or if a divergence takes the place of the clip."""
    settings, loss = objective.recipe.loss, objective.loss
    if objective.recipe.masks.divergence is not None:
        return None
    if loss.ceiling is not None:
        return -math.inf, loss.ceiling if settings.clip_high is None else settings.clip_high
    if loss.token_loss is not clipped_loss:
        return None
    high = 1 + (settings.clip_low if settings.clip_high is None else settings.clip_high)
    capped = settings.dual_clip is not None and settings.dual_clip <= high  # then no ratio is above
    return 1 - settings.clip_low, math.inf if capped else high


class _LocalBatch(NamedTuple):
    """The computed samples of a local batch, and what a mean over all of its samples is divided by."""

    rows: Tensor  # of the mini-batch
    lengths: Tensor  # of these samples
    weights: Tensor  # of these samples in a mean over ratios: their lengths, or 1 each
    total: float  # such weights of all samples of the local batch

    @property
    def complete(self) -> bool:
        """Whether all of its samples are computed."""
        return float(self.weights.sum()) > self.total - 0.5


def local_statistics(
    minibatch: MiniBatch, samples: Mapping[str, Tensor], recipe: Recipe, loss: Loss
) -> dict[str, float]:
    """The statistics of an update by their names, from those of each sample ``(n,)``.

    A sample that is not computed has no clipped tokens. Its entropy is not known, so that is a mean over the others.
    """
    local_batches = _local_batches(minibatch, recipe.train.local_batch_size, _ratio_level(recipe, loss))
    found: dict[str, list[float]] = {name: [] for name in samples}
    lowest, highest = [], []
    for local in local_batches:
        for name, values in samples.items():
            own = values[local.rows]
            if name.startswith("clip_fraction"):
                found[name].append(float((own * local.weights).sum()) / max(local.total, 1.0))
            elif len(own):
                found[name].append(float((own * local.lengths).sum()) / max(float(local.lengths.sum()), 1.0))
        if "clip_fraction_low" in samples:
            others = [] if local.complete else [0.0]
            lowest.append(min([*samples["clip_fraction_low"][local.rows].tolist(), *others], default=0.0))
            highest.append(max([*samples["clip_fraction_high"][local.rows].tolist(), *others], default=0.0))
    extremes = {"clip_ratio/low_min": lowest, "clip_ratio/high_max": highest}
    return {name: sum(values) / len(values) for name, values in {**found, **extremes}.items() if values}


def _local_batches(minibatch: MiniBatch, size: int | None, level: str) -> list[_LocalBatch]:
    if size is None or minibatch.local_batch is None or minibatch.local_lengths is None:
        return []
    lengths, sequences = minibatch.mask.sum(1).double(), minibatch.totals.sequences
    local_batches = []
    for number, start in enumerate(range(0, sequences, size)):
        rows = (minibatch.local_batch == number).nonzero().flatten()
        own, members = lengths[rows], min(size, sequences - start)
        if level == "token":
            tokens = float(minibatch.local_lengths[rows[0]]) * members if len(rows) else 0.0
            local_batches.append(_LocalBatch(rows, own, own, tokens))
        else:
            local_batches.append(_LocalBatch(rows, own, torch.ones_like(own), float(members)))
    return local_batches
