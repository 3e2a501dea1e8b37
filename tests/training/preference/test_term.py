"""The preference term of an update: the literal one, wherever its pairs come from and however they are packed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import groupwise.training.update.updater as step_module
from groupwise.config import Recipe
from groupwise.core import preference_loss
from groupwise.core.preference import BATCH_KINDS, KINDS, SMOOTHED_KINDS
from groupwise.errors import InputError
from groupwise.model.handle import prepare
from groupwise.model.logprobs import padded_logps, samples_together
from groupwise.training.monitor.metrics import step_metrics
from groupwise.training.preference.packing import plan_pair_layout
from groupwise.training.preference.reference_cache import TokenPair
from groupwise.training.rollout.advantages import compare
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.rollout.collector import RolloutResult
from groupwise.training.update.minibatch import DatasetPairs, MiniBatch, build_minibatch
from groupwise.training.update.result import gradient_statistics
from groupwise.training.update.updater import NotFiniteError, Updater
from tests.model.models import VOCABULARY
from tests.training.factories import (
    assert_same,
    last_gradient,
    literal_logps,
    literal_terms,
    made_batch,
    made_recipe,
    made_updater,
    perturb,
    small_llama,
)

PROMPTS = (3, 0, 1)  # the last of them has equal rewards
BUDGETS = (1, 10**6)  # samples of one pair apart; all at once
TERM = {
    "preference.weight": 0.7,
    "preference.beta": 0.3,
    "preference.pairs_per_group": 2,
    "loss.kl_coef": 0.2,
}
SOURCES = {
    "group": {},
    "data": {"preference.pairs": "data", "preference.train": "pairs.jsonl"},
    "both": {"preference.pairs": "both", "preference.train": "pairs.jsonl"},
}
ALONE = {"loss.policy_coef": 0.0, "loss.kl_coef": 0.0}
LONG = [[20] * 4] * 4  # no two such answers fit into a pack that is as long as the longest of them with its prompt


def data_pairs(number=5, least=1, most=8, seed=5):
    """Random ids; no two answers are equally long by design, but by chance."""
    generator = torch.Generator().manual_seed(seed)

    def ids(least, most):
        length = int(torch.randint(least, most + 1, (1,), generator=generator))
        return torch.randint(VOCABULARY, (length,), generator=generator)

    return [TokenPair(tuple(ids(2, 7).tolist()), ids(least, most), ids(least, most)) for _ in range(number)]


@dataclass
class Case:
    """A mini-batch whose policy has moved away from its old log-probs and from the reference."""

    now: Recipe
    batch: Batch
    group_advantages: GroupAdvantages
    updater: Updater
    minibatch: MiniBatch
    fixed: list[TokenPair]
    prompts: tuple[int, ...]
    given: dict[str, Any]  # what the literal terms need: the policy's old log-probs, the reference's
    reference: torch.Tensor | None  # (n, 2), literally

    @property
    def model(self):
        return self.updater.handle.model

    @property
    def sampled(self):
        """The pairs among the samples of this mini-batch, by their numbers in the batch."""
        pairs = self.group_advantages.pairs
        own = [] if pairs is None else zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True)
        return [pair for pair in own if pair[0] // self.batch.samples in self.prompts]

    def sums(self):
        """Summed log-probs ``(n, 2)``: of the groups' pairs as they were sampled, of the data set's at temperature 1.

        Each answer goes through the model by itself, padded by nothing.
        """
        batch, handle, rows = self.batch, self.updater.handle, []
        for sample in [sample for pair in self.sampled for sample in pair]:
            prompt = torch.tensor(batch.prompts[sample // batch.samples].ids)
            kept = None if batch.kept is None else batch.kept.select(batch.places([sample]))
            temperature = self.now.sampling.temperature
            found = padded_logps(handle, [prompt], [[batch.ids[sample]]], temperature=temperature, kept=kept)
            rows.append(found.logps.sum())
        for pair in self.fixed:
            for ids in (pair.chosen, pair.rejected):
                rows.append(padded_logps(handle, [torch.tensor(pair.prompt)], [[ids]]).logps.sum())
        return torch.stack(rows).view(-1, 2)

    def lengths(self):
        sampled = [[len(self.batch.ids[sample]) for sample in pair] for pair in self.sampled]
        return torch.tensor(sampled + [[len(pair.chosen), len(pair.rejected)] for pair in self.fixed])

    def preference(self):
        """The formula over all pairs of the mini-batch at once, without its weight; and statistics."""
        how, sums, lengths = self.now.preference, self.sums(), self.lengths()
        loss, statistics = preference_loss(
            sums[:, 0],
            sums[:, 1],
            self.reference[:, 0],
            self.reference[:, 1],
            beta=how.beta,
            kind=how.kind,
            weights=how.kind_weights,
            label_smoothing=how.label_smoothing,
            discopop_tau=how.discopop_tau,
            chosen_lengths=lengths[:, 0],
            rejected_lengths=lengths[:, 1],
        )
        named = {"loss": loss, **statistics, "chosen_logp": sums[:, 0].mean(), "rejected_logp": sums[:, 1].mean()}
        return loss, {f"preference/{name}": float(value.detach()) for name, value in named.items()}

    def literal(self):
        """The value and the gradient of every term, and the pairs' statistics."""
        loss, statistics = self.preference()
        values, how = {}, self.now.loss
        if how.policy_coef or how.kl_coef:
            handle, given = self.updater.handle, self.given
            values = literal_terms(handle, self.batch, self.group_advantages, self.prompts, self.now, **given)
            values["policy"] = how.policy_coef * values["policy"]
        if not how.policy_coef:
            values.pop("policy", None)
        values["preference"] = self.now.preference.weight * loss
        gradients = {name: gradient_of_term(self.model, value) for name, value in values.items()}
        return {name: float(value.detach()) for name, value in values.items()}, gradients, statistics


