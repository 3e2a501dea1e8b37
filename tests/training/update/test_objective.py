"""The objective: values of its terms by hand, statistics, custom terms and custom losses."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.config import make_recipe, with_settings
from groupwise.core import LOSSES, Loss, TokenTerm, kl_estimate
from groupwise.core.losses import clipped_loss
from groupwise.errors import ConfigError
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.store.model_card import model_card
from groupwise.training.update.minibatch import build_minibatch
from groupwise.training.update.objective import (
    TERMS,
    MicroBatch,
    Objective,
    ObjectiveTerm,
    Totals,
    active_terms,
    find_loss,
    needs_reference,
    samples_completions,
)
from tests.training.factories import (
    PROMPTS,
    assert_same,
    gradient_of,
    last_gradient,
    make_batch,
    make_trainer,
    make_updater,
    moved_minibatch,
    naive_logps,
    naive_terms,
    perturb,
    short_recipe,
)


def small_micro_batch(**changes):
    """Two samples, of two tokens and one token."""
    values = {
        "logps": torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], dtype=torch.float64, requires_grad=True),
        "mask": torch.tensor([[True, True], [True, False]]),
        "advantages": torch.tensor([2.0, -1.0]),
        "policy_mask": None,
        "old_logps": None,
        "ref_logps": None,
        "entropy": None,
    }
    return MicroBatch(**{**values, **changes})


# --- values by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # The micro-batch has 3 of the mini-batch's 10 tokens and 2 of its 4 sequences; on-policy a token's loss is −A.
        ({"loss.name": "dapo"}, -(2 * 2 - 1) / 10),
        ({"loss.name": "grpo"}, -(2 - 1) / 4),
        ({"loss.name": "luspo"}, -(2 * 2 - 1) / 4),
        ({"loss.name": "dr_grpo"}, -(2 * 2 - 1) / (4 * 8)),
        ({"loss.name": "reinforce"}, -(2 * (-1 - 2) - 1 * -3) / 4),
    ],
)
def test_a_micro_batch_has_its_share_of_the_policy_term(settings, wanted):
    recipe = short_recipe(settings)
    objective = Objective(recipe, find_loss(recipe.loss.name), Totals(10, 4, 10, 4, 3, 2))
    values, statistics = objective.terms(small_micro_batch())
    assert float(values["policy"].detach()) == pytest.approx(wanted, rel=1e-9)
    assert set(values) == {"policy"}
    assert float(statistics["ratio"]) == pytest.approx(1.0)


def test_the_policy_term_may_have_a_smaller_denominator_than_the_others():
    """The masks left 5 tokens; the KL and the entropy are still means over all 10."""
    recipe = short_recipe(
        {"loss.denominator": "policy_mask", "loss.kl_coef": 0.5, "loss.kl": "k1", "loss.entropy_coef": 2}
    )
    objective = Objective(recipe, find_loss("dapo"), Totals(10, 4, 5, 2, 3, 2))
    micro_batch = small_micro_batch(
        policy_mask=torch.tensor([[True, True], [False, False]]),
        ref_logps=torch.tensor([[-1.5, -2.0], [-2.0, 0.0]], dtype=torch.float64),
        entropy=torch.tensor([[1.0, 2.0], [4.0, math.nan]], dtype=torch.float64),
    )
    values, statistics = objective.terms(micro_batch)
    assert float(values["policy"].detach()) == pytest.approx(-(2 * 2) / 5)
    assert float(values["kl"].detach()) == pytest.approx(0.5 * (0.5 + 0.0 - 1.0) / 10)
    assert float(values["entropy"].detach()) == pytest.approx(-2 * (1 + 2 + 4) / 10)
    assert float(statistics["kl"]) == pytest.approx((0.5 + 0.0 - 1.0) / 10)
    assert float(statistics["entropy"]) == pytest.approx((1 + 2 + 4) / 3)
    assert float(statistics["ratio"]) == pytest.approx(1.0)


def test_the_kl_of_masked_samples_is_still_a_mean():
    recipe = short_recipe({"loss.denominator": "policy_mask", "masks.truncated": True, "loss.kl_coef": 0.5})
    batch = make_batch(cut=range(16))
    updater = make_updater(recipe, reference=True)
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
    assert minibatch.totals.policy_tokens == 0
    updater.precompute_logps(minibatch, recipe, old=False)
    perturb(updater.handle.model, size=0.02)
    result = updater.update(minibatch, recipe)
    assert result.values["policy"] == 0.0
    assert result.values["kl"] == pytest.approx(0.5 * result.statistics["kl"], rel=1e-9)
    assert 0 < result.values["kl"] < 1


# --- KL and entropy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_the_kl_is_the_estimate_of_the_core(estimator):
    """The term is aggregated like the loss, the metric is a mean over all tokens."""
    recipe, batch, _, updater, minibatch, inputs = moved_minibatch(
        {"loss.name": "grpo", "loss.kl_coef": 0.3, "loss.kl": estimator}, budget=40
    )
    with torch.no_grad():
        naive = naive_logps(updater.handle, batch, PROMPTS, recipe)
    mask = naive["mask"]
    kl = kl_estimate(naive["logps"], inputs["ref"], estimator=estimator, old_logps=inputs["old"], mask=mask)
    result = updater.update(minibatch, recipe)
    assert result.statistics["kl"] == pytest.approx(float(kl[mask].mean()), rel=1e-9)
    assert result.values["kl"] == pytest.approx(0.3 * float((kl.sum(1) / mask.sum(1)).mean()), rel=1e-9)
    assert abs(result.statistics["kl"]) > 1e-5


@pytest.mark.parametrize("loss", ["reinforce", "grpo", "dr_grpo"])
def test_the_mean_of_the_kl_over_tokens(loss):
    """Whatever the aggregation of the loss: value, gradient, and the same in any packing."""
    recipe, batch, group_advantages, updater, minibatch, inputs = moved_minibatch(
        {"loss.name": loss, "loss.kl_coef": 0.3, "loss.kl": "unbiased", "loss.kl_aggregation": "token_mean"}, budget=40
    )
    naive = naive_logps(updater.handle, batch, PROMPTS, recipe)
    kl = kl_estimate(naive["logps"], inputs["ref"], estimator="unbiased", old_logps=inputs["old"], mask=naive["mask"])
    wanted = 0.3 * kl[naive["mask"]].mean()
    policy = naive_terms(
        updater.handle, batch, group_advantages, PROMPTS, with_settings(recipe, {"loss.kl_coef": 0.0}), **inputs
    )["policy"]
    gradient = gradient_of(updater.handle.model, policy + wanted)
    result = updater.update(minibatch, recipe)
    assert result.values["kl"] == pytest.approx(float(wanted.detach()), rel=1e-9)
    assert result.values["kl"] == pytest.approx(0.3 * result.statistics["kl"], rel=1e-9)
    assert_same(last_gradient(updater), gradient)


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [("loss", [[1 / 2, 1 / 2], [1 / 2, 0]]), ("token_mean", [[1 / 3, 1 / 3], [1 / 3, 0]])],
)
def test_the_weight_of_the_kl_does_not_grow_with_the_length(aggregation, weights):
    """REINFORCE sums over a sequence, so a KL aggregated like it grows with the length. By hand: k1 = logp − ref."""
    settings = {"loss.name": "reinforce", "loss.kl_coef": 0.01, "loss.kl": "k1", "loss.kl_aggregation": aggregation}
    recipe = short_recipe(settings)
    ref = torch.tensor([[-1.5, -2.5], [-2.0, 0.0]], dtype=torch.float64)
    micro_batch = small_micro_batch(ref_logps=ref)
    values, statistics = Objective(recipe, find_loss("reinforce"), Totals(3, 2, 3, 2, 3, 2)).terms(micro_batch)
    per_token, weights = [[0.5, 0.5], [-1.0, 0.0]], torch.tensor(weights, dtype=torch.float64)
    by_hand = 0.01 * float((torch.tensor(per_token, dtype=torch.float64) * weights).sum())
    assert float(values["kl"].detach()) == pytest.approx(by_hand, rel=1e-9)
    assert float(statistics["kl"]) == pytest.approx((0.5 + 0.5 - 1.0) / 3, abs=1e-12)
    (gradient,) = torch.autograd.grad(values["kl"], micro_batch.logps)
    assert torch.allclose(gradient, 0.01 * weights)


@pytest.mark.parametrize(
    "estimator", ["k1", "unbiased", *(pytest.param(name, marks=pytest.mark.slow) for name in ("k2", "k3"))]
)
def test_the_kl_to_the_same_policy_is_zero_and_has_no_gradient(estimator):
    """Except for k1, whose gradient is that of the log-probs."""
    recipe, batch, group_advantages, updater, minibatch, inputs = moved_minibatch(
        {"loss.kl_coef": 0.3, "loss.kl": estimator}, size=0.0, budget=1
    )
    result = updater.update(minibatch, recipe)
    assert result.values["kl"] == pytest.approx(0.0, abs=1e-12)
    assert result.statistics["kl"] == pytest.approx(0.0, abs=1e-12)
    terms = naive_terms(updater.handle, batch, group_advantages, PROMPTS, recipe, **inputs)
    with_kl = gradient_of(updater.handle.model, terms["policy"] + (terms["kl"] if estimator == "k1" else 0.0))
    assert_same(last_gradient(updater), with_kl)


def test_the_kl_starts_at_zero_in_a_run_and_grows(tmp_path):
    settings = {"loss.kl_coef": 0.1, "train.steps": 3, "optimizer.learning_rate": 1e-2}
    with make_trainer(tmp_path, settings) as trainer:
        kls = [report.metrics["kl"] for report in trainer.steps()]
    assert kls[0] == pytest.approx(0.0, abs=1e-9)
    assert kls[1] > 1e-6
    assert kls[2] > 1e-6


def test_the_reference_is_refreshed_in_a_run(tmp_path):
    """After a refresh the next step's KL is 0 again."""
    settings = {"loss.kl_coef": 0.1, "train.steps": 4, "optimizer.learning_rate": 1e-2, "reference.refresh_every": 2}
    with make_trainer(tmp_path, settings) as trainer:
        reports = list(trainer.steps())
    kls = [report.metrics["kl"] for report in reports]
    assert kls[0] == pytest.approx(0.0, abs=1e-9)
    assert kls[2] == pytest.approx(0.0, abs=1e-9)
    assert min(kls[1], kls[3]) > 1e-6
    assert [report.metrics["reference_refreshes"] for report in reports] == [0, 1, 1, 2]


