"""The objective's terms and statistics, by hand; and losses of one's own."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.core import LOSSES, Loss, TokenTerm, kl_estimate
from groupwise.core.losses import clipped_loss
from groupwise.errors import ConfigError
from groupwise.training.rollout.advantages import compare
from groupwise.training.update.minibatch import build_minibatch
from groupwise.training.update.objective import TERMS, MicroBatch, Objective, Totals, find_loss
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
)

PROMPTS = (3, 0, 1)


def moved_on(settings, *, budget=40, away=True):
    """A mini-batch with old and reference log-probs, from which the policy has moved away; and the literal ones."""
    now = made_recipe(settings)
    batch = made_batch(cut=[1, 3, 12])
    group_advantages = compare(batch, now, [1.0])
    updater = made_updater(now, budget=budget, reference=True)
    minibatch = build_minibatch(batch, group_advantages, PROMPTS, now)
    with torch.no_grad():
        first = literal_logps(updater.handle, batch, PROMPTS, now)["logps"]
    updater.precompute_logps(minibatch, now, old=True)
    if away:
        perturb(updater.handle.model, size=0.02)
    return now, batch, group_advantages, updater, minibatch, {"ref": first, "old": first}


def small_part(**changes):
    """Two samples of two tokens and one."""
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
        # The part has 3 of the mini-batch's 10 tokens and 2 of its 4 answers; on policy a token's loss is −A.
        ({"loss.name": "dapo"}, -(2 * 2 - 1) / 10),
        ({"loss.name": "grpo"}, -(2 - 1) / 4),
        ({"loss.name": "luspo"}, -(2 * 2 - 1) / 4),
        ({"loss.name": "dr_grpo"}, -(2 * 2 - 1) / (4 * 8)),
        ({"loss.name": "reinforce"}, -(2 * (-1 - 2) - 1 * -3) / 4),
    ],
)
def test_a_part_has_its_share_of_the_policy_term(settings, wanted):
    now = made_recipe(settings)
    objective = Objective(now, find_loss(now.loss.name), Totals(10, 4, 10, 4, 3, 2))
    values, statistics = objective.terms(small_part())
    assert float(values["policy"].detach()) == pytest.approx(wanted, rel=1e-9)
    assert set(values) == {"policy"}
    assert float(statistics["ratio"]) == pytest.approx(1.0)


def test_the_policy_may_be_divided_by_less_than_the_other_terms():
    """The masks left 5 tokens; the KL and the entropy are still means over all 10."""
    now = made_recipe({"loss.denominator": "policy_mask", "loss.kl_coef": 0.5, "loss.kl": "k1", "loss.entropy_coef": 2})
    objective = Objective(now, find_loss("dapo"), Totals(10, 4, 5, 2, 3, 2))
    part = small_part(
        policy_mask=torch.tensor([[True, True], [False, False]]),
        ref_logps=torch.tensor([[-1.5, -2.0], [-2.0, 0.0]], dtype=torch.float64),
        entropy=torch.tensor([[1.0, 2.0], [4.0, math.nan]], dtype=torch.float64),
    )
    values, statistics = objective.terms(part)
    assert float(values["policy"].detach()) == pytest.approx(-(2 * 2) / 5)
    assert float(values["kl"].detach()) == pytest.approx(0.5 * (0.5 + 0.0 - 1.0) / 10)
    assert float(values["entropy"].detach()) == pytest.approx(-2 * (1 + 2 + 4) / 10)
    assert float(statistics["kl"]) == pytest.approx((0.5 + 0.0 - 1.0) / 10)
    assert float(statistics["entropy"]) == pytest.approx((1 + 2 + 4) / 3)
    assert float(statistics["ratio"]) == pytest.approx(1.0)


def test_the_kl_of_samples_that_are_all_silenced_stays_a_mean():
    now = made_recipe({"loss.denominator": "policy_mask", "masks.truncated": True, "loss.kl_coef": 0.5})
    batch = made_batch(cut=range(16))
    updater = made_updater(now, reference=True)
    minibatch = build_minibatch(batch, compare(batch, now, [1.0]), range(4), now)
    assert minibatch.totals.policy_tokens == 0
    updater.precompute_logps(minibatch, now, old=False)
    perturb(updater.handle.model, size=0.02)
    found = updater.update(minibatch, now)
    assert found.values["policy"] == 0.0
    assert found.values["kl"] == pytest.approx(0.5 * found.statistics["kl"], rel=1e-9)
    assert 0 < found.values["kl"] < 1


def test_terms_have_names():
    assert list(TERMS) == ["policy", "kl", "entropy", "preference"]


# --- KL and entropy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_the_kl_is_the_estimate_of_the_core(estimator):
    """Its term with the loss's weights, its metric as a plain mean over all tokens."""
    now, batch, _, updater, minibatch, given = moved_on(
        {"loss.name": "grpo", "loss.kl_coef": 0.3, "loss.kl": estimator}
    )
    with torch.no_grad():
        literal = literal_logps(updater.handle, batch, PROMPTS, now)
    mask = literal["mask"]
    kl = kl_estimate(literal["logps"], given["ref"], estimator=estimator, old_logps=given["old"], mask=mask)
    found = updater.update(minibatch, now)
    assert found.statistics["kl"] == pytest.approx(float(kl[mask].mean()), rel=1e-9)
    assert found.values["kl"] == pytest.approx(0.3 * float((kl.sum(1) / mask.sum(1)).mean()), rel=1e-9)
    assert abs(found.statistics["kl"]) > 1e-5


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_the_kl_to_oneself_is_zero_and_has_no_gradient(estimator):
    """But k1's, whose gradient is that of the log-probs themselves."""
    now, batch, group_advantages, updater, minibatch, given = moved_on(
        {"loss.kl_coef": 0.3, "loss.kl": estimator}, away=False, budget=1
    )
    found = updater.update(minibatch, now)
    assert found.values["kl"] == pytest.approx(0.0, abs=1e-12)
    assert found.statistics["kl"] == pytest.approx(0.0, abs=1e-12)
    terms = literal_terms(updater.handle, batch, group_advantages, PROMPTS, now, **given)
    with_kl = gradient_of(updater.handle.model, terms["policy"] + (terms["kl"] if estimator == "k1" else 0.0))
    assert_same(last_gradient(updater), with_kl)


