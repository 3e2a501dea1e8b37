"""The engine samples what the plain path samples, computes each prompt once, and keeps samples independent."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from groupwise.errors import InputError, NotFiniteError
from groupwise.generate import engine as engine_module
from groupwise.generate import memory
from groupwise.generate.engine import Engine
from groupwise.generate.packet import fill_packet, packet_size, packet_views
from groupwise.generate.plain import PlainGenerator
from groupwise.generate.runner import Runner, SavedSample, StepBatch
from groupwise.generate.sampling import DrawnTokens
from groupwise.generate.types import Rollout, Sampling
from groupwise.model.cache import CACHE_ATTRIBUTE, bytes_per_token
from groupwise.model.handle import prepare
from groupwise.model.logprobs import completion_logps
from tests.generate.preemption import preempt_at_random
from tests.model.models import ARCHITECTURES, VOCABULARY, quick, random_groups, tiny
from tests.weights import smollm2

PROMPTS, _ = random_groups([5, 9, 1, 30, 17], [])
COUNTS = [3, 1, 4, 2, 4]
HANDLES = {name: prepare(tiny(name)) for name in ARCHITECTURES}

SETTINGS = {
    "plain": {},
    "filters": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "keep_sets": True},
    "min_p": {"min_p": 0.1, "min_new_tokens": 6, "keep_sets": True, "eos_ids": (1, 2, 3, 4, 5, 6, 7, 8)},
    "mlx_lm": {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "order": "mlx_lm", "keep_sets": True},
    "endless": {"eos_ids": ()},
    "repetition_penalty": {"repetition_penalty": 1.5, "top_k": 20, "keep_sets": True},
}


def assert_same(got: Rollout, wanted: Rollout) -> None:
    assert torch.equal(got.ids, wanted.ids)
    assert torch.equal(got.lengths, wanted.lengths)
    assert got.stop_reasons == wanted.stop_reasons
    assert torch.equal(got.groups, wanted.groups)
    torch.testing.assert_close(got.logps, wanted.logps, rtol=0, atol=2e-6)
    torch.testing.assert_close(got.filtered_logps, wanted.filtered_logps, rtol=0, atol=2e-6)
    assert (got.kept is None) == (wanted.kept is None)
    if got.kept is not None and wanted.kept is not None:
        assert torch.equal(got.kept.ids, wanted.kept.ids)
        assert torch.equal(got.kept.offsets, wanted.kept.offsets)


@pytest.mark.parametrize("name", quick(ARCHITECTURES, "llama"))
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_is_transformers_token_for_token(name, penalty):
    model = tiny(name)
    sampling = Sampling(max_new_tokens=15, greedy=True, repetition_penalty=penalty)
    rollout = Engine(model, max_num_seqs=4).generate(PROMPTS, 1, sampling)
    greedy = {"do_sample": False, "max_new_tokens": 15, "pad_token_id": 0, "repetition_penalty": penalty}
    for prompt, row, length in zip(PROMPTS, rollout.ids, rollout.lengths.tolist(), strict=True):
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        wanted = model.generate(prompt[None], attention_mask=mask, **greedy)
        assert row[:length].tolist() == wanted[0, len(prompt) :].tolist()


QUICK = set(zip(ARCHITECTURES, itertools.cycle(SETTINGS)))  # every architecture and every kind at least once


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(ARCHITECTURES, SETTINGS)
    ],
)
def test_the_engine_samples_what_the_plain_path_samples(name, kind):
    sampling = Sampling(max_new_tokens=8, seed=5, **SETTINGS[kind])
    got = Engine(HANDLES[name], max_num_seqs=6).generate(PROMPTS, COUNTS, sampling)
    wanted = PlainGenerator(HANDLES[name].model).generate(PROMPTS, COUNTS, sampling)
    assert_same(got, wanted)
    assert got.stats["prefilled_prompts"] == 5
    assert got.stats["prefilled_tokens"] == sum(map(len, PROMPTS))


@pytest.mark.parametrize("name", quick(ARCHITECTURES, "llama", "gemma3"))
def test_the_samplers_log_probs_are_the_models(name):
    """Full log-probs against a plain forward pass; filtered ones against those renormalised over the kept sets."""
    handle = HANDLES[name]
    sampling = Sampling(max_new_tokens=15, temperature=1.2, top_k=30, top_p=0.9, keep_sets=True, eos_ids=(7, 8))
    rollout = Engine(handle, max_num_seqs=7).generate(PROMPTS, COUNTS, sampling)
    row = 0
    for prompt, members in zip(PROMPTS, rollout.completions(), strict=True):
        for ids in members:
            logits = handle.model(torch.cat([prompt, ids])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            wanted = (logits / 1.2).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1).float()
            torch.testing.assert_close(rollout.logps[row, : len(ids)], wanted, rtol=0, atol=2e-6)
            row += 1
    replayed = completion_logps(handle, PROMPTS, rollout.completions(), temperature=1.2, kept=rollout.kept)
    torch.testing.assert_close(rollout.filtered_logps, replayed.logps.float(), rtol=0, atol=2e-6)
    assert torch.equal(rollout.mask, replayed.mask)


def test_each_prompt_is_prefilled_exactly_once():
    """Counts the tokens that pass through the model."""
    handle = HANDLES["llama"]
    seen: list[tuple[int, ...]] = []
    hook = handle.model.model.embed_tokens.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    try:
        rollout = Engine(handle, max_num_seqs=5).generate(PROMPTS, 4, Sampling(max_new_tokens=9, eos_ids=()))
    finally:
        hook.remove()
    prefills = [shape for shape in seen if (shape[0] == 1 and shape[1] > 1) or shape == (1, 1)]
    decoded = [shape for shape in seen if shape not in prefills]
    assert sum(tokens for _, tokens in prefills) == sum(map(len, PROMPTS))
    assert all(tokens == 1 and rows <= 5 for rows, tokens in decoded)
    # A sample's first token comes from the prefill, and its last one is not an input.
    assert sum(rows for rows, _ in decoded) == 20 * 8
    assert rollout.ids.shape == (20, 9)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=5),
    st.integers(1, 7),
    st.integers(5, 60),
    st.sampled_from(["llama", "gemma3"]),
    st.integers(0, 1000),
)
def test_nothing_leaks_between_groups(requests, rows, prefill, name, seed):
    """Random lengths, few slots, a pool that is reused: every group gets what it would get alone."""
    prompts, _ = random_groups([length for length, _ in requests], [], seed)
    counts = [count for _, count in requests]
    sampling = Sampling(max_new_tokens=12, seed=seed, eos_ids=tuple(range(25)))
    engine = LEAKY[name]
    engine.max_num_seqs, engine.prefill_tokens = rows, prefill
    together = engine.generate(prompts, counts, sampling).completions()
    poison(engine)
    for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        alone = Engine(HANDLES[name]).generate([prompt], count, sampling, keys=[number]).completions()[0]
        assert [ids.tolist() for ids in together[number]] == [ids.tolist() for ids in alone]


LEAKY = {name: Engine(HANDLES[name]) for name in ("llama", "gemma3")}


def poison(engine: Engine) -> None:
    """Fill the cache with NaN: the next call must not read it."""
    for layer in engine._cache.layers:
        for tensor in layer:
            tensor.fill_(float("nan"))


@pytest.mark.parametrize("name", quick(["llama", "gemma3"], "llama"))
def test_the_same_seed_gives_the_same_samples(name):
    handle = HANDLES[name]
    sampling = Sampling(max_new_tokens=15, seed=11)
    engine = Engine(handle, max_num_seqs=6)
    first = engine.generate(PROMPTS, COUNTS, sampling)
    again = engine.generate(PROMPTS, COUNTS, sampling)
    assert_same(again, first)
    assert torch.equal(again.logps, first.logps)  # bit for bit
    assert_same(Engine(handle, max_num_seqs=9).generate(PROMPTS, COUNTS, sampling), first)
    other = engine.generate(PROMPTS, COUNTS, Sampling(max_new_tokens=15, seed=12))
    assert not torch.equal(other.ids, first.ids)
    moved = engine.generate(PROMPTS[::-1], COUNTS[::-1], sampling, keys=[4, 3, 2, 1, 0]).completions()
    for got, wanted in zip(moved[::-1], first.completions(), strict=True):
        assert [ids.tolist() for ids in got] == [ids.tolist() for ids in wanted]
    samples = first.completions()[2]
    assert len({tuple(ids.tolist()) for ids in samples}) == len(samples)  # siblings differ


def test_isolated_samples_are_identical_bit_for_bit():
    """In float32, where sums depend on the batch: alone, with others, in another order."""
    handle = prepare(tiny("llama", torch.float32))
    sampling = Sampling(max_new_tokens=12, seed=3, eos_ids=(1, 2))
    engine = Engine(handle, max_num_seqs=8, isolated=True)
    together = engine.generate(PROMPTS, 4, sampling)
    alone = engine.generate(PROMPTS[3:4], 4, sampling, keys=[3])
    others = engine.generate([PROMPTS[1], PROMPTS[3]], [7, 4], sampling, keys=[1, 3])
    width = alone.ids.shape[1]
    for rollout, rows in ((together, slice(12, 16)), (others, slice(7, 11))):
        assert torch.equal(rollout.ids[rows, :width], alone.ids)
        assert torch.equal(rollout.logps[rows, :width], alone.logps)


def test_eos_and_minimum():
    sampling = Sampling(max_new_tokens=30, min_new_tokens=5, eos_ids=tuple(range(40)))
    rollout = Engine(HANDLES["qwen3"], max_num_seqs=6).generate(PROMPTS, 5, sampling)
    assert rollout.lengths.min() >= 6  # five tokens that are not EOS, then one that is
    for row, length, reason in zip(rollout.ids.tolist(), rollout.lengths.tolist(), rollout.stop_reasons, strict=True):
        assert reason == ("eos" if row[length - 1] < 40 else "length")
        assert all(token >= 40 for token in row[: length - 1])
        assert not any(row[length:])
    assert "eos" in rollout.stop_reasons


def test_a_stop_function_ends_a_completion():
    def stop(ids: list[int]) -> bool:
        return len(ids) >= 2 and ids[-1] % 3 == 0 and ids[-2] % 2 == 1

    sampling = Sampling(max_new_tokens=8, eos_ids=(50, 51, 52, 53))
    rollout = Engine(HANDLES["llama"], max_num_seqs=6).generate(PROMPTS, 5, sampling, stop=stop)
    assert_same(PlainGenerator(HANDLES["llama"].model).generate(PROMPTS, 5, sampling, stop=stop), rollout)
    assert set(rollout.stop_reasons) == {"eos", "stop_string", "length"}
    for ids, length, reason in zip(rollout.ids.tolist(), rollout.lengths.tolist(), rollout.stop_reasons, strict=True):
        ends = [at for at in range(1, length + 1) if stop(ids[:at])]
        assert (ends == [length]) if reason == "stop_string" else not ends or reason == "eos"


def test_the_context_length_bounds_a_completion():
    prompt = [3] * 120
    rollout = Engine(HANDLES["llama"]).generate([prompt, [5]], 2, Sampling(max_new_tokens=20, eos_ids=()))
    assert rollout.lengths.tolist() == [8, 8, 20, 20]
    assert set(rollout.stop_reasons) == {"length"}


def test_kept_sets_are_bounded():
    sampling = Sampling(max_new_tokens=20, keep_sets=True, min_p=0.001, kept_bytes=4000, eos_ids=())
    with pytest.raises(InputError, match="more than kept_bytes, 4,000 bytes"):
        Engine(HANDLES["llama"]).generate(PROMPTS, 4, sampling)
    unfiltered = Sampling(max_new_tokens=20, keep_sets=True, kept_bytes=1, eos_ids=())
    assert len(Engine(HANDLES["llama"]).generate(PROMPTS, 1, unfiltered).kept.ids) == 0  # nothing was filtered


@pytest.mark.parametrize(
    ("prompts", "samples", "options", "message"),
    [
        ([], 1, {}, "there is no prompt"),
        ([[1], []], 1, {}, "prompt 1 is empty"),
        ([[1, VOCABULARY]], 1, {}, "prompt 0 holds the id 97, outside the vocabulary of 97"),
        ([[1] * 129], 1, {}, "prompt 0 has 129 tokens; .* is 128"),
        ([[1] * 128], 1, {}, "fills .* of 128"),
        ([[1]], 0, {}, "samples must be an integer of at least 1"),
        ([[1]], [1, 2], {}, "one for each prompt"),
        ([[1]], 1, {"keys": [-1]}, "keys must be"),
        ([[1]], 1, {"keys": [1, 2]}, "keys must be"),
        (["text"], 1, {}, "not a list of token ids"),
    ],
)
def test_bad_input(prompts, samples, options, message):
    with pytest.raises(InputError, match=message):
        Engine(HANDLES["llama"]).generate(prompts, samples, Sampling(max_new_tokens=4), **options)


def test_the_repetition_penalty_changes_what_is_sampled_but_no_log_prob_of_the_model():
    handle = HANDLES["llama"]
    sampling = Sampling(max_new_tokens=12, repetition_penalty=2.0, eos_ids=())
    rollout = Engine(handle, max_num_seqs=7, isolated=True).generate(PROMPTS, COUNTS, sampling)
    plain = Engine(handle, max_num_seqs=7).generate(PROMPTS, COUNTS, Sampling(max_new_tokens=12, eos_ids=()))
    assert not torch.equal(rollout.ids, plain.ids)
    replayed = completion_logps(handle, PROMPTS, rollout.completions())
    torch.testing.assert_close(rollout.logps, replayed.logps.float(), rtol=0, atol=2e-6)
    with pytest.raises(InputError, match="repetition_penalty must be a number above 0"):
        Sampling(repetition_penalty=0.0)


def test_an_eos_outside_the_vocabulary():
    with pytest.raises(InputError, match="EOS id 99 is outside the vocabulary of 97"):
        Engine(HANDLES["llama"]).generate([[1]], 1, Sampling(eos_ids=(99,)))


def test_a_budget_too_small_for_one_group():
    engine = Engine(HANDLES["llama"], cache_bytes=100_000)
    with pytest.raises(InputError, match=r"one group of 8 samples of up to 20 tokens .* raise cache_bytes"):
        engine.generate(PROMPTS, 8, Sampling(max_new_tokens=20))
    per_token = 3 * 2 * 2 * 8 * 8  # layers, keys and values, heads, width, bytes
    enough = Engine(HANDLES["llama"], cache_bytes=per_token * (30 + 17 + 9 * 20))
    rollout = enough.generate(PROMPTS, 8, Sampling(max_new_tokens=20))
    assert rollout.stats["rows"] == 8
    assert enough._cache.bytes <= enough.cache_bytes


def test_many_long_completions_in_little_memory(monkeypatch):
    """Samples grow page by page where not all fit at full length; those that are preempted lose no token."""
    monkeypatch.setattr(memory, "PAGE_TOKENS", 8)
    per_token = bytes_per_token(HANDLES["llama"].shapes, torch.float64)
    engine = Engine(HANDLES["llama"], cache_bytes=per_token * (62 + 15 * 8))
    sampling = Sampling(max_new_tokens=60, seed=3, eos_ids=(1,), top_k=30, keep_sets=True)
    got = engine.generate(PROMPTS, COUNTS, sampling)
    assert engine._cache.bytes <= engine.cache_bytes
    assert got.stats["rows"] >= 5  # one would be 61 tokens long, so that two would fit
    assert got.stats["preempted"] > 0
    assert got.stats["prefilled_tokens"] == sum(map(len, PROMPTS))
    assert int(got.lengths.max()) > 16
    assert_same(got, PlainGenerator(HANDLES["llama"].model).generate(PROMPTS, COUNTS, sampling))
    with pytest.raises(InputError, match=r"one completion of up to 60 tokens .* raise cache_bytes"):
        Engine(HANDLES["llama"], cache_bytes=per_token * 90).generate(PROMPTS, COUNTS, sampling)


class TableRunner(Runner):
    """A stand-in for decoding with CUDA graphs: its only table of the pages is made of the packets of its steps."""

    lag, knows_pages = 4, True

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.table = torch.full((self.cache.slots + 1, 100), self.cache.pages)

    def decode(self, batch: StepBatch, uniform: np.ndarray) -> DrawnTokens:
        count, spare = len(batch.slots), (self.cache.slots, self.cache.pages)
        assert batch.pages.shape == (count, 1)
        packet = np.zeros(packet_size(count), np.int32)
        fill_packet(packet, batch, uniform, self.sampling.min_new_tokens, count, *spare)
        step = packet_views(torch.from_numpy(packet), count, count).attention
        self.table[step.slots.long(), step.lengths.long() // self.cache.page_tokens] = step.pages.long()
        return super().decode(dataclasses.replace(batch, pages=self.table[step.slots.long()].numpy()), uniform)

    def restore(self, saved: SavedSample, slot: int, pages: list[int]) -> None:
        super().restore(saved, slot, pages)
        self.table[slot, : len(pages)] = torch.tensor(pages)


@pytest.mark.parametrize("name", quick(ARCHITECTURES, "llama", "gemma3"))
@pytest.mark.parametrize(("penalty", "runner"), [(1.0, Runner), (1.5, Runner), (1.0, TableRunner), (1.5, TableRunner)])
def test_preemption_at_random_changes_no_token(name, penalty, runner, monkeypatch):
    """With tokens read at once, and, as on a GPU, four steps later with a table of the pages on the device."""
    monkeypatch.setattr(engine_module, "Runner", runner)
    sampling = Sampling(max_new_tokens=40, seed=2, eos_ids=(3, 5), repetition_penalty=penalty)
    wanted = Engine(HANDLES[name]).generate(PROMPTS, COUNTS, sampling)
    assert wanted.stats["preempted"] == 0
    monkeypatch.setattr(memory, "PAGE_TOKENS", 4)
    preempt_at_random(monkeypatch)
    tokens = sum(map(len, PROMPTS)) + 4 * 40  # four samples of full length
    per_token = bytes_per_token(HANDLES[name].shapes, HANDLES[name].dtype)
    engine = Engine(HANDLES[name], cache_bytes=per_token * tokens, max_num_seqs=8)
    got = engine.generate(PROMPTS, COUNTS, sampling)
    assert got.stats["preempted"] > 10
    assert_same(got, wanted)


def test_few_samples_are_preempted_where_the_expected_length_is_kept_free(monkeypatch):
    """As on a GPU, with completions of 25 to 28 tokens and room for eight of them."""
    monkeypatch.setattr(memory, "PAGE_TOKENS", 4)
    tokens = sum(map(len, PROMPTS)) + 9 * 28
    sampling = Sampling(max_new_tokens=28, min_new_tokens=24, eos_ids=tuple(range(20)))
    results = []
    for runner in (Runner, TableRunner):
        monkeypatch.setattr(engine_module, "Runner", runner)
        cache_bytes = tokens * bytes_per_token(HANDLES["llama"].shapes, torch.float64)
        results.append(Engine(HANDLES["llama"], cache_bytes=cache_bytes).generate(PROMPTS, 15, sampling))
    greedy_admission, expected_length = results
    assert_same(greedy_admission, expected_length)
    assert expected_length.stats["preempted"] < greedy_admission.stats["preempted"] / 2


@pytest.mark.parametrize("name", ["cache_bytes", "max_num_seqs", "prefill_tokens"])
def test_bad_engine_settings(name):
    with pytest.raises(InputError, match=f"{name} must be an integer of at least 1"):
        Engine(HANDLES["llama"], **{name: 0})


def test_two_engines_of_one_model_do_not_disturb_each_other():
    handle = HANDLES["qwen3"]
    sampling = Sampling(max_new_tokens=10)
    first, second = Engine(handle, max_num_seqs=3), Engine(handle, max_num_seqs=7)
    wanted = first.generate(PROMPTS, 2, sampling)
    assert_same(second.generate(PROMPTS, 2, sampling), wanted)
    assert_same(first.generate(PROMPTS, 2, sampling), wanted)
    first.release()
    assert_same(second.generate(PROMPTS, 2, sampling), wanted)


def test_a_disabled_adapter_is_not_used():
    from groupwise.model.lora import LoraSettings, adapter_off, add_lora

    base = tiny("llama")
    sampling = Sampling(max_new_tokens=10)
    wanted = Engine(prepare(tiny("llama"))).generate(PROMPTS, 2, sampling)
    model = add_lora(base, LoraSettings(rank=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    handle = prepare(model)
    engine = Engine(handle)
    on, fingerprint = engine.generate(PROMPTS, 2, sampling), handle.fingerprint()
    with adapter_off(model):
        assert handle.fingerprint() != fingerprint
        off = engine.generate(PROMPTS, 2, sampling)
    assert handle.fingerprint() == fingerprint
    assert_same(off, wanted)
    assert not torch.equal(on.ids, off.ids)


def test_dropout_is_off_while_sampling():
    model = tiny("llama")
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, torch.nn.Dropout(0.5))
    engine = Engine(prepare(model))
    sampling = Sampling(max_new_tokens=10)
    wanted = engine.generate(PROMPTS, 2, sampling)
    model.train()
    assert_same(engine.generate(PROMPTS, 2, sampling), wanted)
    assert model.training
    with pytest.raises(InputError):
        engine.generate([[]], 1, sampling)
    assert model.training


def test_a_model_that_changes_its_dtype():
    model = tiny("llama", torch.float32)
    engine = Engine(model)
    sampling = Sampling(max_new_tokens=5)
    engine.generate(PROMPTS, 1, sampling)
    model.double()
    assert engine.generate(PROMPTS, 1, sampling).ids.shape[0] == 5
    assert engine._cache.layers[0].page_keys.dtype == torch.float64


def test_release_frees_the_cache():
    handle = prepare(tiny("llama"))
    engine = Engine(handle)
    engine.generate(PROMPTS, 2, Sampling(max_new_tokens=4))
    assert all(hasattr(module, CACHE_ATTRIBUTE) for module in handle.attentions)
    engine.release()
    assert not any(hasattr(module, CACHE_ATTRIBUTE) for module in handle.attentions)
    assert engine.generate(PROMPTS, 2, Sampling(max_new_tokens=4)).ids.shape[0] == 10


@pytest.mark.slow
def test_real_weights():
    """SmolLM2-135M: greedy like transformers, up to near-ties; log-probs equal those of a forward pass."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    handle = prepare(model)
    assert handle.fallback_reason is None
    chats = [[{"role": "user", "content": text}] for text in ("What is the capital of France?", "Name three colours.")]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    engine = Engine(handle)
    greedy = engine.generate(prompts, 1, Sampling(max_new_tokens=12, greedy=True))
    assert "Paris" in tokenizer.decode(greedy.ids[0])
    for prompt, ids in zip(prompts, greedy.completions(), strict=True):
        rows = torch.tensor([prompt])
        wanted = model.generate(rows, attention_mask=torch.ones_like(rows), do_sample=False, max_new_tokens=12)
        assert_equal_up_to_a_tie(model, prompt, ids[0], wanted[0, len(prompt) :])
    sampling = Sampling(max_new_tokens=12, temperature=0.9, top_k=50, keep_sets=True)
    rollout = engine.generate(prompts, 3, sampling)
    with torch.no_grad():
        full = completion_logps(handle, prompts, rollout.completions(), temperature=0.9)
        kept = completion_logps(handle, prompts, rollout.completions(), temperature=0.9, kept=rollout.kept)
    torch.testing.assert_close(rollout.logps, full.logps, rtol=0, atol=1e-3)
    torch.testing.assert_close(rollout.filtered_logps, kept.logps, rtol=0, atol=1e-3)


