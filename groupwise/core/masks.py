"""What may teach, and why the rest may not.

A completion mask says which tokens exist; it alone defines denominators. The policy masks here (off-policy, validity,
entropy) say which of them may teach: they go to `policy_loss(policy_mask=…)` and do not touch the KL term. True keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from groupwise.core._checks import (
    check_at_least,
    check_mask,
    check_same_shape,
    check_share,
    check_tensors,
    given,
    is_number,
    shape_of,
    working,
)
from groupwise.errors import InputError, check_choice

OFF_POLICY_RULES = ("v3.2", "reference_drift")


def completion_mask(ids: Tensor, eos_ids: int | Sequence[int], *, lengths: Tensor | None = None) -> Tensor:
    """Which of the tokens ``(B, T)`` belong to the completion: all up to and including the first EOS.

    ``lengths`` ``(B,)`` bounds completions that were cut before the end of the row.
    """
    eos = _is_eos(ids, eos_ids).long()
    mask = eos.cumsum(-1) - eos == 0  # no EOS before this token
    return mask if lengths is None else mask & _within(ids, lengths)


def truncated(ids: Tensor, eos_ids: int | Sequence[int], *, lengths: Tensor | None = None) -> Tensor:
    """Which completions ``(B,)`` ended without an EOS: cut off by the length limit."""
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
    """Which sequences are still close enough to the policy to learn from: keep ``(B,)``.

    ``"v3.2"`` (DeepSeek-V3.2): drop iff A < 0 and mean_t(log π_old − log π_θ) > threshold. ``(B, T)`` advantages
    give a ``(B, T)`` mask. ``"reference_drift"`` (the first document): drop iff log π_θ(o) − log π_ref(o) ≥ threshold for
    the whole sequence, whatever its advantage; ``old_logps`` are then the reference's and advantages may be None.
    """
    check_choice("rule", rule, OFF_POLICY_RULES)
    if not is_number(threshold):
        raise InputError(f"threshold must be a finite number, got {threshold!r}")
    check_same_shape(logps=logps, old_logps=old_logps)
    check_tensors(**given(advantages=advantages))
    mask = check_mask("mask", mask, logps.shape)
    behind = working(old_logps.detach()) - working(logps.detach())
    # A token without a valid log-prob is no evidence: out of the sum and out of its denominator.
    known = mask & ~behind.isnan()
    behind = torch.where(known, behind, 0.0).sum(-1)
    if rule == "reference_drift":
        return -behind < threshold
    if advantages is None:
        raise InputError("the rule 'v3.2' needs advantages: it only drops sequences that did worse than their group")
    close = behind / known.sum(-1).clamp(min=1) <= threshold
    if advantages.shape == logps.shape:
        close = close.unsqueeze(1)
    elif advantages.shape != logps.shape[:1]:
        rows, length = logps.shape
        raise InputError(f"advantages has shape {shape_of(advantages)}; expected ({rows},) or ({rows}, {length})")
    return (advantages >= 0) | close


def validity_reasons(
    *,
    lengths: Tensor | None = None,
    min_length: int = 0,
    has_answer: Tensor | None = None,
    repetition: Tensor | None = None,
    max_repetition: float = 0.5,
) -> dict[str, Tensor]:
    """Why samples are not valid: for each fact that is given, which samples ``(B,)`` fail it.

    Facts only, no text: ``lengths`` in whatever unit ``min_length`` is in, ``has_answer`` true or false, and
    ``repetition`` a share from 0 to 1 (or true/false) that may reach ``max_repetition``.
    """
    check_at_least("min_length", min_length, 0)
    check_at_least("max_repetition", max_repetition, 0.0)
    check_tensors(**given(lengths=lengths, has_answer=has_answer, repetition=repetition))
    reasons = {}
    if lengths is not None:
        reasons["too_short"] = lengths < min_length
    if has_answer is not None:
        reasons["no_answer"] = has_answer == 0
    if repetition is not None:
        reasons["repetitive"] = repetition > max_repetition
    if not reasons:
        raise InputError("give at least one fact: lengths, has_answer or repetition")
    first_name, first = next(iter(reasons.items()))
    for name, failed in reasons.items():
        if failed.dim() != 1 or failed.shape != first.shape:
            raise InputError(
                f"facts must be one per sample, (B,): {first_name} has {shape_of(first)}, {name} {shape_of(failed)}"
            )
    return reasons


def validity(
    *,
    lengths: Tensor | None = None,
    min_length: int = 0,
    has_answer: Tensor | None = None,
    repetition: Tensor | None = None,
    max_repetition: float = 0.5,
) -> Tensor:
    """The samples ``(B,)`` that fail none of `validity_reasons`: the first document's 'sampling mask'."""
    reasons = validity_reasons(
        lengths=lengths,
        min_length=min_length,
        has_answer=has_answer,
        repetition=repetition,
        max_repetition=max_repetition,
    )
    return ~torch.stack(list(reasons.values())).any(0)


def high_entropy_mask(entropy: Tensor, mask: Tensor, *, top_fraction: float) -> Tensor:
    """The tokens ``(B, T)`` whose entropy is among the batch's highest ``top_fraction`` (0.2 in Wang et al., 2025)."""
    check_share("top_fraction", top_fraction, "(0, 1]")
    check_tensors(entropy=entropy)
    mask = check_mask("mask", mask, entropy.shape)
    entropy = entropy.detach()
    known = working(entropy[mask]).sort().values
    if not len(known):
        return mask
    # The quantile by linear interpolation between order statistics; torch.quantile refuses over 2^24 values.
    rank = (1 - top_fraction) * (len(known) - 1)
    below = int(rank)
    above = min(below + 1, len(known) - 1)
    bound = torch.lerp(known[below], known[above], rank - below)
    return (working(entropy) >= bound) & mask


def _is_eos(ids: Tensor, eos_ids: int | Sequence[int]) -> Tensor:
    check_tensors(ids=ids)
    if ids.dim() != 2:
        raise InputError(f"ids has shape {shape_of(ids)}; expected (B, T)")
    wanted = [eos_ids] if isinstance(eos_ids, int) else eos_ids
    if not isinstance(wanted, Iterable) or not all(isinstance(number, int) for number in wanted):
        raise InputError(f"eos_ids must be a token id or several, got {eos_ids!r}")
    return torch.isin(ids, torch.tensor(list(wanted), dtype=ids.dtype, device=ids.device))


def _within(ids: Tensor, lengths: Tensor) -> Tensor:
    check_tensors(lengths=lengths)
    if lengths.shape != ids.shape[:1]:
        raise InputError(f"lengths has shape {shape_of(lengths)}; expected ({len(ids)},)")
    return torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
