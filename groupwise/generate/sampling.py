"""From logits to a token: filters, one uniform number, and the inverse of the cumulated distribution.

A token is the first whose cumulated probability exceeds u. One number per token is all the chance there is, and it is
drawn beforehand from (seed, key of the prompt, number of the sample): neither the batch that a sample happens to share
nor the device changes it.
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


class Drawn(NamedTuple):
    ids: Tensor  # (rows,)
    logps: Tensor  # (rows,) under the tempered full distribution
    filtered_logps: Tensor  # (rows,) under the one it was drawn from
    filtered: Tensor  # (rows, V) its logits, −inf for what was filtered away


def uniforms(seed: int, key: int, samples: Sequence[int], count: int) -> np.ndarray:
    """The numbers in [0, 1) that decide the tokens of a prompt's samples, ``(samples, count)`` float32.

    ``count`` may grow: more of them begin with the same. The generator counts in 256 bits, of which a sample's number
    takes the third 64: no sample ever reaches another's numbers.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, key]))
    generator, state = np.random.Generator(bits), bits.state
    found = np.empty((len(samples), count), np.float32)
    for row, sample in enumerate(samples):
        state["state"]["counter"] = np.array([0, 0, sample, 0], np.uint64)
        bits.state = state
        generator.random(out=found[row], dtype=np.float32)
    return found


def draw(logits: Tensor, uniform: Tensor, banned: Tensor | None, eos: Tensor, sampling: Sampling) -> Drawn:
    """One token per row of raw logits ``(rows, V)``; where ``banned`` ``(rows,)`` is true, none of ``eos`` ``(V,)``."""
    temperature = 1.0 if sampling.greedy else sampling.temperature
    full = logits / temperature if temperature != 1.0 else logits
    filtered = full
    if banned is not None:
        logits = logits.masked_fill(banned[:, None] & eos, -torch.inf)
        filtered = logits / temperature
    if sampling.greedy:
        ids, total = logits.argmax(-1), full.logsumexp(-1, keepdim=True)
        return Drawn(ids, _at(full, ids, total), torch.zeros_like(total[:, 0]), filtered)
    if sampling.filters:
        filtered = filter_logits(
            logits,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            order=sampling.order,
        )
    largest = filtered.amax(-1, keepdim=True)
    weights = (filtered - largest).exp()
    filtered_total = largest + weights.sum(-1, keepdim=True).log()
    whole = filtered is full
    total = filtered_total if whole else full.logsumexp(-1, keepdim=True)
    # A running sum of 50,000 float32 numbers is off by 1e-5 where it is added one by one, as on a CPU.
    exact = torch.float64 if logits.device.type == "cpu" else torch.float32
    cumulated = weights.cumsum(-1, dtype=exact)
    last = cumulated[:, -1:]
    target = torch.minimum(uniform[:, None].to(exact) * last, torch.nextafter(last, torch.zeros_like(last)))
    ids = torch.searchsorted(cumulated, target, right=True).squeeze(-1)
    logps = _at(full, ids, total)
    return Drawn(ids, logps, logps if whole else _at(filtered, ids, filtered_total), filtered)


def eos_mask(eos: Sequence[int], handle: ModelHandle) -> Tensor:
    """Which tokens end a completion, ``(V,)``."""
    mask = torch.zeros(handle.vocabulary, dtype=torch.bool)
    mask[list(eos)] = True
    return to_device(mask, handle.device)


def _at(logits: Tensor, ids: Tensor, total: Tensor) -> Tensor:
    return (logits.gather(-1, ids[:, None]) - total).squeeze(-1)