def gradient_of_term(model, value):
    """Its gradient; the terms share what they are computed from."""
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, weights, retain_graph=True), strict=True))


def sum_of(gradients):
    return {name: torch.stack([own[name] for own in gradients]).sum(0) for name in gradients[0]}


def norm_of(gradient):
    return math.sqrt(sum(float(value.square().sum()) for value in gradient.values()))


def made_case(settings=None, *, prompts=PROMPTS, model=None, budget=10**6, fixed=None, literal=True, **batch):
    """``literal``: also what the literal version has to know of the old policy and of the reference."""
    now = made_recipe({**TERM, **(settings or {})})
    made = made_batch(cut=[1, 3, 12], kept=now.masks.keep_sampling_mask, **batch)
    group_advantages = compare(made, now, [1.0])
    updater = made_updater(now, model=model, budget=budget, reference=True)
    if fixed is None:
        fixed = [] if now.preference.pairs == "group" else data_pairs()
    minibatch = build_minibatch(made, group_advantages, prompts, now, DatasetPairs(fixed))
    case = Case(now, made, group_advantages, updater, minibatch, fixed, tuple(prompts), {}, None)
    samples = now.loss.policy_coef or now.loss.kl_coef

    def logps():
        return literal_logps(updater.handle, made, prompts, now)["logps"] if samples else None

    with torch.no_grad():
        if literal:
            case.reference, case.given["ref"] = case.sums(), logps()
        perturb(case.model, seed=2, size=0.02)
        if literal:
            case.given["old"] = logps()
    updater.precompute_logps(minibatch, now, old=True)
    perturb(case.model, seed=3, size=0.02)
    return case


def check_against_literal(case, budgets=BUDGETS):
    values, gradients, statistics = case.literal()
    wanted = sum_of(list(gradients.values()))
    assert norm_of(gradients["preference"]) > 1e-3 * norm_of(wanted)  # else a wrong one would not be noticed
    for budget in budgets:
        case.updater.token_budget = budget
        found = case.updater.update(case.minibatch, case.now)
        assert_same(last_gradient(case.updater), wanted)
        assert {name for name, value in found.values.items() if value} == {n for n, value in values.items() if value}
        for name, value in values.items():
            assert found.values.get(name, 0.0) == pytest.approx(value, rel=1e-9, abs=1e-12), name
        for name, value in statistics.items():
            assert found.statistics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert found.grad_norm == pytest.approx(norm_of(wanted), rel=1e-9)


