"""A model that cannot share prompts is detected and takes the plain path, with correct results."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from groupwise.errors import InputError
from groupwise.generate import Engine, PlainGenerator, Sampling
from groupwise.model import load_model_and_tokenizer
from groupwise.model.attention import IMPLEMENTATION
from groupwise.model.handle import _excess_difference as excess_difference
from groupwise.model.handle import prepare
from groupwise.model.logprobs import completion_logps
from tests.model.models import ARCHITECTURES, padded_logps, quick, random_groups, tiny
from tests.weights import smollm2

SMALL = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def mamba() -> PreTrainedModel:
    config = MambaConfig(**SMALL, hidden_size=32, state_size=4, num_hidden_layers=2)
    return MambaForCausalLM(config).double().eval()


def bloom() -> PreTrainedModel:
    """Its positions are a bias of the attention scores, derived from the mask (ALiBi)."""
    return BloomForCausalLM(BloomConfig(**SMALL, hidden_size=32, n_layer=2, n_head=4)).double().eval()


def opt() -> PreTrainedModel:
    config = OPTConfig(
        **SMALL, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    return OPTForCausalLM(config).double().eval()


def gpt2() -> PreTrainedModel:
    config = GPT2Config(
        **SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config).double().eval()


@pytest.mark.parametrize("name", quick(ARCHITECTURES, "llama_one_head", "mistral", "gemma3"))
def test_the_fields_of_a_handle(name):
    model = tiny(name)
    handle = prepare(model)
    assert handle.fallback_reason is None
    assert model.config._attn_implementation == IMPLEMENTATION
    assert [module.layer_idx for module in handle.attentions] == [0, 1, 2]
    heads = model.config.num_key_value_heads
    assert [tuple(shape) for shape in handle.shapes] == [(heads, 8)] * 3
    assert handle.head.weight is model.get_output_embeddings().weight
    assert (handle.vocabulary, handle.context_length) == (97, 128)
    assert prepare(handle) is handle
    assert prepare(model).fallback_reason is None  # also a second time


@pytest.mark.parametrize("name", quick(ARCHITECTURES, "mistral", "gemma2"))
def test_a_prepared_model_still_works_as_usual(name):
    """Called directly, it computes and generates the same as before."""
    model = tiny(name)
    if name == "gemma2":
        model.set_attn_implementation("eager")
    ids = random_groups([20, 20], [])[0]
    rows = torch.stack(ids)
    mask = torch.ones_like(rows)
    if name != "gemma2":  # its masked softmax is NaN in float64
        mask[0, :7] = 0

    def results() -> list[torch.Tensor]:
        with torch.no_grad():
            plain = model(rows).logits
            padded = model(rows, attention_mask=mask).logits[:, 7:]
            generated = model.generate(rows, attention_mask=mask, do_sample=False, max_new_tokens=8, pad_token_id=0)
        return [plain, padded, generated]

    before = results()
    prepare(model)
    close = 1e-6 if name == "gemma2" else 1e-9  # its softmax is in float32
    for got, wanted in zip(results(), before, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=close)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (mamba, "0 of its 2 layers|a packed pass fails|layers of the kind"),
        (bloom, "attention|packed"),
    ],
)
def test_models_that_cannot_share(make, reason):
    model = make()
    before = model.config._attn_implementation
    with pytest.warns(UserWarning, match=r"takes the plain path, .* slower"):
        handle = prepare(model)
    assert model.config._attn_implementation == before
    assert re.search(reason, handle.fallback_reason)
    prompts, completions = random_groups([3, 5], [[4, 2], [3]])
    result = completion_logps(handle, prompts, completions).logps
    row = 0
    for prompt, members in zip(prompts, completions, strict=True):
        for ids in members:
            logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
            torch.testing.assert_close(result[row, : len(ids)], wanted, rtol=1e-7, atol=1e-9)
            row += 1
    sampling = Sampling(max_new_tokens=6, top_k=20, keep_sets=True, eos_ids=(5,))
    rollout = Engine(handle).generate(prompts, [2, 3], sampling)
    assert rollout.stats["plain"]
    replayed = completion_logps(handle, prompts, rollout.completions(), kept=rollout.kept).logps
    torch.testing.assert_close(rollout.filtered_logps, replayed.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [gpt2, opt])
def test_other_architectures_either_share_or_say_why(make):
    """Whichever path they take, the log-probs are correct."""
    model = make()
    notices: list[str] = []
    handle = prepare(model, notice=notices.append)
    assert (handle.fallback_reason is None) == (not notices)
    prompts, completions = random_groups([3, 5], [[4, 2], [3]])
    result = completion_logps(handle, prompts, completions).logps
    wanted = padded_logps(prepare(make_again(model, make), plain=True), prompts, completions).logps
    torch.testing.assert_close(result, wanted, rtol=1e-7, atol=1e-9)


def make_again(model: PreTrainedModel, make) -> PreTrainedModel:
    copy = make()
    copy.load_state_dict(model.state_dict())
    return copy


def test_a_window_that_does_not_reach_the_attention_is_detected():
    """A short pass does not show it: the configuration has a window, the attention function does not get it."""
    model = tiny("mistral")
    for layer in model.model.layers:
        layer.self_attn.forward = without_window(layer.self_attn)
    notices: list[str] = []
    handle = prepare(model, notice=notices.append)
    assert handle.fallback_reason is not None
    assert "sliding windows" in notices[0]


def without_window(attention: nn.Module):
    original = type(attention).forward

    def forward(*args, **kwargs):
        window, attention.config.sliding_window = attention.config.sliding_window, None
        try:
            return original(attention, *args, **kwargs)
        finally:
            attention.config.sliding_window = window

    return forward


def test_a_head_that_is_not_linear():
    model = tiny("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    notices: list[str] = []
    handle = prepare(model, notice=notices.append)
    assert "its head is a Sequential" in notices[0]
    prompts, completions = random_groups([3], [[4, 2]])
    assert completion_logps(handle, prompts, completions).logps.shape == (2, 4)


def test_the_plain_path_keeps_to_the_token_budget():
    """There every sample includes its prompt: two of 10 + 5 tokens exceed 25."""
    model = tiny("llama")
    prompts, completions = random_groups([10], [[5, 5, 5]])
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    result = completion_logps(prepare(model, plain=True), prompts, completions, token_budget=25)
    assert widths == [15, 15, 15]
    assert result.logps.shape == (3, 5)


def test_a_wrong_head_is_detected():
    """The configuration has a logit scale that the model does not apply."""
    model = tiny("llama")
    model.config.logit_scale = 3.0
    notices: list[str] = []
    prepare(model, notice=notices.append)
    assert "packed and plain log-probs differ" in notices[0]


@pytest.mark.slow
def test_rounding_is_tolerated():
    """In bfloat16, unlikely tokens of a real model move by 0.5; it still shares prompts."""
    model, _ = load_model_and_tokenizer(str(smollm2()), dtype="bfloat16", device="cpu")
    notices: list[str] = []
    assert prepare(model, notice=notices.append).fallback_reason is None
    assert not notices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_than_rounding_is_not_tolerated(dtype):
    """A completion that sees its sibling, fully or by half, is detected in any precision."""
    generator = torch.Generator().manual_seed(0)

    def logits() -> list[torch.Tensor]:
        return [torch.randn(rows, 97, generator=generator, dtype=torch.float32) for rows in (5, 3)]

    plain, noise, wrong = logits(), logits(), logits()
    slightly = [one + 0.06 * other for one, other in zip(plain, noise, strict=True)]
    halfway = [(one + other) / 2 for one, other in zip(plain, wrong, strict=True)]
    mixed = wrong if dtype is torch.bfloat16 else None  # no rounding in full precision
    assert (excess_difference(slightly, plain, mixed) is None) == (dtype is torch.bfloat16)
    for other in (halfway, wrong):
        assert excess_difference(other, plain, mixed) > 0.25


def test_not_a_language_model():
    bert = BertModel(BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(InputError, match="causal language model of transformers, got BertModel"):
        prepare(bert)
    with pytest.raises(InputError, match="got Linear"):
        prepare(nn.Linear(2, 2))


def test_the_plain_path_can_be_requested():
    handle = prepare(tiny("llama"), plain=True)
    assert handle.fallback_reason == "the plain path was requested"
    assert PlainGenerator(handle).generate([[1, 2]], 2, Sampling(max_new_tokens=3)).stats["plain"]


def test_another_attention_implementation_is_replaced():
    """It would ignore the layout, and every completion would silently see its siblings."""
    model = tiny("llama")
    handle = prepare(model)
    prompts, completions = random_groups([5, 9], [[4, 4, 7], [1, 1]])
    wanted = completion_logps(handle, prompts, completions).logps
    model.set_attn_implementation("sdpa")
    assert torch.equal(completion_logps(handle, prompts, completions).logps, wanted)
    model.set_attn_implementation("eager")
    rollout = Engine(handle).generate(prompts, 2, Sampling(max_new_tokens=5))
    again = completion_logps(handle, prompts, rollout.completions()).logps
    torch.testing.assert_close(rollout.logps, again.float(), rtol=0, atol=1e-5)


def test_training_mode_is_kept():
    model = tiny("llama").train()
    prepare(model)
    assert model.training


def test_attention_dropout_is_refused():
    model = tiny("llama")
    model.config.attention_dropout = 0.1
    handle = prepare(model)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()
    with pytest.raises(InputError, match="attention dropout is on"):
        completion_logps(handle, [[1, 2]], [[[3, 4]]])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it, unless warnings are errors
def test_compiled_layers_give_the_same():
    """With and without gradients, with checkpointing, and in decoding; a direct call is not compiled."""
    model = tiny("llama", torch.float32)
    compiled, plain = prepare(model, compile=True), prepare(model, compile=False)
    prompts, completions = random_groups([5, 9], [[4, 4, 7], [1, 1]])
    wanted = completion_logps(plain, prompts, completions).logps
    wanted_gradient = torch.autograd.grad(wanted.sum(), model.lm_head.weight)[0]
    for checkpointing in (False, True):
        if checkpointing:
            model.train()
            model.gradient_checkpointing_enable()
        got = completion_logps(compiled, prompts, completions).logps
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
        got.sum().backward()
        torch.testing.assert_close(model.lm_head.weight.grad, wanted_gradient, rtol=0, atol=1e-3)
        model.zero_grad()
        installed = [layer._compiled_call_impl is not None for layer in model.model.layers]
        assert installed == [checkpointing] * 3
    model.gradient_checkpointing_disable()
    sampling = Sampling(max_new_tokens=6)
    rollout = Engine(compiled).generate(prompts, 3, sampling)
    assert torch.equal(rollout.ids, Engine(plain).generate(prompts, 3, sampling).ids)


def test_without_a_compiler_the_layers_run_uncompiled(monkeypatch):
    model = tiny("llama", torch.float32)

    def broken(function, **options):
        def call(*args, **kwargs):
            raise torch._dynamo.exc.BackendCompilerFailed(function, RuntimeError("no compiler"), [])

        return call

    monkeypatch.setattr(torch, "compile", broken)
    handle = prepare(model, compile=True)
    prompts, completions = random_groups([5], [[4, 4]])
    with pytest.warns(UserWarning, match="torch.compile does not work here, so the model's layers are slower"):
        got = completion_logps(handle, prompts, completions).logps
    wanted = padded_logps(handle, prompts, completions).logps
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    completion_logps(handle, prompts, completions)  # warns only once
