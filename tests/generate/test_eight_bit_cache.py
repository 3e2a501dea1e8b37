"""Keys and values that are stored in eight bits."""

from __future__ import annotations

import pytest
import torch

from groupwise.errors import InputError
from groupwise.generate import memory
from groupwise.generate.engine import Engine
from groupwise.generate.types import Sampling
from groupwise.model import cache
from groupwise.model.cache import LayerCache, SharedCache, _read, _store, bytes_per_token
from groupwise.model.handle import prepare
from tests.generate.preemption import preempt_at_random
from tests.model.models import random_groups, tiny

PROMPTS, _ = random_groups([5, 9, 1, 30, 17], [])
COUNTS = [3, 1, 4, 2, 4]
SAMPLING = Sampling(max_new_tokens=24, eos_ids=())


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_it_samples_what_rounded_keys_and_values_give(name, monkeypatch):
    handle = prepare(tiny(name, torch.float32))
    got = Engine(handle, kv_cache_dtype="fp8").generate(PROMPTS, COUNTS, SAMPLING)
    exact = Engine(handle).generate(PROMPTS, COUNTS, SAMPLING)
    store = cache._store

    def rounded(stored: torch.Tensor, places: torch.Tensor, new: torch.Tensor) -> None:
        store(stored, places, new.to(torch.float8_e4m3fn).to(new.dtype))

    monkeypatch.setattr(cache, "_store", rounded)
    wanted = Engine(handle).generate(PROMPTS, COUNTS, SAMPLING)
    assert torch.equal(got.ids, wanted.ids)
    torch.testing.assert_close(got.logps, wanted.logps)
    assert not torch.equal(exact.logps, wanted.logps)


def test_a_quarter_of_the_memory_of_float32():
    handle = prepare(tiny("llama", torch.float32))
    small, large = Engine(handle, kv_cache_dtype="fp8"), Engine(handle)
    for engine in (small, large):
        engine.generate(PROMPTS, COUNTS, SAMPLING)
    assert small._cache.bytes * 4 == large._cache.bytes
    small.generate(PROMPTS, COUNTS, SAMPLING)  # the cache of the call before is used again


def test_preemption_changes_no_token(monkeypatch):
    """What is saved on the host is what had been rounded."""
    handle = prepare(tiny("llama", torch.float32))
    sampling = Sampling(max_new_tokens=40, seed=2, eos_ids=(3, 5))
    wanted = Engine(handle, kv_cache_dtype="fp8").generate(PROMPTS, COUNTS, sampling)
    monkeypatch.setattr(memory, "PAGE_TOKENS", 4)
    preempt_at_random(monkeypatch)
    limit = bytes_per_token(handle.shapes, torch.float8_e4m3fn) * (sum(map(len, PROMPTS)) + 4 * 40)
    got = Engine(handle, kv_cache_dtype="fp8", cache_bytes=limit).generate(PROMPTS, COUNTS, sampling)
    assert got.stats["preempted"] > 0
    assert torch.equal(got.ids, wanted.ids)


def test_values_beyond_the_largest_number_are_cut_off():
    stored = torch.zeros(3, 1, 2, dtype=torch.float8_e4m3fn)
    _store(stored, torch.tensor([2]), torch.tensor([[[1e6, -500.0]]]))
    assert _read(stored, slice(2, 3), torch.float32).tolist() == [[[448.0, -448.0]]]
    assert _read(stored, torch.tensor([0, 1]), torch.float32).eq(0).all()


def test_nothing_is_kept_between_turns():
    engine = Engine(prepare(tiny("llama", torch.float32)), kv_cache_dtype="fp8")
    with engine.keeping():
        first = engine.generate(PROMPTS[:1], 1, SAMPLING)
        context = torch.cat([PROMPTS[0], first.completions()[0][0]])
        assert engine.generate([context], 1, SAMPLING).stats["reused_tokens"] == 0


def test_other_dtypes_are_refused():
    with pytest.raises(InputError, match="unknown kv_cache_dtype 'fp9'"):
        Engine(prepare(tiny("llama", torch.float32)), kv_cache_dtype="fp9")


def test_pages_are_read_and_written_as_they_are():
    handle = prepare(tiny("llama", torch.float32))
    shared = SharedCache(handle, 4, 2, 2, 3, torch.float8_e4m3fn)
    layer: LayerCache = shared.layers[0]
    filled = torch.randn(layer.page_keys.shape).to(torch.float8_e4m3fn)
    layer.page_keys.copy_(filled)
    shared.write_pages([2], shared.read_pages([0]))
    assert torch.equal(layer.page_keys[2].float(), filled[0].float())
    shared.clear([0, 2])
    assert not layer.page_keys[0].float().any()
    assert torch.equal(layer.page_keys[1].float(), filled[1].float())
