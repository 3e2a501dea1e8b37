"""Completions from real vLLM servers: `make test-vllm`."""

from __future__ import annotations

import importlib.util
import threading
import time

import pytest
import torch

from groupwise.config import make_recipe
from groupwise.distributed.ranks import Ranks
from groupwise.generate import Engine, Sampling
from groupwise.generate.registry import make_generator
from groupwise.generate.stop import StopStrings
from groupwise.model.export import export_model
from groupwise.model.handle import prepare
from groupwise.model.load import load_model
from groupwise.model.logprobs import completion_logps
from groupwise.model.lora import LoraSettings, add_lora
from groupwise.model.tiny import tiny_tokenizer
from tests.vllm.servers import VllmServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm"),
]
PROMPTS = [list(b"hello world"), list(b"abc"), list(b"what is it?"), list(b"one two")]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "tiny"
    export_model(load_model("tiny", dtype="float32", device="cpu"), folder, tokenizer=tiny_tokenizer())
    both = [VllmServer(folder, log=folder.parent) for _ in range(2)]
    try:
        for server in both:
            server.start()
        for server in both:
            server.wait()
        yield both
    finally:
        for server in both:
            server.kill()


def tiny(seed=3):
    return load_model("tiny", dtype="float32", device="cpu", seed=seed)


def generator_of(model, servers, **settings):
    recipe = make_recipe(
        {
            "train": {"steps": 1},
            "data": {"max_prompt_length": 64},
            "sampling": {"generator": "vllm", "max_new_tokens": 400},
            "vllm": {"servers": [server.url for server in servers], "timeout": 120.0, "wait": 60.0, **settings},
        }
    )
    return make_generator(recipe, prepare(model), Ranks())


def moved(model, seed):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))


def trainer_logps(model, rollout, temperature=1.0, prompts=PROMPTS):
    with torch.no_grad():
        return completion_logps(prepare(model), prompts, rollout.completions(), temperature=temperature).logps


def test_after_each_update_greedy_tokens_and_log_probs_are_ours(servers):
    model = tiny()
    generator, engine = generator_of(model, servers), Engine(model)
    greedy, sampling = Sampling(max_new_tokens=24, greedy=True), Sampling(max_new_tokens=24, temperature=0.7, seed=5)
    answers = []
    for version in range(3):
        generator.update_weights(version)
        ours, theirs = engine.generate(PROMPTS, 2, greedy), generator.generate(PROMPTS, 2, greedy)
        assert torch.equal(ours.ids, theirs.ids)
        assert ours.stop_reasons == theirs.stop_reasons
        answers.append(theirs.ids)
        rollout, again = (generator.generate(PROMPTS, 4, sampling) for _ in range(2))
        assert torch.equal(rollout.ids, again.ids)
        assert rollout.versions[rollout.mask].unique().tolist() == [version]
        assert len({tuple(row) for row in rollout.ids.tolist()}) == 16
        logps = trainer_logps(model, rollout, 0.7)
        torch.testing.assert_close(rollout.logps[rollout.mask], logps[rollout.mask], atol=1e-4, rtol=0)
        moved(model, version)
    assert not torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[1], answers[2])
    generator.close()


def test_an_adapter_is_merged(servers):
    model = add_lora(tiny(), LoraSettings(rank=4))
    for seed in range(2):
        moved(model, seed)
    generator = generator_of(model, servers)
    generator.update_weights(1)
    greedy = Sampling(max_new_tokens=24, greedy=True)
    assert torch.equal(Engine(model).generate(PROMPTS, 1, greedy).ids, generator.generate(PROMPTS, 1, greedy).ids)
    generator.close()


