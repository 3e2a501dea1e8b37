"""The KL over the whole vocabulary: the literal computation, however it is packed."""

from __future__ import annotations

import pytest
import torch

import groupwise.training.update.updater as step_module
from groupwise.core.kl import MEAN_RATIO_EPS
from groupwise.core.losses import aggregate
from groupwise.model import LoraSettings
from groupwise.model.handle import prepare
from groupwise.model.logprobs import each_pack, each_states
from groupwise.model.lora import add_lora
from groupwise.training.rollout.advantages import compare
from groupwise.training.update.exact_kl import FACTOR_OF
from groupwise.training.update.minibatch import build_minibatch
from groupwise.training.update.objective import find_loss
from tests.training.factories import (
    assert_same,
    gradient_of,
    last_gradient,
    literal_logps,
    literal_terms,
    made_batch,
    made_recipe,
    made_trainer,
    made_updater,
    perturb,
    small_llama,
)

PROMPTS = (3, 0, 1)
BUDGETS = (1, 40, 10**6)


def tied_llama():
    """The small model with one matrix for its embeddings and its head."""
    model = small_llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def literal_logits(model, batch, temperature):
    """Each sample of `PROMPTS` by itself through the model's own code: the logits of its tokens, one under another."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor(batch.prompts[prompt].ids)
        for sample in range(batch.samples):
            answer = batch.ids[prompt * batch.samples + sample]
            logits = model(input_ids=torch.cat([ids, answer])[None]).logits[0]
            found.append(logits[len(ids) - 1 : -1] / temperature)
    return torch.cat(found)


def literal_kl(logits, ref_logits, form):
    policy, reference = logits.softmax(-1), ref_logits.softmax(-1)
    kl = (policy * (policy.log() - reference.log())).sum(-1)
    return kl if form == "full" else kl * (policy / (reference + MEAN_RATIO_EPS)).mean(-1)


def moved(settings, *, model=None, plain=False):
    """A policy that has moved away from the reference, a mini-batch, and the reference's logits."""
    now = made_recipe({"loss.kl_coef": 0.3, "sampling.temperature": 0.7, **settings})
    batch = made_batch(cut=[1, 3, 12], kept=now.masks.keep_sampling_mask)
    group_advantages = compare(batch, now, [1.0])
    model = small_llama() if model is None else model
    updater = made_updater(now, model=prepare(model, plain=True) if plain else model, reference=True)
    with torch.no_grad():
        reference = literal_logits(model, batch, now.sampling.temperature)
        ref_logps = literal_logps(updater.handle, batch, PROMPTS, now)["logps"]
    minibatch = build_minibatch(batch, group_advantages, PROMPTS, now)
    updater.precompute_logps(minibatch, now, old=True)
    with torch.no_grad():
        old = literal_logps(updater.handle, batch, PROMPTS, now)["logps"]
    perturb(model, size=0.03)
    return now, batch, group_advantages, updater, minibatch, reference, {"old": old, "ref": ref_logps}


def check_against_literal(settings, form, **options):
    now, batch, group_advantages, updater, minibatch, reference, given = moved({"loss.kl": form, **settings}, **options)
    model = updater.handle.model
    rest = now.with_settings({"loss.kl_coef": 0.0})
    terms = literal_terms(updater.handle, batch, group_advantages, PROMPTS, rest, **given)
    per_token = literal_kl(literal_logits(model, batch, now.sampling.temperature), reference, form)
    measured = literal_kl(literal_logits(model, batch, now.sampling.temperature), reference, "full").detach()
    mask = literal_logps(updater.handle, batch, PROMPTS, now)["mask"]
    rows = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, per_token)
    how = find_loss(now.loss.name).aggregation
    terms["kl"] = 0.3 * aggregate(rows, mask, how, max_length=now.sampling.max_new_tokens)
    wanted = gradient_of(model, torch.stack(list(terms.values())).sum())
    for budget in BUDGETS:
        updater.token_budget = budget
        found = updater.update(minibatch, now)
        assert_same(last_gradient(updater), wanted)
        assert found.values["kl"] == pytest.approx(float(terms["kl"].detach()), rel=1e-9)
        assert found.statistics["kl"] == pytest.approx(float(measured.mean()), rel=1e-9)  # without the factor
        assert found.statistics["kl"] > 1e-4
        assert found.values["policy"] == pytest.approx(float(terms["policy"].detach()), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("form", FACTOR_OF)
@pytest.mark.parametrize("loss", ["grpo", "reinforce", "dapo"])
def test_it_is_the_literal_one_however_it_is_packed(form, loss):
    check_against_literal({"loss.name": loss}, form)


@pytest.mark.parametrize("form", FACTOR_OF)
def test_and_where_the_head_is_the_embeddings(form):
    """The reference's head is its own matrix, not the one that the policy has moved."""
    check_against_literal({"loss.name": "grpo"}, form, model=tied_llama())


@pytest.mark.parametrize("form", FACTOR_OF)
def test_and_on_the_plain_path(form):
    check_against_literal({"loss.name": "grpo"}, form, plain=True)


def checkpointed_llama():
    """The small model, of which the backward pass computes each layer again."""
    model = small_llama().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def llama_with_a_frozen_head():
    model = small_llama()
    model.lm_head.weight.requires_grad_(False)
    return model


def llama_with_an_adapter(*targets):
    """Only the adapter is trained: the reference has no weights of its own but the adapter's."""
    return add_lora(small_llama(), LoraSettings(rank=2, targets=targets)).get_base_model()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    "make", [checkpointed_llama, llama_with_a_frozen_head, lambda: llama_with_an_adapter("q_proj")]
)
def test_and_whatever_of_the_model_is_trained_or_computed_again(make, plain):
    check_against_literal({"loss.name": "grpo"}, "full", model=make(), plain=plain)


