"""The size of the KV cache: as many concurrent samples as fit into the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from groupwise.errors import InputError
from groupwise.model.cache import bytes_per_token
from groupwise.model.device import free_memory
from groupwise.model.handle import ModelHandle

FREE_MEMORY_SHARE = 0.7  # the rest is for activations, logits and other processes
PAGE_TOKENS = 128  # of a page, where samples have several
GPU_PAGE_TOKENS = 64  # the same on a GPU, of which the kernels read one at a time
EXPECTED_SHARE = 1 / 4  # of the longest completion: what a sample is expected to need before any has ended


class CachePlan(NamedTuple):
    """The size of a `SharedCache`, and the tokens for which there is memory in all."""

    prompt_tokens: int  # of the pool
    slots: int
    pages: int
    page_tokens: int
    memory_tokens: int

    @property
    def size(self) -> tuple[int, int, int, int]:
        return self[:4]

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + (self.pages + 1) * self.page_tokens


def plan_cache(
    handle: ModelHandle,
    prompt_lengths: Sequence[int],
    counts: Sequence[int],
    length: int,
    max_num_seqs: int,
    cache_bytes: int | None,
    held_bytes: int = 0,
    all_rows: bool = False,
    grows: bool = False,
    keeps: bool = False,
    dtype: torch.dtype | None = None,
) -> CachePlan:
    """Slots for all samples, or as many as ``max_num_seqs`` and the memory allow, and a pool for their prompts.

    Each sample has a page for its longest completion. If there is not enough memory for that, and samples can get one
    page after another (``grows``), the pages are small and fill the memory.
    held_bytes: the size of the cache of an earlier call, which counts as free.
    all_rows: always ``max_num_seqs`` slots, or an error.
    dtype: of the stored keys and values, by default the model's.
    keeps: where pages fill the memory, leave half of those that are not needed at once to `KeptTokens`.
    """
    per_token = bytes_per_token(handle.shapes, dtype or handle.dtype)
    budget = cache_bytes
    if budget is None:
        budget = int((free_memory(handle.device) + held_bytes) * FREE_MEMORY_SHARE)
    tokens = budget // per_token
    longest = sorted(prompt_lengths, reverse=True)
    rows = max_num_seqs if all_rows else min(sum(counts), max_num_seqs)
    group = max_num_seqs if all_rows else min(max(counts), max_num_seqs)
    page_tokens = GPU_PAGE_TOKENS if handle.device.type == "cuda" else PAGE_TOKENS
    most_pages = -(-length // page_tokens)  # of one sample
    grows = grows and most_pages > 1
    least = 1 if grows else group
    while rows >= least:
        # The prompts that can be active at once: those of ``rows`` samples, and one more for a straggler.
        pool = sum(longest[: -(-rows // min(counts)) + 1])
        if pool + (rows + 1) * length <= tokens:
            return CachePlan(pool, rows, rows, length, tokens)
        pages = (tokens - pool) // page_tokens - 1
        enough = max(most_pages + 1, 2 * rows)
        if grows and pages >= enough:
            pages = min((pages + enough) // 2 if keeps else pages, rows * most_pages)
            return CachePlan(pool, rows, pages, page_tokens, tokens)
        rows = rows - 1 if rows < 16 else rows * 15 // 16
    needed = longest[0] + ((most_pages + 2) * page_tokens if grows else (group + 1) * length)
    what = "one completion" if grows else f"one group of {group} samples"
    source = "cache_bytes" if cache_bytes is not None else "the free memory"
    raise InputError(
        f"{what} of up to {length} tokens with a prompt of {longest[0]} takes {needed * per_token / 2**20:,.1f} MiB of "
        f"cache, but {source} is {budget / 2**20:,.1f} MiB; raise cache_bytes, or use fewer samples, fewer tokens or "
        "shorter prompts"
    )
