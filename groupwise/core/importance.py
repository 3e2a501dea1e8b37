"""Corrections for a sampler whose log-probs differ from the trainer's: other kernels, other rounding, older weights.

With k = π_trainer / π_sampler of a token, or of a sequence (the product over its tokens), `importance_weights` weights
each token of the policy loss by k. ``truncate`` limits k to [low, high]: truncated importance sampling (TIS; Yao et
al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). ``mask`` sets k to 0 outside of it: for
tokens that is IcePop (Ling team, "Small Leak Can Sink a Great Ship"), for sequences masked importance sampling.
The names are those of TRL's vllm_importance_sampling_mode. `geometric_mask` rejects sequences by the geometric mean of
k over their tokens, as verl's rollout correction does. One deviation: log k is clamped to ±20, as in `losses`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from groupwise.core._checks import check_above
from groupwise.core.losses import log_ratio
from groupwise.errors import InputError, check_choice

IMPORTANCE_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@torch.no_grad()
def importance_weights(
    logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    *,
    mode: str = "token_truncate",
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """The weight ``(B, T)`` of each token, without gradient; 1 where ``mask`` is false. Multiply the loss by it."""
    check_choice("mode", mode, IMPORTANCE_MODES)
    least, most = _bounds(low, high)
    by_sequence = mode.startswith("sequence")
    ratio = log_ratio(logps, sampler_logps, mask, "sequence_product" if by_sequence else "token").exp()
    if mode.endswith("truncate"):
        weights = ratio.clamp(least, most)
    else:
        weights = torch.where((ratio >= least) & (ratio <= most), ratio, 0.0)
    return torch.where(mask != 0, weights, 1.0)


@torch.no_grad()
def geometric_mask(
    logps: Tensor, sampler_logps: Tensor, mask: Tensor, *, low: float | None = None, high: float | None = None
) -> Tensor:
    """The sequences ``(B,)`` that are kept: low ≤ (Π_t k_t)^(1/T) ≤ high."""
    least, most = _bounds(low, high)
    mean = log_ratio(logps, sampler_logps, mask, "sequence").exp().squeeze(-1)
    return (mean >= least) & (mean <= most)


def _bounds(low: float | None, high: float | None) -> tuple[float, float]:
    for name, bound in (("low", low), ("high", high)):
        if bound is not None:
            check_above(name, bound, 0)
    least, most = 0.0 if low is None else low, math.inf if high is None else high
    if least > most:
        raise InputError(f"low {low} is above high {high}")
    return least, most