def settings_of(kind):
    smoothed = {"preference.label_smoothing": 0.1} if kind in SMOOTHED_KINDS else {}
    return {"preference.kind": kind, **smoothed}


# --- the gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_the_gradient_is_the_literal_one_wherever_pairs_come_from(source):
    case = made_case(SOURCES[source])
    assert len(case.minibatch.pairs) == {"group": 3, "data": 5, "both": 8}[source]
    check_against_literal(case, (1, 25, 40, 60, 10**6))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_literal_one_for_every_kind(kind):
    check_against_literal(made_case({**SOURCES["both"], **settings_of(kind)}))


@pytest.mark.parametrize("kinds", [("sigmoid", "sft"), ("ipo", "hinge")], ids="+".join)
def test_kinds_are_added_with_their_weights(kinds):
    check_against_literal(
        made_case({**SOURCES["both"], "preference.kind": list(kinds), "preference.kind_weights": [1.5, -0.2]})
    )


def test_there_are_fifteen_kinds():
    assert len(KINDS) == 15


@pytest.mark.parametrize("loss", ["dapo", "gspo", "cispo"])
def test_beside_other_losses_and_masks(loss):
    settings = {"loss.name": loss, "masks.truncated": True, "masks.off_policy": "v3.2", "loss.entropy_coef": 0.1}
    check_against_literal(made_case({**SOURCES["both"], **settings, "masks.off_policy_threshold": 0.8}))


def test_beside_the_exact_kl_the_references_sums_are_computed_by_themselves():
    case = made_case({**SOURCES["both"], "loss.kl": "full"})
    assert case.minibatch.ref_logps is None
    torch.testing.assert_close(case.minibatch.pairs.reference, case.reference, rtol=1e-9, atol=1e-9)
    _, statistics = case.preference()
    found = case.updater.update(case.minibatch, case.now)
    assert found.statistics["preference/loss"] == pytest.approx(statistics["preference/loss"], rel=1e-9)


# --- packs ------------------------------------------------------------------------------------------------------------


def plan_of(case, budget):
    case.updater.token_budget = budget
    updater, minibatch = case.updater, case.minibatch
    return plan_pair_layout(
        updater.handle,
        minibatch,
        case.now,
        updater._budget(minibatch),
        lambda: updater._sums_of_pairs(minibatch, case.now),
    )


@pytest.mark.parametrize("plain", [False, True], ids=["packed", "plain"])
@pytest.mark.parametrize("source", SOURCES)
def test_the_token_budget_changes_nothing(source, plain):
    """From everything in one pack to one sample in each: with pairs whole, and with pairs torn apart."""
    model = prepare(small_llama(), plain=True) if plain else None
    settings = {**SOURCES[source], "preference.kind": ["sigmoid", "ipo"], "loss.entropy_coef": 0.1}
    fixed = [] if source == "group" else data_pairs(4, 20, 20)
    case = made_case(settings, lengths=LONG, model=model, fixed=fixed, literal=False)
    minibatch, updater, paths, found, gradients = case.minibatch, case.updater, set(), [], []
    for budget in (1, 52, 75, 110, 10**6):
        plan = plan_of(case, budget)
        paths |= {part.spread is None for part in (plan.sampled, plan.fixed) if part is not None}
        found.append(updater.update(minibatch, case.now))
        gradients.append(last_gradient(updater))
    assert paths == {True, False}
    updater.token_budget = 1
    answers = minibatch.pairs.fixed_answers
    for prompts, completions in ((minibatch.prompts, minibatch.completions), (answers.prompts, answers.completions)):
        packs = samples_together(updater.handle, prompts, completions, updater._budget(minibatch))
        assert all(len(members) == 1 for members in packs)
    for update, gradient in zip(found[:-1], gradients[:-1], strict=True):
        assert_same(gradient, gradients[-1])
        assert update.values == pytest.approx(found[-1].values, rel=1e-9)
        assert update.statistics == pytest.approx(found[-1].statistics, rel=1e-9, abs=1e-12)


def test_the_plain_path_is_the_literal_one():
    model = prepare(small_llama(), plain=True)
    check_against_literal(made_case(SOURCES["both"], model=model))


