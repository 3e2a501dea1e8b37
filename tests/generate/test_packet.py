"""The packet of a decode step: what the device reads is what the host wrote."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.generate.packet import fill_packet, idle_packet, packet_size, packet_views
from groupwise.generate.runner import StepBatch
from groupwise.model.decode_inputs import TILE_ROWS

SPARE_SLOT, SPARE_PAGE = 70, 500


def a_batch(sizes: list[int], seed: int) -> tuple[StepBatch, np.ndarray]:
    """Groups of these sizes, with prompts of lengths 1, 2, …"""
    rng, count = np.random.default_rng(seed), sum(sizes)
    ends = np.cumsum(sizes).tolist()
    groups = [(100 * n, n + 1, slice(end - size, end)) for n, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    index, slots = rng.integers(1, 50, count), rng.permutation(SPARE_SLOT)[:count]
    positions, pages = index + 7, rng.permutation(SPARE_PAGE)[:count, None]
    return StepBatch(np.arange(count), index, slots, pages, positions, groups), rng.random(count, np.float32)


@given(st.lists(st.integers(1, 35), min_size=1, max_size=2), st.integers(0, 5), st.integers(0, 1000))
def test_every_row_is_read_as_it_was_written(sizes, more, seed):
    count = sum(sizes)
    capacity = count + more
    packet = np.random.default_rng(seed).integers(-99, 99, packet_size(capacity)).astype(np.int32)  # an earlier step
    batch, uniform = a_batch(sizes, seed)
    fill_packet(packet, batch, uniform, 20, capacity, SPARE_SLOT, SPARE_PAGE)
    inputs, banned, numbers = packet_views(torch.from_numpy(packet), capacity, capacity)
    assert inputs.slots.tolist() == [*batch.slots, *[SPARE_SLOT] * more]
    assert inputs.pages.tolist() == [*batch.pages[:, 0], *[SPARE_PAGE] * more]
    assert inputs.lengths.tolist() == [*(batch.index - 1), *[0] * more]
    assert inputs.positions.tolist()[:count] == batch.positions.tolist()
    assert banned.tolist()[:count] == (batch.index < 20).tolist()
    assert numbers.dtype == torch.float32
    assert numbers.tolist()[:count] == uniform.tolist()
    assert sorted(inputs.order.tolist()) == list(range(capacity))
    ordered = inputs.lengths[inputs.order.long()].tolist()
    assert ordered[:count] == sorted(ordered[:count], reverse=True)  # the longest first
    for number, (start, length, members) in enumerate(batch.groups):
        assert inputs.prompt_lengths.tolist()[members] == [number + 1] * sizes[number]
        tiles = (inputs.tile_lengths == length) & (inputs.tile_starts == start)
        rows = inputs.tile_rows[tiles].flatten()
        assert int(tiles.sum()) == -(-sizes[number] // TILE_ROWS)
        assert rows[rows >= 0].tolist() == list(range(members.start, members.stop))
    assert inputs.prompt_lengths.tolist()[count:] == [0] * more
    assert int((inputs.tile_lengths > 0).sum()) == sum(-(-size // TILE_ROWS) for size in sizes)


def test_fewer_rows_than_the_packet_has_room_for():
    batch, uniform = a_batch([3], 0)
    packet = np.zeros(packet_size(8), np.int32)
    fill_packet(packet, batch, uniform, 0, 8, SPARE_SLOT, SPARE_PAGE)
    inputs = packet_views(torch.from_numpy(packet), 4, 8).attention
    assert inputs.slots.tolist() == [*batch.slots, SPARE_SLOT]
    assert sorted(inputs.order.tolist()) == [0, 1, 2, 3]
    assert inputs.tile_rows.shape == (4, TILE_ROWS)


def test_an_idle_packet_uses_the_spare_slot_and_page_only():
    inputs, _, _ = packet_views(idle_packet(5, SPARE_SLOT, SPARE_PAGE), 5, 5)
    assert set(inputs.slots.tolist()) == {SPARE_SLOT}
    assert set(inputs.pages.tolist()) == {SPARE_PAGE}
    for unused in (inputs.tile_lengths, inputs.lengths, inputs.prompt_lengths):
        assert not unused.any()
    assert inputs.order.tolist() == [0, 1, 2, 3, 4]
    assert (inputs.tile_rows == -1).all()
