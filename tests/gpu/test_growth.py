"""Completions that grow page by page on a GPU, and joint products: the same tokens as with reserved memory."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from groupwise.generate import Engine, PlainGenerator, Rollout, Sampling, memory
from groupwise.model.attention import AttentionInputs
from groupwise.model.cache import CACHE_ATTRIBUTE, DecodeLayout, LayerCache, bytes_per_token
from groupwise.model.decode_inputs import TILE_ROWS
from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.logprobs import completion_logps
from groupwise.model.precision import MasterWeights, set_precision
from tests.generate.preemption import preempt_at_random
from tests.model.models import random_groups, tiny

pytestmark = pytest.mark.gpu

PROMPTS, _ = random_groups([5, 9, 1, 30, 17], [])
COUNTS = [3, 1, 4, 2, 4]
SETTINGS = {
    "greedy": {"greedy": True},
    "plain": {"eos_ids": (3, 5)},
    "filters": {"top_k": 10, "top_p": 0.8, "min_p": 0.02, "keep_sets": True, "eos_ids": (3, 5)},
    "mlx_lm": {"top_k": 20, "min_p": 0.1, "order": "mlx_lm", "keep_sets": True},
    "penalty": {"repetition_penalty": 1.5, "eos_ids": (3, 5)},  # decoded without graphs
}


def grown(handle: ModelHandle, tokens: int, **settings) -> Engine:
    """An engine with a cache for the prompts and this many tokens of completions."""
    per_token = bytes_per_token(handle.shapes, handle.dtype)
    return Engine(handle, cache_bytes=per_token * (sum(map(len, PROMPTS)) + tokens), graphs=True, **settings)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch) -> None:
    monkeypatch.setattr(memory, "GPU_PAGE_TOKENS", 4)


def assert_same(got: Rollout, wanted: Rollout) -> None:
    assert torch.equal(got.ids, wanted.ids)
    assert got.stop_reasons == wanted.stop_reasons
    torch.testing.assert_close(got.logps, wanted.logps, rtol=0, atol=1e-4)
    torch.testing.assert_close(got.filtered_logps, wanted.filtered_logps, rtol=0, atol=1e-4)
    assert (got.kept is None) == (wanted.kept is None)
    if got.kept is not None and wanted.kept is not None:
        assert torch.equal(got.kept.ids, wanted.kept.ids)
        assert torch.equal(got.kept.offsets, wanted.kept.offsets)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "softcap", "dtype"),
    [
        (9, 3, 64, None, None, torch.float32),
        (9, 3, 64, None, None, torch.bfloat16),
        (4, 1, 24, 7, None, torch.float32),
        (4, 2, 16, None, 5.0, torch.float32),
        (4, 4, 128, 100, None, torch.float32),
        (4, 1, 256, None, None, torch.bfloat16),
        (16, 2, 80, None, None, torch.float16),
    ],
)
@pytest.mark.parametrize(("page_tokens", "longest"), [(64, 1000), (16, 17), (20, 300), (64, 50)])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_attention_through_a_table_of_pages(
    heads, kv_heads, width, window, softcap, dtype, page_tokens, longest, splits
):
    """Against gathered pages in float32; what lies beyond a completion's length is NaN."""
    from groupwise.model.paged_kernels import paged_decode_attention

    torch.manual_seed(0)
    rows, active, slots, columns = 22, 20, 30, -(-longest // page_tokens)
    spare = slots * columns
    pool = [torch.randn(700, kv_heads, width).to(dtype).cuda() for _ in range(2)]
    pages = [torch.randn(spare + 1, page_tokens, kv_heads, width).to(dtype).cuda() for _ in range(2)]
    table = torch.full((slots + 1, columns), spare)
    table[:slots] = torch.randperm(spare).view(slots, columns)
    slot, lengths = torch.randperm(slots)[:rows], torch.randint(0, longest, (rows,))
    lengths[:2] = torch.tensor([0, longest - 1])
    slot[active:], lengths[active:] = slots, 0  # not in use
    groups = [(10, 600, slice(0, 17)), (650, 5, slice(17, 20))]
    prompt = torch.tensor([600] * 17 + [5] * 3 + [0] * 2)
    query = torch.randn(rows, heads, 1, width).to(dtype).cuda()
    key, value = (torch.randn(rows, kv_heads, 1, width).to(dtype).cuda() for _ in range(2))
    module = nn.Module()
    setattr(module, CACHE_ATTRIBUTE, LayerCache(*(tensor.float() for tensor in (*pool, *pages))))
    used = slice(0, active)
    wanted = DecodeLayout(
        table[slot[used]].cuda(), lengths[used].cuda(), (prompt + lengths)[used].cuda(), groups, page_tokens
    ).attend(AttentionInputs(module, *(x[used].float() for x in (query, key, value)), 0.2, window, softcap))
    places = table[slot[used], :, None] * page_tokens + torch.arange(page_tokens)
    beyond = places.flatten(1)[torch.arange(columns * page_tokens) >= lengths[used, None]].cuda()
    for tensor in pages:
        tensor.flatten(0, 1)[beyond] = float("nan")
    starts, sizes = torch.zeros(2, rows, dtype=torch.int32)
    members = torch.full((rows, TILE_ROWS), -1, dtype=torch.int32)
    for tile, (start, size, first, last) in enumerate([(10, 600, 0, 16), (10, 600, 16, 17), (650, 5, 17, 20)]):
        starts[tile], sizes[tile] = start, size
        members[tile, : last - first] = torch.arange(first, last)
    order = lengths.argsort(descending=True)
    numbers = [x.int().cuda() for x in (table, slot, lengths, prompt + lengths, prompt, starts, sizes, members, order)]
    got = paged_decode_attention(
        query, key, value, *pool, *pages, *numbers, 0.2, window or 0, softcap or 0.0, 2, splits
    )
    close = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got[used].float(), wanted, rtol=0, atol=close)
    at = table[slot[used], lengths[used] // page_tokens] * page_tokens + lengths[used] % page_tokens
    for stored, new in zip(pages, (key, value), strict=True):
        assert torch.equal(stored.flatten(0, 1)[at.cuda()], new[used, :, 0])


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", ["llama", "llama_one_head", "gemma2", "gemma3"])
def test_growing_samples_what_reserved_memory_samples(name, kind):
    handle = prepare(tiny(name, torch.float32).cuda(), compile=False)
    sampling = Sampling(max_new_tokens=40, seed=2, **SETTINGS[kind])
    engine = grown(handle, 4 * 40, max_num_seqs=8)
    wanted = Engine(handle, max_num_seqs=8).generate(PROMPTS, COUNTS, sampling)
    for _ in range(2):  # captured, then replayed
        got = engine.generate(PROMPTS, COUNTS, sampling)
        assert_same(got, wanted)
    assert engine._cache.page_tokens == 4
    assert engine._cache.bytes <= engine.cache_bytes
    assert got.stats["rows"] >= 5  # three would fit at full length
    assert_same(got, PlainGenerator(handle.model).generate(PROMPTS, COUNTS, sampling))


def test_greedy_is_transformers_token_for_token():
    model = tiny("llama", torch.float32).cuda()
    engine = grown(prepare(model, compile=False), 3 * 40, max_num_seqs=5)
    rollout = engine.generate(PROMPTS, 1, Sampling(max_new_tokens=40, greedy=True))
    for prompt, row, length in zip(PROMPTS, rollout.ids, rollout.lengths.tolist(), strict=True):
        ids = prompt[None].cuda()
        options = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert row[:length].tolist() == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["plain", "filters", "penalty"])
