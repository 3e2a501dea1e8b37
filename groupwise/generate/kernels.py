"""Sampling on a GPU in one kernel: a program per row reads its logits a few times and stores no distribution.

It samples what `groupwise.generate.sampling.draw` samples. A filter is a threshold on the logits after the temperature:
for top-k the k-th largest, for top-p the largest value above which less than that mass lies; both keep all ties. A
threshold is found by bisection between values that occur, so the search ends when one is left.

With top-k, two passes over the logits suffice. In the first, each of 4,096 lanes keeps the largest of the dozen values
it sees; a bound that k lanes exceed is exceeded by at least k tokens, and by few more. The second pass stores those
candidates, and the rest happens in registers. If there are too many candidates (thousands of ties), or without top-k,
every step of the bisection is a pass.

Import this module only where Triton is installed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.generate.types import Sampling

LANES = 4096
CANDIDATES = 2048  # fit into the registers of one program
MAX_TOP_K = 1024


@triton.jit
def _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK: tl.constexpr, BAN: tl.constexpr):
    """The ids of a block, its logits after the temperature, and those with banned tokens at −inf."""
    ids = block + tl.arange(0, BLOCK)
    x = tl.load(base + ids, mask=ids < vocabulary, other=float("-inf"))
    x = tl.div_rn(x, temperature)
    y = x
    if BAN:
        ends = tl.load(eos + ids, mask=ids < vocabulary, other=0)
        y = tl.where((ends != 0) & ban, float("-inf"), x)
    return ids, x, y


@triton.jit
def _between(low, high):
    """A value in [low, high)."""
    middle = low + (high - low) * 0.5
    return tl.where((middle >= low) & (middle < high), middle, low)


@triton.jit
def _threshold_in_registers(values, total, least, best, COUNT: tl.constexpr):
    """The largest of ``values`` above which less than ``total`` lies: a count, or a sum of exp(value − best)."""
    low, high = least, best
    while low < high:
        middle = _between(low, high)
        above = values > middle
        if COUNT:
            mass_above = tl.sum(above.to(tl.float32), 0)
        else:
            mass_above = tl.sum(tl.where(above, tl.exp(values - best), 0.0), 0)
        if mass_above < total:
            high = tl.max(tl.where(above, float("-inf"), values), 0)
        else:
            low = tl.min(tl.where(above, values, float("inf")), 0)
    return high


@triton.jit
def _threshold_over_logits(
    base, temperature, ban, eos, vocabulary, total, least, best,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, BAN: tl.constexpr,
):  # fmt: skip
    """The same over all logits, with a pass for each step."""
    low, high = least, best
    while low < high:
        middle = _between(low, high)
        mass_above = 0.0
        below, beyond = float("-inf"), float("inf")
        for block in range(0, vocabulary, BLOCK):
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
            above = y > middle
            if COUNT:
                mass_above += tl.sum(above.to(tl.float32), 0)
            else:
                mass_above += tl.sum(tl.where(above, tl.exp(y - best), 0.0), 0)
            below = tl.maximum(below, tl.max(tl.where(above, float("-inf"), y), 0))
            beyond = tl.minimum(beyond, tl.min(tl.where(above, y, float("inf")), 0))
        if mass_above < total:
            high = below
        else:
            low = beyond
    return high


@triton.jit
def _draw_kernel(
    logits, uniform, banned, eos, ids_out, logps_out, filtered_out, threshold_out, counts_out, values, places,
    temperature, top_k, top_p, log_min_p, vocabulary, logits_row,
    BLOCK: tl.constexpr, ROOM: tl.constexpr, FEW: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    MIN_P: tl.constexpr, MIN_P_FIRST: tl.constexpr, BAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * logits_row
    ban = False
    if BAN:
        ban = tl.load(banned + row) != 0
    largest, best, least = float("-inf"), float("-inf"), float("inf")
    total = 0.0
    lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in range(0, vocabulary, BLOCK):
        ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
        lanes = tl.maximum(lanes, y)
        least = tl.minimum(least, tl.min(tl.where(y > float("-inf"), y, float("inf")), 0))
    best = tl.max(lanes, 0)
    threshold = least
    if MIN_P and MIN_P_FIRST:
        threshold = tl.maximum(threshold, best + log_min_p)
    candidates = ROOM + 1
    if FEW:
        # A rough bound suffices, but k lanes must exceed it.
        low, high = threshold, best
        for _ in range(8):
            middle = _between(low, high)
            if tl.sum((lanes > middle).to(tl.int32), 0) >= top_k:
                low = middle
            else:
                high = middle
        candidates = 0
        for block in range(0, vocabulary, BLOCK):
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
            taken = (y >= low).to(tl.int32)
            place = candidates + tl.cumsum(taken, 0) - taken
            room = (taken > 0) & (place < ROOM)
            tl.store(values + row * ROOM + place, y, mask=room)
            tl.store(places + row * ROOM + place, ids, mask=room)
            candidates += tl.sum(taken, 0)
        tl.debug_barrier()  # other threads read what was stored
    chosen, final, count = vocabulary, -1, 0
    kept_total = 0.0
    u = tl.load(uniform + row)
    if candidates <= ROOM:
        at = tl.arange(0, ROOM)
        y = tl.load(values + row * ROOM + at, mask=at < candidates, other=float("-inf"))
        ids = tl.load(places + row * ROOM + at, mask=at < candidates, other=0)
        lowest = tl.min(tl.where(at < candidates, y, float("inf")), 0)
        if candidates > top_k:
            lowest = _threshold_in_registers(y, top_k * 1.0, lowest, best, True)
        threshold = tl.maximum(threshold, lowest)
        if TOP_P:
            mass = tl.sum(tl.where(y >= threshold, tl.exp(y - best), 0.0), 0)
            threshold = _threshold_in_registers(
                tl.where(y >= threshold, y, float("-inf")), top_p * mass, threshold, best, False
            )
        if MIN_P and not MIN_P_FIRST:
            threshold = tl.maximum(threshold, best + log_min_p)
        kept = (y >= threshold) & (at < candidates)
        weights = tl.where(kept, tl.exp(y - best), 0.0)
        kept_total = tl.sum(weights, 0)
        count = tl.sum(kept.to(tl.int32), 0)
        beyond = kept & (tl.cumsum(weights, 0) > u * kept_total)
        chosen = tl.min(tl.where(beyond, ids, vocabulary), 0)
        final = tl.max(tl.where(kept, ids, -1), 0)
    else:
        if TOP_K:
            k_threshold = _threshold_over_logits(
                base, temperature, ban, eos, vocabulary, top_k * 1.0, least, best, True, BLOCK, BAN
            )
            threshold = tl.maximum(threshold, k_threshold)
        if TOP_P:
            mass = 0.0
            for block in range(0, vocabulary, BLOCK):
                ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
                mass += tl.sum(tl.where(y >= threshold, tl.exp(y - best), 0.0), 0)
            p_threshold = _threshold_over_logits(
                base, temperature, ban, eos, vocabulary, top_p * mass, least, best, False, BLOCK, BAN
            )
            threshold = tl.maximum(threshold, p_threshold)
        if MIN_P and not MIN_P_FIRST:
            threshold = tl.maximum(threshold, best + log_min_p)
        for block in range(0, vocabulary, BLOCK):
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
            kept = (y >= threshold) & (ids < vocabulary)
            kept_total += tl.sum(tl.where(kept, tl.exp(y - best), 0.0), 0)
            count += tl.sum(kept.to(tl.int32), 0)
            final = tl.maximum(final, tl.max(tl.where(kept, ids, -1), 0))
        cumulative = 0.0
        for block in range(0, vocabulary, BLOCK):
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN)
            kept = (y >= threshold) & (ids < vocabulary)
            weights = tl.where(kept, tl.exp(y - best), 0.0)
            beyond = kept & (cumulative + tl.cumsum(weights, 0) > u * kept_total)
            chosen = tl.minimum(chosen, tl.min(tl.where(beyond, ids, vocabulary), 0))
            cumulative += tl.sum(weights, 0)
    chosen = tl.maximum(tl.where(chosen < vocabulary, chosen, final), 0)  # with rounding, none may exceed the target
    score = tl.div_rn(tl.load(base + chosen), temperature)
    tl.store(ids_out + row, chosen.to(tl.int64))
    tl.store(logps_out + row, score - largest - tl.log(total))
    tl.store(filtered_out + row, score - best - tl.log(kept_total))
    tl.store(threshold_out + row, threshold)
    tl.store(counts_out + row, tl.where(count == vocabulary, 0, count))


class FusedDraw(NamedTuple):
    """One token per row, and the thresholds of the filters."""

    ids: Tensor  # (rows,)
    logps: Tensor  # (rows,)
    filtered_logps: Tensor  # (rows,)
    thresholds: Tensor  # (rows,) of the logits after the temperature
    counts: Tensor  # (rows,) tokens kept; 0 for all


def can_draw(sampling: Sampling) -> bool:
    """Whether the kernel supports these parameters: not greedy, nor mlx-lm's order, which filters before tempering."""
    return not sampling.greedy and sampling.order != "mlx_lm"