def test_the_entropy_bonus_raises_the_entropy():
    recipe = short_recipe({"loss.entropy_coef": 1.0})
    batch = make_batch([[1.0] * 4] * 4)  # equal rewards: no other gradient
    updater = make_updater(recipe, lr=0.05)
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
    entropies = [updater.update(minibatch, recipe).statistics["entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 1e-3


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "denominator", "kl"),
    [
        ("dapo", "policy_mask", 0.1),
        ("gspo", "completion_mask", 0.0),
        pytest.param("dapo", "completion_mask", 0.0, marks=pytest.mark.slow),
        pytest.param("gspo", "policy_mask", 0.1, marks=pytest.mark.slow),
    ],
)
def test_on_policy_the_ratio_is_one(loss, denominator, kl):
    """Whatever is skipped or masked, and however many packs there are."""
    recipe = short_recipe(
        {"loss.name": loss, "loss.denominator": denominator, "loss.kl_coef": kl, "masks.truncated": True}
    )
    batch = make_batch(cut=[1, 3])
    for old in (False, True):
        updater = make_updater(recipe, budget=1, reference=True)
        minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
        updater.precompute_logps(minibatch, recipe, old=old)
        result = updater.update(minibatch, recipe)
        assert result.statistics["ratio"] == pytest.approx(1.0, abs=1e-12)
        assert result.statistics["approx_kl"] == pytest.approx(0.0, abs=1e-12)
        assert result.statistics["clip_fraction_low"] == result.statistics["clip_fraction_high"] == 0.0


