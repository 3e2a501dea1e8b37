"""The packet that a decode step on a GPU gets from the host: one block of integers, copied at once.

It has eight numbers per row, then the tiles' starts, lengths and rows; see `DecodeInputs`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.generate.runner import StepBatch
from groupwise.model.decode_inputs import TILE_ROWS, DecodeInputs

FIELDS = 8  # per row: slot, length, position, prompt length, banned, uniform, page, order


class PacketViews(NamedTuple):
    """The parts of a packet on the device."""

    attention: DecodeInputs
    banned: Tensor  # (rows,) whether EOS must not be sampled
    uniform: Tensor  # (rows,) float32, the random numbers


def packet_size(capacity: int) -> int:
    """The number of integers for up to ``capacity`` rows."""
    return capacity * (FIELDS + 2 + TILE_ROWS)


def packet_views(packet: Tensor, rows: int, capacity: int) -> PacketViews:
    """The first ``rows`` rows of a packet."""
    fields = packet[: FIELDS * capacity].view(FIELDS, capacity)[:, :rows]
    tiles = packet[FIELDS * capacity :]
    starts, lengths = tiles[:capacity], tiles[capacity : 2 * capacity]
    members = tiles[2 * capacity :].view(capacity, TILE_ROWS)
    slots, slot_lengths, positions, prompt_lengths, banned, uniform, pages, order = fields
    tile_inputs = starts[:rows], lengths[:rows], members[:rows]
    attention = DecodeInputs(slots, slot_lengths, positions, prompt_lengths, *tile_inputs, pages, order)
    return PacketViews(attention, banned > 0, uniform.view(torch.float32))


def idle_packet(capacity: int, spare_slot: int, spare_page: int) -> Tensor:
    """A packet without samples: all rows use the spare slot and the spare page."""
    packet = torch.zeros(packet_size(capacity), dtype=torch.int32)
    fields = packet[: FIELDS * capacity].view(FIELDS, capacity)
    fields[0], fields[6], fields[7] = spare_slot, spare_page, torch.arange(capacity)
    packet[(FIELDS + 2) * capacity :] = -1
    return packet


def fill_packet(
    packet: np.ndarray,
    batch: StepBatch,
    uniform: np.ndarray,
    min_new_tokens: int,
    capacity: int,
    spare_slot: int,
    spare_page: int,
) -> None:
    """Write a step's batch into a packet for ``capacity`` rows; the other rows use the spare slot and page."""
    count = len(batch.slots)
    fields = packet[: FIELDS * capacity].reshape(FIELDS, capacity)
    starts, lengths = packet[FIELDS * capacity : (FIELDS + 2) * capacity].reshape(2, capacity)
    members = packet[(FIELDS + 2) * capacity :].reshape(capacity, TILE_ROWS)
    fields[:, count:] = 0
    fields[0, count:], fields[6, count:], fields[7, count:] = spare_slot, spare_page, np.arange(count, capacity)
    fields[0, :count], fields[1, :count], fields[2, :count] = batch.slots, batch.index - 1, batch.positions
    fields[4, :count] = batch.index < min_new_tokens
    fields[5, :count] = uniform.view(np.int32)
    fields[6, :count], fields[7, :count] = batch.pages[:, 0], np.argsort(-batch.index, kind="stable")
    lengths[:] = 0
    tile = 0
    for start, length, group_rows in batch.groups:
        fields[3, group_rows] = length
        for first in range(group_rows.start, group_rows.stop, TILE_ROWS):
            last = min(first + TILE_ROWS, group_rows.stop)
            starts[tile], lengths[tile] = start, length
            members[tile, : last - first] = np.arange(first, last)
            members[tile, last - first :] = -1
            tile += 1
