"""Keys and values kept between calls on a GPU: the same tokens as without, with graphs, growth and compiled layers."""

from __future__ import annotations

import random

import pytest
import torch

from groupwise.generate import Engine, Sampling, memory
from groupwise.model.cache import bytes_per_token
from groupwise.model.handle import prepare
from groupwise.model.logprobs import completion_logps
from groupwise.model.precision import set_precision
from tests.generate.preemption import preempt_at_random
from tests.generate.test_keeping import next_contexts, random_ids
from tests.gpu.test_growth import SETTINGS, assert_same
from tests.model.models import tiny

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch) -> None:
    monkeypatch.setattr(memory, "GPU_PAGE_TOKENS", 4)


@pytest.mark.parametrize("tokens", [None, 500])
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", ["llama", "llama_one_head", "gemma2", "gemma3"])
def test_turns_are_those_without_keeping(name, kind, tokens, monkeypatch):
    """Contiguous slots, and pages with forced preemption."""
    handle, rng = prepare(tiny(name, torch.float32).cuda(), compile=False), random.Random(1)
    sampling = Sampling(max_new_tokens=60, seed=4, **{"eos_ids": (3, 5, 7, 9, 11), **SETTINGS[kind]})
    limit = None if tokens is None else tokens * bytes_per_token(handle.shapes, handle.dtype)
    engine = Engine(handle, max_num_seqs=8, cache_bytes=limit, keep_on_gpu=True)
    plain = Engine(handle, max_num_seqs=8)
    contexts, stats = [random_ids(rng, 1, 20) for _ in range(4)], []
    with engine.keeping():
        for _ in range(4):
            wanted = plain.generate(contexts, 2, sampling)
            with pytest.MonkeyPatch.context() as patch:
                if limit is not None:
                    preempt_at_random(patch)
                got = engine.generate(contexts, 2, sampling)
            assert_same(got, wanted)
            assert limit is None or engine._cache.bytes + engine._kept.bytes <= limit
            stats.append(got.stats)
            contexts = next_contexts(rng, contexts, got)
    if limit is None:
        assert sum(each["reused_tokens"] for each in stats) > 100
    else:
        assert sum(each["preempted"] for each in stats) > 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_sampler_agrees_with_training_in_compiled_layers(name):
    """In bfloat16, with the flash kernels and their windows."""
    model = tiny(name, torch.float32).cuda()
    set_precision(model, torch.bfloat16)
    handle, rng = prepare(model, compile=True), random.Random(2)
    sampling = Sampling(max_new_tokens=30, temperature=0.9, eos_ids=())
    contexts = [random_ids(rng, 1, 30) for _ in range(5)]
    engine = Engine(handle, keep_on_gpu=True)
    with engine.keeping():
        for _ in range(3):
            rollout = engine.generate(contexts, 1, sampling)
            with torch.no_grad():
                logps = completion_logps(handle, contexts, rollout.completions(), temperature=0.9).logps.cpu()
            assert (logps - rollout.logps).abs().mean() < 0.03
            contexts = [
                context + ids.tolist() + random_ids(rng, 1, 9)
                for context, (ids,) in zip(contexts, rollout.completions(), strict=True)
            ]
    assert handle.compiled.calls
    assert rollout.stats["reused_tokens"] > rollout.stats["prefilled_tokens"]