def test_ends_and_filters(servers):
    model = tiny()
    generator, engine = generator_of(model, servers), Engine(model)
    generator.update_weights(0)
    free = generator.generate(PROMPTS, 8, Sampling(max_new_tokens=60, eos_ids=()))
    assert set(free.stop_reasons) == {"length"}
    eos = tuple(range(0, 259, 20))
    ended = generator.generate(PROMPTS, 8, Sampling(max_new_tokens=60, eos_ids=eos, min_new_tokens=5))
    for row, length, reason in zip(ended.ids.tolist(), ended.lengths.tolist(), ended.stop_reasons, strict=True):
        places = [place for place in range(length) if row[place] in eos]
        assert places == ([length - 1] if reason == "eos" else [])
        assert length > 5
    assert "eos" in ended.stop_reasons
    assert ended.logps[:, :5].isnan().all()  # EOS was excluded, so the log-probs are those of another distribution
    known = ended.mask & (torch.arange(ended.ids.shape[1]) >= 5)
    torch.testing.assert_close(ended.logps[known], trainer_logps(model, ended)[known], atol=1e-4, rtol=0)

    tokenizer = tiny_tokenizer()
    stop = StopStrings(tokenizer, ["a", "b", "c", "d", "e"])
    stopped = generator.generate(PROMPTS, 8, Sampling(max_new_tokens=60, eos_ids=()), stop=stop)
    for row, length, reason in zip(stopped.ids.tolist(), stopped.lengths.tolist(), stopped.stop_reasons, strict=True):
        letters = [place for place in range(length) if set(tokenizer.decode([row[place]])) & set("abcde")]
        assert letters == ([length - 1] if reason == "stop_string" else [])
    assert "stop_string" in stopped.stop_reasons

    filtered = generator.generate(PROMPTS, 8, Sampling(max_new_tokens=20, top_k=3, eos_ids=()))
    assert filtered.logps.isnan().all()
    assert (filtered.filtered_logps[filtered.mask] > trainer_logps(model, filtered)[filtered.mask]).all()
    greedy = engine.generate(PROMPTS, 1, Sampling(max_new_tokens=20, top_k=1, eos_ids=()))
    assert torch.equal(greedy.ids, generator.generate(PROMPTS, 1, Sampling(max_new_tokens=20, top_k=1, eos_ids=())).ids)
    generator.close()


def test_weights_that_change_while_completions_are_sampled(servers):
    """Each token's log-prob is that of the weights of its version."""
    model, before, after = tiny(), tiny(), tiny()
    moved(after, 1)
    generator = generator_of(model, servers[:1])
    generator.update_weights(0)
    results = []
    sampling = Sampling(max_new_tokens=400, seed=1, eos_ids=())
    thread = threading.Thread(target=lambda: results.append(generator.generate(PROMPTS, 4, sampling)))
    thread.start()
    while generator.servers[0].in_flight < len(PROMPTS):
        time.sleep(0.01)
    time.sleep(0.5)
    moved(model, 1)
    generator.update_weights(1)
    thread.join(120)
    (rollout,) = results
    assert rollout.lengths.tolist() == [400] * 16
    versions = rollout.versions
    assert (versions.diff(dim=1) >= 0).all()  # the old weights first
    assert versions.unique().tolist() == [0, 1]
    expected = torch.where(versions == 0, trainer_logps(before, rollout), trainer_logps(after, rollout))
    torch.testing.assert_close(rollout.logps, expected, atol=1e-4, rtol=0)
    generator.close()


def test_a_killed_server_loses_nothing_and_is_used_again_with_the_current_weights(servers):
    """The last test of this file: one server stays dead."""
    model = tiny()
    generator = generator_of(model, servers, timeout=60.0)
    generator.update_weights(0)
    prompts = [list(f"question {number}".encode()) for number in range(12)]
    sampling = Sampling(max_new_tokens=200, seed=2, eos_ids=())
    undisturbed = generator.generate(prompts, 4, sampling)
    moved(model, 1)
    generator.update_weights(1)
    generator.max_num_seqs = 16  # four prompts at once on each server
    results = []
    thread = threading.Thread(target=lambda: results.append(generator.generate(prompts, 4, sampling)))
    thread.start()
    while generator.servers[1].in_flight < 4:
        time.sleep(0.01)
    servers[1].kill()
    thread.join(200)
    (rollout,) = results
    assert rollout.ids.shape == undisturbed.ids.shape
    assert rollout.groups.tolist() == [prompt for prompt in range(12) for _ in range(4)]
    assert len({tuple(row) for row in rollout.ids.tolist()}) == 48  # none twice
    logps = trainer_logps(model, rollout, prompts=prompts)
    torch.testing.assert_close(rollout.logps, logps, atol=1e-4, rtol=0)  # the new weights everywhere
    assert generator.servers[1].version is None
    assert "connection" in generator.servers[1].failure

    servers[1].start()
    servers[1].wait()
    servers[0].kill()
    alone = generator.generate(prompts, 4, sampling)  # the server that came back has the initial weights at first
    torch.testing.assert_close(alone.logps, trainer_logps(model, alone, prompts=prompts), atol=1e-4, rtol=0)
    assert alone.versions.unique().tolist() == [1]
    generator.close()
