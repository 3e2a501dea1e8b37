"""Weights that correct for the difference between the sampler's log-probs and the trainer's (loss.importance_*,
loss.rejection_*), and what they change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.importance import importance_weights, rejection_mask


@dataclass(frozen=True)
class CorrectionCounts:
    """What the correction of a mini-batch changes, as counts, so that those of several mini-batches add up.

    A unit is what has one weight: a computed token, or with a mode of sequences a computed sequence.
    """

    units: int
    weight: float  # sum over units
    outside: int  # units whose ratio is outside the bounds, so that it is truncated or masked
    sequences: int
    rejected: int  # sequences


def corrects_sampler(step_recipe: Recipe) -> bool:
    """Whether the loss is weighted by trainer / sampler probability, or completions are rejected by it."""
    loss = step_recipe.loss
    bounds = (loss.importance_cap, loss.importance_floor, loss.rejection_high, loss.rejection_low)
    return any(bound is not None for bound in bounds)


def weights_by_sampler(step_recipe: Recipe) -> bool:
    """Whether the loss is weighted by trainer / sampler probability."""
    return step_recipe.loss.importance_cap is not None or step_recipe.loss.importance_floor is not None


def masks_by_sampler(step_recipe: Recipe) -> bool:
    """Whether the correction may give a token the weight 0."""
    loss = step_recipe.loss
    rejects = loss.rejection_low is not None or loss.rejection_high is not None
    return rejects or (corrects_sampler(step_recipe) and "mask" in loss.importance_sampling)


def correct_sampler(
    logps: Tensor, sampler_logps: Tensor, mask: Tensor, step_recipe: Recipe
) -> tuple[Tensor, CorrectionCounts]:
    """The weight of each token ``(n, T)`` in the policy loss; ``logps`` are the trainer's before the first update."""
    loss = step_recipe.loss
    weights, outside = torch.ones_like(logps), torch.zeros_like(mask)
    if weights_by_sampler(step_recipe):
        mode, low, high = loss.importance_sampling, loss.importance_floor, loss.importance_cap
        weights = importance_weights(
            logps, sampler_logps, mask, mode=mode, low=low, high=high, normalize=loss.importance_normalize
        )
        ratio = importance_weights(logps, sampler_logps, mask, mode=mode)
        outside = mask & ((ratio < (low or 0.0)) | (ratio > (high or math.inf)))
    kept = torch.ones(len(mask), dtype=torch.bool)
    if loss.rejection_low is not None or loss.rejection_high is not None:
        kept = rejection_mask(
            logps, sampler_logps, mask, statistic=loss.rejection, low=loss.rejection_low, high=loss.rejection_high
        )
        weights = torch.where(kept[:, None], weights, 0.0)
    units = mask  # the tokens, or the first one of each sequence
    if weights_by_sampler(step_recipe) and "sequence" in loss.importance_sampling:
        units = mask & (mask.cumsum(1) == 1)
    total = float(torch.where(units, weights, 0.0).double().sum())
    counts = CorrectionCounts(int(units.sum()), total, int((outside & units).sum()), len(mask), int((~kept).sum()))
    return weights, counts


def correction_metrics(counts: Sequence[CorrectionCounts], step_recipe: Recipe) -> dict[str, float]:
    """The mean weight, and the shares of weights and sequences that are changed; NaN if none was computed."""
    if not corrects_sampler(step_recipe):
        return {}
    units = sum(count.units for count in counts) or math.nan
    sequences = sum(count.sequences for count in counts) or math.nan
    metrics = {"sampler/importance_mean": sum(count.weight for count in counts) / units}
    loss = step_recipe.loss
    if weights_by_sampler(step_recipe):
        kind = "truncated" if "truncate" in loss.importance_sampling else "masked"
        metrics[f"sampler/importance_{kind}"] = sum(count.outside for count in counts) / units
    if loss.rejection_low is not None or loss.rejection_high is not None:
        metrics["sampler/rejected"] = sum(count.rejected for count in counts) / sequences
    return metrics
