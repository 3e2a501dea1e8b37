"""KL divergence from the reference model, per token.

``kl_estimate`` uses the log-probs of the sampled tokens only: Schulman's k1, k2 and k3, and the unbiased estimator of
DeepSeek-V3.2 (arXiv 2512.02556). ``full_kl`` is the exact sum over the vocabulary. Its factor "mean_ratio" multiplies
it by the mean over the vocabulary of π_θ/π_ref; that product is not an unbiased estimator of the KL.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groupwise.core._checks import check_mask, check_same_shape, check_temperature, check_tensors, not_none, working
from groupwise.core.logps import head_logits, rows_per_chunk
from groupwise.core.losses import MAX_LOG_RATIO, log_ratio
from groupwise.errors import InputError, check_choice, check_integer

ESTIMATORS = ("k1", "k2", "k3", "unbiased")
FACTORS = ("none", "mean_ratio")
MEAN_RATIO_EPS = 1e-8


def kl_estimate(
    logps: Tensor,
    ref_logps: Tensor,
    *,
    estimator: str = "k3",
    old_logps: Tensor | None = None,
    mask: Tensor | None = None,
    ratio: str = "token",
) -> Tensor:
    """An estimate of KL(π_θ ‖ π_ref) at each sampled token ``(B, T)``; 0 outside ``mask``.

    With d = log π_ref − log π_θ: ``k1`` = −d, ``k2`` = d²/2, ``k3`` = e^d − d − 1. ``unbiased`` is DeepSeek-V3.2's
    k3 · π_θ/π_old with a differentiable ratio, which corrects value and gradient for samples of an older policy;
    ``ratio`` is a level of `losses.log_ratio`: of the token, or of its sequence.
    Without ``old_logps`` the samples come from the current policy: the ratio is 1, and only its gradient matters.
    Differences are clamped to ±20, as in `losses`.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    check_same_shape(logps=logps, ref_logps=ref_logps, **not_none(old_logps=old_logps))
    present = torch.ones_like(logps, dtype=torch.bool) if mask is None else check_mask("mask", mask, logps.shape)
    d = torch.where(present, working(ref_logps) - working(logps), 0.0)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = torch.expm1(d) - d
    if estimator == "k3":
        return k3
    return k3 * log_ratio(logps, logps.detach() if old_logps is None else old_logps, present, ratio).exp()


def full_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    mask: Tensor | None = None,
    factor: str = "none",
    chunk_size: int | None = None,
) -> Tensor:
    """The exact KL(π_θ ‖ π_ref) ``(…)`` over the vocabulary, from logits ``(…, V)``.

    Computed ``chunk_size`` rows at a time, forward and backward, so that the softmax of the full batch is never in
    memory. ``factor="mean_ratio"`` multiplies by the mean over the vocabulary of π_θ/(π_ref + 1e-8).
    """
    check_same_shape(logits=logits, ref_logits=ref_logits)

    def rows(policy: Tensor, reference: Tensor) -> Tensor:
        return _kl_of_rows(working(policy), working(reference), factor)

    return _in_chunks(rows, logits, ref_logits, logits.shape[-1], mask, factor, chunk_size)


def full_kl_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    factor: str = "none",
    chunk_size: int | None = None,
    float32: bool = False,
) -> Tensor:
    """`full_kl` of two models' heads, straight from hidden states ``(…, D)``, without a ``(…, V)`` tensor.

    float32: logits that are not rounded to half precision, as in `selective_logps`.
    """
    check_temperature(temperature)
    check_tensors(hidden=hidden, weight=weight, ref_hidden=ref_hidden, ref_weight=ref_weight)
    if hidden.shape[:-1] != ref_hidden.shape[:-1] or weight.shape[0] != ref_weight.shape[0]:
        raise InputError(
            f"hidden {tuple(hidden.shape)} and ref_hidden {tuple(ref_hidden.shape)} must agree except in the last, "
            f"weight {tuple(weight.shape)} and ref_weight {tuple(ref_weight.shape)} in the vocabulary"
        )

    def rows(policy: Tensor, reference: Tensor) -> Tensor:
        return _kl_of_rows(
            head_logits(policy, weight, bias, scale, softcap, temperature, float32),
            head_logits(reference, ref_weight, ref_bias, scale, softcap, temperature, float32),
            factor,
        )

    return _in_chunks(rows, hidden, ref_hidden, len(weight), mask, factor, chunk_size)


def _kl_of_rows(logits: Tensor, ref_logits: Tensor, factor: str) -> Tensor:
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    prob = logp.exp()
    # A token with −inf in both contributes 0, not 0 · (−inf + inf) = NaN.
    difference = torch.where(prob > 0, logp - ref_logp, 0.0)
    kl = (prob * difference).sum(-1)
    if factor == "mean_ratio":
        kl = kl * (prob / (ref_logp.exp() + MEAN_RATIO_EPS)).mean(-1)
    return kl


def _in_chunks(
    rows: Callable[[Tensor, Tensor], Tensor],
    policy: Tensor,
    reference: Tensor,
    vocabulary: int,
    mask: Tensor | None,
    factor: str,
    chunk_size: int | None,
) -> Tensor:
    """Apply ``rows`` to the unmasked rows, a chunk at a time, recomputing each chunk in the backward pass."""
    check_choice("factor", factor, FACTORS)
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, 1)
    shape = policy.shape[:-1]
    flat, ref_flat = policy.reshape(-1, policy.shape[-1]), reference.reshape(-1, reference.shape[-1]).detach()
    where = None
    if mask is not None:
        where = check_mask("mask", mask, shape).reshape(-1).nonzero().squeeze(1)
        flat, ref_flat = flat[where], ref_flat[where]
    size = chunk_size or rows_per_chunk(vocabulary, flat.device)
    parts = [
        checkpoint(rows, flat[start : start + size], ref_flat[start : start + size], use_reentrant=False)
        for start in range(0, len(flat), size)
    ]
    result = torch.cat(parts) if parts else working(flat).sum(-1)
    if where is not None:
        result = result.new_zeros(shape.numel()).index_put((where,), result)
    return result.view(shape)