def draw_rows(logits: Tensor, uniform: Tensor, banned: Tensor | None, eos: Tensor, sampling: Sampling) -> FusedDraw:
    """Sample one token per row of raw float32 logits ``(rows, V)``."""
    rows, vocabulary = logits.shape
    ids = torch.empty(rows, dtype=torch.long, device=logits.device)
    logps, filtered, thresholds = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    counts = torch.empty(rows, dtype=torch.int32, device=logits.device)
    top_k = sampling.top_k or 0
    few = 0 < top_k <= min(MAX_TOP_K, vocabulary - 1)  # the candidates fit into registers
    values = torch.empty(rows * CANDIDATES if few else 1, dtype=torch.float32, device=logits.device)
    places = torch.empty_like(values, dtype=torch.int32)
    _draw_kernel[(rows,)](
        logits, uniform, uniform if banned is None else banned, eos, ids, logps, filtered, thresholds, counts,
        values, places, sampling.temperature, top_k, sampling.top_p,
        math.log(sampling.min_p) if sampling.min_p else 0.0, vocabulary, logits.stride(0),
        BLOCK=LANES, ROOM=CANDIDATES, FEW=few, TOP_K=0 < top_k < vocabulary, TOP_P=sampling.top_p < 1.0,
        MIN_P=bool(sampling.min_p), MIN_P_FIRST=sampling.order == "vllm", BAN=banned is not None, num_warps=8,
    )  # fmt: skip
    return FusedDraw(ids, logps, filtered, thresholds, counts)


@triton.jit
def _kept_kernel(
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
    logits: Tensor,
    temperature: float,
    thresholds: Tensor,
    banned: Tensor | None,
    eos: Tensor,
    offsets: Tensor,
    pool: Tensor,
) -> None:
    """Write the kept ids of each row of ``logits`` (rows, V) to pool[offsets[row]:offsets[row + 1]].

    Rows with an empty range write nothing, and nothing is written beyond the pool's end.
    """
    _kept_kernel[(len(logits),)](
        logits, thresholds, thresholds if banned is None else banned, eos, offsets, pool, len(pool), temperature,
        logits.shape[1], logits.stride(0), BLOCK=LANES, BAN=banned is not None, num_warps=8,
    )  # fmt: skip
