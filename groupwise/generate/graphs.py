"""Decoding on a GPU: the whole step, from the last token to the next, replayed as one captured CUDA graph.

A step's input is one packet of integers, copied in one go; its output is one small block, copied back in one go. The
host never waits for a token: it launches step t, then reads the outcome of step t − LAG, whose copy has long arrived.
The lag is fixed, so that which step sees which sample does not depend on anybody's speed. What a sample draws between
its end and the moment the host knows of it is thrown away.

A graph has a number of rows; there is one for each size that occurred, and a step takes the next larger one. Rows in
excess belong to the spare slot. Graphs outlive a call: weights are updated in place, so the next call, with the same
sampling settings and a cache that did not have to grow, replays them at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.generate.kernels import append_kept, can_draw, draw_rows
from groupwise.generate.request import Request
from groupwise.generate.runner import Outcome, Rows, Runner
from groupwise.generate.sampling import draw
from groupwise.generate.types import Sampling
from groupwise.model.attention import Call, to_device
from groupwise.model.cache import STORAGE, SharedCache, Storage
from groupwise.model.handle import Head, ModelHandle
from groupwise.model.kernels import TILE_ROWS, Packet, decode_attention, splits_for

LAG = 4
FIELDS = 6  # of a packet, per row: slot, length, position, prompt length, banned, uniform


class TiledLayout:
    """`DecodeLayout` for the kernels: the same, as tensors of a fixed size."""

    def __init__(self, packet: Packet, splits: int) -> None:
        self.packet, self.splits = packet, splits

    def attend(self, call: Call) -> Tensor:
        storage: Storage = getattr(call.module, STORAGE)
        packet = self.packet
        out: Tensor = decode_attention(
            call.query, call.key, call.value,
            storage.pool_keys, storage.pool_values, storage.own_keys, storage.own_values,
            packet.slots, packet.lengths, packet.positions, packet.prompt_lengths,
            packet.tile_starts, packet.tile_lengths, packet.tile_rows,
            call.scale, call.window or 0, call.softcap or 0.0, self.splits,
        )  # fmt: skip
        return out


class Launched(NamedTuple):
    """A step under way: where its outcome goes, how many rows of it count, and when it is there."""

    entry: int
    rows: int
    arrived: torch.cuda.Event


class Graphs:
    """The captured steps for one cache, and the memory that they read and write."""

    def __init__(self, handle: ModelHandle, head: Head, cache: SharedCache, longest_prompt: int | None) -> None:
        self.handle, self.head, self.cache = handle, head, cache
        device = handle.device
        self.sizes = _sizes(cache.slots)
        most = self.sizes[-1]
        # A fixed number where results must not depend on anybody's prompt.
        self.splits = 4 if longest_prompt is None else splits_for(handle, cache.slots, longest_prompt)
        self.packet = torch.zeros(_packet_size(most), dtype=torch.int32, device=device)
        self.out = torch.zeros(4, most, dtype=torch.int32, device=device)
        self.last = torch.zeros(cache.slots + 1, dtype=torch.long, device=device)
        self.eos = torch.zeros(handle.vocabulary, dtype=torch.bool, device=device)
        self.kept_pool = torch.zeros(0, dtype=torch.int32, device=device)
        self.kept_used = torch.zeros(1, dtype=torch.long, device=device)
        # An entry is written anew only after its event has been waited for: two more than the steps under way.
        self.packets = torch.zeros(LAG + 3, len(self.packet), dtype=torch.int32, pin_memory=True)
        self.outcomes = torch.zeros(LAG + 3, 4, most, dtype=torch.int32, pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(LAG + 3)]  # type: ignore[no-untyped-call]
        self.captured: dict[Any, torch.cuda.CUDAGraph] = {}
        self.fingerprint = handle.fingerprint()
        self.memory = torch.cuda.graph_pool_handle()

    def begin(self) -> None:
        """Before a call: what an interrupted one left under way is over, and a changed model is captured anew."""
        for event in self.events:
            event.synchronize()
        if self.fingerprint != self.handle.fingerprint():
            self.captured, self.fingerprint = {}, self.handle.fingerprint()

    def keep_room_for_sets(self, ids: int) -> None:
        """A place for kept sets; graphs that wrote to a smaller one are of no use any more."""
        if len(self.kept_pool) < ids:
            self.captured = {key: graph for key, graph in self.captured.items() if not key[1].keep_sets}
            self.kept_pool = torch.zeros(ids, dtype=torch.int32, device=self.out.device)

    def replay(self, rows: int, sampling: Sampling) -> None:
        """One step for the packet's first rows."""
        key = rows, _what_is_captured(sampling)
        if key not in self.captured:
            self.captured[key] = self._capture(rows, sampling)
        self.captured[key].replay()

    def _capture(self, rows: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        wanted = self.packet.clone()
        # Whatever is captured is also run, to compile and to warm up: for nobody, in the spare slot.
        self.packet.copy_(idle_packet(self.sizes[-1], self.cache.slots).to(self.packet.device))
        used = self.kept_used.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step(rows, sampling)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            self.step(rows, sampling)
        self.packet.copy_(wanted)
        self.kept_used.copy_(used)
        return graph

    def step(self, rows: int, sampling: Sampling) -> None:
        """From the last tokens to the next."""
        fields, packet = _views(self.packet, rows, self.sizes[-1])
        slots = packet.slots.long()
        layout = TiledLayout(packet, self.splits)
        hidden = self.handle.hidden(self.last[slots, None], packet.positions.long()[:, None], layout)[:, 0]
        self.draw(self.head.logits(hidden), slots, fields[5].view(torch.float32), fields[4] > 0, sampling)

    def draw(self, logits: Tensor, slots: Tensor, uniform: Tensor, banned: Tensor, sampling: Sampling) -> None:
        """Draw a token per row, remember it as its slot's last, and put the outcome into ``out``."""
        rows = len(slots)
        bans = banned if sampling.min_new_tokens else None
        if can_draw(sampling) and logits.dtype == torch.float32:
            ids, logps, filtered_logps, thresholds, counts = draw_rows(logits, uniform, bans, self.eos, sampling)
            temperature = sampling.temperature
        else:
            ids, logps, filtered_logps, logits = draw(logits, uniform, bans, self.eos, sampling)
            kept = logits > -torch.inf
            counts = kept.sum(-1).masked_fill(kept.all(-1), 0)
            temperature, bans, thresholds = 1.0, None, logits.new_full((rows,), torch.finfo(torch.float32).min)
        self.last[slots] = ids
        self.out[0, :rows] = ids
        self.out[1, :rows] = logps.float().view(torch.int32)
        self.out[2, :rows] = filtered_logps.float().view(torch.int32)
        if sampling.keep_sets:
            counts = counts.long().masked_fill(slots == self.cache.slots, 0)
            offsets = torch.cat([self.kept_used, self.kept_used + counts.cumsum(0)])
            append_kept(logits, temperature, thresholds, bans, self.eos, offsets, self.kept_pool)
            self.kept_used.copy_(offsets[-1:])
            self.out[3, :rows] = counts


class GraphRunner(Runner):
    """Runs the steps of one call by `Graphs`."""

    lag = LAG

    def __init__(self, graphs: Graphs, request: Request, isolated: bool) -> None:
        super().__init__(graphs.handle, graphs.head, graphs.cache, request.sampling, request.eos, isolated)
        self.graphs = graphs
        graphs.begin()
        graphs.eos.copy_(self.eos)
        graphs.kept_used.zero_()
        if self.sampling.keep_sets:
            tokens = int(request.limits.sum())  # top_k is no bound: ties are kept
            graphs.keep_room_for_sets(min(self.sampling.kept_bytes // 4, tokens * graphs.handle.vocabulary))
        self.entry = 0

    def first(self, logits: Tensor, rows: Rows, uniform: np.ndarray) -> Launched:
        """The first token of samples, from their prompts' logits ``(rows, V)``."""
        slots, banned = rows.slots, rows.index < self.sampling.min_new_tokens
        here = [to_device(torch.from_numpy(x), self.device) for x in (slots, uniform, banned)]
        self.graphs.draw(logits, here[0], here[1], here[2], self.sampling)
        return self._launched(len(slots))

    def decode(self, rows: Rows, uniform: np.ndarray) -> Launched:
        """The next token of each of these."""
        count, sizes = len(rows.slots), self.graphs.sizes
        size = sizes[-1] if self.isolated else next(size for size in sizes if size >= count)
        packet = self.graphs.packets[self.entry]
        fill_packet(packet.numpy(), rows, uniform, self.sampling.min_new_tokens, sizes[-1], self.cache.slots)
        self.graphs.packet.copy_(packet, non_blocking=True)
        self.graphs.replay(size, self.sampling)
        return self._launched(count)

    def _launched(self, rows: int) -> Launched:
        entry = self.entry
        self.graphs.outcomes[entry].copy_(self.graphs.out, non_blocking=True)
        arrived = self.graphs.events[entry]
        arrived.record()
        self.entry = (entry + 1) % len(self.graphs.events)
        return Launched(entry, rows, arrived)

    def read(self, launched: Launched) -> Outcome:
        """What a step drew; waits for that step, not for those launched since."""
        launched.arrived.synchronize()
        ids, logps, filtered_logps, counts = self.graphs.outcomes[launched.entry, :, : launched.rows].numpy().copy()
        return Outcome(
            ids.astype(np.int64),
            logps.view(np.float32),
            filtered_logps.view(np.float32),
            counts.astype(np.int64) if self.sampling.keep_sets else None,
        )

    def kept_ids(self) -> np.ndarray | None:
        """All kept sets, in the order of the steps."""
        if not self.sampling.keep_sets:
            return None
        ids: np.ndarray = self.graphs.kept_pool[: int(self.graphs.kept_used)].cpu().numpy()
        return ids


# --- packets: six numbers per row, then the tiles' starts, lengths and rows -------------------------------------------


def _packet_size(most: int) -> int:
    return most * (FIELDS + 2 + TILE_ROWS)


def _views(packet: Tensor, rows: int, most: int) -> tuple[Tensor, Packet]:
    """The fields ``(FIELDS, rows)`` of a packet for ``most`` rows, and what the attention takes of it."""
    fields = packet[: FIELDS * most].view(FIELDS, most)[:, :rows]
    tiles = packet[FIELDS * most :]
    starts, lengths, members = tiles[:most], tiles[most : 2 * most], tiles[2 * most :].view(most, TILE_ROWS)
    return fields, Packet(fields[0], fields[1], fields[2], fields[3], starts[:rows], lengths[:rows], members[:rows])


def idle_packet(most: int, spare: int) -> Tensor:
    """A packet for nobody."""
    packet = torch.zeros(_packet_size(most), dtype=torch.int32)
    packet[:most] = spare
    packet[(FIELDS + 2) * most :] = -1
    return packet


def fill_packet(
    packet: np.ndarray, rows: Rows, uniform: np.ndarray, min_new_tokens: int, most: int, spare: int
) -> None:
    """Write a step's rows into a packet for ``most`` rows."""
    count = len(rows.slots)
    fields = packet[: FIELDS * most].reshape(FIELDS, most)
    starts, lengths = packet[FIELDS * most : (FIELDS + 2) * most].reshape(2, most)
    members = packet[(FIELDS + 2) * most :].reshape(most, TILE_ROWS)
    fields[:, count:] = 0
    fields[0, count:] = spare
    fields[0, :count], fields[1, :count], fields[2, :count] = rows.slots, rows.index - 1, rows.positions
    fields[4, :count] = rows.index < min_new_tokens
    fields[5, :count] = uniform.view(np.int32)
    lengths[:] = 0
    tile = 0
    for start, length, rows_of_prompt in rows.groups:
        fields[3, rows_of_prompt] = length
        for first in range(rows_of_prompt.start, rows_of_prompt.stop, TILE_ROWS):
            last = min(first + TILE_ROWS, rows_of_prompt.stop)
            starts[tile], lengths[tile] = start, length
            members[tile, : last - first] = np.arange(first, last)
            members[tile, last - first :] = -1
            tile += 1


def _sizes(slots: int) -> list[int]:
    """Numbers of rows to capture graphs for: close together where a row more costs a share, up to all slots."""
    steps: Sequence[int] = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 512, 32), *range(512, slots + 128, 128)]
    return [size for size in steps if size < slots] + [slots]


def _what_is_captured(sampling: Sampling) -> Sampling:
    """The settings without those that a graph does not know."""
    return dataclasses.replace(
        sampling, max_new_tokens=2, min_new_tokens=min(sampling.min_new_tokens, 1), eos_ids=None, seed=0, kept_bytes=1
    )