def test_pairs_that_are_together_are_computed_once(monkeypatch):
    """No pass comes before the one with a gradient, unless a pair is torn apart or the loss looks across pairs."""
    asked = []
    real = Updater._sums_of_pairs

    def sums(self, minibatch, now):
        asked.append(now.preference.kind)
        return real(self, minibatch, now)

    monkeypatch.setattr(Updater, "_sums_of_pairs", sums)
    for kind in KINDS:
        case = made_case({**SOURCES["both"], **settings_of(kind)}, literal=False)
        case.updater.update(case.minibatch, case.now)
    assert asked == [kind for kind in KINDS if kind in BATCH_KINDS]
    case = made_case(SOURCES["data"], budget=1, fixed=data_pairs(3, 20, 20), literal=False)
    case.updater.update(case.minibatch, case.now)
    assert asked[-1] == "sigmoid"


# --- how log-probs are computed ---------------------------------------------------------------------------------------


def test_the_groups_pairs_have_the_temperature_of_sampling_and_the_data_sets_have_1():
    case = made_case({**SOURCES["both"], "sampling.temperature": 0.6})
    cold = made_case({**SOURCES["both"], "sampling.temperature": 1.0})
    groups = len(case.sampled)
    torch.testing.assert_close(case.minibatch.pairs.reference, case.reference, rtol=1e-9, atol=1e-9)
    difference = (case.reference - cold.reference).abs()
    assert bool((difference[:groups] > 1e-3).all())
    assert bool((difference[groups:] == 0).all())
    check_against_literal(case)


def test_kept_sets_hold_for_the_groups_pairs():
    kept = {"masks.keep_sampling_mask": True, "sampling.top_k": 5}
    for settings in ({}, {"loss.kl_coef": 0.0}):  # the reference's sums come with its log-probs for the KL, or alone
        case = made_case({**SOURCES["both"], **kept, **settings})
        whole = made_case({**SOURCES["both"], **settings})
        groups = len(case.sampled)
        torch.testing.assert_close(case.minibatch.pairs.reference, case.reference, rtol=1e-9, atol=1e-9)
        assert bool((case.reference[:groups] > whole.reference[:groups] + 1e-3).any())
        check_against_literal(case)


def test_what_is_known_of_the_reference_is_not_computed_again(monkeypatch):
    """A data set's numbers come as they are given; the samples' come out of what the KL needs."""
    now = made_recipe({**TERM, **SOURCES["both"]})
    batch, pairs = made_batch(), data_pairs()
    group_advantages = compare(batch, now, [1.0])
    known = torch.arange(10.0, dtype=torch.float64).view(5, 2)
    updater = made_updater(now, reference=True)
    calls = []
    monkeypatch.setattr(Updater, "_sums_of_fixed", lambda *_: calls.append("fixed"))
    monkeypatch.setattr(Updater, "_sums_of_samples", lambda *_: calls.append("samples"))
    minibatch = build_minibatch(batch, group_advantages, PROMPTS, now, DatasetPairs(pairs, known))
    updater.precompute_logps(minibatch, now, old=False)
    assert calls == []
    assert torch.equal(minibatch.pairs.reference[3:], known)
    assert torch.equal(minibatch.pairs.reference[:3], minibatch.ref_logps.sum(1)[minibatch.pairs.rows])


def test_pairs_without_a_reference_are_refused():
    now = made_recipe({**TERM, **ALONE})
    batch = made_batch()
    minibatch = build_minibatch(batch, compare(batch, now, [1.0]), PROMPTS, now)
    updater = made_updater(now)
    updater.precompute_logps(minibatch, now, old=False)
    with pytest.raises(InputError, match="relative to a reference, whose log-probs are not known here"):
        updater.update(minibatch, now)


# --- the policy's own weight ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_without_the_policys_loss_only_members_of_pairs_are_computed(source):
    case = made_case({**SOURCES[source], **ALONE})
    assert sorted(case.minibatch.samples) == ([] if source == "data" else [0, 1, 2, 3, 14, 15])
    check_against_literal(case)
    found = case.updater.update(case.minibatch, case.now)
    assert "policy" not in found.values
    assert not {"ratio", "approx_kl", "clip_fraction_low"} & set(found.statistics)


