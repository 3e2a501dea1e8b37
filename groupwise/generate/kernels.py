"""Sampling on a GPU: a row's logits are read once or twice by sixteen programs, and no distribution is stored.

It samples what `groupwise.generate.sampling.draw` samples. A filter is a threshold on the logits after the temperature:
for top-k the k-th largest, for top-p the largest value above which less than that mass lies; both keep all ties.

The first kernel reads each row in sixteen chunks: their largest logits, their sums of exponentials, and of each of 128
lanes the largest logit. Without filters, the last kernel then knows in which chunk the sampled token is, and reads that
one. With top-k, a bound that k lanes exceed is exceeded by at least k tokens, and by few more: the second kernel finds
it, the third writes down their ids, and for the last one the rest happens in registers. With top-p alone the thousand
most likely tokens are such candidates, if they have that mass; with min-p alone, those that pass. If there are too many
candidates (ties), or too little mass, the threshold is found by bisection between values that occur, with a pass over
the row for each step.

Import this module only where Triton is installed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.generate.types import Sampling

CHUNKS = 16
LANES = 128  # of a chunk
BLOCK = 1024  # logits of a chunk that are read at once
WIDE_BLOCK = 4096  # the same where one program reads the row
MAX_TOP_K = 1024
LIKELY = 1024  # candidates for top-p
CANDIDATES = 512, 2048  # room for them, at least and at most; they fit into the registers of one program
STATISTICS = tl.constexpr(6)  # of a chunk
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _allowed(
    base, block, temperature, ban, eos, vocabulary, BLOCK: tl.constexpr, BAN: tl.constexpr, TEMPERED: tl.constexpr
):
    """The ids of a block, its logits after the temperature, and those with banned tokens at −inf."""
    ids = block + tl.arange(0, BLOCK)
    x = tl.load(base + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
    if TEMPERED:
        x = tl.div_rn(x, temperature)
    y = x
    if BAN:
        ends = tl.load(eos + ids, mask=ids < vocabulary, other=0)
        y = tl.where((ends != 0) & ban, float("-inf"), x)
    return ids, x, y


@triton.jit
def _add_exponentials(largest, total, x):
    """The running largest value, and the sum of exponentials relative to it, with one more value in each lane."""
    difference = x - largest
    power = tl.exp(-tl.abs(difference))
    return tl.maximum(largest, x), tl.where(difference > 0, total * power + 1.0, total + power)


@triton.jit
def _scan_kernel(
    logits, banned, eos, statistics, lanes_out, temperature, vocabulary, logits_row, length,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, FEW: tl.constexpr, BAN: tl.constexpr,
    TEMPERED: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    base = logits + row.to(tl.int64) * logits_row
    ban = False
    if BAN:
        ban = tl.load(banned + row) != 0
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best, mass = largest, total
    lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    first = chunk * length
    for block in range(first, tl.minimum(first + length, vocabulary), BLOCK):
        ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN, TEMPERED)
        largest, total = _add_exponentials(largest, total, x)
        if BAN:
            best, mass = _add_exponentials(best, mass, y)
        lanes = tl.maximum(lanes, y)
        finite = y > float("-inf")
        least = tl.minimum(least, tl.where(finite, y, float("inf")))
        count += finite.to(tl.int32)
    if not BAN:
        best, mass = largest, total
    of_all, of_allowed = tl.max(largest, 0), tl.max(best, 0)
    at = statistics + row * STATISTICS * CHUNKS + chunk
    tl.store(at, of_all)
    tl.store(at + CHUNKS, tl.sum(total * tl.exp(largest - of_all), 0))
    tl.store(at + 2 * CHUNKS, of_allowed)
    tl.store(at + 3 * CHUNKS, tl.sum(mass * tl.exp(best - of_allowed), 0))
    tl.store(at + 4 * CHUNKS, tl.min(least, 0))
    tl.store(at + 5 * CHUNKS, tl.sum(count, 0).to(tl.float32))
    if FEW:
        of_lanes = tl.max(tl.reshape(lanes, [LANES, BLOCK // LANES]), 1)
        tl.store(lanes_out + (row * CHUNKS + chunk) * LANES + tl.arange(0, LANES), of_lanes)


@triton.jit
def _bound_kernel(
    statistics, lanes, bounds, wanted, log_min_p,
    CHUNKS: tl.constexpr, LANES: tl.constexpr, MIN_P_FIRST: tl.constexpr, MIN_P_ONLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = statistics + row * STATISTICS * CHUNKS
    best = tl.max(tl.load(at + 2 * CHUNKS + tl.arange(0, CHUNKS)), 0)
    low = tl.min(tl.load(at + 4 * CHUNKS + tl.arange(0, CHUNKS)), 0)
    if MIN_P_FIRST or MIN_P_ONLY:
        low = tl.maximum(low, best + log_min_p)
    of_lanes = tl.load(lanes + row * CHUNKS * LANES + tl.arange(0, CHUNKS * LANES))
    high = best
    if MIN_P_ONLY:
        high = low
    for _ in range(8):  # a rough bound suffices, but so many lanes must exceed it
        middle = _between(low, high)
        if tl.sum((of_lanes > middle).to(tl.int32), 0) >= wanted:
            low = middle
        else:
            high = middle
    tl.store(bounds + row, low)


@triton.jit
def _candidates_kernel(
    logits, banned, eos, statistics, bounds, places, found_out, mass_out, temperature, vocabulary, logits_row, length,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr, BAN: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    base = logits + row.to(tl.int64) * logits_row
    ban = False
    if BAN:
        ban = tl.load(banned + row) != 0
    low = tl.load(bounds + row)
    found = 0
    mass = 0.0
    best = tl.load(statistics + (row * STATISTICS + 2) * CHUNKS + chunk)
    if best >= low:
        first = chunk * length
        for block in range(first, tl.minimum(first + length, vocabulary), BLOCK):
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN, TEMPERED)
            taken = (y >= low).to(tl.int32)
            number = tl.sum(taken, 0)
            if number > 0:
                place = found + tl.cumsum(taken, 0) - taken
                room = (taken > 0) & (place < ROOM)
                tl.store(places + (row * CHUNKS + chunk) * ROOM + place, ids, mask=room)
                found += number
                mass += tl.sum(tl.where(taken > 0, tl.exp(y - best), 0.0), 0)
    tl.store(found_out + row * CHUNKS + chunk, found)
    tl.store(mass_out + row * CHUNKS + chunk, mass)


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
    COUNT: tl.constexpr, BLOCK: tl.constexpr, BAN: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """The same over all logits, with a pass for each step."""
    low, high = least, best
    while low < high:
        middle = _between(low, high)
        mass_above = 0.0
        below, beyond = float("-inf"), float("inf")
        for block in range(0, vocabulary, BLOCK):
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN, TEMPERED)
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
    logits, uniform, banned, eos, statistics, places, found_by_chunk, mass_by_chunk,
    ids_out, logps_out, filtered_out, threshold_out, counts_out,
    temperature, top_k, top_p, log_min_p, vocabulary, logits_row, length,
    BLOCK: tl.constexpr, WIDE_BLOCK: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr, MOST: tl.constexpr,
    FEW: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, MIN_P_FIRST: tl.constexpr,
    BAN: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * logits_row
    ban = False
    if BAN:
        ban = tl.load(banned + row) != 0
    chunks = tl.arange(0, CHUNKS)
    at = statistics + row * STATISTICS * CHUNKS + chunks
    largest_of, best_of = tl.load(at), tl.load(at + 2 * CHUNKS)
    largest, best = tl.max(largest_of, 0), tl.max(best_of, 0)
    total = tl.sum(tl.load(at + CHUNKS) * tl.exp(largest_of - largest), 0)
    masses = tl.load(at + 3 * CHUNKS) * tl.exp(best_of - best)
    least = tl.min(tl.load(at + 4 * CHUNKS), 0)
    threshold = least
    if MIN_P and MIN_P_FIRST:
        threshold = tl.maximum(threshold, best + log_min_p)
    candidates = MOST + 1
    found = tl.zeros([CHUNKS], tl.int32)
    if FEW:
        found = tl.load(found_by_chunk + row * CHUNKS + chunks)
        candidates = tl.where(tl.max(found, 0) <= ROOM, tl.sum(found, 0), MOST + 1)
        if TOP_P and not TOP_K:
            have = tl.sum(tl.load(mass_by_chunk + row * CHUNKS + chunks) * tl.exp(best_of - best), 0)
            candidates = tl.where(have >= (top_p + 1e-6) * tl.sum(masses, 0), candidates, MOST + 1)
    chosen, final, count = vocabulary, -1, 0
    kept_total = 0.0
    u = tl.load(uniform + row)
    if not (TOP_K or TOP_P or MIN_P):
        kept_total = tl.sum(masses, 0)
        count = tl.sum(tl.load(at + 5 * CHUNKS), 0).to(tl.int32)
        chunk = tl.sum((tl.cumsum(masses, 0) <= u * kept_total).to(tl.int32), 0)
        chunk = tl.minimum(chunk, tl.max(tl.where(masses > 0, chunks, 0), 0))  # rounding may end beyond the last one
        cumulative = tl.sum(tl.where(chunks < chunk, masses, 0.0), 0)
        first = chunk * length
        for block in range(first, tl.minimum(first + length, vocabulary), BLOCK):
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN, TEMPERED)
            kept = y > float("-inf")
            weights = tl.where(kept, tl.exp(y - best), 0.0)
            beyond = kept & (cumulative + tl.cumsum(weights, 0) > u * kept_total)
            chosen = tl.minimum(chosen, tl.min(tl.where(beyond, ids, vocabulary), 0))
            final = tl.maximum(final, tl.max(tl.where(kept, ids, -1), 0))
            cumulative += tl.sum(weights, 0)
    elif candidates <= MOST:
        place = tl.arange(0, MOST)
        there = place < candidates
        later = place[:, None] >= tl.cumsum(found, 0)[None, :]
        chunk_of = tl.sum(later.to(tl.int32), 1)
        within = place - tl.sum(tl.where(later, found[None, :], 0), 1)
        ids = tl.load(places + (row * CHUNKS + chunk_of) * ROOM + within, mask=there, other=0)
        y = tl.load(base + ids, mask=there, other=float("-inf")).to(tl.float32)
        y = tl.div_rn(y, temperature)
        lowest = tl.min(tl.where(there, y, float("inf")), 0)
        if TOP_K and candidates > top_k:
            lowest = _threshold_in_registers(y, top_k * 1.0, lowest, best, True)
        threshold = tl.maximum(threshold, lowest)
        if TOP_P:
            mass = tl.sum(masses, 0)
            if TOP_K:
                mass = tl.sum(tl.where(y >= threshold, tl.exp(y - best), 0.0), 0)
            threshold = _threshold_in_registers(
                tl.where(y >= threshold, y, float("-inf")), top_p * mass, threshold, best, False
            )
        if MIN_P and not MIN_P_FIRST:
            threshold = tl.maximum(threshold, best + log_min_p)
        kept = (y >= threshold) & there
        weights = tl.where(kept, tl.exp(y - best), 0.0)
        kept_total = tl.sum(weights, 0)
        count = tl.sum(kept.to(tl.int32), 0)
        beyond = kept & (tl.cumsum(weights, 0) > u * kept_total)
        chosen = tl.min(tl.where(beyond, ids, vocabulary), 0)
        final = tl.max(tl.where(kept, ids, -1), 0)
    else:
        if TOP_K:
            k_threshold = _threshold_over_logits(
                base, temperature, ban, eos, vocabulary, top_k * 1.0, least, best, True, WIDE_BLOCK, BAN, TEMPERED
            )
            threshold = tl.maximum(threshold, k_threshold)
        if TOP_P:
            mass = 0.0
            for block in range(0, vocabulary, WIDE_BLOCK):
                ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, WIDE_BLOCK, BAN, TEMPERED)
                mass += tl.sum(tl.where(y >= threshold, tl.exp(y - best), 0.0), 0)
            p_threshold = _threshold_over_logits(
                base, temperature, ban, eos, vocabulary, top_p * mass, least, best, False, WIDE_BLOCK, BAN, TEMPERED
            )
            threshold = tl.maximum(threshold, p_threshold)
        if MIN_P and not MIN_P_FIRST:
            threshold = tl.maximum(threshold, best + log_min_p)
        for block in range(0, vocabulary, WIDE_BLOCK):
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, WIDE_BLOCK, BAN, TEMPERED)
            kept = (y >= threshold) & (ids < vocabulary)
            kept_total += tl.sum(tl.where(kept, tl.exp(y - best), 0.0), 0)
            count += tl.sum(kept.to(tl.int32), 0)
            final = tl.maximum(final, tl.max(tl.where(kept, ids, -1), 0))
        cumulative = 0.0
        for block in range(0, vocabulary, WIDE_BLOCK):
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, WIDE_BLOCK, BAN, TEMPERED)
            kept = (y >= threshold) & (ids < vocabulary)
            weights = tl.where(kept, tl.exp(y - best), 0.0)
            beyond = kept & (cumulative + tl.cumsum(weights, 0) > u * kept_total)
            chosen = tl.minimum(chosen, tl.min(tl.where(beyond, ids, vocabulary), 0))
            cumulative += tl.sum(weights, 0)
    chosen = tl.maximum(tl.where(chosen < vocabulary, chosen, final), 0)  # with rounding, none may exceed the target
    score = tl.div_rn(tl.load(base + chosen).to(tl.float32), temperature)
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
    """Whether the kernels support these parameters: not greedy, nor mlx-lm's order, which filters before tempering."""
    return not sampling.greedy and sampling.order != "mlx_lm"


