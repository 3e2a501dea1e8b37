"""The KL over the full vocabulary equals the naive computation, however samples are packed."""

from __future__ import annotations

import pytest
import torch

import groupwise.training.update.updater as updater_module
from groupwise.config import with_settings
from groupwise.core.aggregation import aggregate
from groupwise.core.kl import MEAN_RATIO_EPS
from groupwise.model import LoraSettings
from groupwise.model.handle import prepare
from groupwise.model.logprobs import iter_pack_states, iter_packs
from groupwise.model.lora import add_lora
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.update.exact_kl import EXACT_KL_FACTORS
from groupwise.training.update.minibatch import build_minibatch
from groupwise.training.update.objective import find_loss
from tests.training.factories import (
    BUDGETS,
    PROMPTS,
    assert_same,
    check_update,
    last_gradient,
    make_batch,
    make_trainer,
    make_updater,
    moved_minibatch,
    naive_logps,
    naive_terms,
    short_recipe,
    small_llama,
)


def tied_llama():
    model = small_llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def naive_logits(model, batch, temperature):
    """Each sample of `PROMPTS` computed on its own by the unmodified model: the logits of its tokens, stacked."""
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor(batch.prompts[prompt].ids)
        for sample in range(batch.samples):
            completion = batch.ids[prompt * batch.samples + sample]
            logits = model(input_ids=torch.cat([ids, completion])[None]).logits[0]
            rows.append(logits[len(ids) - 1 : -1] / temperature)
    return torch.cat(rows)


def naive_kl(logits, ref_logits, form):
    policy, reference = logits.softmax(-1), ref_logits.softmax(-1)
    kl = (policy * (policy.log() - reference.log())).sum(-1)
    return kl if form == "full" else kl * (policy / (reference + MEAN_RATIO_EPS)).mean(-1)


def moved(settings, *, model=None, plain=False):
    """A policy that differs from the reference, a mini-batch, and the reference's logits."""
    settings = {"loss.kl_coef": 0.3, "sampling.temperature": 0.7, **settings}
    model = small_llama() if model is None else model
    with torch.no_grad():
        reference = naive_logits(model, make_batch(), settings["sampling.temperature"])
    return *moved_minibatch(settings, model=prepare(model, plain=True) if plain else model), reference


def check_against_naive(settings, form, *, budgets=(40,), **options):
    recipe, batch, group_advantages, updater, minibatch, inputs, reference = moved(
        {"loss.kl": form, **settings}, **options
    )
    model = updater.handle.model
    rest = with_settings(recipe, {"loss.kl_coef": 0.0})
    terms = naive_terms(updater.handle, batch, group_advantages, PROMPTS, rest, **inputs)
    per_token = naive_kl(naive_logits(model, batch, recipe.sampling.temperature), reference, form)
    measured = naive_kl(naive_logits(model, batch, recipe.sampling.temperature), reference, "full").detach()
    mask = naive_logps(updater.handle, batch, PROMPTS, recipe)["mask"]
    rows = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, per_token)
    aggregation = find_loss(recipe.loss.name).aggregation if recipe.loss.kl_aggregation == "loss" else "token_mean"
    terms["kl"] = 0.3 * aggregate(rows, mask, aggregation, max_length=recipe.sampling.max_new_tokens)
    for result in check_update(updater, minibatch, recipe, terms, budgets):
        assert result.statistics["kl"] == pytest.approx(float(measured.mean()), rel=1e-9)  # without the factor
        assert result.statistics["kl"] > 1e-4
        if form == "full_ratio_weighted":
            assert result.statistics["kl_ratio_weighted"] == pytest.approx(float(per_token.detach().mean()), rel=1e-9)


@pytest.mark.parametrize("form", EXACT_KL_FACTORS)
@pytest.mark.parametrize(
    "loss", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reinforce", "dapo"))]
)
def test_it_is_the_naive_kl_however_samples_are_packed(form, loss):
    check_against_naive({"loss.name": loss}, form, budgets=BUDGETS)


@pytest.mark.parametrize("form", EXACT_KL_FACTORS)
def test_its_mean_over_tokens(form):
    check_against_naive({"loss.name": "reinforce", "loss.kl_aggregation": "token_mean"}, form, budgets=BUDGETS)


def test_tied_embeddings():
    """The reference has its own head, not the policy's."""
    check_against_naive({"loss.name": "grpo"}, "full_ratio_weighted", model=tied_llama())