def assert_equal_up_to_a_tie(model: torch.nn.Module, prompt: list[int], got: Tensor, wanted: Tensor) -> None:
    for at in range(min(len(got), len(wanted))):
        if got[at] != wanted[at]:
            logits = model(torch.cat([torch.tensor(prompt), got[:at]])[None]).logits[0, -1]
            first, second = logits.topk(2).values
            assert first - second < 1e-3, f"token {at} differs, and is not a near-tie"
            return
    assert len(got) == len(wanted)


@pytest.mark.parametrize(
    "settings", [{}, {"greedy": True}, {"top_k": 3, "top_p": 0.5, "keep_sets": True}, {"min_p": 1.0}]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("generator", [Engine, PlainGenerator])
def test_a_damaged_model_is_refused_and_its_weight_named(generator, value, settings):
    """No token of such logits is returned; a valid id before it would be garbage too."""
    model = tiny("llama", torch.float32)
    handle = prepare(model)  # before the damage, which could change the path
    with torch.no_grad():
        model.model.norm.weight[3] = value
    with pytest.raises(NotFiniteError, match=r"token 1 of completion 1 .*the weight model\.norm\.weight holds"):
        generator(handle).generate(PROMPTS, 2, Sampling(max_new_tokens=4, **settings))


def test_activations_that_overflow_are_refused():
    model = tiny("llama", torch.float32)
    handle = prepare(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    with pytest.raises(NotFiniteError, match=r"weights are finite, so its activations overflow in float32"):
        Engine(handle).generate(PROMPTS, 1, Sampling(max_new_tokens=4))
