"""Decode attention with a shared prompt: groups of equal size are computed together, with the same result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from groupwise.model.attention import AttentionInputs
from groupwise.model.cache import CACHE_ATTRIBUTE, DecodeLayout, LayerCache, _runs

KV_HEADS, PER_HEAD, WIDTH = 2, 3, 8


@pytest.mark.parametrize(
    ("groups", "runs"),
    [
        ([(0, 5, 2)], [(0, 1, 0, 5)]),
        ([(0, 5, 2), (5, 5, 2), (10, 5, 2)], [(0, 3, 0, 5)]),  # equal lengths, adjacent: one call
        ([(0, 5, 2), (6, 5, 2), (11, 4, 2)], [(0, 1, 0, 5), (1, 1, 6, 5), (2, 1, 11, 4)]),
        ([(5, 5, 2), (0, 5, 2)], [(0, 1, 5, 5), (1, 1, 0, 5)]),
        ([(0, 5, 2), (5, 5, 1)], None),  # different numbers of rows
        ([(0, 5, 1), (5, 5, 3)], None),
        ([], None),
    ],
)
def test_runs(groups, runs):
    placed, row = [], 0
    for start, length, size in groups:
        placed.append((start, length, slice(row, row + size)))
        row += size
    assert _runs(placed, row) == runs


@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 4, 5), (1, 7, 7)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_equal_groups_equal_one_by_one(lengths, softcap):
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size, slot_length = 4, 6
    rows = size * len(lengths)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    groups = [
        (start, length, slice(size * number, size * number + size))
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    slots, filled = torch.arange(rows), torch.randint(0, slot_length, (rows,), generator=generator)
    cache = LayerCache(
        *(randn(sum(lengths), KV_HEADS, WIDTH) for _ in range(2)),
        *(randn(rows + 1, slot_length, KV_HEADS, WIDTH) for _ in range(2)),
    )
    module = nn.Module()
    setattr(module, CACHE_ATTRIBUTE, cache)
    inputs = AttentionInputs(
        module,
        randn(rows, KV_HEADS * PER_HEAD, 1, WIDTH),
        randn(rows, KV_HEADS, 1, WIDTH),
        randn(rows, KV_HEADS, 1, WIDTH),
        0.3,
        None,
        softcap,
    )
    together, one_by_one = (DecodeLayout(slots[:, None], filled, filled + 9, groups, slot_length) for _ in range(2))
    assert together.runs is not None
    one_by_one.runs = None
    torch.testing.assert_close(together.attend(inputs), one_by_one.attend(inputs), rtol=1e-12, atol=1e-12)
