"""Keys and values kept between calls: the same tokens and log-probs, fewer tokens computed, nothing stale."""

from __future__ import annotations

import random
from contextlib import closing, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from groupwise.conversations import EpisodeLimits, EpisodeSampler, EpisodeStart, PlainFormat
from groupwise.environments import Environment, Reply
from groupwise.errors import NotFiniteError
from groupwise.generate import Engine, PlainGenerator, Rollout, Sampling, memory, runner
from groupwise.generate.runner import Runner
from groupwise.generate.types import keeping
from groupwise.model import cache
from groupwise.model.attention import dense_attention
from groupwise.model.cache import bytes_per_token
from groupwise.model.handle import prepare
from groupwise.model.tiny import tiny_model, tiny_tokenizer
from tests.generate.preemption import preempt_at_random
from tests.generate.test_engine import SETTINGS, assert_same, poison
from tests.model.models import ARCHITECTURES, quick, tiny

HANDLES = {name: prepare(tiny(name)) for name in ARCHITECTURES}
FEW = tuple(range(20))  # of the ids, as EOS: turns of different lengths


def cache_bytes(name: str, tokens: int) -> int:
    return tokens * bytes_per_token(HANDLES[name].shapes, HANDLES[name].dtype)


def random_ids(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(20, 60) for _ in range(rng.randint(least, most))]


def next_contexts(rng: random.Random, contexts: list[list[int]], rollout: Rollout) -> list[list[int]]:
    """Conversations that go on, in another order, of which a few differ in their last turns, stop or are new."""
    following = []
    for context, members in zip(contexts, rollout.completions(), strict=True):
        for ids in members:
            extended = context + ids.tolist() + random_ids(rng, 0, 6)
            chance = rng.random()
            if chance < 0.15:
                extended = extended[: rng.randint(1, len(extended))] + random_ids(rng, 0, 4)
            if chance < 0.85 and len(extended) < 100:
                following.append(extended)
    rng.shuffle(following)
    return [*following[:10], random_ids(rng, 1, 12)]


def finish_with_nan(engine: Engine) -> None:
    """Fill everything that the next call must not read with NaN."""
    poison(engine)
    for layer in engine._kept._layers:
        for tensor in layer:
            tensor[torch.from_numpy(engine._kept._free)] = float("nan")


def converse(engine: Engine, plain: Any, rng: random.Random, sampling: Sampling, turns: int) -> list[dict[str, Any]]:
    """Random conversations with one engine that keeps and one that does not; the statistics of the first."""
    contexts, stats = [random_ids(rng, 1, 20) for _ in range(3)], []
    contexts.append(contexts[0] + random_ids(rng, 1, 5))
    with engine.keeping():
        for _ in range(turns):
            counts = [rng.randint(1, 3) for _ in contexts]
            keys = [rng.randrange(1000) for _ in contexts]
            got = engine.generate(contexts, counts, sampling, keys=keys)
            wanted = plain.generate(contexts, counts, sampling, keys=keys)
            assert_same(got, wanted)
            shown = sum(map(len, contexts))
            assert got.stats["prefilled_tokens"] + got.stats["reused_tokens"] == shown
            assert got.stats["prefilled_tokens"] >= len(contexts)  # the last token of each
            assert engine.cache_bytes is None or engine._cache.bytes + engine._kept.bytes <= engine.cache_bytes
            stats.append(got.stats)
            finish_with_nan(engine)
            contexts = next_contexts(rng, contexts, got)
    return stats


@pytest.mark.parametrize("name", quick(ARCHITECTURES, "llama", "gemma2", "gemma3"))
@pytest.mark.parametrize(("kind", "lag"), [("plain", 0), ("plain", 4), ("filters", 0), ("repetition_penalty", 0)])
def test_turns_are_those_without_keeping(name, kind, lag, monkeypatch):
    """lag: as on a GPU, some steps have been launched when the host learns that a sample has ended."""
    monkeypatch.setattr(Runner, "lag", lag)
    engine, plain = Engine(HANDLES[name], max_num_seqs=7), Engine(HANDLES[name])
    sampling = Sampling(max_new_tokens=9, seed=4, **{"eos_ids": FEW, **SETTINGS[kind]})
    stats = converse(engine, plain, random.Random(1), sampling, 5)
    assert sum(each["reused_tokens"] for each in stats[1:]) > sum(each["prefilled_tokens"] for each in stats[1:])