def test_without_the_policys_loss_masks_are_not_asked(monkeypatch):
    settings = {"masks.off_policy": "v3.2", "masks.off_policy_threshold": 1e-6, "masks.high_entropy": 0.1}
    asked, real = [], step_module.completion_logps

    def completion_logps(*arguments, **options):
        asked.append(True)
        return real(*arguments, **options)

    plain = made_case(ALONE, literal=False)
    case = made_case({**ALONE, **settings}, literal=False)
    with monkeypatch.context() as patch:
        patch.setattr(step_module, "completion_logps", completion_logps)
        found = case.updater.update(case.minibatch, case.now)
        assert not asked
        assert found.masked_out == {}
        other = made_case(settings, literal=False)
        assert other.updater.update(other.minibatch, other.now).masked_out["off_policy"]
        assert asked
    plain.updater.update(plain.minibatch, plain.now)
    for name, gradient in last_gradient(plain.updater).items():
        assert torch.equal(gradient, last_gradient(case.updater)[name])


def test_half_of_the_policys_loss_is_half_of_its_gradient():
    gradients, values = {}, {}
    for coefficient in (0.0, 0.5, 1.0):
        case = made_case({**SOURCES["both"], "loss.policy_coef": coefficient}, literal=coefficient == 0.5)
        if coefficient == 0.5:
            check_against_literal(case)
        values[coefficient] = case.updater.update(case.minibatch, case.now).values
        gradients[coefficient] = last_gradient(case.updater)
    assert "policy" not in values[0.0]
    assert values[0.5]["policy"] == pytest.approx(values[1.0]["policy"] / 2, rel=1e-9)
    halfway = {name: (gradients[0.0][name] + gradients[1.0][name]) / 2 for name in gradients[0.0]}
    assert_same(gradients[0.5], halfway)
    assert norm_of({name: gradients[1.0][name] - gradients[0.0][name] for name in halfway}) > 1e-3


@pytest.mark.parametrize("compare_terms", [False, True])
@pytest.mark.parametrize("budget", BUDGETS)
def test_samples_that_nothing_is_learned_from_may_be_computed(budget, compare_terms):
    """With train.skip_equal_rewards = false there are packs without a pair, and mini-batches without a term."""
    case = made_case({**ALONE, "train.skip_equal_rewards": False}, budget=budget, literal=False)
    assert len(case.minibatch) == 12
    usual = made_case(ALONE, literal=False)
    usual.updater.update(usual.minibatch, usual.now)
    found = case.updater.update(case.minibatch, case.now, compare_terms=compare_terms)
    assert_same(last_gradient(case.updater), last_gradient(usual.updater))
    assert found.values["preference"] > 0
    minibatch = build_minibatch(case.batch, case.group_advantages, [1], case.now)
    before = {name: weight.clone() for name, weight in case.updater.masters.state_dict().items()}
    case.updater.precompute_logps(minibatch, case.now, old=False)
    if not minibatch.empty:
        case.updater.update(minibatch, case.now, compare_terms=compare_terms)
    assert all(torch.equal(weight, before[name]) for name, weight in case.updater.masters.state_dict().items())


# --- mini-batches -----------------------------------------------------------------------------------------------------


def test_each_mini_batch_is_normalised_by_its_own_pairs():
    pairs = data_pairs(5)
    for prompts, fixed, number in (((0,), pairs[:1], 3), ((2, 3), pairs[1:], 6), ((1,), pairs[:2], 2), ((0,), [], 2)):
        case = made_case(SOURCES["both"], prompts=prompts, fixed=fixed)
        assert case.minibatch.totals.pairs == len(case.minibatch.pairs) == number
        check_against_literal(case)