def test_the_entropy_is_a_mean_over_computed_tokens():
    recipe = short_recipe()
    batch = make_batch()
    updater = make_updater(recipe, budget=20)
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
    with torch.no_grad():
        naive = naive_logps(updater.handle, batch, range(4), recipe)
    wanted = naive["entropy"][minibatch.samples][naive["mask"][minibatch.samples]].mean()
    assert updater.update(minibatch, recipe).statistics["entropy"] == pytest.approx(float(wanted), rel=1e-9)


@pytest.mark.parametrize(("loss", "low", "high", "everything"), [("dapo", 0.02, 0.03, 67), ("gspo", 1e-3, 2e-3, 16)])
def test_clip_fractions_are_shares_of_all_tokens_or_sequences(loss, low, high, everything):
    """In the second update: tokens (or sequences) beyond the clipping bounds, counted by hand."""
    recipe = short_recipe({"loss.name": loss, "loss.clip_low": low, "loss.clip_high": high})
    batch = make_batch()
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    updater = make_updater(recipe, budget=30, lr=0.05)
    minibatch = build_minibatch(batch, group_advantages, range(4), recipe)
    updater.precompute_logps(minibatch, recipe, old=True)
    with torch.no_grad():
        before = naive_logps(updater.handle, batch, range(4), recipe)
    assert updater.update(minibatch, recipe).statistics["ratio"] == pytest.approx(1.0, abs=1e-6)
    with torch.no_grad():
        after = naive_logps(updater.handle, batch, range(4), recipe)
    result = updater.update(minibatch, recipe)
    present, difference = before["mask"], after["logps"] - before["logps"]
    if loss == "gspo":
        difference = torch.where(present, difference, 0.0).sum(1, keepdim=True) / present.sum(1, keepdim=True)
        present = torch.ones_like(difference, dtype=torch.bool)
    ratio, advantages = difference.exp(), group_advantages.advantages[:, None]
    below = int(((ratio < 1 - low) & (advantages < 0) & present).sum())
    above = int(((ratio > 1 + high) & (advantages > 0) & present).sum())
    assert below
    assert above
    assert result.statistics["clip_fraction_low"] == pytest.approx(below / everything)
    assert result.statistics["clip_fraction_high"] == pytest.approx(above / everything)
    computed = present & torch.isin(torch.arange(16), torch.tensor(minibatch.samples))[:, None]
    assert not bool(computed.all())
    assert result.statistics["ratio"] == pytest.approx(float(ratio[computed].mean()), rel=1e-9)
    assert abs(result.statistics["ratio"] - 1) > 1e-5


