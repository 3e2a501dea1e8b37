"""Decoding on a GPU: a step, from the last tokens to the next, is replayed as one captured CUDA graph.

A step's inputs are one block of integers, the packet, and its outputs another, each copied at once. The host never
waits for a token: it launches step t, then reads the output of step t − LAG, whose copy has long finished. The lag is
fixed, so the schedule does not depend on timing. Tokens sampled between a sample's end and the moment the host learns
of it are discarded.

Where samples have several pages, the device has a table of them, a row per slot. The packet has the page that each
row's token is written to, and the step writes it into the table, so that a sample that gets another page costs nothing
more. Only a preempted sample that goes on has its row of the table written at once.

Each graph has a fixed number of rows. There is one for each size that occurred, and a step uses the next larger one;
padding rows use the spare slot. Graphs outlive a call: weights are updated in place, so the next call, with the same
sampling parameters and a cache that did not have to grow, replays them at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.generate.kernels import append_kept, can_draw, draw_rows
from groupwise.generate.packet import fill_packet, idle_packet, packet_size, packet_views
from groupwise.generate.request import Request
from groupwise.generate.runner import Runner, SavedSample, StepBatch, StepOutput
from groupwise.generate.sampling import draw
from groupwise.generate.types import Sampling
from groupwise.model.attention import AttentionInputs, to_device
from groupwise.model.cache import CACHE_ATTRIBUTE, LayerCache, SharedCache
from groupwise.model.decode_inputs import DecodeInputs
from groupwise.model.handle import Head, ModelHandle
from groupwise.model.kernels import decode_attention, splits_for, tile_part
from groupwise.model.paged_kernels import paged_decode_attention

LAG = 4
MAX_SETTINGS = 4  # sampling parameters whose graphs are kept


class TiledLayout:
    """`DecodeLayout` for the kernels, as tensors of a fixed size."""

    def __init__(self, step: DecodeInputs, splits: int) -> None:
        self.step, self.splits = step, splits

    def attend(self, inputs: AttentionInputs) -> Tensor:
        cache: LayerCache = getattr(inputs.module, CACHE_ATTRIBUTE)
        step = self.step
        out: Tensor = decode_attention(
            inputs.query, inputs.key, inputs.value,
            cache.pool_keys, cache.pool_values, cache.page_keys, cache.page_values,
            step.slots, step.lengths, step.positions, step.prompt_lengths,
            step.tile_starts, step.tile_lengths, step.tile_rows,
            inputs.scale, inputs.window or 0, inputs.softcap or 0.0, self.splits,
        )  # fmt: skip
        return out


class PagedLayout:
    """`TiledLayout` where samples have several pages."""

    def __init__(self, step: DecodeInputs, table: Tensor, prompt_splits: int, splits: int) -> None:
        self.step, self.table, self.prompt_splits, self.splits = step, table, prompt_splits, splits

    def attend(self, inputs: AttentionInputs) -> Tensor:
        cache: LayerCache = getattr(inputs.module, CACHE_ATTRIBUTE)
        step = self.step
        out: Tensor = paged_decode_attention(
            inputs.query, inputs.key, inputs.value,
            cache.pool_keys, cache.pool_values, cache.page_keys, cache.page_values, self.table,
            step.slots, step.lengths, step.positions, step.prompt_lengths,
            step.tile_starts, step.tile_lengths, step.tile_rows, step.order,
            inputs.scale, inputs.window or 0, inputs.softcap or 0.0, self.prompt_splits, self.splits,
        )  # fmt: skip
        return out


class GraphKey(NamedTuple):
    """What a captured step depends on."""

    rows: int
    settings: Sampling
    paged: bool


class PendingStep(NamedTuple):
    """A launched step: the host buffer of its output, its number of rows, and the event of the copy."""

    entry: int
    rows: int
    ready: torch.cuda.Event


class DecodeGraphs:
    """The captured steps for one cache, and their input and output buffers."""

    def __init__(self, handle: ModelHandle, head: Head, cache: SharedCache, longest_prompt: int | None) -> None:
        self.handle, self.head, self.cache = handle, head, cache
        device = handle.device
        self.sizes = _sizes(cache.slots)
        capacity = self.sizes[-1]
        # A fixed number where results must not depend on the other prompts.
        per_head = handle.model.config.get_text_config().num_attention_heads // handle.shapes[0].heads
        units = -(-cache.slots // tile_part(per_head))
        self.splits = 4 if longest_prompt is None else splits_for(handle, units, longest_prompt)
        self.packet = torch.zeros(packet_size(capacity), dtype=torch.int32, device=device)
        self.table = torch.zeros(cache.slots + 1, 0, dtype=torch.int32, device=device)  # of each slot's pages
        self.out = torch.zeros(4, capacity, dtype=torch.int32, device=device)
        self.last = torch.zeros(cache.slots + 1, dtype=torch.long, device=device)
        self.eos = torch.zeros(handle.vocabulary, dtype=torch.bool, device=device)
        self.kept_pool = torch.zeros(0, dtype=torch.int32, device=device)
        self.kept_used = torch.zeros(1, dtype=torch.long, device=device)
        # An entry is reused only after its event has been waited for.
        self.host_packets = torch.zeros(LAG + 3, len(self.packet), dtype=torch.int32, pin_memory=True)
        self.host_outputs = torch.zeros(LAG + 3, 4, capacity, dtype=torch.int32, pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(LAG + 3)]  # type: ignore[no-untyped-call]
        self.captured: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self.fingerprint = handle.fingerprint()
        self.memory = torch.cuda.graph_pool_handle()

    def start(self) -> None:
        """Before a call: wait for the steps of an interrupted one, and drop the graphs of a changed model."""
        for event in self.events:
            event.synchronize()
        if self.fingerprint != self.handle.fingerprint():
            self.captured, self.fingerprint = {}, self.handle.fingerprint()

    def reserve_kept(self, ids: int) -> None:
        """Reserve memory for kept sets; drops the graphs that write to a smaller one."""
        if len(self.kept_pool) < ids:
            self.captured = {key: graph for key, graph in self.captured.items() if not key.settings.keep_sets}
            self.kept_pool = torch.zeros(ids, dtype=torch.int32, device=self.out.device)

    def reserve_table(self, pages: int) -> None:
        """Reserve room for this many pages of each slot; drops the graphs that read a smaller table."""
        if self.table.shape[1] < pages:
            self.captured = {key: graph for key, graph in self.captured.items() if not key.paged}
            self.table = self.table.new_full((self.cache.slots + 1, pages), self.cache.pages)

    def replay(self, rows: int, sampling: Sampling, paged: bool) -> None:
        """Run one step for the first ``rows`` rows of the packet. paged: samples have several pages."""
        key = GraphKey(rows, _captured_settings(sampling), paged)
        if key not in self.captured:
            known = list(dict.fromkeys(key.settings for key in self.captured))
            if key.settings not in known and len(known) >= MAX_SETTINGS:  # a ramp of the temperature: others each step
                self.captured = {other: graph for other, graph in self.captured.items() if other.settings != known[0]}
            self.captured[key] = self._capture(rows, sampling, paged)
        self.captured[key].replay()

    def _capture(self, rows: int, sampling: Sampling, paged: bool) -> torch.cuda.CUDAGraph:
        saved_packet = self.packet.clone()
        # Warm up before capturing, on the spare slot and the spare page only.
        idle = idle_packet(self.sizes[-1], self.cache.slots, self.cache.pages)
        self.packet.copy_(idle.to(self.packet.device))
        saved_used = self.kept_used.clone()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step(rows, sampling, paged)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a reward in another thread may use the GPU meanwhile (asynchronous rollouts).
        with torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
            self.step(rows, sampling, paged)
        self.packet.copy_(saved_packet)
        self.kept_used.copy_(saved_used)
        return graph

    def step(self, rows: int, sampling: Sampling, paged: bool) -> None:
        """Compute the next token of each row from its last one."""
        inputs, banned, uniform = packet_views(self.packet, rows, self.sizes[-1])
        slots = inputs.slots.long()
        layout = self._paged_layout(inputs, slots) if paged else TiledLayout(inputs, self.splits)
        hidden = self.handle.hidden(self.last[slots, None], inputs.positions.long()[:, None], layout)[:, 0]
        self.draw(self.head.rounded_logits(hidden), slots, uniform, banned, sampling)

    def _paged_layout(self, inputs: DecodeInputs, slots: Tensor) -> PagedLayout:
        """The layout of a step whose pages have been written into the table."""
        page_tokens = self.cache.page_tokens
        self.table[slots, inputs.lengths.long() // page_tokens] = inputs.pages
        splits = splits_for(self.handle, len(slots), self.table.shape[1] * page_tokens)
        return PagedLayout(inputs, self.table, self.splits, splits)

    def draw(self, logits: Tensor, slots: Tensor, uniform: Tensor, banned: Tensor, sampling: Sampling) -> None:
        """Sample a token per row; store it as its slot's last token and in ``out``."""
        rows = len(slots)
        bans = banned if sampling.min_new_tokens else None
        if can_draw(sampling) and logits.dtype != torch.float64:
            ids, logps, filtered_logps, thresholds, counts = draw_rows(logits, uniform, bans, self.eos, sampling)
            temperature = sampling.temperature
        else:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
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
    """Runs the steps of one call with `DecodeGraphs`."""

    lag = LAG
    knows_pages = True

    def __init__(self, graphs: DecodeGraphs, request: Request, isolated: bool, paged: bool) -> None:
        super().__init__(graphs.handle, graphs.head, graphs.cache, request.sampling, request.eos, isolated)
        self.graphs, self.last, self.paged = graphs, graphs.last, paged
        if paged:
            graphs.reserve_table(-(-request.longest // self.cache.page_tokens) + 1)
        graphs.start()
        graphs.eos.copy_(self.eos)
        graphs.kept_used.zero_()
        if self.sampling.keep_sets:
            tokens = int(request.limits.sum())  # ties may exceed top_k
            graphs.reserve_kept(min(self.sampling.kept_bytes // 4, tokens * graphs.handle.vocabulary))
        self.entry = 0

    def first(self, logits: Tensor, batch: StepBatch, uniform: np.ndarray) -> PendingStep:
        """Sample the first tokens, from the prompts' logits ``(rows, V)``."""
        slots, banned = batch.slots, batch.index < self.sampling.min_new_tokens
        on_device = [to_device(torch.from_numpy(x), self.device) for x in (slots, uniform, banned)]
        self.graphs.draw(logits, on_device[0], on_device[1], on_device[2], self.sampling)
        return self._copy_output(len(slots))

    def decode(self, batch: StepBatch, uniform: np.ndarray) -> PendingStep:
        """Sample the next token of each row."""
        count, sizes = len(batch.slots), self.graphs.sizes
        size = sizes[-1] if self.isolated else next(size for size in sizes if size >= count)
        packet, spare = self.graphs.host_packets[self.entry], (self.cache.slots, self.cache.pages)
        fill_packet(packet.numpy(), batch, uniform, self.sampling.min_new_tokens, sizes[-1], *spare)
        self.graphs.packet.copy_(packet, non_blocking=True)
        self.graphs.replay(size, self.sampling, self.paged)
        return self._copy_output(count)

    def clear(self, pages: Sequence[int]) -> None:
        """The kernels read no place of a page that has not been written."""

    def restore(self, saved: SavedSample, slot: int, pages: Sequence[int]) -> None:
        """Let a saved sample go on in this slot and these pages."""
        super().restore(saved, slot, pages)
        numbers = to_device(torch.tensor(pages, dtype=torch.int32), self.device)
        self.graphs.table[slot, : len(pages)] = numbers

    def _copy_output(self, rows: int) -> PendingStep:
        entry = self.entry
        self.graphs.host_outputs[entry].copy_(self.graphs.out, non_blocking=True)
        ready = self.graphs.events[entry]
        ready.record()
        self.entry = (entry + 1) % len(self.graphs.events)
        return PendingStep(entry, rows, ready)

    def read(self, step: PendingStep) -> StepOutput:
        """The output of a step; waits for that step, not for those launched since."""
        step.ready.synchronize()
        ids, logps, filtered_logps, counts = self.graphs.host_outputs[step.entry, :, : step.rows].numpy().copy()
        return StepOutput(
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


def _sizes(slots: int) -> list[int]:
    """The graph sizes, in rows: denser for small batches, up to all slots."""
    steps: Sequence[int] = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 512, 32), *range(512, slots + 128, 128)]
    return [size for size in steps if size < slots] + [slots]


def _captured_settings(sampling: Sampling) -> Sampling:
    """The sampling parameters, with those that a graph does not depend on set to constants."""
    return dataclasses.replace(
        sampling, max_new_tokens=2, min_new_tokens=min(sampling.min_new_tokens, 1), eos_ids=None, seed=0, kept_bytes=1
    )