def test_and_with_an_adapter_on_the_head():
    """Such a head is no plain matrix, so that the model takes the plain path by itself."""
    model = llama_with_an_adapter("lm_head", "q_proj")
    handle = prepare(model, notice=lambda text: None)
    assert "its head is a" in handle.fallback_reason
    check_against_literal({"loss.name": "grpo"}, "full", model=model, plain=True)


def test_and_with_the_documents_off_policy_mask_and_all_its_terms():
    settings = {"loss.name": "reinforce", "loss.denominator": "policy_mask", "masks.off_policy": "reference_drift"}
    check_against_literal({**settings, "masks.off_policy_threshold": 0.2}, "full_ratio_weighted")


def test_kept_sets_narrow_the_policy_and_not_the_kl():
    check_against_literal({"masks.keep_sampling_mask": True, "sampling.top_k": 5}, "full")


def test_its_gradient_by_itself_is_that_of_the_sum():
    now, _, _, updater, minibatch, _, _ = moved({"loss.kl": "full", "loss.entropy_coef": 0.2})
    updater.update(minibatch, now)
    together = last_gradient(updater)
    found = updater.update(minibatch, now, compare_terms=True)
    assert_same(last_gradient(updater), together, 1e-12)
    assert found.terms["grad_norm/kl"] > 0


def test_to_oneself_it_is_zero():
    now = made_recipe({"loss.kl_coef": 0.3, "loss.kl": "full_ratio_weighted"})
    batch = made_batch()
    updater = made_updater(now, reference=True, budget=40)
    found = updater.update(build_minibatch(batch, compare(batch, now, [1.0]), range(4), now), now)
    assert found.values["kl"] == pytest.approx(0.0, abs=1e-12)


def test_no_log_probs_of_the_reference_are_computed_beside_it(monkeypatch):
    """They would cost a pass over the batch for nothing, unless the off-policy mask asks for them."""
    now, _, _, updater, minibatch, _, _ = moved({"loss.kl": "full"})
    assert minibatch.ref_logps is None
    other = moved({"loss.kl": "full", "masks.off_policy": "reference_drift"})[4]
    assert other.ref_logps is not None
    seen = []
    real = step_module.each_pack
    monkeypatch.setattr(
        step_module, "each_pack", lambda *a, **options: seen.append(options["with_states"]) or real(*a, **options)
    )
    updater.update(minibatch, now)
    updater.update(minibatch, now.with_settings({"loss.kl_coef": 0.0}))
    assert seen == [True, False]


def test_the_states_of_each_pack_are_those_behind_its_log_probs():
    handle = prepare(small_llama())
    batch = made_batch()
    prompts = [prompt.ids for prompt in batch.prompts]
    completions = [batch.ids[4 * n : 4 * n + 4] for n in range(4)]
    packs = list(each_pack(handle, prompts, completions, with_states=True, token_budget=30))
    states = list(each_states(handle, prompts, completions, token_budget=30))
    assert len(packs) == len(states) > 1
    for (_, found), own in zip(packs, states, strict=True):
        assert torch.equal(found.states, own)
        assert len(own) == int(found.mask.sum())
    assert next(each_pack(handle, prompts, completions))[1].states is None


def test_in_a_run(tmp_path):
    settings = {"loss.kl_coef": 0.1, "loss.kl": "full", "train.steps": 3, "optimizer.learning_rate": 1e-2}
    with made_trainer(tmp_path, {**settings, "train.iterations": 2}) as trainer:
        kls = [report.metrics["kl"] for report in trainer.steps()]
    assert 0 < kls[0] < kls[1]  # the mean over two updates, of which the first is at 0
    assert kls[2] > 1e-6
