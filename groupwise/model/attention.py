"""Shared-prefix attention: a prompt is computed once and read by all of its completions.

A packed row holds prompts followed by their completions. A completion attends to its prompt and to itself, a prompt to
itself, and to nothing else. (In a `groupwise.model.tree_attention.TreeLayout` completions may also share their
beginnings.) The softmax over both sets of keys splits into two independent attentions, which are merged by their
log-sum-exps:

    out = Σ_i exp(lse_i − lse) out_i,   lse = log Σ_i exp(lse_i).

The merge needs no backward pass of its own: each part's backward, given the merged ``out`` and ``lse``, yields exactly
its share of the gradient, because softmax probabilities are exp(score − lse) in either case.

transformers looks up attention functions by name. `attention` is registered as ``"groupwise"``. A layout says which
tokens attend to which; without one it is PyTorch's scaled-dot-product attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from groupwise.errors import InputError
from groupwise.model.flash import FLASH_DTYPES, shared_flash, varlen_flash

IMPLEMENTATION = "groupwise"
LAYOUT = "groupwise_layout"  # the keyword that carries a layout through a model's forward

Lengths = Sequence[int] | np.ndarray
Places = slice | Tensor  # along a dimension


class AttentionInputs(NamedTuple):
    """One attention call of a model: query (rows, H, L, d), key and value (rows, Hkv, L, d), and its settings."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls. A layout arrives as a keyword: its ``attend`` returns (rows, L, H, d)."""
    layout = kwargs.pop(LAYOUT, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layout is None:
        if softcap is not None:  # not supported by scaled_dot_product_attention
            return _softcapped_attention(query, key, value, attention_mask, scale, softcap), None
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    if dropout:
        raise InputError("attention dropout is on: set the model's attention_dropout to 0, or call model.eval()")
    return layout.attend(AttentionInputs(module, query, key, value, scale, sliding_window, softcap)), None


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


class PackedLayout:
    """Prompts, then their completions, in one row.

    ``prompts`` are the prompts' lengths, ``sizes`` the number of completions of each, ``completions`` their lengths.
    Positions are those of a completion that stands alone behind its prompt.
    """

    deeper: Sequence[tuple[int, Places, Places, bool]] = ()  # further `calls`, whose results are merged in this order

    def __init__(self, prompts: Lengths, sizes: Lengths, completions: Lengths, device: torch.device) -> None:
        prompts, sizes, completions = (np.asarray(x, np.int64) for x in (prompts, sizes, completions))
        present = completions > 0
        self._prompts, self._prompt_of = prompts, np.arange(len(prompts)).repeat(sizes)[present]
        grouped = np.zeros_like(prompts)
        np.add.at(grouped, self._prompt_of, completions[present])
        segments = np.concatenate([prompts, completions[present]])
        self.prompt_tokens, self.tokens = int(prompts.sum()), int(segments.sum())
        prompt_ends, group_ends, segment_ends = (np.append(0, x.cumsum()) for x in (prompts, grouped, segments))
        self._ends = prompt_ends, group_ends, segment_ends
        starts = np.concatenate([np.zeros_like(prompts), prompts[self._prompt_of]])
        shift = starts - segment_ends[:-1]
        self.positions = to_device(torch.from_numpy(np.arange(self.tokens) + shift.repeat(segments)), device)
        # For the kernels: cumulative lengths, and the longest, rounded up so that few distinct numbers occur.
        self.segment_ends, self.prompt_ends, self.group_ends = (
            to_device(torch.from_numpy(ends.astype(np.int32)), device)
            for ends in (segment_ends, prompt_ends, group_ends)
        )
        self.longest_segment, self.longest_prompt, self.longest_group = (
            round_up(int(lengths.max(initial=0))) for lengths in (segments, prompts, grouped)
        )
        self.longest = int((starts + segments).max(initial=0))
        self._windowed: dict[int, tuple[Tensor, Tensor, int]] = {}

    def prepare_windows(self, windows: Iterable[int]) -> None:
        """Compute the keys for these sliding windows in advance.

        Inside a compiled layer, the first layer would compute them and the others find them cached, and gradient
        checkpointing would find them cached too: each case would be traced differently.
        """
        for window in windows:
            if window < self.longest:
                self._windowed_keys(window)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        _, query, key, value, scale, window, softcap = inputs
        if window is not None and window >= self.longest:
            window = None  # it hides nothing
        if query.device.type == "cuda" and query.dtype in FLASH_DTYPES and query.shape[-1] <= 256 and softcap is None:
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            out = self._flash(q, k, v, scale, window)
        else:
            out = self._by_segments(query[0], key[0], value[0], scale, window, softcap)
        attended: Tensor = out.unsqueeze(0)
        return attended

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        if window is not None:
            index, key_ends, longest = self._windowed_keys(window)
            out: Tensor = varlen_flash(
                query, key[index], value[index], self.segment_ends, key_ends, self.longest_segment, longest, scale,
                window,
            )[0]  # fmt: skip
        else:
            out = shared_flash(
                query, key, value, self.segment_ends, self.group_ends, self.prompt_ends, self.prompt_tokens,
                self.longest_segment, self.longest_group, self.longest_prompt, scale,
            )[0]  # fmt: skip
        return out

    # Dynamo would unroll its loops and recompile for every layout.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _by_segments(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        if query.device.type == "cpu" and window is None and softcap is None:
            out: Tensor = _SharedPrefix.apply(query, key, value, self, scale)  # type: ignore[no-untyped-call]
        else:
            out = self._dense(query, key, value, scale, window, softcap)
        return out.transpose(0, 1)

    def _windowed_keys(self, window: int) -> tuple[Tensor, Tensor, int]:
        """Key indices per segment for a sliding window, the segments' ends among them, and the longest segment.

        The window's edge falls at a different prompt token for every query, so the prompt cannot be one block of keys
        for all completions. Each completion gets its own copy of the prompt's last keys instead.
        """
        if window not in self._windowed:
            device, count = self.positions.device, len(self._prompts)
            prompt_ends, _, segment_ends = self._ends
            seen = np.minimum(self._prompts, window - 1)[self._prompt_of]  # of each completion's prompt
            own = np.diff(segment_ends[count:])
            starts = np.stack([prompt_ends[1:][self._prompt_of] - seen, segment_ends[count:-1]], 1).flatten()
            lengths = np.concatenate([self._prompts, np.stack([seen, own], 1).flatten()])
            keys = torch.from_numpy(ranges(np.concatenate([prompt_ends[:-1], starts]), lengths))
            sizes = np.concatenate([self._prompts, seen + own])
            ends = torch.from_numpy(np.append(0, sizes.cumsum()).astype(np.int32))
            self._windowed[window] = keys.to(device), ends.to(device), round_up(int(sizes.max()))
        return self._windowed[window]

    def _dense(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """With explicit scores: any device, dtype, window and softcap; differentiated by autograd."""
        key, value = (x.repeat_interleave(query.shape[0] // key.shape[0], 0) for x in (key, value))

        def attend(rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
            distance = self.positions[rows, None] - self.positions[None, keys]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            return dense_attention(query[:, rows], key[:, keys], value[:, keys], scale, visible, softcap)

        prompt_ends, group_ends, segment_ends = (ends.tolist() for ends in self._ends)
        segments = [slice(a, b) for a, b in pairwise(segment_ends)]
        outs, lses = zip(*(attend(segment, segment) for segment in segments), strict=True)
        segment_out, segment_lse = torch.cat(outs, 1), torch.cat(lses, 1)
        result, first = [segment_out[:, : self.prompt_tokens]], self.prompt_tokens
        for (q0, q1), keys in zip(pairwise(group_ends), starmap(slice, pairwise(prompt_ends)), strict=True):
            if q0 == q1:
                continue
            rows = slice(first, first + q1 - q0)
            merged, _ = merge_attention(segment_out[:, rows], segment_lse[:, rows], *attend(rows, keys))
            result.append(merged)
            first = rows.stop
        return torch.cat([*result, segment_out[:, first:]], 1)

    @cached_property
    def calls(self) -> list[tuple[int, Places, Places, bool]]:
        """Calls of the CPU kernel: number of groups, their rows, their keys, and whether they attend causally.

        Segments of equal length are one call, wherever they are: thousands of short answers have few lengths.
        """
        prompt_ends, group_ends, segment_ends = self._ends
        calls: list[tuple[int, Places, Places, bool]] = []
        lengths = np.diff(segment_ends)
        for length in np.unique(lengths):
            starts = segment_ends[:-1][lengths == length]
            places = _places(starts, length)
            calls.append((len(starts), places, places, True))
        pairs = np.stack([np.diff(group_ends), np.diff(prompt_ends)], 1)
        for rows, keys in np.unique(pairs[pairs[:, 0] > 0], axis=0):
            equal = (pairs == (rows, keys)).all(1)
            first = _places(self.prompt_tokens + group_ends[:-1][equal], rows)
            calls.append((int(equal.sum()), first, _places(prompt_ends[:-1][equal], keys), False))
        return calls

    @cached_property
    def merges(self) -> list[slice]:
        """The completions of adjacent prompts that are equal in length and in tokens of completions."""
        prompt_ends, group_ends, _ = self._ends
        bounds = (group_ends + self.prompt_tokens).tolist()
        groups = zip(starmap(slice, pairwise(bounds)), starmap(slice, pairwise(prompt_ends.tolist())), strict=True)
        merged = merge_equal_groups([(rows, keys) for rows, keys in groups if rows.start < rows.stop])
        return [rows for _, rows, _ in merged]


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two sets of keys, from the outputs ``(…, d)`` and log-sum-exps ``(…)`` over each.

    The first set must not be empty for any query; where the other one is, its log-sum-exp is −inf.
    """
    share = torch.sigmoid(other_lse - lse).unsqueeze(-1)  # the other set's part of the probability
    both = torch.lerp(out.to(share.dtype), other.to(share.dtype), share)
    return both.to(out.dtype), torch.logaddexp(lse, other_lse)


class _SharedPrefix(torch.autograd.Function):
    """Shared-prefix attention with PyTorch's CPU flash kernel, which returns log-sum-exps.

    Tensors are (H, N, d), in memory (N, H, d), so that the rows of scattered tokens are copied fast.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
        repeat = query.shape[0] // key.shape[0]
        wide_query, wide_key, wide_value = (_repeated(x, n) for x, n in ((query, 1), (key, repeat), (value, repeat)))
        out = torch.empty_like(wide_query)
        lse = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        # Attention to the prompts, in memory as the kernel returns it.
        prefix_out, prefix_lse = (x.new_empty(x.transpose(0, 1).shape).transpose(0, 1) for x in (out, lse))
        for number, rows, keys, causal in layout.calls:
            places = ((wide_query, rows), (wide_key, keys), (wide_value, keys))
            parts = _cpu_forward(*(_batched(x, at, number) for x, at in places), 0.0, causal, scale=scale)
            for total, part in zip((out, lse) if causal else (prefix_out, prefix_lse), parts, strict=True):
                if isinstance(rows, slice):
                    total[:, rows] = _unbatched(part).transpose(0, 1)
                else:
                    total.transpose(0, 1).index_copy_(0, rows, _unbatched(part))
        # Not all rows at once: a vectorised loop and its remainder round differently, and seeded runs must not change.
        for rows in layout.merges:
            own, prefix = (out[:, rows], lse[:, rows]), (prefix_out[:, rows], prefix_lse[:, rows])
            out[:, rows], lse[:, rows] = merge_attention(*own, *prefix)
        for number, rows, keys, causal in layout.deeper:
            places = ((wide_query, rows), (wide_key, keys), (wide_value, keys))
            parts = _cpu_forward(*(_batched(x, at, number) for x, at in places), 0.0, causal, scale=scale)
            deeper = (_unbatched(part).transpose(0, 1) for part in parts)
            out[:, rows], lse[:, rows] = merge_attention(out[:, rows], lse[:, rows], *deeper)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        layout: PackedLayout = ctx.layout
        repeat = query.shape[0] // key.shape[0]
        counts = (1, 1, repeat, repeat, 1)
        wide = [_repeated(x, n) for x, n in zip((grad, query, key, value, out), counts, strict=True)]
        grads = [torch.zeros_like(x) for x in wide[1:4]]
        tensors = (*wide, lse)
        for number, rows, keys, causal in (*layout.calls, *layout.deeper):
            places = zip(tensors, (rows, rows, keys, keys, rows, rows), strict=True)
            parts = _cpu_backward(*(_batched(x, at, number) for x, at in places), 0.0, causal, scale=ctx.scale)
            for total, share, at in zip(grads, parts, (rows, keys, keys), strict=True):
                if isinstance(at, slice):
                    total[:, at] += _unbatched(share).transpose(0, 1)
                else:
                    total.transpose(0, 1).index_add_(0, at, _unbatched(share))
        if repeat > 1:
            grads[1:] = [x.view(-1, repeat, *x.shape[1:]).sum(1) for x in grads[1:]]
        return *grads, None, None


_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def merge_equal_groups(groups: Sequence[tuple[slice, slice]]) -> list[tuple[int, slice, slice]]:
    """Adjacent groups of equal size merged into batches: (number of groups, their rows, their keys)."""
    merged: list[tuple[int, slice, slice]] = []
    size = (-1, -1)
    for rows, keys in groups:
        lengths = (rows.stop - rows.start, keys.stop - keys.start)
        if merged and lengths == size and (merged[-1][1].stop, merged[-1][2].stop) == (rows.start, keys.start):
            number, first_rows, first_keys = merged[-1]
            merged[-1] = (number + 1, slice(first_rows.start, rows.stop), slice(first_keys.start, keys.stop))
        else:
            merged.append((1, rows, keys))
        size = lengths
    return merged


def _places(starts: np.ndarray, length: int) -> Places:
    """The places of ranges of equal length: a slice if they are adjacent."""
    first, last = int(starts[0]), int(starts[-1]) + int(length)
    if last - first == len(starts) * length:
        return slice(first, last)
    return torch.from_numpy((starts[:, None] + np.arange(length)).flatten())


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers of all these ranges, one range after another."""
    ends = lengths.cumsum()
    numbers: np.ndarray = np.arange(lengths.sum()) + (starts - ends + lengths).repeat(lengths)
    return numbers


def _batched(x: Tensor, places: Places, number: int) -> Tensor:
    """These places of (H, N, …), n groups of L, as (n, H, L, …)."""
    if isinstance(places, slice):
        return x[:, places].reshape(x.shape[0], number, -1, *x.shape[2:]).transpose(0, 1)
    x = x.transpose(0, 1).index_select(0, places)
    return x.view(number, -1, *x.shape[1:]).transpose(1, 2)


def _repeated(x: Tensor, repeat: int) -> Tensor:
    """Each of the heads ``repeat`` times, in memory (N, H, d)."""
    wide = x if repeat == 1 else x.repeat_interleave(repeat, 0)
    return wide.transpose(0, 1).contiguous().transpose(0, 1)


def _unbatched(x: Tensor) -> Tensor:
    """(n, H, L, …) as (n · L, H, …)."""
    return x.transpose(1, 2).flatten(0, 1)


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention ``(…, L, d)`` over one set of keys and its log-sum-exps ``(…, L)``, without gradients."""
    if query.device.type == "cpu" and softcap is None:
        mask = None if visible is None else torch.where(visible, 0.0, -math.inf).to(query.dtype)
        out, lse = _cpu_forward(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        # For a query that sees no key the kernel does not return −inf.
        return out, lse if visible is None else lse.masked_fill(~visible.any(-1), -math.inf)
    return dense_attention(query, key, value, scale, visible, softcap)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    # For a query that sees no key, −inf − (−inf) would be NaN.
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
    return weights.to(value.dtype) @ value, lse


def _softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Ordinary attention with capped scores. The mask is PyTorch's: true where visible; None is causal."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    if mask is None:
        rows, columns = query.shape[2], key.shape[2]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
    visible = mask if mask.dtype == torch.bool else mask == 0
    return dense_attention(query, key, value, scale, visible[..., : key.shape[2]], softcap)[0].transpose(1, 2)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for the work in its queue."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def round_up(number: int, unit: int = 128) -> int:
    return -(-number // unit) * unit
