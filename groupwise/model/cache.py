"""The KV cache: a prompt's keys and values are stored once for all of its samples.

Each attention layer has two kinds of storage. The pool holds prompts, each in a range of its own, (tokens, Hkv, d). The
pages hold what samples generate, (pages + 1, tokens, Hkv, d); the last page is a spare for padding rows. A sample has
one page for its longest completion if there is memory for that, and otherwise gets page after page as it grows.
`groupwise.generate.scheduler` decides which range and which page is whose.

A layer's storage is an attribute of its attention module rather than an entry of a list: a compiled layer then sees it
as one more input, and one compilation serves all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.model.attention import (
    AttentionInputs,
    PackedLayout,
    merge_attention,
    merge_equal_groups,
    partial_attention,
    ranges,
    round_up,
    to_device,
)
from groupwise.model.flash import varlen_flash
from groupwise.model.handle import KVShape, ModelHandle

CACHE_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn}  # of stored keys and values; None: the model's
CACHE_ATTRIBUTE = "groupwise_cache"  # of an attention module
SHORT_PROMPT = 256  # tokens
COPIED_TOKENS = 8192  # of contexts that are copied to attend to them in one call


class LayerCache(NamedTuple):
    """The storage of one layer."""

    pool_keys: Tensor  # (prompt tokens, Hkv, d)
    pool_values: Tensor
    page_keys: Tensor  # (pages + 1, tokens of a page, Hkv, d)
    page_values: Tensor


class SharedCache:
    """Room for ``prompt_tokens`` of prompts, and ``pages`` of ``page_tokens`` for up to ``slots`` running samples.

    dtype: of the stored keys and values, by default the model's; with float8, they are rounded when they are written.
    """

    def __init__(
        self,
        handle: ModelHandle,
        prompt_tokens: int,
        slots: int,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.handle, self.dtype = handle, dtype
        self.prompt_tokens, self.slots, self.pages, self.page_tokens = prompt_tokens, slots, pages, page_tokens
        # Zeros, not uninitialised memory: a masked position has weight 0, and 0 · NaN is NaN.
        zeros = partial(torch.zeros, dtype=dtype or handle.dtype, device=handle.device)
        pool, page = (prompt_tokens,), (pages + 1, page_tokens)
        self.layers = [
            LayerCache(*(zeros(*size, *shape) for size in (pool, pool, page, page))) for shape in handle.shapes
        ]
        self.attach()

    def attach(self) -> None:
        """Make this the cache of the model's layers. Where several caches share a model, the next to run attaches."""
        for module, layer in zip(self.handle.attentions, self.layers, strict=True):
            setattr(module, CACHE_ATTRIBUTE, layer)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + (self.pages + 1) * self.page_tokens

    def fits(self, prompt_tokens: int, slots: int, pages: int, page_tokens: int) -> bool:
        """Whether it is large enough and still has the model's device and dtype."""
        keys, model = self.layers[0].page_keys, self.handle
        large = prompt_tokens <= self.prompt_tokens and slots <= self.slots
        large = large and pages <= self.pages and page_tokens <= self.page_tokens
        return large and (keys.device, keys.dtype) == (model.device, self.dtype or model.dtype)

    def release(self) -> None:
        """Free the memory."""
        for module, layer in zip(self.handle.attentions, self.layers, strict=True):
            if getattr(module, CACHE_ATTRIBUTE, None) is layer:
                delattr(module, CACHE_ATTRIBUTE)
        self.layers = []

    def clear(self, pages: Sequence[int]) -> None:
        """Zero these pages.

        Old entries are masked, so their weight is 0; a NaN among them would spread all the same.
        """
        if not pages:
            return
        first, last = min(pages), max(pages) + 1
        places: Any = slice(first, last) if len(pages) == last - first else list(pages)
        for layer in self.layers:
            for stored in (layer.page_keys, layer.page_values):
                _indexable(stored)[places] = 0

    def read_pages(self, pages: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of these pages in each layer, on the host; a GPU may still be copying them."""
        numbers = self._numbers(pages)
        stored = ([_indexable(pages) for pages in (layer.page_keys, layer.page_values)] for layer in self.layers)
        return [(_to_host(keys[numbers]), _to_host(values[numbers])) for keys, values in stored]

    def write_pages(self, pages: Sequence[int], contents: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write what `read_pages` has read to other pages."""
        numbers = self._numbers(pages)
        for layer, (keys, values) in zip(self.layers, contents, strict=True):
            _indexable(layer.page_keys)[numbers] = keys.to(numbers.device, non_blocking=True)
            _indexable(layer.page_values)[numbers] = values.to(numbers.device, non_blocking=True)

    def _numbers(self, pages: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(pages, dtype=torch.long), self.handle.device)


def _indexable(stored: Tensor) -> Tensor:
    """float8 as bytes, because PyTorch indexes it in few operations; other tensors as they are."""
    return stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored


def _store(stored: Tensor, places: Tensor, new: Tensor) -> None:
    """Write ``new`` to these places of the first dimension."""
    if stored.dtype != new.dtype:
        largest = torch.finfo(stored.dtype).max  # beyond it, the conversion gives NaN
        new = new.clamp(-largest, largest).to(stored.dtype)
    _indexable(stored).index_copy_(0, places, _indexable(new))


def _read(stored: Tensor, places: Any, dtype: torch.dtype) -> Tensor:
    """What is at these places of the first dimension."""
    return _indexable(stored)[places].view(stored.dtype).to(dtype)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host; the next work in the device's queue sees it complete, the host may not."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def bytes_per_token(shapes: Sequence[KVShape], dtype: torch.dtype) -> int:
    """Cache bytes of one token, over all layers."""
    return sum(2 * shape.heads * shape.head_dim for shape in shapes) * dtype.itemsize


class PrefillLayout(PackedLayout):
    """Prompts in one row, independent of each other; their keys and values are written to the pool."""

    def __init__(self, prompts: Sequence[int], starts: Sequence[int], device: torch.device) -> None:
        super().__init__(prompts, [0] * len(prompts), [], device)
        shift = np.asarray(starts, np.int64) - self._ends[0][:-1]
        places = np.arange(self.prompt_tokens) + shift.repeat(prompts)
        self.places = to_device(torch.from_numpy(places), device)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        self.write(inputs)
        return super().attend(inputs)

    def write(self, inputs: AttentionInputs) -> LayerCache:
        """Store the new keys and values in the pool."""
        cache: LayerCache = getattr(inputs.module, CACHE_ATTRIBUTE)
        _store(cache.pool_keys, self.places, inputs.key[0].transpose(0, 1))
        _store(cache.pool_values, self.places, inputs.value[0].transpose(0, 1))
        return cache


class ContinuedPrefillLayout(PrefillLayout):
    """The rests of prompts in one row, where the pool has the first ``present`` tokens of each."""

    def __init__(
        self, prompts: Sequence[int], present: Sequence[int], starts: Sequence[int], device: torch.device
    ) -> None:
        lengths, before, first = (np.asarray(x, np.int64) for x in (prompts, present, starts))
        rests = lengths - before
        super().__init__(rests.tolist(), (first + before).tolist(), device)
        self.positions = self.positions + to_device(torch.from_numpy(before.repeat(rests)), device)
        self.longest = int(lengths.max())
        self.longest_prompt = round_up(self.longest)
        self.keys = to_device(torch.from_numpy(ranges(first, lengths)), device)  # of all prompts, in the pool
        self.key_ends = to_device(torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32)), device)
        self._rests, self._lengths = rests, lengths

    def prepare_windows(self, windows: Iterable[int]) -> None:
        """A window needs nothing: each prompt's keys are adjacent."""

    def attend(self, inputs: AttentionInputs) -> Tensor:
        cache = self.write(inputs)
        module, query, _, _, scale, window, softcap = inputs
        keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (cache.pool_keys, cache.pool_values))
        return PackedLayout.attend(self, AttentionInputs(module, query, keys, values, scale, window, softcap))

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        out: Tensor = varlen_flash(
            query, key[self.keys], value[self.keys], self.segment_ends, self.key_ends, self.longest_segment,
            self.longest_prompt, scale, window,
        )[0]  # fmt: skip
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _by_segments(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        out, repeat = torch.empty_like(query), query.shape[0] // key.shape[0]
        for rows, places in self._equal:
            (_, rest), (_, length) = rows.shape, places.shape
            at = torch.arange(length, device=query.device)
            distance = at[length - rest :, None] - at
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            keys, values = (x[:, places].transpose(0, 1).repeat_interleave(repeat, 1) for x in (key, value))
            part, _ = partial_attention(query[:, rows].transpose(0, 1), keys, values, scale, visible, softcap)
            out[:, rows] = part.transpose(0, 1)
        return out.transpose(0, 1)

    @cached_property
    def _equal(self) -> list[tuple[Tensor, Tensor]]:
        """The rows (n, rest) and the places in the pool (n, length) of prompts that are equally long, a few at once."""
        rows_of = self.segment_ends[:-1].long()
        keys_of = self.key_ends[:-1].long()
        sizes, batches = np.stack([self._rests, self._lengths], 1), []
        for rest, length in np.unique(sizes, axis=0).tolist():
            equal = torch.from_numpy(np.flatnonzero((sizes == (rest, length)).all(1))).to(rows_of.device)
            for some in torch.split(equal, max(1, COPIED_TOKENS // length)):
                rows = rows_of[some, None] + torch.arange(rest, device=rows_of.device)
                keys = keys_of[some, None] + torch.arange(length, device=rows_of.device)
                batches.append((rows, self.keys[keys]))
        return batches


@dataclass
class DecodeLayout:
    """One token for each of some running samples, grouped by prompt."""

    pages: Tensor  # (rows, n) of each sample, in order; those that it does not have yet are not read
    lengths: Tensor  # (rows,) tokens in the pages before this one
    positions: Tensor  # (rows,) of this token, prompt included
    groups: Sequence[tuple[int, int, slice]]  # a prompt's start in the pool, its length, its rows
    page_tokens: int  # of a page
    own_tokens: int | None = None  # tokens of each sample to read; by default those of the longest

    def __post_init__(self) -> None:
        rows, each = self.pages.shape
        self.longest = self.own_tokens or int(self.lengths.max()) + 1
        # If each sample has one page, in order, which is common, their contents need not be copied.
        in_order = torch.arange(rows, device=self.pages.device)
        self.in_order = each == 1 and bool((self.pages[:, 0] == in_order).all())
        page = self.pages.gather(1, (self.lengths // self.page_tokens)[:, None])[:, 0]
        self.places = page * self.page_tokens + self.lengths % self.page_tokens
        self.used = self.pages[:, : -(-self.longest // self.page_tokens)]
        at = torch.arange(self.longest, device=self.pages.device)
        self.visible = at <= self.lengths[:, None]  # (rows, longest)
        self.even = bool(self.visible.all())
        self.runs = _runs(self.groups, rows)
        self.batches = _batches(self.groups) if self.runs is None and self.pages.device.type == "cpu" else {}

    # Dynamo would unroll its loop over groups and recompile for every step.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, inputs: AttentionInputs) -> Tensor:
        module, query, key, value, scale, window, softcap = inputs
        cache: LayerCache = getattr(module, CACHE_ATTRIBUTE)
        for stored, new in ((cache.page_keys, key), (cache.page_values, value)):
            _store(stored.flatten(0, 1), self.places, new[:, :, 0])
        rows, heads, _, width = query.shape
        kv_heads = key.shape[1]
        per_head = heads // kv_heads
        query = query.view(rows, kv_heads, per_head, width)
        own_keys, own_values = (
            _read(x, slice(rows) if self.in_order else self.used, query.dtype)
            .view(rows, -1, kv_heads, width)[:, : self.longest]
            .transpose(1, 2)
            for x in (cache.page_keys, cache.page_values)
        )
        if cache.pool_keys.dtype != query.dtype:
            pool_keys, pool_values = (_read(x, slice(None), query.dtype) for x in (cache.pool_keys, cache.pool_values))
            cache = cache._replace(pool_keys=pool_keys, pool_values=pool_values)
        visible = None if self.even else self.visible
        if window is not None:
            at = torch.arange(self.longest, device=query.device)
            visible = self.visible & (self.lengths[:, None] - at < window)
        visible = None if visible is None else visible[:, None, None, :].expand(-1, kv_heads, per_head, -1)
        own_out, own_lse = partial_attention(query, own_keys, own_values, scale, visible, softcap)
        if self.runs is not None and window is None:
            prompts = self._equal_groups(query, cache, scale, softcap)
            return merge_attention(own_out, own_lse, *prompts)[0].reshape(rows, 1, heads, width)
        prompt_out, prompt_lse = torch.zeros_like(own_out), torch.full_like(own_lse, -torch.inf)
        batches = self.batches if window is None and softcap is None else {}
        for rows_of, keys_of in batches.values():
            groups = len(rows_of)
            several = query[rows_of].transpose(1, 2).reshape(groups, kv_heads, -1, width)
            keys, values = (x[keys_of].transpose(1, 2) for x in (cache.pool_keys, cache.pool_values))
            out, lse = partial_attention(several, keys, values, scale, None, softcap)
            prompt_out[rows_of] = out.view(groups, kv_heads, -1, per_head, width).transpose(1, 2)
            prompt_lse[rows_of] = lse.view(groups, kv_heads, -1, per_head).transpose(1, 2)
        for start, length, members in self.groups:
            if (length, members.stop - members.start) in batches:
                continue
            one = query[members].transpose(0, 1).reshape(1, kv_heads, -1, width)  # the prompt is read once for all
            seen = None
            if window is not None:
                at = torch.arange(length, device=query.device)
                seen = (self.positions[members, None] - at < window).repeat_interleave(per_head, 0)
                seen = seen.expand(1, kv_heads, -1, -1)
            keys, values = (
                x[start : start + length].transpose(0, 1).unsqueeze(0) for x in (cache.pool_keys, cache.pool_values)
            )
            out, lse = partial_attention(one, keys, values, scale, seen, softcap)
            prompt_out[members] = out.view(kv_heads, -1, per_head, width).transpose(0, 1)
            prompt_lse[members] = lse.view(kv_heads, -1, per_head).transpose(0, 1)
        return merge_attention(own_out, own_lse, prompt_out, prompt_lse)[0].reshape(rows, 1, heads, width)

    def _equal_groups(
        self, query: Tensor, cache: LayerCache, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attention to the prompts where all groups have as many rows.

        Queries are reordered once for all groups, and adjacent prompts of equal length make one call.
        """
        groups, (rows, kv_heads, per_head, width) = len(self.groups), query.shape
        ordered = query.view(groups, -1, kv_heads, per_head, width).transpose(1, 2)
        ordered = ordered.reshape(groups, kv_heads, -1, width)
        outs, lses = [], []
        for first, number, start, length in self.runs or ():
            keys, values = (
                x[start : start + number * length].view(number, length, kv_heads, width).transpose(1, 2)
                for x in (cache.pool_keys, cache.pool_values)
            )
            out, lse = partial_attention(ordered[first : first + number], keys, values, scale, None, softcap)
            outs.append(out)
            lses.append(lse)
        out, lse = (x[0] if len(x) == 1 else torch.cat(x) for x in (outs, lses))
        out = out.reshape(groups, kv_heads, -1, per_head, width).transpose(1, 2)
        lse = lse.reshape(groups, kv_heads, -1, per_head).transpose(1, 2)
        return out.reshape(rows, kv_heads, per_head, width), lse.reshape(rows, kv_heads, per_head)


def _batches(groups: Sequence[tuple[int, int, slice]]) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Groups with equal prompt lengths and equal numbers of rows, by both: their rows (n, r) and pool entries (n, L).

    Only of short prompts, of which a copy takes less time than another call.
    """
    equal: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start, length, members in groups:
        if length <= SHORT_PROMPT:
            equal.setdefault((length, members.stop - members.start), []).append((members.start, start))
    batches = {}
    for (length, size), places in equal.items():
        if len(places) > 1:
            first_rows, starts = torch.tensor(places).unsqueeze(2).unbind(1)
            batches[length, size] = first_rows + torch.arange(size), starts + torch.arange(length)
    return batches


def _runs(groups: Sequence[tuple[int, int, slice]], rows: int) -> list[tuple[int, int, int, int]] | None:
    """Runs of adjacent prompts of equal length: (first group, number of groups, start in the pool, prompt length).

    None unless the groups cover all rows in order, with as many rows each.
    """
    if not groups or rows % len(groups):
        return None
    size = rows // len(groups)
    if any(members != slice(n * size, (n + 1) * size) for n, (_, _, members) in enumerate(groups)):
        return None
    merged = merge_equal_groups([(members, slice(start, start + length)) for start, length, members in groups])
    return [
        (members.start // size, number, keys.start, (keys.stop - keys.start) // number)
        for number, members, keys in merged
    ]