@pytest.mark.parametrize("form", EXACT_KL_FACTORS)
def test_a_model_without_packing(form):
    check_against_naive({"loss.name": "grpo"}, form, plain=True)


def checkpointed_llama():
    model = small_llama().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def llama_with_a_frozen_head():
    model = small_llama()
    model.lm_head.weight.requires_grad_(False)
    return model


def llama_with_an_adapter(*targets):
    return add_lora(small_llama(), LoraSettings(rank=2, targets=targets)).get_base_model()


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "make", [checkpointed_llama, llama_with_a_frozen_head, lambda: llama_with_an_adapter("q_proj")]
)
def test_gradient_checkpointing_frozen_heads_and_adapters(make, plain):
    check_against_naive({"loss.name": "grpo"}, "full", model=make(), plain=plain)


def test_an_adapter_on_the_head():
    """Such a head is not a linear layer, so the model falls back to the padded computation."""
    model = llama_with_an_adapter("lm_head", "q_proj")
    handle = prepare(model, notice=lambda text: None)
    assert "its head is a" in handle.fallback_reason
    check_against_naive({"loss.name": "grpo"}, "full", model=model, plain=True)


def test_with_the_reference_drift_mask_and_its_denominator():
    settings = {"loss.name": "reinforce", "loss.denominator": "policy_mask", "masks.off_policy": "reference_drift"}
    check_against_naive({**settings, "masks.off_policy_threshold": 0.2}, "full_ratio_weighted")


def test_kept_sets_restrict_the_policy_but_not_the_kl():
    check_against_naive({"masks.keep_sampling_mask": True, "sampling.top_k": 5}, "full")


def test_the_gradients_of_separate_terms_add_up():
    recipe, _, _, updater, minibatch, _, _ = moved({"loss.kl": "full", "loss.entropy_coef": 0.2})
    updater.update(minibatch, recipe)
    together = last_gradient(updater)
    result = updater.update(minibatch, recipe, log_term_gradients=True)
    assert_same(last_gradient(updater), together, 1e-12)
    assert result.term_gradients["grad_norm/kl"] > 0


def test_the_kl_to_the_same_policy_is_zero():
    recipe = short_recipe({"loss.kl_coef": 0.3, "loss.kl": "full_ratio_weighted"})
    batch = make_batch()
    updater = make_updater(recipe, reference=True, budget=40)
    result = updater.update(
        build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe), recipe
    )
    assert result.values["kl"] == pytest.approx(0.0, abs=1e-12)


def test_the_references_log_probs_are_not_computed(monkeypatch):
    """Unless the off-policy mask needs them."""
    recipe, _, _, updater, minibatch, _, _ = moved({"loss.kl": "full"})
    assert minibatch.ref_logps is None
    other = moved({"loss.kl": "full", "masks.off_policy": "reference_drift"})[4]
    assert other.ref_logps is not None
    seen = []
    real = updater_module.iter_packs
    monkeypatch.setattr(
        updater_module, "iter_packs", lambda *a, **options: seen.append(options["with_states"]) or real(*a, **options)
    )
    updater.update(minibatch, recipe)
    updater.update(minibatch, with_settings(recipe, {"loss.kl_coef": 0.0}))
    assert seen == [True, False]


def test_the_states_of_each_pack_belong_to_its_log_probs():
    handle = prepare(small_llama())
    batch = make_batch()
    prompts = [prompt.ids for prompt in batch.prompts]
    completions = [batch.ids[4 * n : 4 * n + 4] for n in range(4)]
    packs = list(iter_packs(handle, prompts, completions, with_states=True, token_budget=30))
    states = [states for _, states in iter_pack_states(handle, prompts, completions, token_budget=30)]
    assert len(packs) == len(states) > 1
    for (_, pack), pack_states in zip(packs, states, strict=True):
        assert torch.equal(pack.states, pack_states)
        assert len(pack_states) == int(pack.mask.sum())
    assert next(iter_packs(handle, prompts, completions))[1].states is None


def test_in_a_run(tmp_path):
    settings = {"loss.kl_coef": 0.1, "loss.kl": "full", "train.steps": 3, "optimizer.learning_rate": 1e-2}
    with make_trainer(tmp_path, {**settings, "train.iterations": 2}) as trainer:
        kls = [report.metrics["kl"] for report in trainer.steps()]
    assert 0 < kls[0] < kls[1]  # a mean over two updates; the first one has KL 0
    assert kls[2] > 1e-6
