"""Shared-prefix attention: a prompt is computed once and read by all of its completions.

A packed row holds prompts followed by their completions. A completion attends to its prompt and to itself, a prompt to
itself, and to nothing else. Conversations that begin alike form a tree behind their prompt: a node attends to the
prompt, to the nodes above it and to itself. The softmax over several sets of keys splits into independent attentions,
which are merged by their log-sum-exps:

    out = Σ_i exp(lse_i − lse) out_i,   lse = log Σ_i exp(lse_i).

The merge needs no backward pass of its own: each part's backward, given the merged ``out`` and ``lse``, yields exactly
its share of the gradient, because softmax probabilities are exp(score − lse) in either case.

transformers looks up attention functions by name. `attention` is registered as ``"groupwise"``. A layout says which
tokens attend to which; without one it is PyTorch's scaled-dot-product attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from groupwise.errors import InputError
from groupwise.model.flash import FLASH_DTYPES, shared_flash, tree_flash, varlen_flash

IMPLEMENTATION = "groupwise"
LAYOUT = "groupwise_layout"  # the keyword that carries a layout through a model's forward


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

    ``prompts`` are the prompts' lengths, ``completions[i]`` the lengths of the completions of prompt i. Positions are
    those of a completion that stands alone behind its prompt. With ``parents``, the completions of a prompt are the
    nodes of a tree, each followed by its descendants: ``parents[i][j]`` is the node before node j, −1 for the prompt.
    """

    def __init__(
        self,
        prompts: Sequence[int],
        completions: Sequence[Sequence[int]],
        device: torch.device,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.prompt_tokens = sum(prompts)
        grouped = [sum(lengths) for lengths in completions]
        sizes = [*prompts, *(length for lengths in completions for length in lengths if length)]
        self.tokens = sum(sizes)
        prompt_ends, group_ends = [0, *accumulate(prompts)], [0, *accumulate(grouped)]
        segment_ends = [0, *accumulate(sizes)]
        # For loops in Python: the segments that attend to themselves, and which rows attend to which prompt.
        self.segments = [slice(a, b) for a, b in pairwise(segment_ends)]
        self.prefix = [
            (slice(self.prompt_tokens + q0, self.prompt_tokens + q1), slice(k0, k1))
            for (q0, q1), (k0, k1) in zip(pairwise(group_ends), pairwise(prompt_ends), strict=True)
            if q1 > q0
        ]
        starts = [0] * len(prompts)
        self._above: list[list[slice]] = []  # with trees: the nodes above each node
        self.deeper: list[tuple[slice, slice]] = []  # and for each inner node: its descendants, itself
        if parents is None:
            starts += [prompt for prompt, lengths in zip(prompts, completions, strict=True) for n in lengths if n]
        else:
            self._add_trees(starts, prompts, completions, parents)
        shift = np.array(starts, np.int64) - np.array(segment_ends[:-1], np.int64)
        self.positions = to_device(torch.from_numpy(np.arange(self.tokens) + shift.repeat(sizes)), device)
        self._sizes = [len([length for length in lengths if length]) for lengths in completions]
        # For the kernels: cumulative lengths, and the longest, rounded up so that few distinct numbers occur.
        self.segment_ends, self.prompt_ends, self.group_ends = (
            to_device(torch.tensor(ends, dtype=torch.int32), device) for ends in (segment_ends, prompt_ends, group_ends)
        )
        self.longest_segment, self.longest_prompt, self.longest_group = (
            _round_up(max(lengths, default=0)) for lengths in (sizes, prompts, grouped)
        )
        self.longest = max((start + size for start, size in zip(starts, sizes, strict=True)), default=0)
        self._gathered: dict[int | None, tuple[Tensor, Tensor, int]] = {}

    def _add_trees(
        self,
        starts: list[int],
        prompts: Sequence[int],
        completions: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
    ) -> None:
        """Add the position at which each node starts, the nodes above it, and the pairs that attend across nodes."""
        at = self.prompt_tokens
        for prompt, lengths, above in zip(prompts, completions, parents, strict=True):
            nodes = [slice(at + a, at + b) for a, b in pairwise([0, *accumulate(lengths)])]
            chains: list[list[int]] = []
            for parent in above:
                chains.append([] if parent < 0 else [*chains[parent], parent])
            starts += [prompt + sum(lengths[node] for node in chain) for chain in chains]
            self._above += [[nodes[node] for node in chain] for chain in chains]
            last = {node: child for child, chain in enumerate(chains) for node in chain}  # the last descendant of each
            self.deeper += [(slice(nodes[node].stop, nodes[last[node]].stop), nodes[node]) for node in sorted(last)]
            at += sum(lengths)

    def prepare(self, windows: Iterable[int]) -> None:
        """Compute the gathered keys for these sliding windows, and for trees, in advance.

        Inside a compiled layer, the first layer would compute them and the others find them cached, and gradient
        checkpointing would find them cached too: each case would be traced differently.
        """
        for window in windows:
            if window < self.longest:
                self._gathered_keys(window)
        if self.deeper:
            self._gathered_keys(None)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        _, query, key, value, scale, window, softcap = inputs
        if window is not None and window >= self.longest:
            window = None  # it hides nothing
        if query.device.type == "cuda" and query.dtype in FLASH_DTYPES and query.shape[-1] <= 256 and softcap is None:
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            if window is not None:
                index, key_ends, longest = self._gathered_keys(window)
                out = varlen_flash(
                    q, k[index], v[index], self.segment_ends, key_ends, self.longest_segment, longest, scale, window
                )[0]
            elif self.deeper:
                index, key_ends, longest = self._gathered_keys(None)
                out = tree_flash(
                    q, k[: self.prompt_tokens], v[: self.prompt_tokens], k[index], v[index],
                    self.segment_ends, key_ends, self.group_ends, self.prompt_ends,
                    self.longest_segment, longest, self.longest_group, self.longest_prompt, scale,
                )[0]  # fmt: skip
            else:
                out = shared_flash(
                    q, k, v, self.segment_ends, self.group_ends, self.prompt_ends, self.prompt_tokens,
                    self.longest_segment, self.longest_group, self.longest_prompt, scale,
                )[0]  # fmt: skip
        else:
            out = self._by_segments(query[0], key[0], value[0], scale, window, softcap)
        attended: Tensor = out.unsqueeze(0)
        return attended

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

    def _gathered_keys(self, window: int | None) -> tuple[Tensor, Tensor, int]:
        """Key indices per segment, the segments' ends among them, and the longest segment.

        A segment's keys are its own copy of the keys before it, and itself. With a sliding window they are the last
        keys that it can see: the window's edge falls at a different token for every query, so the prompt cannot be one
        block of keys for all completions. Without one they are the nodes above it, as its prompt is attended to apart.
        """
        if window not in self._gathered:
            device, prompts = self.positions.device, self.segments[: len(self._sizes)]
            prompt_of = [slice(0, 0)] * len(prompts)
            prompt_of += [prompt for prompt, size in zip(prompts, self._sizes, strict=True) for _ in range(size)]
            parts, sizes = [], []
            for number, (segment, prompt) in enumerate(zip(self.segments, prompt_of, strict=True)):
                above = self._nodes_above(number)
                before = above if window is None else [prompt, *above]
                seen = torch.cat([torch.zeros(0, dtype=torch.long), *(torch.arange(x.start, x.stop) for x in before)])
                if window is not None:
                    seen = seen[max(len(seen) - window + 1, 0) :]
                parts += [seen, torch.arange(segment.start, segment.stop)]
                sizes.append(len(seen) + segment.stop - segment.start)
            ends = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
            self._gathered[window] = torch.cat(parts).to(device), ends, _round_up(max(sizes))
        return self._gathered[window]

    def _dense(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """With explicit scores: any device, dtype, window and softcap; differentiated by autograd."""
        key, value = (x.repeat_interleave(query.shape[0] // key.shape[0], 0) for x in (key, value))

        def attend(rows: slice, keys: slice | Tensor) -> tuple[Tensor, Tensor]:
            distance = self.positions[rows, None] - self.positions[None, keys]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            return _dense_attention(query[:, rows], key[:, keys], value[:, keys], scale, visible, softcap)

        def keys_of(number: int, segment: slice) -> slice | Tensor:
            above = self._nodes_above(number)
            parts = [torch.arange(part.start, part.stop, device=query.device) for part in (*above, segment)]
            return torch.cat(parts) if above else segment

        pieces = [attend(segment, keys_of(number, segment)) for number, segment in enumerate(self.segments)]
        outs, lses = zip(*pieces, strict=True)
        segment_out, segment_lse = torch.cat(outs, 1), torch.cat(lses, 1)
        result, first = [segment_out[:, : self.prompt_tokens]], self.prompt_tokens
        for rows, keys in self.prefix:
            merged, _ = merge_attention(segment_out[:, rows], segment_lse[:, rows], *attend(rows, keys))
            result.append(merged)
            first = rows.stop
        return torch.cat([*result, segment_out[:, first:]], 1)

    def _nodes_above(self, segment: int) -> list[slice]:
        node = segment - len(self._sizes)
        return self._above[node] if self._above and node >= 0 else []

    def batches(self) -> list[tuple[int, slice, slice, bool]]:
        """Calls of the CPU kernel: number of groups, their rows, their keys, and whether they attend causally."""
        segments = merge_equal_groups([(segment, segment) for segment in self.segments])
        across = merge_equal_groups(self.prefix) + merge_equal_groups(self.deeper)
        return [(*group, True) for group in segments] + [(*group, False) for group in across]


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two sets of keys, from the outputs ``(…, d)`` and log-sum-exps ``(…)`` over each.

    The first set must not be empty for any query; where the other one is, its log-sum-exp is −inf.
    """
    share = torch.sigmoid(other_lse - lse).unsqueeze(-1)  # the other set's part of the probability
    both = torch.lerp(out.to(share.dtype), other.to(share.dtype), share)
    return both.to(out.dtype), torch.logaddexp(lse, other_lse)


class _SharedPrefix(torch.autograd.Function):
    """Shared-prefix attention with PyTorch's CPU flash kernel, which returns log-sum-exps. Tensors are (H, N, d)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
        repeat = query.shape[0] // key.shape[0]
        wide_key, wide_value = (x.repeat_interleave(repeat, 0) for x in (key, value))
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for number, rows, keys, causal in layout.batches():
            places = ((query, rows), (wide_key, keys), (wide_value, keys))
            parts = _cpu_forward(*(_batched(x[:, at], number) for x, at in places), 0.0, causal, scale=scale)
            part_out, part_lse = (_unbatched(x) for x in parts)
            if not causal:  # a prompt or a node, after the segments themselves
                part_out, part_lse = merge_attention(out[:, rows], lse[:, rows], part_out, part_lse)
            out[:, rows], lse[:, rows] = part_out, part_lse
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        layout: PackedLayout = ctx.layout
        repeat = query.shape[0] // key.shape[0]
        key, value = (x.repeat_interleave(repeat, 0) for x in (key, value))
        grads = [torch.zeros_like(x) for x in (query, key, value)]
        tensors = (grad, query, key, value, out, lse)
        for number, rows, keys, causal in layout.batches():
            places = zip(tensors, (rows, rows, keys, keys, rows, rows), strict=True)
            parts = _cpu_backward(*(_batched(x[:, at], number) for x, at in places), 0.0, causal, scale=ctx.scale)
            for total, share, at in zip(grads, parts, (rows, keys, keys), strict=True):
                total[:, at] += _unbatched(share)
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


def _batched(x: Tensor, number: int) -> Tensor:
    """(H, n · L, …) as (n, H, L, …)."""
    return x.reshape(x.shape[0], number, -1, *x.shape[2:]).transpose(0, 1)


def _unbatched(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1, 2)


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention ``(…, L, d)`` over one set of keys and its log-sum-exps ``(…, L)``, without gradients."""
    if query.device.type == "cpu" and softcap is None:
        mask = None if visible is None else torch.where(visible, 0.0, -math.inf).to(query.dtype)
        out, lse = _cpu_forward(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        # For a query that sees no key the kernel does not return −inf.
        return out, lse if visible is None else lse.masked_fill(~visible.any(-1), -math.inf)
    return _dense_attention(query, key, value, scale, visible, softcap)


def _dense_attention(
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
    return _dense_attention(query, key, value, scale, visible[..., : key.shape[2]], softcap)[0].transpose(1, 2)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for the work in its queue."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _round_up(number: int, unit: int = 128) -> int:
    return -(-number // unit) * unit
