"""Decoding with a shared prompt: groups of one size are computed together, and it makes no difference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from groupwise.model.attention import Call
from groupwise.model.cache import STORAGE, DecodeLayout, Storage, _runs

SHARED, PER_HEAD, WIDTH = 2, 3, 8


@pytest.mark.parametrize(
    ("groups", "runs"),
    [
        ([(0, 5, 2)], [(0, 1, 0, 5)]),
        ([(0, 5, 2), (5, 5, 2), (10, 5, 2)], [(0, 3, 0, 5)]),  # equally long, side by side: one call
        ([(0, 5, 2), (6, 5, 2), (11, 4, 2)], [(0, 1, 0, 5), (1, 1, 6, 5), (2, 1, 11, 4)]),
        ([(5, 5, 2), (0, 5, 2)], [(0, 1, 5, 5), (1, 1, 0, 5)]),
        ([(0, 5, 2), (5, 5, 1)], None),  # one has more rows than the other
        ([(0, 5, 1), (5, 5, 3)], None),
        ([], None),
    ],
)
def test_runs(groups, runs):
    found, row = [], 0
    for start, length, size in groups:
        found.append((start, length, slice(row, row + size)))
        row += size
    assert _runs(found, row) == runs


@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 4, 5), (1, 7, 7)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_equal_groups_equal_one_by_one(lengths, softcap):
    make = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    size, own = 4, 6
    rows = size * len(lengths)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    groups = [
        (start, length, slice(size * number, size * number + size))
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    slots, filled = torch.arange(rows), torch.randint(0, own, (rows,), generator=make)
    storage = Storage(
        *(some(sum(lengths), SHARED, WIDTH) for _ in range(2)), *(some(rows + 1, own, SHARED, WIDTH) for _ in range(2))
    )
    module = nn.Module()
    setattr(module, STORAGE, storage)
    call = Call(
        module,
        some(rows, SHARED * PER_HEAD, 1, WIDTH),
        some(rows, SHARED, 1, WIDTH),
        some(rows, SHARED, 1, WIDTH),
        0.3,
        None,
        softcap,
    )
    together, one_by_one = (DecodeLayout(slots, filled, filled + 9, groups) for _ in range(2))
    assert together.runs is not None
    one_by_one.runs = None
    torch.testing.assert_close(together.attend(call), one_by_one.attend(call), rtol=1e-12, atol=1e-12)
