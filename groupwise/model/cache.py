"""The cache of keys and values: a prompt's are stored once, a sample's own beside them.

Two kinds of storage per attention layer. The pool holds prompts, each in a range of its own, (tokens, Hkv, d). The
slots hold what samples add, one slot per running sample, (slots + 1, length, Hkv, d); the last slot belongs to nobody
and takes what must be written somewhere. Whoever decides which range and which slot belongs to whom is elsewhere
(`groupwise.generate.scheduler`).

A layer's storage hangs on its attention module, not in a list by layer number: a compiled layer then sees it as one
more input, and one compilation serves all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.model.attention import Call, PackedLayout, equal_prefixes, join, part_attention, to_device
from groupwise.model.handle import LayerShape, ModelHandle

STORAGE = "groupwise_cache"  # the attribute of an attention module


class Storage(NamedTuple):
    """One layer's."""

    pool_keys: Tensor  # (prompt tokens, Hkv, d)
    pool_values: Tensor
    own_keys: Tensor  # (slots + 1, length, Hkv, d)
    own_values: Tensor


class SharedCache:
    """Room for ``prompt_tokens`` of prompts and for ``slots`` samples of up to ``length`` tokens each."""

    def __init__(self, handle: ModelHandle, prompt_tokens: int, slots: int, length: int) -> None:
        self.handle = handle
        self.prompt_tokens, self.slots, self.length = prompt_tokens, slots, length
        # Zeros, not whatever the memory held: a masked position has the weight 0, and 0 · NaN is NaN.
        pool, own = (prompt_tokens,), (slots + 1, length)
        self.layers = [
            Storage(
                *(
                    torch.zeros(*size, *shape, dtype=handle.dtype, device=handle.device)
                    for size in (pool, pool, own, own)
                )
            )
            for shape in handle.shapes
        ]
        self.attach()

    def attach(self) -> None:
        """Hang the storage on the model's modules; whoever runs next does so, where several caches share a model."""
        for module, storage in zip(self.handle.attentions, self.layers, strict=True):
            setattr(module, STORAGE, storage)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def fits(self, prompt_tokens: int, slots: int, length: int) -> bool:
        """Whether it is large enough, and of the model's device and type, which may have changed."""
        mine, model = self.layers[0].own_keys, self.handle
        large = prompt_tokens <= self.prompt_tokens and slots <= self.slots and length <= self.length
        return large and (mine.device, mine.dtype) == (model.device, model.dtype)

    def release(self) -> None:
        """Give the memory back."""
        for module, storage in zip(self.handle.attentions, self.layers, strict=True):
            if getattr(module, STORAGE, None) is storage:
                delattr(module, STORAGE)
        self.layers = []

    def clear(self, slots: Sequence[int]) -> None:
        """Forget what samples left in these slots.

        Only masked positions could still be read, with the weight 0; a NaN among them would spread all the same.
        """
        for layer in self.layers:
            layer.own_keys[slots] = 0
            layer.own_values[slots] = 0


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """What one token takes, in all layers."""
    return sum(2 * shape.heads * shape.width for shape in shapes) * dtype.itemsize


class PrefillLayout(PackedLayout):
    """Prompts in one row, none of which sees another; their keys and values go to their places in the pool."""

    def __init__(self, prompts: Sequence[int], starts: Sequence[int], device: torch.device) -> None:
        super().__init__(prompts, [()] * len(prompts), device)
        places = [torch.arange(start, start + length) for start, length in zip(starts, prompts, strict=True)]
        self.places = to_device(torch.cat(places), device)

    def attend(self, call: Call) -> Tensor:
        storage: Storage = getattr(call.module, STORAGE)
        storage.pool_keys.index_copy_(0, self.places, call.key[0].transpose(0, 1))
        storage.pool_values.index_copy_(0, self.places, call.value[0].transpose(0, 1))
        return super().attend(call)