def test_the_kl_begins_at_zero_in_a_run_and_then_grows(tmp_path):
    settings = {"loss.kl_coef": 0.1, "train.steps": 3, "optimizer.learning_rate": 1e-2}
    with made_trainer(tmp_path, settings) as trainer:
        kls = [report.metrics["kl"] for report in trainer.steps()]
    assert kls[0] == pytest.approx(0.0, abs=1e-9)
    assert kls[1] > 1e-6
    assert kls[2] > 1e-6


def test_the_reference_of_a_run_is_refreshed_in_time(tmp_path):
    """After a refresh the next step's KL is 0 again."""
    settings = {"loss.kl_coef": 0.1, "train.steps": 4, "optimizer.learning_rate": 1e-2, "reference.refresh_every": 2}
    with made_trainer(tmp_path, settings) as trainer:
        reports = list(trainer.steps())
    kls = [report.metrics["kl"] for report in reports]
    assert kls[0] == pytest.approx(0.0, abs=1e-9)
    assert kls[2] == pytest.approx(0.0, abs=1e-9)
    assert min(kls[1], kls[3]) > 1e-6
    assert [report.metrics["reference_refreshes"] for report in reports] == [0, 1, 1, 2]


def test_the_entropy_bonus_raises_the_entropy():
    now = made_recipe({"loss.entropy_coef": 1.0})
    batch = made_batch([[1.0] * 4] * 4)  # equal rewards: nothing else pulls
    updater = made_updater(now, lr=0.05)
    minibatch = build_minibatch(batch, compare(batch, now, [1.0]), range(4), now)
    entropies = [updater.update(minibatch, now).statistics["entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 1e-3


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "denominator", "kl"),
    [
        ("dapo", "completion_mask", 0.0),
        ("dapo", "policy_mask", 0.1),
        ("gspo", "completion_mask", 0.0),
        ("gspo", "policy_mask", 0.1),
    ],
)
def test_on_policy_the_ratio_is_one(loss, denominator, kl):
    """Whatever is skipped or masked_out, and in however many packs."""
    now = made_recipe({"loss.name": loss, "loss.denominator": denominator, "loss.kl_coef": kl, "masks.truncated": True})
    batch = made_batch(cut=[1, 3])
    for old in (False, True):
        updater = made_updater(now, budget=1, reference=True)
        minibatch = build_minibatch(batch, compare(batch, now, [1.0]), range(4), now)
        updater.precompute_logps(minibatch, now, old=old)
        found = updater.update(minibatch, now)
        assert found.statistics["ratio"] == pytest.approx(1.0, abs=1e-12)
        assert found.statistics["approx_kl"] == pytest.approx(0.0, abs=1e-12)
        assert found.statistics["clip_fraction_low"] == found.statistics["clip_fraction_high"] == 0.0


def test_the_mean_entropy_is_that_of_what_was_computed():
    now = made_recipe()
    batch = made_batch()
    updater = made_updater(now, budget=20)
    minibatch = build_minibatch(batch, compare(batch, now, [1.0]), range(4), now)
    with torch.no_grad():
        literal = literal_logps(updater.handle, batch, range(4), now)
    wanted = literal["entropy"][minibatch.samples][literal["mask"][minibatch.samples]].mean()
    assert updater.update(minibatch, now).statistics["entropy"] == pytest.approx(float(wanted), rel=1e-9)


