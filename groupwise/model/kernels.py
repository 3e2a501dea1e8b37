"""Decode attention on a GPU: one new token per row; a shared prompt is read once for up to sixteen rows.

Two Triton kernels. The first handles tiles, up to sixteen samples of one prompt, and reads the prompt's keys and values
once for all of a tile, or of half of it: with more than 64 queries (samples times query heads per KV head) a program
would run out of registers. The second handles one sample: it stores the new key and value, attends to the sample's
slot, and merges both results by their log-sum-exps. Which rows form a tile is data, not shape, so that every step has
the same launch and can be captured in a CUDA graph. There may be as many tiles as rows, but hardly ever are; so a
program of the first kernel takes one tile after another.

Import this module only where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.model.decode_inputs import TILE_ROWS
from groupwise.model.handle import ModelHandle

MAX_QUERIES = 64  # of a program


@triton.jit
def capped(scores, softcap, CAPPED: tl.constexpr):
    if CAPPED:  # softcap · tanh(scores / softcap)
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores


@triton.jit
def dot(a, b, EXACT: tl.constexpr):
    if EXACT:  # float32 without TF32
        product = tl.dot(a, b, input_precision="ieee")
    else:
        product = tl.dot(a, b)
    return product


@triton.jit
def attend_block(
    q, keys, values, kv, mask, visible, scale, softcap, largest, total, result,
    CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One more block of keys: the running largest score, sum of exponentials, and weighted sum of values.

    kv: its places (BLOCK, PADDED) in ``keys`` and ``values``; what ``mask`` leaves out is not read. visible: which
    queries see which keys; it may be none of them.
    """
    k = tl.load(keys + kv, mask=mask, other=0.0).to(q.dtype)
    scores = capped(dot(q, tl.trans(k), EXACT) * scale, softcap, CAPPED)
    scores = tl.where(visible, scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, 1))
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    weights = tl.exp(scores - safe[:, None])
    shrink = tl.exp(largest - safe)
    v = tl.load(values + kv, mask=mask, other=0.0).to(q.dtype)
    result = result * shrink[:, None] + dot(weights.to(v.dtype), v, EXACT)
    return larger, total * shrink + tl.sum(weights, 1), result


@triton.jit
def merge(largest, total, result, other, more):
    """Take in a result that is complete: its log-sum-exps and its output."""
    larger = tl.maximum(largest, other)
    shrink, weight = tl.exp(largest - larger), tl.exp(other - larger)
    return larger, total * shrink + weight, result * shrink[:, None] + more * weight[:, None]


