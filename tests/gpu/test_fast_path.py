"""Generation and log-probs on a GPU: kernels, CUDA graphs and compiled layers equal the plain computation."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import pytest
import torch
from torch import nn

from groupwise.core.filters import KeptSets
from groupwise.errors import NotFiniteError
from groupwise.generate import Engine, PlainGenerator, Rollout, Sampling, memory
from groupwise.generate.sampling import draw
from groupwise.model.attention import AttentionInputs
from groupwise.model.cache import CACHE_ATTRIBUTE, DecodeLayout, LayerCache, bytes_per_token
from groupwise.model.decode_inputs import TILE_ROWS
from groupwise.model.handle import prepare
from groupwise.model.logprobs import completion_logps
from groupwise.model.precision import MasterWeights, set_precision
from tests.model.models import ARCHITECTURES, padded_logps, random_groups, tiny
from tests.model.test_tree import random_conversations

pytestmark = pytest.mark.gpu

RAGGED = ([5, 9, 1, 12], [[4, 4, 7], [1, 1], [12, 3], [2, 9, 9, 1]])
PROMPTS, _ = random_groups([5, 9, 1, 30, 17], [])
COUNTS = [3, 1, 4, 2, 4]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "softcap", "dtype"),
    [
        (9, 3, 64, None, None, torch.float32),
        (9, 3, 64, None, None, torch.bfloat16),
        (4, 1, 24, 7, None, torch.float32),
        (4, 2, 16, None, 5.0, torch.float32),
        (4, 4, 128, 12, None, torch.float32),
        (4, 1, 256, 300, None, torch.bfloat16),
        (16, 2, 80, None, None, torch.float16),
    ],
)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
def test_decode_attention(heads, kv_heads, width, window, softcap, dtype, splits, alone, rounded):
    """alone: each row has its own prompt, so that a program takes several tiles. rounded: an eight-bit cache."""
    from groupwise.model.kernels import decode_attention

    generator = torch.Generator(device="cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    rows, slots, length = 22, 30, 20
    cache = LayerCache(
        *(randn(700, kv_heads, width) for _ in range(2)), *(randn(slots + 1, length, kv_heads, width) for _ in range(2))
    )
    if rounded:
        cache = LayerCache(*(tensor.to(torch.float8_e4m3fn) for tensor in cache))
    copy = LayerCache(*(tensor.clone() for tensor in cache))
    slot = torch.randperm(slots)[:rows].cuda()
    lengths = torch.randint(0, length, (rows,)).cuda()
    groups = [(10, 600, slice(0, 18)), (650, 5, slice(18, 20)), (620, 20, slice(20, 22))]
    if alone:
        groups = [(25 * number, 1 + number, slice(number, number + 1)) for number in range(rows)]
    prompt = torch.tensor([size for _, size, of in groups for _ in range(of.start, of.stop)]).cuda()
    query, key, value = randn(rows, heads, 1, width), randn(rows, kv_heads, 1, width), randn(rows, kv_heads, 1, width)
    if rounded:  # the newest token, too
        key, value = (new.to(torch.float8_e4m3fn).to(dtype) for new in (key, value))
    module = nn.Module()
    setattr(module, CACHE_ATTRIBUTE, LayerCache(*(tensor.float() for tensor in cache)))
    wanted = DecodeLayout(slot[:, None], lengths, prompt + lengths, groups, length).attend(
        AttentionInputs(module, query.float(), key.float(), value.float(), 0.2, window, softcap)
    )
    starts, sizes = torch.zeros(2, rows, dtype=torch.int32)
    members = torch.full((rows, TILE_ROWS), -1, dtype=torch.int32)
    tiles = [
        (start, size, first, min(first + TILE_ROWS, of.stop))
        for start, size, of in groups
        for first in range(of.start, of.stop, TILE_ROWS)
    ]
    for tile, (start, size, first, last) in enumerate(tiles):
        starts[tile], sizes[tile] = start, size
        members[tile, : last - first] = torch.arange(first, last)
    numbers = (x.int().cuda() for x in (slot, lengths, prompt + lengths, prompt, starts, sizes, members))
    got = decode_attention(query, key, value, *copy, *numbers, 0.2, window or 0, softcap or 0.0, splits)
    close = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.float(), wanted, rtol=0, atol=close)
    stored: LayerCache = getattr(module, CACHE_ATTRIBUTE)
    assert torch.equal(copy.page_keys.float(), stored.page_keys.to(copy.page_keys.dtype).float())
    assert torch.equal(copy.page_values.float(), stored.page_values.to(copy.page_keys.dtype).float())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 40, "temperature": 0.7},
        {"top_k": 1},
        {"top_k": 3000},
        {"top_p": 0.8},
        {"min_p": 0.1, "min_new_tokens": 1},
        {"top_k": 100, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3, "min_new_tokens": 1},
        {"top_k": 60, "top_p": 0.7, "min_p": 0.05, "order": "vllm"},
        {"min_new_tokens": 1},
        {"top_k": 900},
        {"top_p": 0.95, "temperature": 0.6, "min_new_tokens": 1},
        {"top_p": 0.9, "min_p": 0.05},
        {"top_p": 0.9, "min_p": 0.05, "order": "vllm"},
        {"min_p": 0.02, "order": "vllm"},
    ],
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "ties", "flat", "peaked"])
def test_the_kernel_samples_what_the_sampler_samples(settings, kind):
    """Rounded logits have many ties, and flat ones are all tied. Of peaked ones the most likely have top-p's mass."""
    from groupwise.generate.kernels import append_kept, draw_rows

    vocabulary, rows, sampling = 50_000, 64, Sampling(**settings)
    logits = torch.randn(rows, vocabulary).cuda() * 3
    rounded = logits.bfloat16()
    more = {"ties": rounded.float(), "flat": torch.zeros_like(logits), "peaked": 3 * logits}
    logits = {"float32": logits, "bfloat16": rounded, **more}[kind]
    uniform = torch.rand(rows).cuda()
    eos = torch.zeros(vocabulary, dtype=torch.bool)
    eos[:5000] = True
    eos = eos.cuda()
    banned = torch.arange(rows).cuda() % 2 == 0 if sampling.min_new_tokens else None
    wanted = draw(logits.float(), uniform, banned, eos, sampling)
    got = draw_rows(logits, uniform, banned, eos, sampling)
    sets = KeptSets.from_logits(wanted.filtered)
    assert torch.equal(got.counts.long(), sets.offsets.diff())
    # The cumulative sum is rounded differently: over the full vocabulary a neighbour may be sampled.
    same = got.ids == wanted.ids
    assert same.float().mean() > (0.9 if sets.ids.numel() > rows * 1000 or not sets.ids.numel() else 0.99)
    torch.testing.assert_close(got.logps[same], wanted.logps[same], rtol=0, atol=2e-5)
    torch.testing.assert_close(got.filtered_logps[same], wanted.filtered_logps[same], rtol=0, atol=2e-5)
    pool = torch.full((len(sets.ids) + 7,), -1, dtype=torch.int32, device="cuda")
    append_kept(logits, sampling.temperature, got.thresholds, banned, eos, sets.offsets, pool)
    assert torch.equal(pool[: len(sets.ids)], sets.ids)
    assert (pool[len(sets.ids) :] == -1).all()
    short = torch.full((len(sets.ids) // 2,), -1, dtype=torch.int32, device="cuda")
    append_kept(logits, sampling.temperature, got.thresholds, banned, eos, sets.offsets, short)
    assert torch.equal(short, sets.ids[: len(short)])


@pytest.mark.parametrize(
    ("name", "compile"), [*((name, False) for name in ARCHITECTURES), ("llama", True), ("gemma3", True)]
)
@pytest.mark.parametrize("turns", [1, 3])
def test_packed_equals_padded(name, compile, turns):
    """float32 with explicit scores; bfloat16 with flash kernels, as accurate as the padded pass."""
    truth_model = tiny(name, torch.float32).cuda()
    prompts, completions = random_groups(*RAGGED) if turns == 1 else random_conversations(seed=1)
    truth = padded_logps(prepare(truth_model, plain=True), prompts, completions).logps
    wanted = gradients(truth_model, truth.sum())
    packed = completion_logps(prepare(truth_model, compile=compile), prompts, completions).logps
    torch.testing.assert_close(packed, truth, rtol=0, atol=1e-4)
    got = gradients(truth_model, packed.sum())
    for parameter, gradient in wanted.items():
        assert (got[parameter] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, parameter
    model = tiny(name, torch.float32).cuda()
    set_precision(model, torch.bfloat16)
    rough = prepare(model, compile=compile)
    assert rough.fallback_reason is None
    theirs = padded_logps(rough, prompts, completions).logps
    their_gradient = gradients(model, theirs.sum())
    ours = completion_logps(rough, prompts, completions).logps
    our_gradient = gradients(model, ours.sum())
    assert (ours - truth).abs().mean() <= 1.5 * (theirs - truth).abs().mean() + 1e-3
    distance = [
        sum((g[p].float() - wanted[p]).square().sum() for p in wanted).sqrt() for g in (our_gradient, their_gradient)
    ]
    assert distance[0] <= 1.5 * distance[1]


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_gradient_checkpointing_under_compilation(name):
    model = tiny(name, torch.float32).cuda()
    set_precision(model, torch.bfloat16)
    handle = prepare(model)
    prompts, completions = random_groups(*RAGGED)
    model.train()
    plain = gradients(model, completion_logps(handle, prompts, completions).logps.sum())
    model.gradient_checkpointing_enable()
    again = gradients(model, completion_logps(handle, prompts, completions).logps.sum())
    for parameter, gradient in plain.items():
        assert (again[parameter] - gradient).float().norm() <= 0.05 * gradient.float().norm() + 1e-3, parameter


SETTINGS = {
    "greedy": {"greedy": True},
    "plain": {},
    "top_p": {"top_p": 0.6, "temperature": 1.4, "keep_sets": True},
    "all": {"top_k": 10, "top_p": 0.8, "min_p": 0.02, "keep_sets": True},
    "minimum": {"min_p": 0.3, "min_new_tokens": 6, "keep_sets": True, "eos_ids": (1, 2, 3, 4, 5, 6, 7, 8)},
    "mlx_lm": {"top_k": 20, "min_p": 0.1, "order": "mlx_lm", "keep_sets": True},
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", ["llama", "llama_one_head", "qwen3", "gemma2", "gemma3"])
def test_graphs_sample_what_single_operations_sample(name, kind):
    handle = prepare(tiny(name, torch.float32).cuda(), compile=False)
    sampling = Sampling(max_new_tokens=20, **SETTINGS[kind])
    graphs = Engine(handle, max_num_seqs=6)
    assert graphs.graphs
    for _ in range(2):  # captured, then replayed
        got = graphs.generate(PROMPTS, COUNTS, sampling)
        assert_same(got, Engine(handle, max_num_seqs=6, graphs=False).generate(PROMPTS, COUNTS, sampling))
    assert_same(got, PlainGenerator(handle.model).generate(PROMPTS, COUNTS, sampling))
    assert got.stats["prefilled_tokens"] == sum(map(len, PROMPTS))


def assert_same(got: Rollout, wanted: Rollout) -> None:
    assert torch.equal(got.ids, wanted.ids)
    assert got.stop_reasons == wanted.stop_reasons
    torch.testing.assert_close(got.logps, wanted.logps, rtol=0, atol=1e-4)
    torch.testing.assert_close(got.filtered_logps, wanted.filtered_logps, rtol=0, atol=1e-4)
    if got.kept is not None and wanted.kept is not None:
        assert torch.equal(got.kept.ids, wanted.kept.ids)
        assert torch.equal(got.kept.offsets, wanted.kept.offsets)


@pytest.mark.parametrize("kind", [*SETTINGS, "greedy"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_damaged_model_is_refused_and_the_device_lives_on(kind, value):
    """Its ids are valid until the host reads the log-probs, so there is no assert on the device."""
    model = tiny("llama", torch.float32).cuda()
    handle = prepare(model, compile=False)
    sampling = Sampling(max_new_tokens=20, **SETTINGS.get(kind, {"greedy": True}))
    engine = Engine(handle, max_num_seqs=6)
    wanted = engine.generate(PROMPTS, COUNTS, sampling)
    weight = model.model.norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3] = value
    with pytest.raises(NotFiniteError, match=r"the weight model\.norm\.weight holds NaN or an infinity"):
        engine.generate(PROMPTS, COUNTS, sampling)
    with torch.no_grad():
        weight.copy_(kept)
    assert torch.equal(engine.generate(PROMPTS, COUNTS, sampling).ids, wanted.ids)


def test_a_ramp_of_the_temperature_does_not_keep_a_graph_for_every_step():
    engine = Engine(prepare(tiny("llama", torch.float32).cuda(), compile=False), max_num_seqs=4)
    for step in range(12):
        engine.generate(PROMPTS[:2], 2, Sampling(max_new_tokens=6, temperature=1 - step / 100))
    assert len({key.settings for key in engine._graphs.captured}) == 4


def rough(name: str = "llama") -> nn.Module:
    model = tiny(name, torch.float32).cuda()
    set_precision(model, torch.bfloat16)
    return model


def test_the_same_seed_gives_the_same_samples_run_after_run():
    handle = prepare(rough(), compile=False)
    sampling = Sampling(max_new_tokens=60, seed=4, eos_ids=(1, 2, 3))
    engine = Engine(handle, max_num_seqs=8)
    first, again = (engine.generate(PROMPTS, 4, sampling) for _ in range(2))
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.logps, again.logps)
    engine.release()
    fresh = Engine(handle, max_num_seqs=8).generate(PROMPTS, 4, sampling)
    assert torch.equal(first.ids, fresh.ids)
    assert torch.equal(first.logps, fresh.logps)


def test_isolated_samples_are_identical_bit_for_bit_in_bfloat16():
    engine = Engine(prepare(rough(), compile=False), max_num_seqs=16, isolated=True)
    sampling = Sampling(max_new_tokens=60, eos_ids=(1, 2))
    together = engine.generate(PROMPTS, 4, sampling)
    alone = engine.generate(PROMPTS[3:4], 4, sampling, keys=[3])
    others = engine.generate([PROMPTS[4], PROMPTS[3]], [9, 4], sampling, keys=[4, 3])
    width = alone.ids.shape[1]
    for rollout, rows in ((together, slice(12, 16)), (others, slice(9, 13))):
        assert torch.equal(rollout.ids[rows, :width], alone.ids)
        assert torch.equal(rollout.logps[rows, :width], alone.logps)


@pytest.mark.parametrize("float32_head", [False, True])
def test_the_sampler_agrees_with_training(float32_head):
    """The ratio before the first update is 1, up to bfloat16."""
    handle = prepare(rough(), compile=True, float32_head=float32_head)
    sampling = Sampling(max_new_tokens=30, temperature=0.9, top_k=20, keep_sets=True)
    rollout = Engine(handle).generate(PROMPTS, 6, sampling)
    with torch.no_grad():
        full = completion_logps(handle, PROMPTS, rollout.completions(), temperature=0.9).logps.cpu()
        kept = completion_logps(handle, PROMPTS, rollout.completions(), temperature=0.9, kept=rollout.kept).logps.cpu()
    assert (full - rollout.logps).abs().mean() < 0.03
    assert (kept - rollout.filtered_logps).abs().mean() < 0.03


@pytest.mark.parametrize("graphs", [False, True])
def test_a_float32_head_samples_from_logits_that_are_not_rounded(graphs):
    """The first token's log-prob is that of the float32 product of the prompt's last state."""
    handle = prepare(rough(), compile=False, float32_head=True)
    rollout = Engine(handle, graphs=graphs).generate(PROMPTS, 8, Sampling(max_new_tokens=2, eos_ids=()))
    with torch.no_grad():
        exact = completion_logps(handle, PROMPTS, rollout.completions()).logps[:, 0].cpu()
        rounded = (
            completion_logps(prepare(handle.model, compile=False), PROMPTS, rollout.completions()).logps[:, 0].cpu()
        )
    near, far = ((logps - rollout.logps[:, 0]).square().mean() for logps in (exact, rounded))
    assert near < far


def test_graphs_see_new_weights():
    """Captured steps use weights that master weights update in place."""
    model = rough()
    engine = Engine(prepare(model, compile=False), max_num_seqs=8)
    sampling = Sampling(max_new_tokens=20)
    before = engine.generate(PROMPTS, 2, sampling)
    with closing(MasterWeights(model)) as masters:
        for parameter in masters.parameters():
            parameter.data.mul_(1.5)
        masters.sync_to_model()
    after = engine.generate(PROMPTS, 2, sampling)
    assert not torch.equal(before.ids, after.ids)
    engine.release()
    fresh = Engine(prepare(model, compile=False), max_num_seqs=8).generate(PROMPTS, 2, sampling)
    assert torch.equal(after.ids, fresh.ids)


def test_decoding_never_waits_for_the_device():
    """PyTorch raises at every synchronization."""
    engine = Engine(prepare(rough(), compile=False), max_num_seqs=8)
    sampling = Sampling(max_new_tokens=40, top_k=20, eos_ids=(1, 2, 3))
    wanted = engine.generate(PROMPTS, 4, sampling)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = engine.generate(PROMPTS, 4, sampling)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.ids, wanted.ids)


def test_kept_sets_are_bounded():
    from groupwise.errors import InputError

    sampling = Sampling(max_new_tokens=20, keep_sets=True, min_p=0.001, kept_bytes=4000, eos_ids=())
    engine = Engine(prepare(rough(), compile=False))
    with pytest.raises(InputError, match="more than kept_bytes, 4,000 bytes"):
        engine.generate(PROMPTS, 4, sampling)


def test_a_cache_too_large_for_the_device():
    from groupwise.errors import InputError

    handle = prepare(rough(), compile=False)
    engine = Engine(dataclasses.replace(handle, context_length=None), max_num_seqs=10**4)
    with pytest.raises(InputError, match="the free memory"):
        engine.generate([[1]], 10**4, Sampling(max_new_tokens=10**9))


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_graphs_with_an_eight_bit_cache(name, grows, monkeypatch):
    """They sample what single operations sample from the same rounded keys and values, also from page to page."""
    monkeypatch.setattr(memory, "GPU_PAGE_TOKENS", 4)
    handle = prepare(tiny(name, torch.float32).cuda(), compile=False)
    limit = bytes_per_token(handle.shapes, torch.float8_e4m3fn) * (sum(map(len, PROMPTS)) + 4 * 40) if grows else None
    options = {"kv_cache_dtype": "fp8", "max_num_seqs": 6, "cache_bytes": limit}
    sampling = Sampling(max_new_tokens=40, eos_ids=(3, 5))
    graphs = Engine(handle, **options)
    for _ in range(2):
        got = graphs.generate(PROMPTS, COUNTS, sampling)
        assert_same(got, Engine(handle, **options, graphs=False).generate(PROMPTS, COUNTS, sampling))
    if grows:
        assert got.stats["preempted"] > 0