def test_preemption_at_random_changes_no_token(kind, monkeypatch):
    handle = prepare(tiny("gemma3", torch.float32).cuda(), compile=False)
    sampling = Sampling(max_new_tokens=40, seed=2, **SETTINGS[kind])
    wanted = Engine(handle).generate(PROMPTS, COUNTS, sampling)
    preempt_at_random(monkeypatch)
    got = grown(handle, 4 * 40, max_num_seqs=8).generate(PROMPTS, COUNTS, sampling)
    assert got.stats["preempted"] > 10
    assert_same(got, wanted)


def test_long_answers_with_few_pages(monkeypatch):
    """Room for five completions of full length; most are short, so that many run at once."""
    monkeypatch.setattr(memory, "GPU_PAGE_TOKENS", 64)
    handle = dataclasses.replace(prepare(tiny("llama", torch.float32).cuda(), compile=False), context_length=None)
    sampling = Sampling(max_new_tokens=2048, eos_ids=(4,))  # about a hundred tokens
    engine = grown(handle, 5 * 2048)
    got = engine.generate(PROMPTS, 16, sampling)
    assert got.stats["rows"] > 40
    assert int(got.lengths.max()) > 200  # several pages
    reserved = Engine(handle, cache_bytes=20 * engine.cache_bytes).generate(PROMPTS, 16, sampling)
    assert reserved.stats["rows"] == 80
    pairs = zip(*(itertools.chain.from_iterable(rollout.completions()) for rollout in (got, reserved)), strict=True)
    # Thousands of tokens: a random number may lie between two roundings of a token's bounds.
    assert sum(torch.equal(*pair) for pair in pairs) >= 76