@pytest.mark.slow
@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["llama", "gemma2", "gemma3"]),
    st.integers(1, 8),  # rows
    st.integers(1, 60),  # tokens of a prefill
    st.sampled_from([None, 250, 400, 800]),  # tokens for which there is memory
    st.sampled_from(sorted(SETTINGS)),
    st.sampled_from([0, 4]),
)
def test_any_conversations(rng, name, rows, prefill_tokens, tokens, kind, lag):
    limit = None if tokens is None else cache_bytes(name, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "PAGE_TOKENS", 4)
        patch.setattr(Runner, "lag", lag)
        engine = Engine(HANDLES[name], max_num_seqs=rows, prefill_tokens=prefill_tokens, cache_bytes=limit)
        sampling = Sampling(max_new_tokens=9, seed=4, **{"eos_ids": FEW, **SETTINGS[kind]})
        converse(engine, Engine(HANDLES[name]), rng, sampling, 5)


@pytest.mark.parametrize("name", quick(["llama", "gemma3"], "llama"))
def test_preemption_at_random_changes_no_token(name, monkeypatch):
    monkeypatch.setattr(memory, "PAGE_TOKENS", 4)
    engine = Engine(HANDLES[name], max_num_seqs=6, cache_bytes=cache_bytes(name, 800))
    sampling = Sampling(max_new_tokens=100, min_new_tokens=8, eos_ids=FEW, top_k=30, keep_sets=True)
    preempt_at_random(monkeypatch)
    stats = converse(engine, PlainGenerator(HANDLES[name].model), random.Random(2), sampling, 4)
    assert sum(each["preempted"] for each in stats) > 10
    assert sum(each["reused_tokens"] for each in stats) > 100


def spied(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[Tensor]]:
    """The logits after prompts and the log-probs of tokens, in the model's dtype, of the calls from now on."""
    logits: list[Tensor] = []
    logps: list[Tensor] = []
    prefill, to_output = Runner.prefill, runner.to_step_output

    def prefill_and_note(*args):
        logits.append(prefill(*args))
        return logits[-1]

    def to_output_and_note(drawn, keep_sets):
        logps.extend((drawn.logps, drawn.filtered_logps))
        return to_output(drawn, keep_sets)

    monkeypatch.setattr(Runner, "prefill", prefill_and_note)
    monkeypatch.setattr(runner, "to_step_output", to_output_and_note)
    return logits, logps