def test_importance_weights_are_the_capped_ratio_to_the_sampler():
    recipe = short_recipe({"loss.importance_cap": 1.1})
    batch = make_batch()
    updater = make_updater(recipe, budget=30)
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
    with torch.no_grad():
        naive = naive_logps(updater.handle, batch, range(4), recipe)
    updater.precompute_logps(minibatch, recipe, old=False)
    assert minibatch.old_logps is None
    for row, sample in enumerate(minibatch.samples):
        for place in range(len(batch.ids[sample])):
            ratio = math.exp(float(naive["logps"][sample, place]) - float(batch.sampler_logps[sample][place]))
            assert float(minibatch.weights[row, place]) == pytest.approx(min(ratio, 1.1), rel=1e-6)
    on_policy = -(minibatch.advantages.double()[:, None] * minibatch.weights * minibatch.mask).sum() / 67
    assert updater.update(minibatch, recipe).values["policy"] == pytest.approx(float(on_policy), rel=1e-6)


# --- gradients of separate terms --------------------------------------------------------------------------------------


def test_gradients_of_separate_terms_are_the_naive_ones_and_add_up():
    settings = {"loss.kl_coef": 0.3, "loss.kl": "k2", "loss.entropy_coef": 0.2}
    recipe, batch, group_advantages, updater, minibatch, inputs = moved_minibatch(settings, budget=40)
    terms = naive_terms(updater.handle, batch, group_advantages, PROMPTS, recipe, **inputs)
    model = updater.handle.model
    flat = {}
    for name in terms:
        again = naive_terms(updater.handle, batch, group_advantages, PROMPTS, recipe, **inputs)
        flat[name] = torch.cat([g.flatten() for g in gradient_of(model, again[name]).values()])
    together = updater.update(minibatch, recipe)
    wanted = last_gradient(updater)
    result = updater.update(minibatch, recipe, check=True, log_term_gradients=True)
    assert_same(last_gradient(updater), wanted, 1e-12)
    for name, gradient in flat.items():
        assert result.term_gradients[f"grad_norm/{name}"] == pytest.approx(float(gradient.norm()), rel=1e-9)
        assert result.values[name] == pytest.approx(together.values[name], rel=1e-9)
    for one, other in (("policy", "kl"), ("policy", "entropy"), ("kl", "entropy")):
        cosine = float(flat[one] @ flat[other] / flat[one].norm() / flat[other].norm())
        assert result.term_gradients[f"grad_cosine/{one}_{other}"] == pytest.approx(cosine, rel=1e-6)
        assert abs(cosine) > 1e-4
    assert set(result.term_gradients) == {f"grad_norm/{name}" for name in flat} | {
        "grad_cosine/policy_kl",
        "grad_cosine/policy_entropy",
        "grad_cosine/kl_entropy",
    }
    assert result.statistics == pytest.approx(together.statistics, rel=1e-9)
    assert result.mismatch.tokens == int(minibatch.mask.sum())
    assert together.term_gradients == {}


