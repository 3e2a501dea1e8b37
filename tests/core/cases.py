"""Random inputs, shared by the tests of the core."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """A ragged batch in float64, with positions beyond each completion that must not matter."""

    logps: Tensor
    old_logps: Tensor
    ref_logps: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())


def ragged_mask(rows: int, length: int, generator: torch.Generator, empty_rows: bool = False) -> Tensor:
    lengths = torch.randint(0 if empty_rows else 1, length + 1, (rows,), generator=generator)
    return torch.arange(length) < lengths.unsqueeze(1)


def random_batch(seed: int, *, per_token_advantages: bool = False, spread: float = 0.4) -> Batch:
    """Ratios on both sides of every clip; advantages of both signs and exactly zero."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = int(torch.randint(1, 7, (), generator=generator))
    length = int(torch.randint(1, 12, (), generator=generator))
    logps = -randn(rows, length).abs() * 2
    old = logps + spread * randn(rows, length)
    ref = logps + spread * randn(rows, length)
    advantages = randn(rows, length) if per_token_advantages else randn(rows)
    advantages = torch.where(torch.rand(advantages.shape, generator=generator) < 0.15, 0.0, advantages)
    return Batch(logps.requires_grad_(), old, ref, advantages, ragged_mask(rows, length, generator))