@pytest.mark.parametrize(("loss", "low", "high", "everything"), [("dapo", 0.02, 0.03, 67), ("gspo", 1e-3, 2e-3, 16)])
def test_clip_fractions_are_shares_of_everything(loss, low, high, everything):
    """The second update: what is beyond the bounds on the side that clips, by hand, over all tokens or answers."""
    now = made_recipe({"loss.name": loss, "loss.clip_low": low, "loss.clip_high": high})
    batch = made_batch()
    group_advantages = compare(batch, now, [1.0])
    updater = made_updater(now, budget=30, lr=0.05)
    minibatch = build_minibatch(batch, group_advantages, range(4), now)
    updater.precompute_logps(minibatch, now, old=True)
    with torch.no_grad():
        before = literal_logps(updater.handle, batch, range(4), now)
    assert updater.update(minibatch, now).statistics["ratio"] == pytest.approx(1.0, abs=1e-6)
    with torch.no_grad():
        after = literal_logps(updater.handle, batch, range(4), now)
    found = updater.update(minibatch, now)
    present, difference = before["mask"], after["logps"] - before["logps"]
    if loss == "gspo":
        difference = torch.where(present, difference, 0.0).sum(1, keepdim=True) / present.sum(1, keepdim=True)
        present = torch.ones_like(difference, dtype=torch.bool)
    ratio, advantages = difference.exp(), group_advantages.advantages[:, None]
    below = int(((ratio < 1 - low) & (advantages < 0) & present).sum())
    above = int(((ratio > 1 + high) & (advantages > 0) & present).sum())
    assert below
    assert above
    assert found.statistics["clip_fraction_low"] == pytest.approx(below / everything)
    assert found.statistics["clip_fraction_high"] == pytest.approx(above / everything)
    computed = present & torch.isin(torch.arange(16), torch.tensor(minibatch.samples))[:, None]
    assert not bool(computed.all())
    assert found.statistics["ratio"] == pytest.approx(float(ratio[computed].mean()), rel=1e-9)
    assert abs(found.statistics["ratio"] - 1) > 1e-5


def test_importance_weights_are_the_ratio_to_the_sampler_at_most_the_cap():
    now = made_recipe({"loss.importance_cap": 1.1})
    batch = made_batch()
    updater = made_updater(now, budget=30)
    minibatch = build_minibatch(batch, compare(batch, now, [1.0]), range(4), now)
    with torch.no_grad():
        literal = literal_logps(updater.handle, batch, range(4), now)
    updater.precompute_logps(minibatch, now, old=False)
    assert minibatch.old_logps is None
    for row, sample in enumerate(minibatch.samples):
        for place in range(len(batch.ids[sample])):
            ratio = math.exp(float(literal["logps"][sample, place]) - float(batch.sampler_logps[sample][place]))
            assert float(minibatch.weights[row, place]) == pytest.approx(min(ratio, 1.1), rel=1e-6)
    on_policy = -(minibatch.advantages.double()[:, None] * minibatch.weights * minibatch.mask).sum() / 67
    assert updater.update(minibatch, now).values["policy"] == pytest.approx(float(on_policy), rel=1e-6)


# --- terms by themselves ----------------------------------------------------------------------------------------------


def test_gradients_of_terms_are_those_by_hand_and_their_sum_is_the_same():
    settings = {"loss.kl_coef": 0.3, "loss.kl": "k2", "loss.entropy_coef": 0.2}
    now, batch, group_advantages, updater, minibatch, given = moved_on(settings)
    terms = literal_terms(updater.handle, batch, group_advantages, PROMPTS, now, **given)
    model = updater.handle.model
    flat = {}
    for name in terms:
        again = literal_terms(updater.handle, batch, group_advantages, PROMPTS, now, **given)
        flat[name] = torch.cat([g.flatten() for g in gradient_of(model, again[name]).values()])
    together = updater.update(minibatch, now)
    wanted = last_gradient(updater)
    found = updater.update(minibatch, now, check=True, compare_terms=True)
    assert_same(last_gradient(updater), wanted, 1e-12)
    for name, gradient in flat.items():
        assert found.terms[f"grad_norm/{name}"] == pytest.approx(float(gradient.norm()), rel=1e-9)
        assert found.values[name] == pytest.approx(together.values[name], rel=1e-9)
    for one, other in (("policy", "kl"), ("policy", "entropy"), ("kl", "entropy")):
        cosine = float(flat[one] @ flat[other] / flat[one].norm() / flat[other].norm())
        assert found.terms[f"grad_cosine/{one}_{other}"] == pytest.approx(cosine, rel=1e-6)
        assert abs(cosine) > 1e-4
    assert set(found.terms) == {f"grad_norm/{name}" for name in flat} | {
        "grad_cosine/policy_kl",
        "grad_cosine/policy_entropy",
        "grad_cosine/kl_entropy",
    }
    assert found.statistics == pytest.approx(together.statistics, rel=1e-9)
    assert found.mismatch.tokens == int(minibatch.mask.sum())
    assert together.terms == {}


