"""From logits to a token: filters, then inverse-CDF sampling with one uniform number per token.

The token is the first whose cumulative probability exceeds u. The uniform numbers are generated in advance from (seed,
prompt key, sample number), so they depend neither on the batch nor on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.core.filters import filter_logits
from groupwise.generate.types import Sampling
from groupwise.model.attention import to_device
from groupwise.model.handle import ModelHandle


class DrawnTokens(NamedTuple):
    """One token per row."""

    ids: Tensor  # (rows,)
    logps: Tensor  # (rows,) under the full distribution, after the temperature
    filtered_logps: Tensor  # (rows,) after the filters
    filtered: Tensor  # (rows, V) logits after the filters, −inf where filtered out


def uniforms(seed: int, key: int, samples: Sequence[int], count: int) -> np.ndarray:
    """The uniform numbers in [0, 1) for a prompt's samples, ``(samples, count)`` float32.

    A larger ``count`` extends the same sequences. The sample's number is the third 64-bit word of the generator's
    256-bit counter, so no two samples share numbers.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, key]))
    generator, state = np.random.Generator(bits), bits.state
    numbers = np.empty((len(samples), count), np.float32)
    for row, sample in enumerate(samples):
        state["state"]["counter"] = np.array([0, 0, sample, 0], np.uint64)
        bits.state = state
        generator.random(out=numbers[row], dtype=np.float32)
    return numbers


def draw(
    logits: Tensor,
    uniform: Tensor,
    banned: Tensor | None,
    eos: Tensor,
    sampling: Sampling,
    occurred: Tensor | None = None,
) -> DrawnTokens:
    """Sample a token per row of raw logits ``(rows, V)``; none of ``eos`` ``(V,)`` where ``banned`` ``(rows,)``.

    occurred: which tokens the repetition penalty applies to, ``(rows, V)``.
    """
    temperature = 1.0 if sampling.greedy else sampling.temperature
    full = logits / temperature if temperature != 1.0 else logits
    filtered = full
    if occurred is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(occurred, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        filtered = logits / temperature
    if banned is not None:
        logits = logits.masked_fill(banned[:, None] & eos, -torch.inf)
        filtered = logits / temperature
    if sampling.greedy:
        ids, total = logits.argmax(-1), full.logsumexp(-1, keepdim=True)
        return DrawnTokens(ids, _logps_at(full, ids, total), torch.zeros_like(total[:, 0]), filtered)
    if sampling.filters:
        filtered = filter_logits(
            logits,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            order=sampling.order,
        )
    unfiltered = filtered is full
    kept, kept_ids = filtered, None
    if not unfiltered and filtered.device.type == "cpu":  # exponentials of tens of numbers, not of tens of thousands
        kept, kept_ids = _kept_only(filtered)
    largest = kept.amax(-1, keepdim=True)
    weights = (kept - largest).exp()
    filtered_total = largest + weights.sum(-1, keepdim=True).log()
    total = filtered_total if unfiltered else full.logsumexp(-1, keepdim=True)
    # On a CPU the cumulative sum is sequential: with 50,000 float32 numbers it is off by 1e-5.
    exact = torch.float64 if logits.device.type == "cpu" else torch.float32
    cumulative = weights.cumsum(-1, dtype=exact)
    last = cumulative[:, -1:]
    target = torch.minimum(uniform[:, None].to(exact) * last, torch.nextafter(last, torch.zeros_like(last)))
    # Logits with NaN give no index; a valid id keeps the device alive, and the log-prob is NaN, which the host refuses.
    ids = torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[-1] - 1)
    ids = (ids if kept_ids is None else kept_ids.gather(-1, ids)).squeeze(-1)
    logps = _logps_at(full, ids, total)
    return DrawnTokens(ids, logps, logps if unfiltered else _logps_at(filtered, ids, filtered_total), filtered)


def _kept_only(filtered: Tensor) -> tuple[Tensor, Tensor | None]:
    """The logits that passed the filters and their ids, in order, padded with −inf and 0; all of them if many did."""
    rows, ids = (filtered > -torch.inf).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=len(filtered))
    width = max(1, int(counts.max()))
    if 4 * width > filtered.shape[-1]:
        return filtered, None
    places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    kept, kept_ids = filtered.new_full((len(filtered), width), -torch.inf), ids.new_zeros(len(filtered), width)
    kept[rows, places], kept_ids[rows, places] = filtered[rows, ids], ids
    return kept, kept_ids


class OccurredTokens:
    """The tokens that each slot's prompt and completion have so far, for the repetition penalty."""

    def __init__(self, slots: int, handle: ModelHandle) -> None:
        self.mask = torch.zeros(slots, handle.vocabulary, dtype=torch.bool, device=handle.device)

    def start(self, slots: Sequence[int], prompts: Sequence[Tensor]) -> None:
        """Begin the completions of these prompts, one per slot."""
        for slot, ids in zip(slots, prompts, strict=True):
            self.mask[slot] = False
            self.mask[slot, ids.to(self.mask.device)] = True

    def add(self, slots: Tensor, ids: Tensor) -> None:
        """Add each slot's next token."""
        self.mask[slots, ids] = True


def eos_mask(eos: Sequence[int], handle: ModelHandle) -> Tensor:
    """True for the tokens that end a completion, ``(V,)``."""
    mask = torch.zeros(handle.vocabulary, dtype=torch.bool)
    mask[list(eos)] = True
    return to_device(mask, handle.device)


def _logps_at(logits: Tensor, ids: Tensor, total: Tensor) -> Tensor:
    return (logits.gather(-1, ids[:, None]) - total).squeeze(-1)
