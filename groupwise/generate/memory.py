"""How much cache a call gets: as many samples at once as fit into the memory there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from groupwise.errors import InputError
from groupwise.model.cache import bytes_per_token
from groupwise.model.device import free_memory
from groupwise.model.handle import ModelHandle

SHARE_OF_FREE = 0.7  # the rest is for activations, logits and whatever else runs


class CachePlan(NamedTuple):
    prompt_tokens: int  # of the pool
    slots: int
    length: int  # tokens of a slot


def plan_cache(
    handle: ModelHandle,
    prompt_lengths: Sequence[int],
    counts: Sequence[int],
    length: int,
    max_num_seqs: int,
    cache_bytes: int | None,
    held_bytes: int = 0,
    all_rows: bool = False,
) -> CachePlan:
    """Slots for as many samples as there are, as ``max_num_seqs`` allows and as fit, and a pool for their prompts.

    held_bytes: what a cache from an earlier call takes already; it counts as free.
    all_rows: ``max_num_seqs`` slots however few samples there are, or an error.
    """
    each = bytes_per_token(handle.shapes, handle.dtype)
    found = free_memory(handle.device) if cache_bytes is None else 0
    budget = cache_bytes if cache_bytes is not None else int((found + held_bytes) * SHARE_OF_FREE)
    tokens = budget // each
    largest, longest = max(counts), max(prompt_lengths)
    rows = max_num_seqs if all_rows else min(sum(counts), max_num_seqs)
    while rows > 0:
        pool = _pool(prompt_lengths, counts, rows)
        if pool + (rows + 1) * length <= tokens:
            break
        rows = rows - 1 if rows < 16 else rows * 15 // 16
    if rows < min(largest, max_num_seqs) or (all_rows and rows < max_num_seqs):
        wanted = max_num_seqs if all_rows else min(largest, max_num_seqs)
        need = (longest + (wanted + 1) * length) * each
        whose = "the cache_bytes given" if cache_bytes is not None else "the memory that is free"
        raise InputError(
            f"one group of {wanted} samples of up to {length} tokens with a prompt of {longest} takes {_mib(need)} of "
            f"cache, but {whose} is {_mib(budget)}; raise cache_bytes, or ask for fewer samples, fewer tokens or a "
            "shorter prompt"
        )
    return CachePlan(pool, rows, length)


def _pool(prompt_lengths: Sequence[int], counts: Sequence[int], rows: int) -> int:
    """Room for the prompts that can run at once: those of ``rows`` samples, and one more that a straggler may hold."""
    longest = sorted(prompt_lengths, reverse=True)
    fewest = min(counts)
    return sum(longest[: -(-rows // fewest) + 1])


def _mib(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB"
