"""Completion masks and policy masks. True keeps.

A completion mask marks the tokens that exist; it alone defines denominators. Policy masks (off-policy, validity,
entropy) select those that contribute to the policy loss: they go to `policy_loss(policy_mask=…)`. The KL term ignores
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.core._checks import (
    check_above,
    check_at_least,
    check_mask,
    check_same_shape,
    check_share,
    check_tensors,
    is_number,
    not_none,
    working,
)
from groupwise.errors import InputError, check_choice, check_integer

OFF_POLICY_RULES = ("v3.2", "reference_drift")
DIVERGENCES = {"tv": 0.15, "kl": 0.05}  # with the limits of the paper's experiments


def completion_mask(ids: Tensor, eos_ids: int | Sequence[int], *, lengths: Tensor | None = None) -> Tensor:
    """The tokens ``(B, T)`` of each completion: all up to and including the first EOS.

    ``lengths`` ``(B,)`` bounds completions that end before the end of the row.
    """
    eos = _is_eos(ids, eos_ids).long()
    mask = eos.cumsum(-1) - eos == 0  # no EOS before this token
    return mask if lengths is None else mask & _within(ids, lengths)


def truncated(ids: Tensor, eos_ids: int | Sequence[int], *, lengths: Tensor | None = None) -> Tensor:
    """The completions ``(B,)`` without an EOS: cut off by the length limit."""
    ended = _is_eos(ids, eos_ids)
    if lengths is not None:
        ended = ended & _within(ids, lengths)
    return ~ended.any(-1)


def off_policy_sequence_mask(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor | None,
    mask: Tensor,
    *,
    threshold: float,
    rule: str = "v3.2",
) -> Tensor:
    """The sequences ``(B,)`` that are close enough to the policy to be kept.

    ``"v3.2"`` (DeepSeek-V3.2, arXiv 2512.02556): drop iff A < 0 and mean_t(log π_old − log π_θ) > threshold. ``(B, T)``
    advantages give a ``(B, T)`` mask. ``"reference_drift"``: drop iff log π_θ(o) − log π_ref(o), summed over the
    sequence, is at least the threshold, for any advantage; pass the reference's log-probs as ``old_logps``, and
    advantages may be None.
    """
    check_choice("rule", rule, OFF_POLICY_RULES)
    if not is_number(threshold):
        raise InputError(f"threshold must be a finite number, got {threshold!r}")
    check_same_shape(logps=logps, old_logps=old_logps)
    check_tensors(**not_none(advantages=advantages))
    mask = check_mask("mask", mask, logps.shape)
    behind = working(old_logps.detach()) - working(logps.detach())
    # A token without a valid log-prob is dropped from the sum and from its denominator.
    valid = mask & ~behind.isnan()
    behind = torch.where(valid, behind, 0.0).sum(-1)
    if rule == "reference_drift":
        return -behind < threshold
    if advantages is None:
        raise InputError("the rule 'v3.2' needs advantages: it drops only sequences with a negative advantage")
    close = behind / valid.sum(-1).clamp(min=1) <= threshold
    if advantages.shape == logps.shape:
        close = close.unsqueeze(1)
    elif advantages.shape != logps.shape[:1]:
        rows, length = logps.shape
        raise InputError(f"advantages has shape {tuple(advantages.shape)}; expected ({rows},) or ({rows}, {length})")
    return (advantages >= 0) | close


@dataclass(frozen=True)
class DivergenceLimit:
    """DPPO's limit to the divergence between sampler μ and policy π at each token (arXiv 2602.04879).

    The divergence is that of two outcomes, the sampled token or any other, which needs no more than its probability:
    ``"tv"`` is |μ − π|, ``"kl"`` is μ·log(μ/π) + (1 − μ)·log((1 − μ)/(1 − π)). A token beyond the limit is masked if
    its update would move it further: A > 0 and π > μ, or A < 0 and π < μ. As in verl, 1e-8 is added to 1 − μ and 1 − π.
    """

    sampler_logps: Tensor  # (B, T); a token without one (NaN) is never masked
    kind: str = "tv"
    threshold: float | None = None  # default: 0.15 for tv, 0.05 for kl

    @torch.no_grad()
    def exceeded(self, logps: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens ``(B, T)`` of ``mask`` to mask: those with a negative advantage, and those with a positive one."""
        check_choice("divergence", self.kind, DIVERGENCES)
        threshold = DIVERGENCES[self.kind] if self.threshold is None else self.threshold
        check_above("threshold", threshold, 0.0)
        check_same_shape(logps=logps, sampler_logps=self.sampler_logps, advantages=advantages, mask=mask)
        logps, sampler_logps = working(logps), working(self.sampler_logps)
        policy, sampler = logps.exp(), sampler_logps.exp()
        if self.kind == "tv":
            divergence = (sampler - policy).abs()
        else:
            others, sampled_others = 1 - policy + 1e-8, 1 - sampler + 1e-8
            divergence = sampler * (sampler_logps - logps) + (1 - sampler) * (sampled_others / others).log()
        beyond = mask & (divergence > threshold)
        return beyond & (advantages < 0) & (policy < sampler), beyond & (advantages > 0) & (policy > sampler)


