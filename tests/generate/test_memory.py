"""How many samples run at once for a given memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import InputError
from groupwise.generate import memory
from groupwise.generate.memory import plan_cache
from groupwise.model.cache import SharedCache, bytes_per_token
from groupwise.model.handle import prepare
from tests.model.models import tiny

HANDLE = prepare(tiny("llama"))
TOKEN_BYTES = bytes_per_token(HANDLE.shapes, HANDLE.dtype)


def test_bytes_of_a_token():
    assert TOKEN_BYTES == 3 * 2 * 2 * 8 * 8  # layers, keys and values, heads, width, bytes of a float64
    cache = SharedCache(HANDLE, 10, 4, 4, 6)
    assert cache.bytes == TOKEN_BYTES * (10 + 5 * 6)
    cache.release()


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=10),
    st.integers(1, 30),
    st.integers(1, 64),
    st.integers(1, 3000),
)
def test_a_plan_fits_or_is_refused(requests, length, max_num_seqs, tokens):
    lengths, counts = [prompt for prompt, _ in requests], [count for _, count in requests]
    largest = min(max(counts), max_num_seqs)
    try:
        plan = plan_cache(HANDLE, lengths, counts, length, max_num_seqs, tokens * TOKEN_BYTES)
    except InputError:
        fewest = sum(sorted(lengths)[-(-(-largest // min(counts)) + 1) :])
        assert fewest + (largest + 1) * length > tokens
        return
    assert plan.prompt_tokens + (plan.slots + 1) * plan.page_tokens <= tokens
    assert largest <= plan.slots <= min(sum(counts), max_num_seqs)
    assert plan.prompt_tokens >= max(lengths)
    assert (plan.pages, plan.page_tokens) == (plan.slots, length)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=10),
    st.integers(129, 400),  # at least two pages
    st.integers(1, 64),
    st.integers(1, 5000),
)
def test_a_plan_for_samples_that_grow_fits_or_is_refused(requests, length, max_num_seqs, tokens):
    lengths, counts = [prompt for prompt, _ in requests], [count for _, count in requests]
    page = memory.PAGE_TOKENS
    most = -(-length // page)  # pages of one sample
    try:
        plan = plan_cache(HANDLE, lengths, counts, length, max_num_seqs, tokens * TOKEN_BYTES, grows=True)
    except InputError:
        assert sum(sorted(lengths)[-2:]) + min((most + 2) * page, 2 * length) > tokens
        return
    assert plan.prompt_tokens + (plan.pages + 1) * plan.page_tokens <= tokens
    assert 1 <= plan.slots <= min(sum(counts), max_num_seqs)
    if plan.page_tokens == length:  # all fit at full length
        assert plan.pages == plan.slots
    else:
        assert plan.page_tokens == page
        # One sample can always run to its end, and all can start.
        assert plan.pages >= max(most, 2 * plan.slots)


def test_samples_that_grow_run_in_less_memory():
    tokens = 10 * 4096
    reserved = plan_cache(HANDLE, [100], [64], 4096, 64, tokens * TOKEN_BYTES * 8)
    grown = plan_cache(HANDLE, [100], [64], 4096, 64, tokens * TOKEN_BYTES, grows=True)
    assert reserved.slots == grown.slots == 64
    with pytest.raises(InputError, match="one group of 64 samples"):
        plan_cache(HANDLE, [100], [64], 4096, 64, tokens * TOKEN_BYTES)


def test_pages_leave_memory_for_what_is_kept():
    """Half of those that are not needed to begin with; as many samples run as without."""
    tokens = 100 + 301 * memory.PAGE_TOKENS
    plans = [
        plan_cache(HANDLE, [100], [64], 4096, 64, tokens * TOKEN_BYTES, grows=True, keeps=keeps)
        for keeps in (False, True)
    ]
    assert [plan.slots for plan in plans] == [64, 64]
    assert [plan.pages for plan in plans] == [300, (300 + 2 * 64) // 2]
    assert [plan.memory_tokens for plan in plans] == [tokens, tokens]
    assert all(plan.tokens == 100 + (plan.pages + 1) * memory.PAGE_TOKENS for plan in plans)


def test_the_free_memory_is_the_default_budget(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 100 * TOKEN_BYTES)
    with pytest.raises(InputError, match="the free memory is"):
        plan_cache(HANDLE, [30], [8], 10, 64, None)
    assert plan_cache(HANDLE, [30], [8], 10, 64, None, held_bytes=100 * TOKEN_BYTES).slots == 8
    assert plan_cache(HANDLE, [30], [8], 10, 64, 120 * TOKEN_BYTES).slots == 8


def test_all_rows_or_an_error():
    assert plan_cache(HANDLE, [3], [2], 5, 16, 10**6, all_rows=True).slots == 16
    with pytest.raises(InputError, match="one group of 16 samples"):
        plan_cache(HANDLE, [3], [2], 5, 16, 60 * TOKEN_BYTES, all_rows=True)
