"""Packed rows give the log-probs and gradients of the plain computation."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from groupwise.core.filters import KeptSets
from groupwise.errors import InputError
from groupwise.model.handle import prepare
from groupwise.model.logprobs import TokenLogps, completion_logps, iter_packs
from groupwise.model.packing import plan_packs
from tests.model.models import ARCHITECTURES, VOCABULARY, padded_logps, quick, random_groups, tiny
from tests.weights import smollm2

RAGGED = ([5, 9, 1, 12], [[4, 4, 7], [1, 1], [12, 3], [2, 9, 9, 1]])


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def some_loss(result: TokenLogps) -> torch.Tensor:
    """Different for every token, so that no two gradients can be exchanged."""
    weights = torch.linspace(-1, 2, result.logps.numel(), dtype=result.logps.dtype).view_as(result.logps)
    loss = (weights * result.logps).sum()
    return loss if result.entropy is None else loss + (weights.flip(1) * result.entropy).sum()


def assert_equal_gradients(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], relative: float) -> None:
    assert got.keys() == wanted.keys()
    assert wanted
    for name, gradient in wanted.items():
        assert (got[name] - gradient).norm() <= relative * gradient.norm(), name
        assert gradient.norm() > 0, name


@pytest.mark.parametrize("name", quick(ARCHITECTURES, "llama", "qwen2_windows", "gemma2", "gemma3"))
def test_packed_equals_padded(name):
    model = tiny(name)
    handle = prepare(model)
    assert handle.fallback_reason is None
    prompts, completions = random_groups(*RAGGED)
    options = {"temperature": 0.7, "with_entropy": True}
    packed = completion_logps(handle, prompts, completions, **options)
    padded = padded_logps(handle, prompts, completions, **options)
    assert torch.equal(packed.mask, padded.mask)
    torch.testing.assert_close(packed.logps, padded.logps, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(packed.entropy, padded.entropy, rtol=1e-9, atol=1e-12)
    assert (packed.logps[packed.mask] < 0).all()
    assert not packed.logps[~packed.mask].any()
    got, wanted = gradients(model, some_loss(packed)), gradients(model, some_loss(padded))
    assert_equal_gradients(got, wanted, 1e-9)


@pytest.mark.parametrize("name", quick(["llama", "gemma3"], "llama"))
def test_padded_is_each_sample_by_itself(name):
    """The literal version is itself checked: one sample at a time, no padding, transformers alone."""
    model = tiny(name)
    prompts, completions = random_groups(*RAGGED)
    padded = padded_logps(prepare(model, plain=True), prompts, completions, temperature=1.3)
    row = 0
    for prompt, members in zip(prompts, completions, strict=True):
        for ids in members:
            logits = model(torch.cat([prompt, ids])[None], use_cache=False).logits[0, len(prompt) - 1 : -1] / 1.3
            wanted = logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
            torch.testing.assert_close(padded.logps[row, : len(ids)], wanted, rtol=1e-9, atol=1e-12)
            row += 1
    assert row == len(padded.logps)


@pytest.mark.parametrize("name", quick(["llama", "qwen3", "gemma3"], "gemma3"))
def test_gradient_checkpointing_changes_nothing(name):
    model = tiny(name)
    handle = prepare(model)
    prompts, completions = random_groups(*RAGGED)
    model.train()
    plain = gradients(model, some_loss(completion_logps(handle, prompts, completions)))
    model.gradient_checkpointing_enable()
    calls = count_calls(model)
    checkpointed = gradients(model, some_loss(completion_logps(handle, prompts, completions)))
    assert calls() == 2 * model.config.num_hidden_layers  # forward, and again in the backward pass
    assert_equal_gradients(checkpointed, plain, 1e-9)


def count_calls(model):
    seen = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    return lambda: len(seen)


@pytest.mark.parametrize("name", quick(["llama", "gemma3"], "gemma3"))
def test_lora(name):
    from groupwise.model.lora import LoraSettings, adapter_off, add_lora

    base = tiny(name)
    prompts, completions = random_groups(*RAGGED)
    reference = padded_logps(prepare(base, plain=True), prompts, completions).logps.detach()
    model = add_lora(base, LoraSettings(rank=4))
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.2)
    handle = prepare(model)
    assert handle.fallback_reason is None
    packed = completion_logps(handle, prompts, completions)
    padded = padded_logps(handle, prompts, completions)
    torch.testing.assert_close(packed.logps, padded.logps, rtol=1e-9, atol=1e-12)
    got, wanted = gradients(model, some_loss(packed)), gradients(model, some_loss(padded))
    assert_equal_gradients(got, wanted, 1e-9)
    assert all("lora" in parameter_name for parameter_name in got)
    with adapter_off(model), torch.no_grad():
        off = completion_logps(handle, prompts, completions).logps
    torch.testing.assert_close(off, reference, rtol=1e-9, atol=1e-12)
    assert (packed.logps - reference).abs().max() > 0.1


def test_packs_add_up():
    """Log-probs and gradients do not depend on how the samples are divided."""
    model = tiny("qwen3")
    handle = prepare(model)
    prompts, completions = random_groups(*RAGGED)
    complete = completion_logps(handle, prompts, completions)
    wanted = gradients(model, complete.logps.sum())
    model.zero_grad()
    seen, packs = [], 0
    for samples, result in iter_packs(handle, prompts, completions, token_budget=24):
        result.logps.sum().backward()
        width = result.logps.shape[1]
        torch.testing.assert_close(result.logps, complete.logps[samples, :width], rtol=1e-9, atol=1e-12)
        seen += samples.tolist()
        packs += 1
    assert packs > 3
    assert sorted(seen) == list(range(11))
    assert_equal_gradients({name: p.grad for name, p in model.named_parameters()}, wanted, 1e-9)


def test_kept_sets():
    model = tiny("llama")
    handle = prepare(model)
    prompts, completions = random_groups(*RAGGED)
    tokens = torch.cat([ids for members in completions for ids in members])
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(len(tokens), VOCABULARY, generator=generator) < 0.3
    mask[torch.arange(len(tokens)), tokens] = True
    mask[5] = False  # nothing filtered there
    kept = KeptSets.from_logits(torch.where(mask, 0.0, -torch.inf))
    options = {"temperature": 1.2, "kept": kept, "with_entropy": True}
    packed = completion_logps(handle, prompts, completions, token_budget=30, **options)
    padded = padded_logps(handle, prompts, completions, **options)
    torch.testing.assert_close(packed.logps, padded.logps, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(packed.entropy, padded.entropy, rtol=1e-9, atol=1e-12)
    assert_equal_gradients(gradients(model, some_loss(packed)), gradients(model, some_loss(padded)), 1e-9)
    without = completion_logps(handle, prompts, completions, temperature=1.2)
    assert (packed.logps >= without.logps - 1e-12).all()
    assert (packed.logps > without.logps + 0.1).any()


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=4),
    st.integers(0, 10_000),
)
def test_any_shape(groups, seed):
    prompts, completions = random_groups([p for p, _ in groups], [c for _, c in groups], seed)
    result = completion_logps(HANDLE, prompts, completions)
    wanted = padded_logps(HANDLE, prompts, completions)
    torch.testing.assert_close(result.logps, wanted.logps, rtol=1e-9, atol=1e-12)


HANDLE = prepare(tiny("gemma3"))


def test_a_completion_does_not_see_others():
    """Changes in a sibling or in another group change nothing, bit for bit."""
    prompts, completions = random_groups(*RAGGED)
    before = completion_logps(HANDLE, prompts, completions).logps
    completions[0][1] = (completions[0][1] + 1) % VOCABULARY
    prompts[2] = (prompts[2] + 1) % VOCABULARY
    after = completion_logps(HANDLE, prompts, completions).logps
    changed = {1, 5, 6}
    for row in range(len(before)):
        assert torch.equal(before[row], after[row]) == (row not in changed)


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1, max_size=8
    ),
    st.integers(39, 120),
)
def test_packs_keep_to_the_budget(groups, budget):
    prompts, completions = [p for p, _ in groups], [c for _, c in groups]
    group_of = [g for g, members in enumerate(completions) for _ in members]
    lengths = [length for members in completions for length in members]
    packs = plan_packs(prompts, [len(members) for members in completions], lengths, budget)
    seen = []
    for pack in packs:
        samples = list(pack.samples)
        assert Counter(group_of[i] for i in samples) == dict(zip(pack.groups, pack.sizes, strict=True))
        assert sum(prompts[g] for g in pack.groups) + sum(lengths[i] - 1 for i in samples) <= budget
        seen += samples
    assert seen == list(range(len(lengths)))
    for group, members in enumerate(completions):  # a group that fits is not split
        if prompts[group] + sum(length - 1 for length in members) <= budget:
            assert sum(group in pack.groups for pack in packs) == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=9)), min_size=1, max_size=8
    ),
    st.integers(39, 120),
)
def test_packs_are_those_of_one_sample_after_another(groups, budget):
    prompts, completions = [p for p, _ in groups], [c for _, c in groups]
    wanted: list[dict[int, int]] = [{}]  # how many samples of each group
    used = 0
    for group, (prompt, lengths) in enumerate(groups):
        total = prompt + sum(lengths) - len(lengths)
        if used + total > budget and (total <= budget or used + prompt > budget):
            wanted.append({})
            used = 0
        for length in lengths:
            added = length - 1 if group in wanted[-1] else prompt + length - 1
            if used + added > budget:
                wanted.append({})
                used, added = 0, prompt + length - 1
            used += added
            wanted[-1][group] = wanted[-1].get(group, 0) + 1
    flat = [length for members in completions for length in members]
    packs = plan_packs(prompts, [len(members) for members in completions], flat, budget)
    assert [dict(zip(pack.groups, pack.sizes, strict=True)) for pack in packs] == [pack for pack in wanted if pack]


def test_a_budget_that_is_too_small():
    with pytest.raises(InputError, match=r"sample 1 takes 19 tokens with its prompt, more than token_budget 15"):
        plan_packs([10], [2], [3, 10], 15)


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        ([], [], "0 prompts"),
        ([[1, 2]], [], "1 prompts but completions for 0"),
        ([[1, 2]], [[]], "prompt 0 has no completion"),
        ([[]], [[[1]]], "prompt 0 is empty"),
        ([[1]], [[[1], []]], "completion 1 of prompt 0 is empty"),
        ([[1, 97]], [[[1]]], "prompt 0 holds the id 97, outside the vocabulary of 97"),
        ([[1]], [[[-1]]], "completion 0 of prompt 0 holds the id -1"),
        ([[0.5]], [[[1]]], "integers"),
        ([["a"]], [[[1]]], "not a list of token ids"),
        ([list(range(90)) * 2], [[[1]]], "180 tokens; .* is 128"),
        ([[1] * 100], [[[1] * 28, [1] * 29]], "prompt 0 and its longest completion have 129 tokens"),
    ],
)
def test_bad_input(prompts, completions, message):
    with pytest.raises(InputError, match=message):
        completion_logps(HANDLE, prompts, completions)


def test_kept_sets_of_the_wrong_number():
    kept = KeptSets(torch.zeros(0, dtype=torch.int32), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match="3 kept sets were given for 2 completion tokens"):
        completion_logps(HANDLE, [[1]], [[[1, 2]]], kept=kept)


TEXTS = {
    "The heart pumps blood through": [" the body.", " arteries and veins to all organs, day and night."],
    "2 + 2 =": [" 4", " 5, said the fool, and left."],
}


@pytest.mark.slow
def test_real_weights_are_as_accurate_as_transformers():
    """SmolLM2-135M in float32 against float64: packed, and transformers' padded batch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in TEXTS]
    completions = [[tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts] for texts in TEXTS.values()]
    runs = {}
    for dtype in (torch.float64, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        handle = prepare(model)
        assert handle.fallback_reason is None
        result = padded_logps(handle, prompts, completions).logps
        runs[dtype, "padded"] = result.detach(), some_of(gradients(model, result.sum()))
        result = completion_logps(handle, prompts, completions).logps
        runs[dtype, "packed"] = result.detach(), some_of(gradients(model, result.sum()))
    truth, true_gradient = runs[torch.float64, "padded"]
    packed, gradient = runs[torch.float64, "packed"]
    torch.testing.assert_close(packed, truth, rtol=1e-6, atol=1e-9)  # the norms compute in float32
    theirs, ours = ((runs[torch.float32, name][0] - truth).abs().max() for name in ("padded", "packed"))
    assert ours <= theirs
    for name, wanted in true_gradient.items():
        assert (gradient[name] - wanted).norm() <= 1e-5 * wanted.norm(), name
        theirs, ours = ((runs[torch.float32, run][1][name] - wanted).norm() for run in ("padded", "packed"))
        assert ours <= 2 * theirs, name


def some_of(gradient: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A few of the many: the embedding, the first layer and the last."""
    return {name: g.double() for name, g in gradient.items() if "embed" in name or ".0." in name or ".29." in name}