def test_terms_are_compared_every_so_many_steps(tmp_path):
    settings = {"train.log_term_gradients_every": 2, "train.steps": 3, "loss.entropy_coef": 0.01}
    with made_trainer(tmp_path, settings) as trainer:
        reports = list(trainer.steps())
    assert ["grad_norm/policy" in report.metrics for report in reports] == [True, False, True]
    assert ["grad_cosine/policy_entropy" in report.metrics for report in reports] == [True, False, True]


def test_a_term_without_gradient_has_no_direction():
    """The KL to oneself: its gradient is 0, and so is its cosine with anything."""
    now = made_recipe({"loss.kl_coef": 0.3, "loss.kl": "k2"})
    batch = made_batch()
    updater = made_updater(now, reference=True)
    minibatch = build_minibatch(batch, compare(batch, now, [1.0]), range(4), now)
    updater.precompute_logps(minibatch, now, old=False)
    found = updater.update(minibatch, now, compare_terms=True)
    assert found.terms["grad_norm/kl"] == pytest.approx(0.0, abs=1e-9)
    assert found.terms["grad_cosine/policy_kl"] == pytest.approx(0.0, abs=1e-3)


# --- a loss of one's own ----------------------------------------------------------------------------------------------

OWN = """
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
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


@pytest.mark.parametrize("name", ["mine", "clipped"])
def test_a_function_of_ones_own(own, name):
    """With wide bounds both are the ratio times the advantage, every token weighing the same: what dapo is."""
    settings = {"loss.clip_low": 0.9, "loss.clip_high": 9.0}
    now, _, _, updater, minibatch, _ = moved_on(settings)
    updater.update(minibatch, now)
    wanted = last_gradient(updater)
    updater.loss = find_loss(f"{own}/own.py:{name}")
    assert updater.loss.aggregation == "token_mean"
    found = updater.update(minibatch, now)
    assert_same(last_gradient(updater), wanted, 1e-12)
    assert found.statistics["ratio"] != 1.0


@pytest.mark.parametrize(
    ("name", "returned"),
    [("narrow", r"\(12,\)"), ("term", r"\(12, 1\)"), ("nothing", "NoneType")],
)
def test_a_function_that_returns_something_else(own, name, returned):
    now, _, _, updater, minibatch, _ = moved_on({"train.skip_equal_rewards": False}, budget=10**6)
    updater.loss = find_loss(f"{own}/own.py:{name}")
    with pytest.raises(
        ConfigError, match=rf"own.py:{name} returned {returned}; expected one number per token, \(12, 7\)"
    ):
        updater.update(minibatch, now)


def test_a_function_that_is_not_there(own):
    with pytest.raises(ConfigError, match=r"own\.py:absent': there is no 'absent'"):
        find_loss(f"{own}/own.py:absent")
    with pytest.raises(ConfigError, match="a loss is given as module:function"):
        find_loss("mine")


def test_a_function_of_ones_own_in_a_run(own):
    with made_trainer(own, {"loss.name": f"{own}/own.py:mine", "train.steps": 1}) as trainer:
        (report,) = trainer.steps()
    assert report.metrics["updates"] == 1
    assert report.metrics["grad_norm"] > 0


def test_a_registered_loss_by_name(tmp_path, monkeypatch):
    """A `core.Loss` with an aggregation of its own: grpo's under another name is grpo."""
    monkeypatch.setitem(LOSSES, "registered", Loss(clipped_loss, "sequence_mean"))
    assert find_loss("registered") is LOSSES["registered"]
    norms = {}
    for name in ("registered", "grpo"):
        with made_trainer(tmp_path / name, {"loss.name": name, "train.steps": 1}) as trainer:
            (report,) = trainer.steps()
        norms[name] = report.metrics["grad_norm"]
    assert norms["registered"] == norms["grpo"] > 0


def test_a_loss_that_does_not_clip_has_no_clip_fraction():
    now = made_recipe()
    objective = Objective(now, Loss(lambda tokens, _: TokenTerm(-tokens.logps), "token_mean"), Totals(3, 2, 3, 2, 3, 2))
    values, statistics = objective.terms(small_part())
    assert float(values["policy"].detach()) == pytest.approx((1 + 2 + 3) / 3)
    assert float(statistics["clip_fraction_low"]) == float(statistics["clip_fraction_high"]) == 0.0
