"""The size of the KV cache: as many concurrent samples as fit into the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from groupwise.errors import InputError
from groupwise.model.cache import bytes_per_token
from groupwise.model.device import free_memory
from groupwise.model.handle import ModelHandle

FREE_MEMORY_SHARE = 0.7  # the rest is for activations, logits and other processes


class CachePlan(NamedTuple):
    """The size of a `SharedCache`."""

    prompt_tokens: int  # of the pool
    slots: int
    length: int  # tokens per slot


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
    """Slots for all samples, or as many as ``max_num_seqs`` and the memory allow, and a pool for their prompts.

    held_bytes: the size of the cache of an earlier call, which counts as free.
    all_rows: always ``max_num_seqs`` slots, or an error.
    """
    per_token = bytes_per_token(handle.shapes, handle.dtype)
    budget = cache_bytes
    if budget is None:
        budget = int((free_memory(handle.device) + held_bytes) * FREE_MEMORY_SHARE)
    tokens = budget // per_token
    longest = sorted(prompt_lengths, reverse=True)
    rows = max_num_seqs if all_rows else min(sum(counts), max_num_seqs)
    while rows > 0:
        # The prompts that can be active at once: those of ``rows`` samples, and one more for a straggler.
        pool = sum(longest[: -(-rows // min(counts)) + 1])
        if pool + (rows + 1) * length <= tokens:
            break
        rows = rows - 1 if rows < 16 else rows * 15 // 16
    group = max_num_seqs if all_rows else min(max(counts), max_num_seqs)
    if rows < group:
        needed = (longest[0] + (group + 1) * length) * per_token
        source = "cache_bytes" if cache_bytes is not None else "the free memory"
        raise InputError(
            f"one group of {group} samples of up to {length} tokens with a prompt of {longest[0]} takes "
            f"{needed / 2**20:,.1f} MiB of cache, but {source} is {budget / 2**20:,.1f} MiB; raise cache_bytes, or use "
            "fewer samples, fewer tokens or shorter prompts"
        )
    return CachePlan(pool, rows, length)