def test_a_mini_batch_without_pairs_has_no_term():
    now = made_recipe(TERM)
    batch = made_batch()
    minibatch = build_minibatch(batch, compare(batch, now, [1.0]), [1], now)
    assert minibatch.pairs is None
    assert not minibatch.empty  # the KL has something to say
    updater = made_updater(now, reference=True)
    updater.precompute_logps(minibatch, now, old=False)
    perturb(updater.handle.model)
    found = updater.update(minibatch, now, compare_terms=True)
    assert "preference" not in found.values
    assert not any("preference" in name for name in [*found.statistics, *found.terms])
    nothing = made_recipe({**TERM, **ALONE})
    assert build_minibatch(batch, compare(batch, nothing, [1.0]), [1], nothing).empty
    assert not build_minibatch(batch, compare(batch, nothing, [1.0]), [1], nothing, DatasetPairs(data_pairs(1))).empty


@pytest.mark.parametrize(("number", "parts"), [(5, 2), (4, 4), (2, 3), (0, 2)])
def test_a_data_sets_pairs_are_divided_among_mini_batches(number, components):
    pairs = data_pairs(number)
    reference = torch.arange(2.0 * number).view(number, 2)
    cut = [DatasetPairs(pairs, reference).part(at, components) for at in range(components)]
    assert [pair for part in cut for pair in part.pairs] == pairs
    assert torch.equal(torch.cat([part.reference for part in cut]), reference)
    assert all(len(part.pairs) == len(part.reference) for part in cut)
    sizes = [len(part.pairs) for part in cut]
    assert max(sizes) - min(sizes) <= 1
    assert all(
        part.reference is None for part in [DatasetPairs(pairs).part(at, components) for at in range(components)]
    )


def metrics_of(settings, cuts, fixed=(), *, iterations=1):
    """Three mini-batches of one step, and the metrics that come of them."""
    now = made_recipe({**TERM, **settings})
    batch = made_batch()
    group_advantages = compare(batch, now, [1.0])
    updater = made_updater(now, reference=True)
    pairs = DatasetPairs(fixed)
    minibatches = [
        build_minibatch(batch, group_advantages, cut, now, pairs.part(at, len(cuts))) for at, cut in enumerate(cuts)
    ]
    for minibatch in minibatches:
        updater.precompute_logps(minibatch, now, old=True)
    perturb(updater.handle.model)
    updates = [
        updater.update(minibatch, now) for _ in range(iterations) for minibatch in minibatches if not minibatch.empty
    ]
    return updates, step_metrics(RolloutResult(batch), group_advantages, ["one"], minibatches, updates, now)


def test_statistics_are_means_over_the_updates_that_have_pairs():
    updates, found = metrics_of({}, [[0], [1], [2, 3]])
    with_pairs = [updates[0], updates[2]]
    assert ["preference" in update.values for update in updates] == [True, False, True]
    for name in ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp"):
        own = [update.statistics[f"preference/{name}"] for update in with_pairs]
        assert found[f"preference/{name}"] == pytest.approx(sum(own) / 2, rel=1e-12)
    # What is minimised is a mean over all updates: where there are no pairs, nothing is added.
    assert found["loss/preference"] == pytest.approx(sum(update.values["preference"] for update in with_pairs) / 3)
    assert found["preference/loss"] == pytest.approx(found["loss/preference"] * 3 / 2 / 0.7)
    assert found["preference/weight"] == 0.7
    assert found["preference/pairs"] == 4
    assert "preference/pairs_group" not in found
    refused = {name: found[f"preference/refused/{name}"] for name in ("tie", "margin", "same_answer", "alone")}
    assert refused == {"tie": 4, "margin": 0, "same_answer": 0, "alone": 0}


def test_where_pairs_came_from_is_counted():
    _, found = metrics_of(SOURCES["both"], [[0, 1], [2, 3]], data_pairs(5))
    assert (found["preference/pairs"], found["preference/pairs_group"], found["preference/pairs_data"]) == (9, 4, 5)
    _, found = metrics_of(SOURCES["data"], [[0, 1], [2, 3]], data_pairs(5))
    assert found["preference/pairs"] == 5
    assert not any(name.startswith(("preference/refused", "preference/pairs_")) for name in found)
    _, found = metrics_of({"preference.weight": 0.0}, [[0, 1], [2, 3]])
    assert not any(name.startswith("preference") for name in found)


