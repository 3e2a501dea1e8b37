"""Drawing tokens on a GPU in one kernel: a program per row goes over its logits a few times, and nothing else is stored.

It draws what `groupwise.generate.sampling.draw` draws. A filter is a threshold on the tempered logits. Top-k's is the
k-th largest, found digit by digit (a radix select over the bits of the float, 8 at a time); top-p's is found by
bisection over the same bits; both keep all that tie with the last. Import this module only where Triton is installed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.generate.types import Sampling


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    """Unsigned integers in the order of the floats."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _float(key):  # type: ignore[no-untyped-def]
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK: tl.constexpr, BAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tempered logits of a block, all of them and those that may be drawn."""
    ids = block + tl.arange(0, BLOCK)
    x = tl.load(base + ids, mask=ids < vocabulary, other=float("-inf"))
    x = tl.div_rn(x, temperature)
    y = x
    if BAN:
        ends = tl.load(eos + ids, mask=ids < vocabulary, other=0)
        y = tl.where((ends != 0) & ban, float("-inf"), x)
    return ids, x, y


@triton.jit
def _digit(base, prefix, wanted, temperature, ban, eos, vocabulary, SHIFT: tl.constexpr, BLOCK: tl.constexpr, BAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Eight more bits of the ``wanted``-th largest key of those that begin with ``prefix``, and the new ``wanted``."""
    bins = tl.arange(0, 256)
    counts = tl.zeros([256], tl.int32)
    for block in range(0, vocabulary, BLOCK):
        ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
        key = _key(y)
        same = ids < vocabulary
        if SHIFT < 24:
            same = same & ((key >> (SHIFT + 8)) == (prefix >> (SHIFT + 8)))
        counts += tl.histogram(((key >> SHIFT) & 255).to(tl.int32), 256, mask=same)
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    chosen = tl.max(tl.where(at_least >= wanted, bins, 0), 0)
    return prefix | (chosen.to(tl.uint32) << SHIFT), wanted - tl.sum(tl.where(bins > chosen, counts, 0), 0)


@triton.jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits, uniform, banned, eos, ids_out, logps_out, filtered_out, threshold_out, counts_out,
    temperature, top_k, top_p, log_min_p, vocabulary, logits_row,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, MIN_P_FIRST: tl.constexpr,
    BAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * logits_row
    ban = False
    if BAN:
        ban = tl.load(banned + row) != 0
    largest, best = float("-inf"), float("-inf")
    total = 0.0
    for block in range(0, vocabulary, BLOCK):
        ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
        best = tl.maximum(best, tl.max(y, 0))
    threshold = best * 0.0 + float("-inf")
    if MIN_P and MIN_P_FIRST:
        threshold = best + log_min_p
    if TOP_K:
        prefix = tl.full([], 0, tl.uint32)
        prefix, wanted = _digit(base, prefix, top_k, temperature, ban, eos, vocabulary, 24, BLOCK, BAN)
        prefix, wanted = _digit(base, prefix, wanted, temperature, ban, eos, vocabulary, 16, BLOCK, BAN)
        prefix, wanted = _digit(base, prefix, wanted, temperature, ban, eos, vocabulary, 8, BLOCK, BAN)
        prefix, wanted = _digit(base, prefix, wanted, temperature, ban, eos, vocabulary, 0, BLOCK, BAN)
        threshold = tl.maximum(threshold, _float(prefix))
    if TOP_P:
        mass = 0.0
        for block in range(0, vocabulary, BLOCK):
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
            mass += tl.sum(tl.where(y >= threshold, tl.exp(y - best), 0.0), 0)
        # The smallest key above which less than top_p of the mass lies.
        low, high = _key(threshold).to(tl.int64), _key(best).to(tl.int64)
        for _ in range(32):
            middle = (low + high) // 2
            above = 0.0
            for block in range(0, vocabulary, BLOCK):
                ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
                above += tl.sum(tl.where(_key(y).to(tl.int64) > middle, tl.exp(y - best), 0.0), 0)
            enough = above < top_p * mass
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, tl.minimum(middle + 1, high))
        threshold = tl.maximum(threshold, _float(high.to(tl.uint32)))
    if MIN_P and not MIN_P_FIRST:
        threshold = tl.maximum(threshold, best + log_min_p)
    kept_total, count, final = 0.0, 0, -1
    for block in range(0, vocabulary, BLOCK):
        ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
        kept = (y >= threshold) & (y > float("-inf"))
        kept_total += tl.sum(tl.where(kept, tl.exp(y - best), 0.0), 0)
        count += tl.sum(kept.to(tl.int32), 0)
        final = tl.maximum(final, tl.max(tl.where(kept, ids, -1), 0))
    target = tl.load(uniform + row) * kept_total
    cumulated, found = 0.0, vocabulary
    for block in range(0, vocabulary, BLOCK):
        ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
        kept = (y >= threshold) & (y > float("-inf"))
        weights = tl.where(kept, tl.exp(y - best), 0.0)
        beyond = kept & (cumulated + tl.cumsum(weights, 0) > target)
        found = tl.minimum(found, tl.min(tl.where(beyond, ids, vocabulary), 0))
        cumulated += tl.sum(weights, 0)
    found = tl.maximum(tl.where(found < vocabulary, found, final), 0)  # rounding may leave none beyond the target
    score = tl.div_rn(tl.load(base + found), temperature)
    tl.store(ids_out + row, found.to(tl.int64))
    tl.store(logps_out + row, score - largest - tl.log(total))
    tl.store(filtered_out + row, score - best - tl.log(kept_total))
    tl.store(threshold_out + row, threshold)
    tl.store(counts_out + row, tl.where(count == vocabulary, 0, count))