@triton.jit
def _prompt_kernel(
    query, pool_keys, pool_values, tile_starts, tile_lengths, tile_rows, positions, out, lse,
    scale, window, softcap, rows, query_row, query_head, pool_token, pool_head, splits, tiles,
    HEADS: tl.constexpr, PER_HEAD: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, QUERIES)
    member, offset = lane // PER_HEAD, lane % PER_HEAD
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    unit = tl.program_id(0)  # a tile, or a part of one; those in use come first
    length = tl.load(tile_lengths + unit // (TILE // PART))
    while length > 0:
        tile, first_member = unit // (TILE // PART), unit % (TILE // PART) * PART
        start = tl.load(tile_starts + tile)
        row = tl.load(tile_rows + tile * TILE + first_member + member, mask=member < PART, other=-1)
        valid = row >= 0
        row = tl.where(valid, row, 0)
        q_at = query + row[:, None] * query_row + (head * PER_HEAD + offset)[:, None] * query_head + column[None, :]
        q = tl.load(q_at, mask=valid[:, None] & inside[None, :], other=0.0)
        at = tl.load(positions + row, mask=valid, other=0)
        per_split = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
        first = split * per_split
        last = tl.minimum(first + per_split, length)
        if tl.load(tile_rows + tile * TILE + first_member) < 0:
            last = first  # the tile has only members of the part before
        largest = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        result = tl.zeros([QUERIES, PADDED], tl.float32)
        for block in range(first, last, BLOCK):
            place = block + tl.arange(0, BLOCK)
            there = place < last
            kv = (start + place).to(tl.int64)[:, None] * pool_token + head * pool_head + column[None, :]
            mask = there[:, None] & inside[None, :]
            visible = there[None, :] & valid[:, None]
            if WINDOWED:
                visible = visible & (at[:, None] - place[None, :] < window)
            largest, total, result = attend_block(
                q, pool_keys, pool_values, kv, mask, visible, scale, softcap, largest, total, result, CAPPED, EXACT
            )
        some = total > 0
        result = result / tl.where(some, total, 1.0)[:, None]
        place = (split * rows + row) * (HEADS * PER_HEAD) + head * PER_HEAD + offset
        tl.store(lse + place, tl.where(some, largest + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=valid)
        tl.store(out + place[:, None] * WIDTH + column[None, :], result, mask=valid[:, None] & inside[None, :])
        unit += tl.num_programs(0)
        tile = unit // (TILE // PART)
        length = tl.load(tile_lengths + tile, mask=tile < tiles, other=0)


@triton.jit
def _completion_kernel(
    query, key, value, slot_keys, slot_values, slots, lengths, prompt_lengths, part, lse, out,
    scale, window, softcap, rows, query_row, query_head, key_row, key_head, value_row, value_head,
    slot_stride, token_stride, head_stride,
    HEADS: tl.constexpr, PER_HEAD: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    slot, length = tl.load(slots + row).to(tl.int64), tl.load(lengths + row)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    offset = tl.arange(0, QUERIES)
    valid = offset < PER_HEAD
    q_at = query + row * query_row + (head * PER_HEAD + offset)[:, None] * query_head + column[None, :]
    q = tl.load(q_at, mask=valid[:, None] & inside[None, :], other=0.0)
    new_key = tl.load(key + row * key_row + head * key_head + column, mask=inside, other=0.0)
    new_value = tl.load(value + row * value_row + head * value_head + column, mask=inside, other=0.0)
    new_key, new_value = new_key.to(slot_keys.dtype.element_ty), new_value.to(slot_keys.dtype.element_ty)
    base = slot * slot_stride + head * head_stride
    tl.store(slot_keys + base + length * token_stride + column, new_key, mask=inside)
    tl.store(slot_values + base + length * token_stride + column, new_value, mask=inside)
    # The new token comes from registers, earlier ones from the cache.
    newest = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    largest = capped(newest, softcap, CAPPED)
    total = tl.full([QUERIES], 1.0, tl.float32)
    result = tl.zeros([QUERIES, PADDED], tl.float32) + new_value.to(tl.float32)[None, :]
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window + 1, 0) // BLOCK * BLOCK
    for block in range(first, length, BLOCK):
        place = block + tl.arange(0, BLOCK)
        there = place < length
        if WINDOWED:
            there = there & (length - place < window)
        kv = base + place[:, None] * token_stride + column[None, :]
        mask = there[:, None] & inside[None, :]
        largest, total, result = attend_block(
            q, slot_keys, slot_values, kv, mask, there[None, :], scale, softcap, largest, total, result, CAPPED, EXACT
        )
    if tl.load(prompt_lengths + row) > 0:
        for split in range(SPLITS):
            place = (split * rows + row) * (HEADS * PER_HEAD) + head * PER_HEAD + offset
            other = tl.load(lse + place, mask=valid, other=float("-inf"))
            more = tl.load(
                part + place[:, None] * WIDTH + column[None, :], mask=valid[:, None] & inside[None, :], other=0.0
            )
            largest, total, result = merge(largest, total, result, other, more)
    place = row * (HEADS * PER_HEAD) + head * PER_HEAD + offset
    result = (result / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * WIDTH + column[None, :], result, mask=valid[:, None] & inside[None, :])


@torch.library.custom_op("groupwise::decode_attention", mutates_args=("slot_keys", "slot_values"))
def decode_attention(
    query: Tensor, key: Tensor, value: Tensor,
    pool_keys: Tensor, pool_values: Tensor, slot_keys: Tensor, slot_values: Tensor,
    slots: Tensor, lengths: Tensor, positions: Tensor, prompt_lengths: Tensor,
    tile_starts: Tensor, tile_lengths: Tensor, tile_rows: Tensor,
    scale: float, window: int, softcap: float, splits: int,
) -> Tensor:  # fmt: skip
    """query (rows, H, 1, d), key and value (rows, Hkv, 1, d) → (rows, 1, H, d). 0 means no window or no softcap."""
    rows, heads, _, width = query.shape
    kv_heads = key.shape[1]
    constants = constants_of(query, kv_heads, window, softcap)
    part = torch.empty(splits, rows, heads, width, dtype=torch.float32, device=query.device)
    lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, 1, heads, width, dtype=query.dtype, device=query.device)
    attend_prompts(
        query, pool_keys, pool_values, tile_starts, tile_lengths, tile_rows, positions, part, lse,
        scale, window, softcap, splits, constants,
    )  # fmt: skip
    _completion_kernel[(rows, kv_heads)](
        query, key, value, slot_keys, slot_values, slots, lengths, prompt_lengths, part, lse, out,
        scale, window, softcap, rows, query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), slot_keys.stride(0), slot_keys.stride(1), slot_keys.stride(2),
        QUERIES=max(16, triton.next_power_of_2(heads // kv_heads)), SPLITS=splits, num_stages=2, **constants,
    )  # fmt: skip
    return out


def constants_of(query: Tensor, kv_heads: int, window: int, softcap: float) -> dict[str, Any]:
    """What all attention kernels are compiled for."""
    _, heads, _, width = query.shape
    padded = max(16, triton.next_power_of_2(width))
    return {
        "HEADS": kv_heads, "PER_HEAD": heads // kv_heads, "WIDTH": width, "PADDED": padded,
        "BLOCK": 64 if padded <= 128 else 32,
        "WINDOWED": window > 0, "CAPPED": softcap > 0, "EXACT": query.dtype == torch.float32,
    }  # fmt: skip


def attend_prompts(
    query: Tensor, pool_keys: Tensor, pool_values: Tensor,
    tile_starts: Tensor, tile_lengths: Tensor, tile_rows: Tensor, positions: Tensor, part: Tensor, lse: Tensor,
    scale: float, window: int, softcap: float, splits: int, constants: dict[str, Any],
) -> None:  # fmt: skip
    """Attention of each row to its prompt, in ``splits`` parts, into the first of ``part`` and ``lse``."""
    part_rows = tile_part(constants["PER_HEAD"])
    programs = min(len(tile_starts), 2 * -(-len(query) // TILE_ROWS)) * (TILE_ROWS // part_rows)
    _prompt_kernel[(programs, constants["HEADS"], splits)](
        query, pool_keys, pool_values, tile_starts, tile_lengths, tile_rows, positions, part, lse,
        scale, window, softcap, len(query), query.stride(0), query.stride(1), pool_keys.stride(0), pool_keys.stride(1),
        splits, len(tile_starts),
        TILE=TILE_ROWS, PART=part_rows, QUERIES=max(16, triton.next_power_of_2(part_rows * constants["PER_HEAD"])),
        **constants,
    )  # fmt: skip


def tile_part(per_head: int) -> int:
    """How many samples of a tile a program handles: a power of two with at most 64 queries where that is possible."""
    part = TILE_ROWS
    while part > 1 and part * per_head > MAX_QUERIES:
        part //= 2
    return part


@decode_attention.register_fake
def _(query: Tensor, *args: object) -> Tensor:
    rows, heads, _, width = query.shape
    return query.new_empty(rows, 1, heads, width)


def splits_for(handle: ModelHandle, programs: int, tokens: int) -> int:
    """Into how many programs to split up to ``tokens`` keys, where there are ``programs`` per head without it.

    Enough to keep every multiprocessor busy, none with too little.
    """
    processors = torch.cuda.get_device_properties(handle.device).multi_processor_count
    programs *= handle.shapes[0].heads
    return max(1, min(16, processors // programs, tokens // 64), min(16, tokens // 2048))
