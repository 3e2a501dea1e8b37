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
from groupwise.core.losses import log_ratio


@dataclass(frozen=True)
class CorrectionCounts:
    """What the correction of a mini-batch changes: counts of its computed tokens and sequences."""

    tokens: int
    weight: float  # sum over tokens
    truncated: int  # tokens
    masked: int  # tokens with weight 0, rejected sequences not included
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
    weights, truncated, masked = torch.ones_like(logps), 0, 0
    if weights_by_sampler(step_recipe):
        mode, low, high = loss.importance_sampling, loss.importance_floor, loss.importance_cap
        weights = importance_weights(
            logps, sampler_logps, mask, mode=mode, low=low, high=high, normalize=loss.importance_normalize
        )
        ratio = log_ratio(logps, sampler_logps, mask, "sequence_product" if "sequence" in mode else "token").exp()
        outside = int((mask & ((ratio < (low or 0.0)) | (ratio > (high or math.inf)))).sum())
        truncated, masked = (outside, 0) if "truncate" in mode else (0, outside)
    kept = torch.ones(len(mask), dtype=torch.bool)
    if loss.rejection_low is not None or loss.rejection_high is not None:
        kept = rejection_mask(
            logps, sampler_logps, mask, statistic=loss.rejection, low=loss.rejection_low, high=loss.rejection_high
        )
        weights = torch.where(kept[:, None], weights, 0.0)
    total = float(torch.where(mask, weights, 0.0).double().sum())
    counts = CorrectionCounts(int(mask.sum()), total, truncated, masked, len(mask), int((~kept).sum()))
    return weights, counts


def correction_metrics(counts: Sequence[CorrectionCounts], step_recipe: Recipe) -> dict[str, float]:
    """The mean weight, and the shares of tokens and sequences that the correction changes; NaN if none was computed."""
    if not corrects_sampler(step_recipe):
        return {}
    tokens = sum(count.tokens for count in counts) or math.nan
    sequences = sum(count.sequences for count in counts) or math.nan
    metrics = {"sampler/importance_mean": sum(count.weight for count in counts) / tokens}
    loss = step_recipe.loss
    if weights_by_sampler(step_recipe):
        kind = "truncated" if "truncate" in loss.importance_sampling else "masked"
        metrics[f"sampler/importance_{kind}"] = sum(count.truncated + count.masked for count in counts) / tokens
    if loss.rejection_low is not None or loss.rejection_high is not None:
        metrics["sampler/rejected"] = sum(count.rejected for count in counts) / sequences
    return metrics