class DrawnRows(NamedTuple):
    ids: Tensor  # (rows,)
    logps: Tensor  # (rows,)
    filtered_logps: Tensor  # (rows,)
    thresholds: Tensor  # (rows,) on tempered logits
    counts: Tensor  # (rows,) how many were kept; 0 for all


def can_draw(sampling: Sampling) -> bool:
    """Whether the kernel draws like this. The document's order filters before it tempers; greedy needs no chance."""
    return not sampling.greedy and sampling.order != "document"


def draw_rows(logits: Tensor, uniform: Tensor, banned: Tensor | None, eos: Tensor, sampling: Sampling) -> DrawnRows:
    """One token per row of raw float32 logits ``(rows, V)``."""
    rows, vocabulary = logits.shape
    ids = torch.empty(rows, dtype=torch.long, device=logits.device)
    logps, filtered, thresholds = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    counts = torch.empty(rows, dtype=torch.int32, device=logits.device)
    top_k = sampling.top_k or 0
    _draw_kernel[(rows,)](
        logits, uniform, uniform if banned is None else banned, eos, ids, logps, filtered, thresholds, counts,
        sampling.temperature, top_k, sampling.top_p, math.log(sampling.min_p) if sampling.min_p else 0.0,
        vocabulary, logits.stride(0),
        BLOCK=4096, TOP_K=0 < top_k < vocabulary, TOP_P=sampling.top_p < 1.0, MIN_P=bool(sampling.min_p),
        MIN_P_FIRST=sampling.order == "vllm", BAN=banned is not None, num_warps=8,
    )  # fmt: skip
    return DrawnRows(ids, logps, filtered, thresholds, counts)


@triton.jit
def _kept_kernel(  # type: ignore[no-untyped-def]
    logits, thresholds, banned, eos, offsets, pool, capacity, temperature, vocabulary, logits_row,
    BLOCK: tl.constexpr, BAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    if end > at:
        base = logits + row.to(tl.int64) * logits_row
        ban = False
        if BAN:
            ban = tl.load(banned + row) != 0
        threshold = tl.load(thresholds + row)
        for block in range(0, vocabulary, BLOCK):
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
            kept = ((y >= threshold) & (y > float("-inf"))).to(tl.int32)
            place = at + tl.cumsum(kept, 0) - kept
            tl.store(pool + place, ids.to(tl.int32), mask=(kept > 0) & (place < capacity))
            at += tl.sum(kept, 0)


def append_kept(
    logits: Tensor, temperature: float, thresholds: Tensor, banned: Tensor | None, eos: Tensor, offsets: Tensor, pool: Tensor
) -> None:
    """Write the ids that each row of ``logits`` (rows, V) kept to pool[offsets[row]:offsets[row + 1]].

    A row whose range is empty writes nothing, and nothing is written behind the pool's end.
    """
    _kept_kernel[(len(logits),)](
        logits, thresholds, thresholds if banned is None else banned, eos, offsets, pool, len(pool), temperature,
        logits.shape[1], logits.stride(0), BLOCK=1024, BAN=banned is not None,
    )  # fmt: skip