@pytest.mark.parametrize("name", quick(ARCHITECTURES, "llama", "gemma2", "gemma3"))
def test_logits_and_log_probs_are_exact_in_float64(name, monkeypatch):
    """The logits are those of a plain forward pass, too."""
    handle, rng = HANDLES[name], random.Random(3)
    sampling = Sampling(max_new_tokens=6, eos_ids=(), top_k=30)
    logits, logps = spied(monkeypatch)
    contexts = [random_ids(rng, 1, 30) for _ in range(4)]
    engine, plain = Engine(handle), Engine(handle)
    with engine.keeping():
        for _ in range(3):
            rollout = engine.generate(contexts, 2, sampling)
            got, got_logps = torch.cat(logits), torch.cat(logps)
            logits.clear(), logps.clear()
            plain.generate(contexts, 2, sampling)
            torch.testing.assert_close(got, torch.cat(logits), rtol=0, atol=1e-9)
            torch.testing.assert_close(got_logps, torch.cat(logps), rtol=0, atol=1e-9)
            logits.clear(), logps.clear()
            for row, context in zip(got, contexts, strict=True):
                with torch.no_grad():
                    wanted = handle.model(torch.tensor([context]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(row, wanted, rtol=0, atol=1e-9)
            contexts = [
                context + ids.tolist() + random_ids(rng, 0, 9)
                for context, members in zip(contexts, rollout.completions(), strict=True)
                for ids in members
            ][:6]
    assert got.dtype == torch.float64
    assert rollout.stats["reused_tokens"] > 0


def literal_flash(query, key, value, q_ends, k_ends, longest_q, longest_k, scale, window):
    """What the GPU's kernel computes of packed sequences: the queries are the last tokens of the keys."""
    out = torch.empty_like(query)
    for (q0, q1), (k0, k1) in zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True):
        assert q1 - q0 <= longest_q
        assert k1 - k0 <= longest_k
        distance = torch.arange(k1 - k0)[k1 - k0 - (q1 - q0) :, None] - torch.arange(k1 - k0)
        visible = (distance >= 0) & (distance < (window or longest_k))
        repeat = query.shape[1] // key.shape[1]
        q, k, v = query[q0:q1], key[k0:k1].repeat_interleave(repeat, 1), value[k0:k1].repeat_interleave(repeat, 1)
        out[q0:q1] = dense_attention(*(x.transpose(0, 1) for x in (q, k, v)), scale, visible, None)[0].transpose(0, 1)
    return (out,)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_kernel_of_a_gpu_is_given_the_same_keys(name, monkeypatch):
    def by_flash(layout, query, key, value, scale, window, softcap):
        return layout._flash(*(x.transpose(0, 1) for x in (query, key, value)), scale, window)

    monkeypatch.setattr(cache, "varlen_flash", literal_flash)
    monkeypatch.setattr(cache.ContinuedPrefillLayout, "_by_segments", by_flash)
    sampling = Sampling(max_new_tokens=9, eos_ids=FEW)
    stats = converse(Engine(HANDLES[name], max_num_seqs=7), Engine(HANDLES[name]), random.Random(5), sampling, 4)
    assert sum(each["reused_tokens"] for each in stats) > 100


def test_only_what_is_new_is_computed():
    """Counts the tokens that pass through the model: the last sampled one, which has no key yet, and those given."""
    handle = HANDLES["llama"]
    engine, sampling = Engine(handle), Sampling(max_new_tokens=4, eos_ids=())
    prompt = list(range(20, 30))
    with engine.keeping():
        first = engine.generate([prompt], 3, sampling)
        contexts = [prompt + row + [7, 8] for row in first.ids.tolist()]
        seen: list[int] = []
        hook = handle.model.model.embed_tokens.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
        try:
            second = engine.generate(contexts, 1, sampling)
            again = engine.generate(contexts, 1, sampling)
        finally:
            hook.remove()
        assert seen == [3 * 3, 3, 3, 3, 3 * 1, 3, 3, 3]
        assert second.stats["reused_tokens"] == 3 * 13
        assert again.stats["prefilled_tokens"] == 3  # the contexts are complete, but for the logits
        assert_same(again, second)
        # What is common is stored once.
        stored = [context + row[:-1] for context, row in zip(contexts, second.ids.tolist(), strict=True)]
        beginnings = {tuple(ids[: n + 1]) for ids in stored for n in range(len(ids))}
        assert sum(len(run.places) for run in engine._kept._tree.runs()) == len(beginnings)


class Count(Environment):
    """Answers each of four turns with a number."""

    async def start(self, row, seed):
        self.turns = 0

    async def respond(self, turn):
        self.turns += 1
        return Reply([{"role": "user", "content": f"<{self.turns}>"}], done=self.turns == 4)


@pytest.mark.parametrize("make", [Engine, PlainGenerator])
def test_greedy_turns_of_conversations_are_those_of_model_generate(make):
    tokenizer, generator = tiny_tokenizer(), make(prepare(tiny_model().double()))
    start = EpisodeStart({}, tokenizer("What is it?")["input_ids"], [{"role": "user", "content": "What is it?"}], 0, 0)
    reused: list[int] = []

    def generate(generator, *args, **settings):
        rollout = generator.generate(*args, **settings)
        reused.append(rollout.stats.get("reused_tokens", 0))
        return rollout

    sampling = Sampling(max_new_tokens=5, greedy=True, eos_ids=())
    with closing(EpisodeSampler(Count, PlainFormat(tokenizer), EpisodeLimits())) as sampler:
        ((episode,),) = sampler.sample(generator, [start], 1, sampling, generate=generate)
    context = list(episode.prompt)
    for turn in episode.turns:
        settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        wanted = generator.handle.model.generate(torch.tensor([context]), eos_token_id=None, **settings)
        assert turn.sampled.ids.tolist() == wanted[0, len(context) :].tolist()
        context += [*turn.sampled.ids.tolist(), *turn.given]
    assert len(reused) == 4
    assert (sum(reused) > 0) == (make is Engine)
    assert getattr(generator, "_kept", None) is None  # dropped with the conversations


@pytest.fixture
def warm():
    """An engine within a block, that has kept a prompt, and a call that would reuse it."""
    engine = Engine(prepare(tiny("llama")))
    prompts, sampling = [list(range(20, 40))], Sampling(max_new_tokens=3, eos_ids=())
    with engine.keeping():
        engine.generate(prompts, 1, sampling)
        yield engine, lambda: engine.generate(prompts, 1, sampling)


def test_reuse_is_seen(warm):
    engine, generate = warm
    assert generate().stats["reused_tokens"] == 19
    assert engine._kept.bytes > 0
    with engine.keeping():
        assert generate().stats["reused_tokens"] == 19
    assert generate().stats["reused_tokens"] == 19  # the outer block goes on


def test_nothing_is_kept_outside_of_a_block():
    engine = Engine(HANDLES["llama"])
    for block in (nullcontext(), keeping(engine), nullcontext(), keeping(engine)):
        with block:
            assert engine.generate([[20, 21, 22]], 1, Sampling(max_new_tokens=3)).stats["reused_tokens"] == 0
        assert engine._kept is None


def scale_weights(engine: Engine) -> None:
    with torch.no_grad():
        for weight in engine.handle.model.parameters():
            weight.mul_(1.1)


def step_optimizer(engine: Engine, **settings: Any) -> None:
    optimizer = torch.optim.AdamW(engine.handle.model.parameters(), lr=0.1, **settings)
    for weight in engine.handle.model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def load_weights(engine: Engine) -> None:
    engine.handle.model.load_state_dict(tiny("llama", seed=1).state_dict())


@pytest.mark.parametrize(
    "change",
    [
        scale_weights,
        step_optimizer,
        lambda engine: step_optimizer(engine, fused=True),
        load_weights,
        lambda engine: engine.update_weights(1),
        Engine.release,
    ],
    ids=["in_place", "optimizer", "fused", "loaded", "update_weights", "release"],
)
def test_nothing_stale_is_used(warm, change):
    engine, generate = warm
    change(engine)
    got = generate()
    assert got.stats["reused_tokens"] == 0
    assert_same(got, Engine(engine.handle).generate([list(range(20, 40))], 1, Sampling(max_new_tokens=3, eos_ids=())))
    assert generate().stats["reused_tokens"] == 19


def test_nothing_is_kept_of_an_interrupted_call(warm):
    engine, generate = warm
    weight = engine.handle.model.model.norm.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[3] = float("nan")
    with pytest.raises(NotFiniteError):
        generate()
    assert not engine._kept.bytes
    with torch.no_grad():
        weight.copy_(before)
    assert generate().stats["reused_tokens"] == 0


def test_isolated_samples_do_not_depend_on_earlier_calls():
    engine = Engine(prepare(tiny("llama", torch.float32)), max_num_seqs=4, isolated=True)
    sampling = Sampling(max_new_tokens=6, eos_ids=())
    with engine.keeping():
        first, again = (engine.generate([[20, 21, 22, 23]], 2, sampling) for _ in range(2))
    assert again.stats["reused_tokens"] == 0
    assert torch.equal(first.logps, again.logps)


def test_running_samples_go_first():
    """What is kept gives way to a call that needs the memory; then what was used last is still there."""
    name, sampling = "llama", Sampling(max_new_tokens=3, eos_ids=())
    engine = Engine(HANDLES[name], cache_bytes=cache_bytes(name, 100))
    first, second = list(range(20, 40)), list(range(30, 50))
    with engine.keeping():
        engine.generate([first], 1, sampling)
        engine.generate([second], 1, sampling)
        assert engine.generate([first], 1, sampling).stats["reused_tokens"] == 19
        large = engine.generate([[*range(20, 60), *range(20, 28)]], 1, sampling)  # takes 54 of 100 places
        assert large.stats["reused_tokens"] == 20  # of the first prompt
        engine.generate([[*range(20, 60), *range(20, 60)]], 1, sampling)  # 86
        assert engine._kept.bytes <= cache_bytes(name, 14)
        assert engine.generate([second], 1, sampling).stats["reused_tokens"] == 0