def test_term_gradients_are_logged_every_n_steps(tmp_path):
    settings = {"train.log_term_gradients_every": 2, "train.steps": 3, "loss.entropy_coef": 0.01}
    with make_trainer(tmp_path, settings) as trainer:
        reports = list(trainer.steps())
    assert ["grad_norm/policy" in report.metrics for report in reports] == [True, False, True]
    assert ["grad_cosine/policy_entropy" in report.metrics for report in reports] == [True, False, True]


def test_the_cosine_with_a_zero_gradient_is_zero():
    recipe = short_recipe({"loss.kl_coef": 0.3, "loss.kl": "k2"})
    batch = make_batch()
    updater = make_updater(recipe, reference=True)
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
    updater.precompute_logps(minibatch, recipe, old=False)
    result = updater.update(minibatch, recipe, log_term_gradients=True)
    assert result.term_gradients["grad_norm/kl"] == pytest.approx(0.0, abs=1e-9)
    assert result.term_gradients["grad_cosine/policy_kl"] == pytest.approx(0.0, abs=1e-3)


# --- the registry of terms --------------------------------------------------------------------------------------------


def length_penalty(objective, micro_batch, weight):
    """A custom term: weight · the mean squared log-prob of the mini-batch's tokens."""
    weights = objective.token_weights(micro_batch, "token_mean")
    value = (micro_batch.logps.square() * weights).sum()
    return weight * value, {"squared_logp": value.detach()}


def ref_distance(objective, micro_batch, weight):
    """A custom term that needs the reference."""
    if not weight:
        return None
    difference = micro_batch.logps - micro_batch.ref_logps
    return weight * (difference.square() * objective.token_weights(micro_batch)).sum(), {}


def test_the_built_in_terms():
    assert list(TERMS) == ["policy", "kl", "entropy", "preference", "distillation"]
    assert all(name == term.name for name, term in TERMS.items())
    recipe = short_recipe({"loss.kl_coef": 0.1})
    assert [term.name for term in active_terms(recipe)] == ["policy", "kl"]
    assert [term.name for term in active_terms(recipe, ["loss.entropy_coef"])] == ["policy", "kl", "entropy"]


