"""Decode attention on a GPU where completions are stored in pages: their keys are read through a table of the pages.

The prompts are computed as in `groupwise.model.kernels`. For the completions there are two kernels. The first handles
one part of one sample: a long completion is split among several programs, so that the step does not wait for its
longest sample; the first part also stores the new key and value. The second merges the parts of prompt and completion
by their log-sum-exps. Rows, pages and lengths are data, so that the launch is the same in every step.

Import this module only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.model.kernels import attend_block, attend_prompts, capped, constants_of

LEAST_TOKENS = 256  # of a part, if there are several


@triton.jit
def _parts(length, window, splits, BLOCK: tl.constexpr, LEAST: tl.constexpr, WINDOWED: tl.constexpr):
    """The first earlier token that a completion's newest one sees, up to a block, and the tokens of each part."""
    begin = 0
    if WINDOWED:
        begin = tl.maximum(length - window + 1, 0) // BLOCK * BLOCK
    each = tl.cdiv(tl.cdiv(length - begin, splits), BLOCK) * BLOCK
    return begin, tl.maximum(each, LEAST)


@triton.jit
def _page_kernel(
    query, key, value, page_keys, page_values, table, order, slots, lengths, part, lse,
    scale, window, softcap, rows, query_row, query_head, key_row, key_head, value_row, value_head,
    table_row, page_stride, token_stride, head_stride, prompt_splits, splits,
    HEADS: tl.constexpr, PER_HEAD: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, LEAST: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(1), tl.program_id(2)
    row = tl.load(order + tl.program_id(0))
    length = tl.load(lengths + row)
    begin, each = _parts(length, window, splits, BLOCK, LEAST, WINDOWED)
    first = begin + split * each
    last = tl.minimum(first + each, length)
    if split > 0 and first >= length:
        return
    pages = table + tl.load(slots + row).to(tl.int64) * table_row
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    offset = tl.arange(0, QUERIES)
    valid = offset < PER_HEAD
    q_at = query + row * query_row + (head * PER_HEAD + offset)[:, None] * query_head + column[None, :]
    q = tl.load(q_at, mask=valid[:, None] & inside[None, :], other=0.0)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, PADDED], tl.float32)
    if split == 0:
        new_key = tl.load(key + row * key_row + head * key_head + column, mask=inside, other=0.0)
        new_value = tl.load(value + row * value_row + head * value_head + column, mask=inside, other=0.0)
        new_key, new_value = new_key.to(page_keys.dtype.element_ty), new_value.to(page_keys.dtype.element_ty)
        new_page = tl.load(pages + length // PAGE).to(tl.int64)
        new_at = new_page * page_stride + length % PAGE * token_stride + head * head_stride + column
        tl.store(page_keys + new_at, new_key, mask=inside)
        tl.store(page_values + new_at, new_value, mask=inside)
        # The new token comes from registers, earlier ones from the cache.
        largest = capped(tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale, softcap, CAPPED)
        total += 1.0
        result += new_value.to(tl.float32)[None, :]
    for block in range(first, last, BLOCK):
        place = block + tl.arange(0, BLOCK)
        there = place < last
        page = tl.load(pages + place // PAGE, mask=there, other=0).to(tl.int64)
        seen = there
        if WINDOWED:
            seen = there & (length - place < window)
        kv = (page * page_stride + place % PAGE * token_stride + head * head_stride)[:, None] + column[None, :]
        mask = seen[:, None] & inside[None, :]
        largest, total, result = attend_block(
            q, page_keys, page_values, kv, mask, seen[None, :], scale, softcap, largest, total, result, CAPPED, EXACT
        )
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    place = ((prompt_splits + split) * rows + row) * (HEADS * PER_HEAD) + head * PER_HEAD + offset
    tl.store(lse + place, tl.where(some, largest + tl.log(divisor), float("-inf")), mask=valid)
    tl.store(
        part + place[:, None] * WIDTH + column[None, :], result / divisor[:, None],
        mask=valid[:, None] & inside[None, :],
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    part, lse, out, lengths, prompt_lengths, window, rows, splits,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr,
    PROMPT_SPLITS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    begin, each = _parts(length, window, splits, BLOCK, LEAST, WINDOWED)
    parts = tl.maximum(tl.cdiv(length - begin, each), 1)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    # The first part of a completion has its newest token, so that its log-sum-exp is finite.
    place = (PROMPT_SPLITS * rows + row) * HEADS + head
    largest = tl.load(lse + place)
    result = tl.load(part + place * WIDTH + column, mask=inside, other=0.0)
    total = 1.0
    first = tl.where(tl.load(prompt_lengths + row) > 0, 0, PROMPT_SPLITS + 1)
    for split in range(first, PROMPT_SPLITS + parts):
        place = (split * rows + row) * HEADS + head
        other = tl.load(lse + place)
        other = tl.where(split == PROMPT_SPLITS, float("-inf"), other)  # it is there already
        more = tl.load(part + place * WIDTH + column, mask=inside, other=0.0)
        larger = tl.maximum(largest, other)
        shrink, weight = tl.exp(largest - larger), tl.exp(other - larger)
        result = result * shrink + more * weight
        total = total * shrink + weight
        largest = larger
    at = (row * HEADS + head) * WIDTH + column
    tl.store(out + at, (result / total).to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("groupwise::paged_decode_attention", mutates_args=("page_keys", "page_values"))
def paged_decode_attention(
    query: Tensor, key: Tensor, value: Tensor,
    pool_keys: Tensor, pool_values: Tensor, page_keys: Tensor, page_values: Tensor, table: Tensor,
    slots: Tensor, lengths: Tensor, positions: Tensor, prompt_lengths: Tensor,
    tile_starts: Tensor, tile_lengths: Tensor, tile_rows: Tensor, order: Tensor,
    scale: float, window: int, softcap: float, prompt_splits: int, splits: int,
) -> Tensor:  # fmt: skip
    """As `decode_attention`, with the completions' keys and values in pages; ``table`` (slots, n) has their numbers.

    order: in which order the rows are started. splits: the maximal number of parts of a completion.
    """
    rows, heads, _, width = query.shape
    kv_heads = key.shape[1]
    constants = constants_of(query, kv_heads, window, softcap)
    part = torch.empty(prompt_splits + splits, rows, heads, width, dtype=torch.float32, device=query.device)
    lse = torch.empty(prompt_splits + splits, rows, heads, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, 1, heads, width, dtype=query.dtype, device=query.device)
    attend_prompts(
        query, pool_keys, pool_values, tile_starts, tile_lengths, tile_rows, positions, part, lse,
        scale, window, softcap, prompt_splits, constants,
    )  # fmt: skip
    _page_kernel[(rows, kv_heads, splits)](
        query, key, value, page_keys, page_values, table, order, slots, lengths, part, lse,
        scale, window, softcap, rows, query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), table.stride(0),
        page_keys.stride(0), page_keys.stride(1), page_keys.stride(2), prompt_splits, splits,
        QUERIES=max(16, triton.next_power_of_2(heads // kv_heads)), PAGE=page_keys.shape[1], LEAST=LEAST_TOKENS,
        num_stages=2, **constants,
    )  # fmt: skip
    _merge_kernel[(rows, heads)](
        part, lse, out, lengths, prompt_lengths, window, rows, splits,
        HEADS=heads, WIDTH=width, PADDED=constants["PADDED"], BLOCK=constants["BLOCK"], LEAST=LEAST_TOKENS,
        PROMPT_SPLITS=prompt_splits, WINDOWED=window > 0,
    )  # fmt: skip
    return out


@paged_decode_attention.register_fake
def _(query: Tensor, *args: object) -> Tensor:
    rows, heads, _, width = query.shape
    return query.new_empty(rows, 1, heads, width)