@pytest.mark.parametrize("iterations", [1, 2])
def test_updates_on_a_data_sets_pairs_alone_do_not_thin_out_what_masks_took(iterations):
    """The second mini-batch has nothing of the batch in it: its updates are no passes over samples."""
    settings = {"masks.off_policy": "v3.2", "masks.off_policy_threshold": 1e-6, "loss.kl_coef": 0.0}
    taken = {}
    for source, fixed in (("group", ()), ("both", data_pairs(4))):
        updates, found = metrics_of({**SOURCES[source], **settings}, [[0, 2, 3], [1]], fixed, iterations=iterations)
        assert len(updates) == iterations * (2 if fixed else 1)
        taken[source] = found["masks/off_policy"], found["mask_ratio"]
    assert taken["group"][0] == 6 / 16
    assert taken["both"] == taken["group"]


# --- the terms side by side -------------------------------------------------------------------------------------------


def cosine(one, other):
    product = sum(float((one[name] * other[name]).sum()) for name in one)
    return product / (norm_of(one) * norm_of(other))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_each_terms_gradient_and_how_they_pull(source, budget):
    case = made_case({**SOURCES[source], "loss.entropy_coef": 0.1}, budget=budget)
    _, own, _ = case.literal()
    grpo = sum_of([own["policy"], own["kl"], own["entropy"]])
    joint = case.updater.update(case.minibatch, case.now)
    gradient = last_gradient(case.updater)
    found = case.updater.update(case.minibatch, case.now, compare_terms=True)
    assert_same(last_gradient(case.updater), gradient)
    assert found.values == pytest.approx(joint.values, rel=1e-9)
    assert found.statistics == pytest.approx(joint.statistics, rel=1e-9, abs=1e-12)
    wanted = {f"grad_norm/{name}": norm_of(own[name]) for name in own}
    for number, one in enumerate(own):
        for other in list(own)[number + 1 :]:
            wanted[f"grad_cosine/{one}_{other}"] = cosine(own[one], own[other])
    wanted |= {"grad_norm/grpo": norm_of(grpo), "grad_cosine/grpo_preference": cosine(grpo, own["preference"])}
    assert list(own) == ["policy", "kl", "entropy", "preference"]
    assert "grad_cosine/policy_preference" in wanted
    assert found.terms == pytest.approx(wanted, rel=1e-8, abs=1e-10)


def test_gradients_by_hand():
    """Two weights: the policy pulls along the first, the KL along the second, the pairs between them."""
    pulls = {"policy": [3.0, 0.0], "kl": [0.0, 4.0], "preference": [0.0, -2.0]}
    found = gradient_statistics({name: [torch.tensor(pull)] for name, pull in pulls.items()})
    assert found == {
        "grad_norm/policy": 3.0,
        "grad_norm/kl": 4.0,
        "grad_norm/preference": 2.0,
        "grad_cosine/policy_kl": 0.0,
        "grad_cosine/policy_preference": 0.0,
        "grad_cosine/kl_preference": -1.0,
        "grad_norm/grpo": 5.0,
        "grad_cosine/grpo_preference": pytest.approx(-0.8),
    }
    assert "grad_norm/grpo" not in gradient_statistics({"preference": [torch.ones(2)]})
    assert "grad_norm/grpo" not in gradient_statistics({"policy": [torch.ones(2)], "kl": [torch.ones(2)]})