@pytest.mark.parametrize("weight", [0.3, "loss.entropy_coef"])
def test_a_custom_term_is_part_of_the_gradient_in_every_step(monkeypatch, weight):
    """Also in steps that compute the gradient of each term separately."""
    monkeypatch.setitem(TERMS, "length", ObjectiveTerm("length", length_penalty, weight))
    recipe, _, _, updater, minibatch, _ = moved_minibatch({"loss.entropy_coef": 0.2}, budget=40, naive=False)
    together = updater.update(minibatch, recipe)
    wanted = last_gradient(updater)
    separate = updater.update(minibatch, recipe, log_term_gradients=True)
    assert_same(last_gradient(updater), wanted, 1e-12)
    assert separate.values == pytest.approx(together.values, rel=1e-9)
    assert separate.statistics == pytest.approx(together.statistics, rel=1e-9)
    assert together.statistics["squared_logp"] > 0
    assert together.values["length"] == pytest.approx(
        together.statistics["squared_logp"] * (0.3 if weight == 0.3 else 0.2), rel=1e-9
    )
    assert separate.term_gradients["grad_norm/length"] > 0
    assert "grad_cosine/policy_length" in separate.term_gradients
    monkeypatch.delitem(TERMS, "length")
    updater.update(minibatch, recipe)
    assert any(not torch.allclose(gradient, wanted[name]) for name, gradient in last_gradient(updater).items())


def test_a_custom_term_decides_what_is_computed(monkeypatch):
    """All samples, and the reference's log-probs."""
    batch, recipe = make_batch(), short_recipe()
    advantages = compute_group_advantages(batch, recipe, [1.0])
    assert len(build_minibatch(batch, advantages, range(4), recipe)) < 16
    assert not needs_reference(recipe)
    term = ObjectiveTerm("distance", ref_distance, 0.5, needs_reference=True, needs_all_samples=True)
    monkeypatch.setitem(TERMS, "distance", term)
    minibatch = build_minibatch(batch, advantages, range(4), recipe)
    assert len(minibatch) == 16
    assert needs_reference(recipe)
    updater = make_updater(recipe, reference=True)
    updater.precompute_logps(minibatch, recipe, old=False)
    perturb(updater.handle.model, size=0.02)
    result = updater.update(minibatch, recipe)
    assert result.values["distance"] > 0
    assert "kl" not in result.values


def test_a_custom_term_in_a_run(tmp_path, monkeypatch):
    """The reference is created for it, and logging term gradients does not change the result."""
    term = ObjectiveTerm("distance", ref_distance, 0.5, needs_reference=True, needs_all_samples=True, tag="distance")
    monkeypatch.setitem(TERMS, "distance", term)
    norms = {}
    for every in (0, 1):
        with make_trainer(tmp_path / str(every), {"train.log_term_gradients_every": every}) as trainer:
            assert trainer.components.uses_reference
            reports = list(trainer.steps())
        norms[every] = [report.metrics["grad_norm"] for report in reports]
        assert all("loss/distance" in report.metrics for report in reports)
        assert "distance" in model_card(trainer.components, trainer.state)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_custom_term_may_be_the_only_one(tmp_path, monkeypatch):
    """Regularizers alone are refused."""
    settings = {"loss.policy_coef": 0.0, "loss.entropy_coef": 0.1, "train.steps": 1}
    with pytest.raises(ConfigError, match="nothing would be learned"), make_trainer(tmp_path, settings):
        pass
    term = ObjectiveTerm("length", length_penalty, 0.3, needs_all_samples=True)
    monkeypatch.setitem(TERMS, "length", term)
    with make_trainer(tmp_path, settings) as trainer:
        (report,) = trainer.steps()
    assert report.metrics["grad_norm"] > 0


def test_which_steps_sample_completions(monkeypatch):
    dpo = make_recipe({"algorithm": "dpo"})
    assert not samples_completions(dpo)
    for name in ("loss.policy_coef", "loss.kl_coef", "loss.entropy_coef"):
        assert samples_completions(with_settings(dpo, {name: 0.1}))
        assert samples_completions(dpo, [name])  # a schedule may set it later
    assert samples_completions(with_settings(dpo, {"preference.pairs": "both"}))
    assert not samples_completions(dpo, ["preference.weight"])
    assert samples_completions(make_recipe({"algorithm": "pg_grpo"}))
    monkeypatch.setitem(TERMS, "length", ObjectiveTerm("length", length_penalty, 0.3))
    assert samples_completions(dpo)