def draw_rows(logits: Tensor, uniform: Tensor, banned: Tensor | None, eos: Tensor, sampling: Sampling) -> FusedDraw:
    """Sample one token per row of raw logits ``(rows, V)``, in float32 or half precision."""
    rows, vocabulary = logits.shape
    empty_of = partial(torch.empty, device=logits.device)
    ids, counts = empty_of(rows, dtype=torch.long), empty_of(rows, dtype=torch.int32)
    logps, filtered, thresholds = (empty_of(rows, dtype=torch.float32) for _ in range(3))
    top_k = sampling.top_k or 0
    by_k, by_p, by_min_p = 0 < top_k < vocabulary, sampling.top_p < 1, bool(sampling.min_p)
    min_p_first = by_min_p and sampling.order == "vllm"
    wanted = top_k if by_k else min(LIKELY, max(64, vocabulary // 16))
    # Whether candidates may fit into registers. With min-p first, the mass that top-p divides is not known.
    few = top_k <= MAX_TOP_K if by_k else (by_p and not min_p_first) or (by_min_p and not by_p)
    most = min(CANDIDATES[1], max(CANDIDATES[0], triton.next_power_of_2(4 * wanted)))
    room = most // 2  # of one chunk
    length = -(-vocabulary // (CHUNKS * BLOCK)) * BLOCK  # of a chunk
    statistics = empty_of(rows, STATISTICS.value, CHUNKS, dtype=torch.float32)
    lanes = empty_of(rows, CHUNKS * LANES if few else 0, dtype=torch.float32)
    places, found = (empty_of(rows, size, dtype=torch.int32) for size in (CHUNKS * room if few else 0, CHUNKS))
    mass = empty_of(rows, CHUNKS, dtype=torch.float32)
    log_min_p = math.log(sampling.min_p) if sampling.min_p else 0.0
    bans, temperature, stride = uniform if banned is None else banned, sampling.temperature, logits.stride(0)
    common = {"BLOCK": BLOCK, "CHUNKS": CHUNKS, "BAN": banned is not None, "TEMPERED": temperature != 1, "num_warps": 4}
    _scan_kernel[(rows, CHUNKS)](
        logits, bans, eos, statistics, lanes, temperature, vocabulary, stride, length, LANES=LANES, FEW=few, **common
    )
    if few:
        bounds = empty_of(rows, dtype=torch.float32)
        _bound_kernel[(rows,)](
            statistics, lanes, bounds, wanted, log_min_p,
            CHUNKS=CHUNKS, LANES=LANES, MIN_P_FIRST=min_p_first, MIN_P_ONLY=not by_k and not by_p,
        )  # fmt: skip
        _candidates_kernel[(rows, CHUNKS)](
            logits, bans, eos, statistics, bounds, places, found, mass, temperature, vocabulary, stride, length,
            ROOM=room, **common,
        )  # fmt: skip
    _draw_kernel[(rows,)](
        logits, uniform, bans, eos, statistics, places, found, mass, ids, logps, filtered, thresholds, counts,
        temperature, top_k, sampling.top_p, log_min_p, vocabulary, stride, length,
        WIDE_BLOCK=WIDE_BLOCK, ROOM=room, MOST=most, FEW=few, TOP_K=by_k,
        TOP_P=by_p, MIN_P=by_min_p, MIN_P_FIRST=min_p_first, **common,
    )  # fmt: skip
    return FusedDraw(ids, logps, filtered, thresholds, counts)


@triton.jit
def _kept_kernel(
    logits, thresholds, banned, eos, offsets, pool, capacity, temperature, vocabulary, logits_row,
    BLOCK: tl.constexpr, BAN: tl.constexpr, TEMPERED: tl.constexpr,
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
            ids, x, y = _allowed(base, block, temperature, ban, eos, vocabulary, BLOCK, BAN, TEMPERED)
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
        logits.shape[1], logits.stride(0), BLOCK=WIDE_BLOCK, BAN=banned is not None, TEMPERED=temperature != 1,
        num_warps=8,
    )  # fmt: skip
