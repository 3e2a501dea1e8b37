"""Corrections for a sampler whose log-probs differ from the trainer's: other kernels, other rounding, older weights.

With k = π_trainer / π_sampler of a token, or of a sequence (the product over its tokens), `importance_weights` weights
each token of the policy loss by k. ``truncate`` limits k to [low, high]: truncated importance sampling (TIS; Yao et
al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). ``mask`` sets k to 0 outside of it: for
tokens that is IcePop (Ling team, "Small Leak Can Sink a Great Ship"), for sequences masked importance sampling.
The names are those of TRL's vllm_importance_sampling_mode. `rejection_mask` rejects sequences, as verl's rollout
correction does, by a statistic of k over their tokens. One deviation: log k is clamped to ±20, as in `losses`.

A token without a log-prob of the sampler (NaN) has k = 1, as in TRL. Statistics over a sequence leave it out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from groupwise.core._checks import check_above, check_mask, check_same_shape
from groupwise.core.losses import log_ratio
from groupwise.errors import InputError, check_choice

IMPORTANCE_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
REJECTIONS = ("geometric", "product", "any_token", "k3")


@torch.no_grad()
def importance_weights(
    logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    *,
    mode: str = "token_truncate",
    low: float | None = None,
    high: float | None = None,
    normalize: bool = False,
) -> Tensor:
    """The weight ``(B, T)`` of each token, without gradient; 1 where ``mask`` is false. Multiply the loss by it.

    normalize: divide by the mean weight, over all tokens or with a mode of sequences over all sequences, so that it is
        1 (verl's rollout_is_batch_normalize).
    """
    check_choice("mode", mode, IMPORTANCE_MODES)
    least, most = _bounds(low, high)
    by_sequence = mode.startswith("sequence")
    known = _known(logps, sampler_logps, mask)
    ratio = log_ratio(logps, sampler_logps, known, "sequence_product" if by_sequence else "token").exp()
    if mode.endswith("truncate"):
        weights = ratio.clamp(least, most)
    else:
        weights = torch.where((ratio >= least) & (ratio <= most), ratio, 0.0)
    if normalize:
        counted = (mask != 0).any(-1, keepdim=True) if by_sequence else mask != 0
        mean = torch.where(counted, weights, 0.0).sum() / counted.sum().clamp(min=1)
        weights = weights / torch.where(mean > 0, mean, 1.0)
    return torch.where(mask != 0, weights, 1.0)


@torch.no_grad()
def rejection_mask(
    logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    *,
    statistic: str = "geometric",
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """The sequences ``(B,)`` that are kept: low ≤ statistic ≤ high.

    ``"geometric"``: (Π_t k_t)^(1/T), which does not grow with the length (verl's seq_mean_k1).
    ``"product"``: Π_t k_t, the ratio of the sequence (seq_sum_k1).
    ``"any_token"``: each k_t must be within the bounds; one token outside rejects the sequence (a token veto).
    ``"k3"``: the mean of k_t − log k_t − 1, an estimate of KL(sampler ‖ trainer), at most high (seq_mean_k3).
    """
    check_choice("statistic", statistic, REJECTIONS)
    least, most = _bounds(low, high)
    known = _known(logps, sampler_logps, mask)
    if statistic == "any_token":
        ratios = log_ratio(logps, sampler_logps, known).exp()
        return (((ratios >= least) & (ratios <= most)) | ~known).all(-1)
    if statistic == "k3":
        if low is not None:
            raise InputError("the statistic 'k3' is a distance, which is 0 for equal log-probs: give high, not low")
        differences = log_ratio(logps, sampler_logps, known)
        values = (differences.expm1() - differences).sum(-1) / known.sum(-1).clamp(min=1)
    else:
        level = "sequence" if statistic == "geometric" else "sequence_product"
        values = log_ratio(logps, sampler_logps, known, level).exp().squeeze(-1)
    return (values >= least) & (values <= most)


def _known(logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> Tensor:
    """The tokens of ``mask`` that have a log-prob of the sampler."""
    check_same_shape(logps=logps, sampler_logps=sampler_logps)
    return check_mask("mask", mask, logps.shape) & ~sampler_logps.isnan()


def _bounds(low: float | None, high: float | None) -> tuple[float, float]:
    for name, bound in (("low", low), ("high", high)):
        if bound is not None:
            check_above(name, bound, 0)
    least, most = 0.0 if low is None else low, math.inf if high is None else high
    if least > most:
        raise InputError(f"low {low} is above high {high}")
    return least, most