def test_the_same_seed_gives_the_same_samples_run_after_run():
    model = tiny("llama", torch.float32).cuda()
    set_precision(model, torch.bfloat16)
    handle = prepare(model, compile=False)
    sampling = Sampling(max_new_tokens=60, seed=4, eos_ids=(1, 2, 3))
    engine = grown(handle, 3 * 60, max_num_seqs=8)
    first, again = (engine.generate(PROMPTS, 4, sampling) for _ in range(2))
    fresh = grown(handle, 3 * 60, max_num_seqs=8).generate(PROMPTS, 4, sampling)
    for other in (again, fresh):
        assert torch.equal(first.ids, other.ids)
        assert torch.equal(first.logps, other.logps)
        assert first.stats == other.stats


def test_growing_and_preempting_never_wait_for_the_device():
    """PyTorch raises at every synchronization."""
    engine = grown(prepare(tiny("llama", torch.float32).cuda(), compile=False), 3 * 60, max_num_seqs=8)
    sampling = Sampling(max_new_tokens=60, min_new_tokens=40, top_k=20, eos_ids=(1, 2, 3))
    wanted = engine.generate(PROMPTS, 4, sampling)
    assert wanted.stats["preempted"] > 0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = engine.generate(PROMPTS, 4, sampling)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.ids, wanted.ids)


@pytest.mark.parametrize("joint_products", [False, True])
def test_the_sampler_agrees_with_training_in_compiled_layers(joint_products):
    model = tiny("llama", torch.float32).cuda()
    set_precision(model, torch.bfloat16)
    handle = prepare(model, compile=True)
    sampling = Sampling(max_new_tokens=30, temperature=0.9, eos_ids=())
    rollout = grown(handle, 5 * 30, joint_products=joint_products).generate(PROMPTS, 6, sampling)
    assert handle.compiled is not None
    assert handle.compiled.calls
    with torch.no_grad():
        logps = completion_logps(handle, PROMPTS, rollout.completions(), temperature=0.9).logps.cpu()
    assert (logps - rollout.logps).abs().mean() < 0.03


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", ["llama", "llama_all_heads", "qwen3", "gemma2"])
def test_joint_products_sample_what_separate_ones_sample(name, kind):
    model = tiny(name, torch.float32).cuda()
    sampling = Sampling(max_new_tokens=20, **SETTINGS[kind])
    apart = Engine(prepare(model, compile=False), max_num_seqs=6, joint_products=False)
    wanted = apart.generate(PROMPTS, COUNTS, sampling)
    engine = Engine(prepare(model, compile=False), max_num_seqs=6)
    assert len(engine._joint_products.groups) == 6
    for _ in range(2):  # captured, then replayed
        assert_same(engine.generate(PROMPTS, COUNTS, sampling), wanted)


def test_graphs_with_joint_products_see_new_weights():
    model = tiny("llama", torch.float32).cuda()
    set_precision(model, torch.bfloat16)
    engine = Engine(prepare(model, compile=False), max_num_seqs=8, joint_products=True)
    sampling = Sampling(max_new_tokens=20)
    before = engine.generate(PROMPTS, 2, sampling)
    masters = MasterWeights(model)
    for parameter in masters.parameters():
        parameter.data.mul_(1.5)
    masters.sync_to_model()
    masters.close()
    after = engine.generate(PROMPTS, 2, sampling)
    assert not torch.equal(before.logps, after.logps)
    fresh = Engine(prepare(model, compile=False), max_num_seqs=8, joint_products=True).generate(PROMPTS, 2, sampling)
    assert torch.equal(after.ids, fresh.ids)
