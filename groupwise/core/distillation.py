"""Reverse KL to a teacher, KL(π_θ ‖ π_T), at each token that the student sampled (on-policy distillation).

`sampled_reverse_kl` needs one log-prob per token of each model. Its gradient is that of Thinking Machines' on-policy
distillation, in which log π_T − log π_θ is the advantage of a single token, without a discount from later tokens; on
average it is the gradient of the exact KL. `reverse_kl` is exact, over the vocabulary (GKD, arXiv 2306.13649, with the
student's own samples and reverse KL), and `top_k_reverse_kl` over the tokens whose log-probs a server returns, with all
others as one. No function keeps logits: they are computed a chunk of rows at a time, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groupwise.core._checks import check_mask, check_same_shape, check_temperature, check_tensors, not_none, working
from groupwise.core.logps import finish_logits, head_logits, rows_per_chunk
from groupwise.core.losses import MAX_LOG_RATIO, log_ratio
from groupwise.errors import InputError, check_integer

SMALLEST_REST = 1e-8  # probability of all tokens beyond the top k: rounding may leave less than nothing


class NextTokens(NamedTuple):
    """What predicts ``N`` tokens: hidden states ``(N, D)`` and a head, or logits ``(N, V)`` without a head's weight."""

    states: Tensor
    weight: Tensor | None = None  # (V, D)
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    @property
    def vocabulary(self) -> int:
        return (self.states.shape[1:] if self.weight is None else self.weight.shape)[0]

    def logits(self, states: Tensor, temperature: float) -> Tensor:
        """The logits of some of the ``states``, in float32 or better."""
        if self.weight is None:
            return finish_logits(states, self.bias, self.scale, self.softcap, temperature)
        return head_logits(states, self.weight, self.bias, self.scale, self.softcap, temperature)


def sampled_reverse_kl(
    logps: Tensor, teacher_logps: Tensor, *, old_logps: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """ρ · (log π_θ − log π_T) of each sampled token ``(B, T)``; 0 outside ``mask``. The gradient is that of ρ alone.

    ρ = π_θ/π_old corrects for samples of an older policy; without ``old_logps`` its value is 1. Differences are
    clamped to ±20, as in `losses`.
    """
    check_same_shape(logps=logps, teacher_logps=teacher_logps, **not_none(old_logps=old_logps))
    present = torch.ones_like(logps, dtype=torch.bool) if mask is None else check_mask("mask", mask, logps.shape)
    difference = torch.where(present, working(logps.detach()) - working(teacher_logps), 0.0)
    ratio = log_ratio(logps, logps.detach() if old_logps is None else old_logps, present).exp()
    return ratio * difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def reverse_kl(
    student: NextTokens, teacher: NextTokens, *, temperature: float = 1.0, chunk_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The exact KL(π_θ ‖ π_T) ``(N,)``, and whether both have the same most likely token ``(N,)``, as 0 or 1.

    Only the student gets a gradient. Models of one tokenizer may pad their vocabularies to different sizes: both
    distributions are those over the tokens that both have.
    """
    _check(student, teacher.states)
    vocabulary = min(student.vocabulary, teacher.vocabulary)

    def rows(states: Tensor, teacher_states: Tensor) -> tuple[Tensor, Tensor]:
        logits = student.logits(states, temperature)[:, :vocabulary]
        with torch.no_grad():
            teacher_logits = teacher.logits(teacher_states, temperature)[:, :vocabulary]
            same = (logits.argmax(-1) == teacher_logits.argmax(-1)).to(logits.dtype)
            teacher_logps = teacher_logits.log_softmax(-1)
        logps = logits.log_softmax(-1)
        prob = logps.exp()
        # A token with −inf in both contributes 0, not 0 · (−inf + inf) = NaN.
        return (prob * torch.where(prob > 0, logps - teacher_logps, 0.0)).sum(-1), same

    return _in_chunks(rows, student, (teacher.states.detach(),), temperature, chunk_size)


def top_k_reverse_kl(
    student: NextTokens,
    ids: Tensor,
    teacher_logps: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`reverse_kl` from the teacher's log-probs ``(N, K)`` of the tokens ``ids`` ``(N, K)``, most likely first.

    All other tokens count as one, with the probability that is left: a lower bound of the exact KL, which it reaches
    if the ids are the vocabulary. An id of −1 is no token. ``temperature`` is the student's.
    """
    check_same_shape(ids=ids, teacher_logps=teacher_logps)
    _check(student, ids)
    if ids.is_floating_point() or (ids.numel() and int(ids.max()) >= student.vocabulary):
        raise InputError(f"ids must be integers below the student's vocabulary of {student.vocabulary}, or −1")

    def rows(states: Tensor, ids: Tensor, teacher_logps: Tensor) -> tuple[Tensor, Tensor]:
        logits = student.logits(states, temperature)
        known = ids >= 0
        chosen = logits.log_softmax(-1).gather(1, ids.clamp(min=0))
        prob = torch.where(known, chosen, -torch.inf).exp()
        kl = (prob * torch.where(known, chosen - teacher_logps, 0.0)).sum(-1)
        rest = (1 - prob.sum(-1)).clamp(min=SMALLEST_REST)
        teacher_rest = 1 - torch.where(known, teacher_logps, -torch.inf).exp().sum(-1)
        kl = kl + rest * (rest.log() - teacher_rest.clamp(min=SMALLEST_REST).log())
        return kl, (logits.argmax(-1) == ids[:, 0]).to(logits.dtype)

    return _in_chunks(rows, student, (ids.long(), working(teacher_logps.detach())), temperature, chunk_size)


def _check(student: NextTokens, other: Tensor) -> None:
    check_tensors(states=student.states, other=other)
    if student.states.dim() != 2 or other.dim() != 2 or len(student.states) != len(other):
        raise InputError(
            f"the student's states {tuple(student.states.shape)} and the teacher's {tuple(other.shape)} must be rows "
            "of the same tokens"
        )


def _in_chunks(
    rows: Callable[..., tuple[Tensor, Tensor]],
    student: NextTokens,
    others: tuple[Tensor, ...],
    temperature: float,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """Apply ``rows`` to a chunk of the student's states and of the others at a time; recompute it for the gradient."""
    check_temperature(temperature)
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, 1)
    states = student.states
    size = chunk_size or rows_per_chunk(student.vocabulary, states.device)
    parts = [
        checkpoint(rows, *(values[start : start + size] for values in (states, *others)), use_reentrant=False)
        for start in range(0, len(states), size)
    ]
    if not parts:
        nothing = working(states).sum(-1)
        return nothing, nothing.detach()
    kl, same = zip(*parts, strict=True)
    return torch.cat(kl), torch.cat(same)