# --- custom losses ----------------------------------------------------------------------------------------------------

CUSTOM = """
import torch
from groupwise.core import TokenTerm
from groupwise.core.losses import clipped_loss

def mine(tokens, settings):
    return -tokens.advantages * tokens.log_ratio.exp()

def clipped(tokens, settings):
    return clipped_loss(tokens, settings)

def narrow(tokens, settings):
    return tokens.advantages.sum(1)

def term(tokens, settings):
    return TokenTerm(tokens.advantages[:, :1])

def nothing(tokens, settings):
    return None
"""


@pytest.fixture
def losses(tmp_path):
    (tmp_path / "losses.py").write_text(CUSTOM)
    return tmp_path


@pytest.mark.parametrize("name", ["mine", "clipped"])
def test_a_custom_loss(losses, name):
    """With wide bounds both are the ratio times the advantage with equal token weights, like dapo."""
    settings = {"loss.clip_low": 0.9, "loss.clip_high": 9.0}
    recipe, _, _, updater, minibatch, _ = moved_minibatch(settings, budget=40)
    updater.update(minibatch, recipe)
    wanted = last_gradient(updater)
    updater.loss = find_loss(f"{losses}/losses.py:{name}")
    assert updater.loss.aggregation == "token_mean"
    result = updater.update(minibatch, recipe)
    assert_same(last_gradient(updater), wanted, 1e-12)
    assert result.statistics["ratio"] != 1.0


@pytest.mark.parametrize(
    ("name", "returned"),
    [("narrow", r"\(12,\)"), ("term", r"\(12, 1\)"), ("nothing", "NoneType")],
)
def test_a_custom_loss_with_a_wrong_result(losses, name, returned):
    recipe, _, _, updater, minibatch, _ = moved_minibatch({"train.skip_equal_rewards": False}, naive=False)
    updater.loss = find_loss(f"{losses}/losses.py:{name}")
    with pytest.raises(ConfigError, match=rf"losses.py:{name} returned {returned}; expected .* \(12, 7\)"):
        updater.update(minibatch, recipe)


def test_a_custom_loss_that_does_not_exist(losses):
    with pytest.raises(ConfigError, match=r"losses\.py:absent': there is no 'absent'"):
        find_loss(f"{losses}/losses.py:absent")
    with pytest.raises(ConfigError, match="a loss is given as module:function"):
        find_loss("mine")


def test_a_custom_loss_in_a_run(losses):
    with make_trainer(losses, {"loss.name": f"{losses}/losses.py:mine", "train.steps": 1}) as trainer:
        (report,) = trainer.steps()
    assert report.metrics["updates"] == 1
    assert report.metrics["grad_norm"] > 0


def test_a_registered_loss_by_name(tmp_path, monkeypatch):
    """grpo's loss and aggregation under another name."""
    monkeypatch.setitem(LOSSES, "registered", Loss(clipped_loss, "sequence_mean"))
    assert find_loss("registered") is LOSSES["registered"]
    norms = {}
    for name in ("registered", "grpo"):
        with make_trainer(tmp_path / name, {"loss.name": name, "train.steps": 1}) as trainer:
            (report,) = trainer.steps()
        norms[name] = report.metrics["grad_norm"]
    assert norms["registered"] == norms["grpo"] > 0


def test_a_loss_that_does_not_clip_has_no_clip_fraction():
    recipe = short_recipe()
    objective = Objective(
        recipe, Loss(lambda tokens, _: TokenTerm(-tokens.logps), "token_mean"), Totals(3, 2, 3, 2, 3, 2)
    )
    values, statistics = objective.terms(small_micro_batch())
    assert float(values["policy"].detach()) == pytest.approx((1 + 2 + 3) / 3)
    assert float(statistics["clip_fraction_low"]) == float(statistics["clip_fraction_high"]) == 0.0