def test_pairs_alone_have_nothing_to_be_compared_with():
    case = made_case({**SOURCES["data"], **ALONE})
    wanted = case.literal()[1]["preference"]
    found = case.updater.update(case.minibatch, case.now, compare_terms=True)
    assert found.terms == {"grad_norm/preference": pytest.approx(norm_of(wanted), rel=1e-9)}
    assert_same(last_gradient(case.updater), wanted)
    # The policy's term is switched on, but there is nothing to apply it to.
    case = made_case({**SOURCES["data"], "loss.kl_coef": 0.0}, prompts=(1,))
    assert len(case.minibatch) == 0
    found = case.updater.update(case.minibatch, case.now, compare_terms=True)
    assert (found.terms["grad_norm/policy"], found.terms["grad_cosine/grpo_preference"]) == (0.0, 0.0)
    assert_same(last_gradient(case.updater), case.literal()[1]["preference"])


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compare_terms", [False, True])
@pytest.mark.parametrize("where", ["packs", "sums"])
def test_out_of_memory_halves_the_packs_with_the_same_result(monkeypatch, where, compare_terms):
    """In the packs with a gradient, of the samples or of a data set's pairs, and in the sums that come before them."""
    settings = {**SOURCES["both"], "preference.kind": "aot" if where == "sums" else "sigmoid"}
    lengths, pairs = [[9 + n % 3 for n in range(4)] for _ in range(4)], data_pairs(8, 9, 12)
    small = made_case(settings, lengths=lengths, prompts=range(4), fixed=pairs, budget=75, literal=False)
    large = made_case(settings, lengths=lengths, prompts=range(4), fixed=pairs, budget=151, literal=False)
    wanted = small.updater.update(small.minibatch, small.now, check=True, compare_terms=compare_terms)
    said, budgets = [], []
    name = "each_pack" if where == "packs" else "completion_logps"
    real = getattr(step_module, name)

    def check(token_budget, number=1):
        if token_budget > 80 and number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    def each_pack(*arguments, token_budget, **options):
        budgets.append(token_budget)
        for number, pack in enumerate(real(*arguments, token_budget=token_budget, **options)):
            check(token_budget, number)
            yield pack

    def completion_logps(*arguments, token_budget, **options):
        budgets.append(token_budget)
        check(token_budget)
        return real(*arguments, token_budget=token_budget, **options)

    monkeypatch.setattr(step_module, name, each_pack if where == "packs" else completion_logps)
    large.updater.say = said.append
    found = large.updater.update(large.minibatch, large.now, check=True, compare_terms=compare_terms)
    assert budgets[0] == 151
    assert set(budgets[1:]) == {75}
    assert said == ["memory ran out: the step is done again with a token budget of 75; same result"]
    assert large.updater.token_budget == 75
    gradient = last_gradient(small.updater)
    if where == "packs":
        assert found == wanted
        assert all(torch.equal(value, gradient[name]) for name, value in last_gradient(large.updater).items())
    assert_same(last_gradient(large.updater), gradient)
    assert found.values == pytest.approx(wanted.values, rel=1e-9)


def test_out_of_memory_in_the_middle_of_a_data_sets_pairs(monkeypatch):
    """The samples are through already; nothing of them is counted twice."""
    settings = {**SOURCES["both"], **ALONE}
    pairs = data_pairs(12, 9, 12)
    small = made_case(settings, fixed=pairs, budget=75, literal=False)
    wanted = small.updater.update(small.minibatch, small.now)
    large = made_case(settings, fixed=pairs, budget=151, literal=False)
    real, failed = step_module.each_pack, []

    def each_pack(handle, prompts, *arguments, token_budget, **options):
        for pack in real(handle, prompts, *arguments, token_budget=token_budget, **options):
            if token_budget == 151 and len(prompts) == 12:
                failed.append(True)
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
            yield pack

    monkeypatch.setattr(step_module, "each_pack", each_pack)
    found = large.updater.update(large.minibatch, large.now)
    assert failed == [True]
    assert found == wanted
    assert all(
        torch.equal(value, last_gradient(small.updater)[name]) for name, value in last_gradient(large.updater).items()
    )


# --- not finite -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_names_the_term_and_moves_nothing(value, budget):
    for settings, at in ((SOURCES["group"], 0), (SOURCES["both"], -1)):
        case = made_case({**settings, "preference.kind": "ipo"}, budget=budget, literal=False)
        case.minibatch.pairs.reference[at, 0] = value
        before = {name: weight.clone() for name, weight in case.updater.masters.state_dict().items()}
        with pytest.raises(NotFiniteError, match=r"\(terms: policy -?[\d.]+.*, preference (nan|inf)\)"):
            case.updater.update(case.minibatch, case.now)
        skipping = case.now.with_settings({"train.on_non_finite": "skip"})
        assert case.updater.update(case.minibatch, skipping).skipped
        assert all(torch.equal(weight, before[name]) for name, weight in case.updater.masters.state_dict().items())
        assert all(master.grad is None for master in case.updater.masters.parameters())