def validity_reasons(
    *,
    lengths: Tensor | None = None,
    min_length: int = 0,
    has_answer: Tensor | None = None,
    repetition: Tensor | None = None,
    max_repetition: float = 0.5,
) -> dict[str, Tensor]:
    """The samples ``(B,)`` that fail each of the given checks, by reason.

    ``lengths`` must reach ``min_length`` (in the same unit), ``has_answer`` be true, and ``repetition``, a share from
    0 to 1 or a boolean, not exceed ``max_repetition``.
    """
    check_integer("min_length", min_length, 0)
    check_at_least("max_repetition", max_repetition, 0.0)
    check_tensors(**not_none(lengths=lengths, has_answer=has_answer, repetition=repetition))
    reasons = {}
    if lengths is not None:
        reasons["too_short"] = lengths < min_length
    if has_answer is not None:
        reasons["no_answer"] = has_answer == 0
    if repetition is not None:
        reasons["repetitive"] = repetition > max_repetition
    if not reasons:
        raise InputError("pass at least one of lengths, has_answer and repetition")
    shapes = {name: tuple(failed.shape) for name, failed in reasons.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise InputError(f"pass one value per sample, (B,), for each check; got {shapes}")
    return reasons


def validity(
    *,
    lengths: Tensor | None = None,
    min_length: int = 0,
    has_answer: Tensor | None = None,
    repetition: Tensor | None = None,
    max_repetition: float = 0.5,
) -> Tensor:
    """The samples ``(B,)`` that pass all checks of `validity_reasons`."""
    reasons = validity_reasons(
        lengths=lengths,
        min_length=min_length,
        has_answer=has_answer,
        repetition=repetition,
        max_repetition=max_repetition,
    )
    return ~torch.stack(list(reasons.values())).any(0)


def high_entropy_mask(entropy: Tensor, mask: Tensor, *, top_fraction: float) -> Tensor:
    """The ``top_fraction`` of tokens ``(B, T)`` with the highest entropy of the batch (0.2 in arXiv 2506.01939)."""
    check_share("top_fraction", top_fraction, "(0, 1]")
    check_tensors(entropy=entropy)
    mask = check_mask("mask", mask, entropy.shape)
    entropy = entropy.detach()
    ascending = working(entropy[mask]).sort().values
    if not len(ascending):
        return mask
    # A linearly interpolated quantile; torch.quantile is limited to 2^24 values.
    rank = (1 - top_fraction) * (len(ascending) - 1)
    below = int(rank)
    above = min(below + 1, len(ascending) - 1)
    bound = torch.lerp(ascending[below], ascending[above], rank - below)
    return (working(entropy) >= bound) & mask


def _is_eos(ids: Tensor, eos_ids: int | Sequence[int]) -> Tensor:
    check_tensors(ids=ids)
    if ids.dim() != 2:
        raise InputError(f"ids has shape {tuple(ids.shape)}; expected (B, T)")
    eos = [eos_ids] if isinstance(eos_ids, int) else eos_ids
    if not isinstance(eos, Iterable) or not all(isinstance(number, int) for number in eos):
        raise InputError(f"eos_ids must be a token id or several, got {eos_ids!r}")
    return torch.isin(ids, torch.tensor(list(eos), dtype=ids.dtype, device=ids.device))


def _within(ids: Tensor, lengths: Tensor) -> Tensor:
    check_tensors(lengths=lengths)
    if lengths.shape != ids.shape[:1]:
        raise InputError(f"lengths has shape {tuple(lengths.shape)}; expected ({len(ids)},)")
    return torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