@dataclass
class DecodeLayout:
    """One token for each of some running samples: who they are, and which of them share which prompt."""

    slots: Tensor  # (rows,)
    lengths: Tensor  # (rows,) tokens in the slot before this one
    positions: Tensor  # (rows,) of this token in the whole text
    groups: Sequence[tuple[int, int, slice]]  # a prompt's start in the pool, its length, its rows
    own_tokens: int | None = None  # how much of a slot to look at; by default as much as the longest sample has

    def __post_init__(self) -> None:
        rows = len(self.slots)
        self.longest = self.own_tokens or int(self.lengths.max()) + 1
        # The common case, every slot busy, needs no copy of the slots' contents.
        self.all_slots = bool((self.slots == torch.arange(rows, device=self.slots.device)).all())
        at = torch.arange(self.longest, device=self.slots.device)
        self.own_visible = at <= self.lengths[:, None]  # (rows, longest)
        self.even = bool(self.own_visible.all())
        self.runs = _runs(self.groups, rows)

    # Its loop over groups would be unrolled, and compiled anew for every step.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, call: Call) -> Tensor:
        module, query, key, value, scale, window, softcap = call
        storage: Storage = getattr(module, STORAGE)
        places = self.slots * storage.own_keys.shape[1] + self.lengths
        for own, new in ((storage.own_keys, key), (storage.own_values, value)):
            own.flatten(0, 1).index_copy_(0, places, new[:, :, 0])
        rows, heads, _, width = query.shape
        shared_heads = key.shape[1]
        per_head = heads // shared_heads
        query = query.view(rows, shared_heads, per_head, width)
        own_keys, own_values = (
            (x[:rows] if self.all_slots else x[self.slots])[:, : self.longest].transpose(1, 2)
            for x in (storage.own_keys, storage.own_values)
        )
        visible = None if self.even else self.own_visible
        if window is not None:
            at = torch.arange(self.longest, device=query.device)
            visible = self.own_visible & (self.lengths[:, None] - at < window)
        visible = None if visible is None else visible[:, None, None, :].expand(-1, shared_heads, per_head, -1)
        own_out, own_lse = part_attention(query, own_keys, own_values, scale, visible, softcap)
        if self.runs is not None and window is None:
            shared, shared_lse = self._of_equal_groups(query, storage, scale, softcap)
            return join(own_out, own_lse, shared, shared_lse)[0].reshape(rows, 1, heads, width)
        shared, shared_lse = torch.zeros_like(own_out), torch.full_like(own_lse, -torch.inf)
        for start, length, members in self.groups:
            one = query[members].transpose(0, 1).reshape(1, shared_heads, -1, width)  # a prompt read once for all
            seen = None
            if window is not None:
                at = torch.arange(length, device=query.device)
                seen = (self.positions[members, None] - at < window).repeat_interleave(per_head, 0)
                seen = seen.expand(1, shared_heads, -1, -1)
            keys, values = (
                x[start : start + length].transpose(0, 1).unsqueeze(0) for x in (storage.pool_keys, storage.pool_values)
            )
            out, lse = part_attention(one, keys, values, scale, seen, softcap)
            shared[members] = out.view(shared_heads, -1, per_head, width).transpose(0, 1)
            shared_lse[members] = lse.view(shared_heads, -1, per_head).transpose(0, 1)
        return join(own_out, own_lse, shared, shared_lse)[0].reshape(rows, 1, heads, width)

    def _of_equal_groups(
        self, query: Tensor, storage: Storage, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """The prompts' part where all groups have as many rows: queries are put in order once for all groups, and
        prompts of one length that lie side by side are one call."""
        groups, (rows, shared_heads, per_head, width) = len(self.groups), query.shape
        ordered = query.view(groups, -1, shared_heads, per_head, width).transpose(1, 2)
        ordered = ordered.reshape(groups, shared_heads, -1, width)
        outs, lses = [], []
        for first, number, start, length in self.runs or ():
            keys, values = (
                x[start : start + number * length].view(number, length, shared_heads, width).transpose(1, 2)
                for x in (storage.pool_keys, storage.pool_values)
            )
            out, lse = part_attention(ordered[first : first + number], keys, values, scale, None, softcap)
            outs.append(out)
            lses.append(lse)
        out, lse = (x[0] if len(x) == 1 else torch.cat(x) for x in (outs, lses))
        out = out.reshape(groups, shared_heads, -1, per_head, width).transpose(1, 2)
        lse = lse.reshape(groups, shared_heads, -1, per_head).transpose(1, 2)
        return out.reshape(rows, shared_heads, per_head, width), lse.reshape(rows, shared_heads, per_head)


def _runs(groups: Sequence[tuple[int, int, slice]], rows: int) -> list[tuple[int, int, int, int]] | None:
    """Groups whose prompts are equally long and lie side by side: the first's number, how many, where, and how long.

    None unless the groups are all the rows, in their order and equally many each.
    """
    if not groups or rows % len(groups):
        return None
    size = rows // len(groups)
    for number, (_, _, members) in enumerate(groups):
        if (members.start, members.stop) != (number * size, (number + 1) * size):
            return None
    found = equal_prefixes([(members, slice(start, start + length)) for start, length, members in groups])
    return [
        (members.start // size, number, keys.start, (keys.stop - keys.start) // number)
        for number, members, keys in found
    ]
