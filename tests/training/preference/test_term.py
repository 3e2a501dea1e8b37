"""The preference term of an update equals the naive computation, whatever the source of pairs and the packs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import groupwise.training.update.updater as updater_module
from groupwise.config import Recipe, with_settings
from groupwise.core import preference_loss
from groupwise.core.preference import BATCH_KINDS, KINDS, SMOOTHED_KINDS
from groupwise.errors import InputError, NotFiniteError
from groupwise.model.handle import prepare
from groupwise.model.packing import pack_members
from groupwise.model.precision import MasterWeights
from groupwise.training.monitor.metrics import step_metrics
from groupwise.training.preference.packing import plan_pair_layout
from groupwise.training.preference.reference_cache import TokenPair, pair_completions
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.rollout.collector import RolloutResult
from groupwise.training.update.minibatch import DatasetPairs, MiniBatch, build_minibatch
from groupwise.training.update.result import gradient_statistics
from groupwise.training.update.shares import share_of
from groupwise.training.update.updater import Updater
from tests.model.models import VOCABULARY, padded_logps
from tests.training.factories import (
    assert_same,
    last_gradient,
    make_batch,
    make_updater,
    naive_logps,
    naive_terms,
    perturb,
    short_recipe,
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
SLOW_SOURCES = [pytest.param(source, marks=pytest.mark.slow) for source in ("group", "data")]
QUICK_KINDS = ("ipo", "aot")
ALONE = {"loss.policy_coef": 0.0, "loss.kl_coef": 0.0}
LONG = [[20] * 4] * 4  # with the smallest packs, no two such completions fit into one


def data_pairs(number=5, least=1, most=8, seed=5):
    """Pairs of random ids and lengths."""
    generator = torch.Generator().manual_seed(seed)

    def ids(least, most):
        length = int(torch.randint(least, most + 1, (1,), generator=generator))
        return torch.randint(VOCABULARY, (length,), generator=generator)

    return [TokenPair(tuple(ids(2, 7).tolist()), ids(least, most), ids(least, most)) for _ in range(number)]


@dataclass
class Case:
    """A mini-batch whose policy has moved away from its old log-probs and from the reference."""

    recipe: Recipe
    batch: Batch
    group_advantages: GroupAdvantages
    updater: Updater
    minibatch: MiniBatch
    dataset: list[TokenPair]
    prompts: tuple[int, ...]
    inputs: dict[str, Any]  # arguments of `naive_terms`: old and reference log-probs
    reference: torch.Tensor | None  # (n, 2), naive

    @property
    def model(self):
        return self.updater.handle.model

    @property
    def sampled(self):
        """The pairs of this mini-batch's samples, by their index in the batch."""
        pairs = self.group_advantages.pairs
        numbers = [] if pairs is None else zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True)
        return [pair for pair in numbers if pair[0] // self.batch.samples in self.prompts]

    def sums(self):
        """Summed log-probs ``(n, 2)``, each completion on its own: the groups' at the sampling temperature, the data
        set's at temperature 1."""
        batch, handle, rows = self.batch, self.updater.handle, []
        for sample in [sample for pair in self.sampled for sample in pair]:
            prompt = torch.tensor(batch.prompts[sample // batch.samples].ids)
            kept = None if batch.kept is None else batch.kept.select(batch.token_indices([sample]))
            temperature = self.recipe.sampling.temperature
            result = padded_logps(handle, [prompt], [[batch.ids[sample]]], temperature=temperature, kept=kept)
            rows.append(result.logps.sum())
        for pair in self.dataset:
            for ids in (pair.chosen, pair.rejected):
                rows.append(padded_logps(handle, [torch.tensor(pair.prompt)], [[ids]]).logps.sum())
        return torch.stack(rows).view(-1, 2)

    def lengths(self):
        sampled = [[len(self.batch.ids[sample]) for sample in pair] for pair in self.sampled]
        return torch.tensor(sampled + [[len(pair.chosen), len(pair.rejected)] for pair in self.dataset])

    def preference(self):
        """The unweighted loss of all pairs of the mini-batch at once, and statistics."""
        preference, sums, lengths = self.recipe.preference, self.sums(), self.lengths()
        loss, statistics = preference_loss(
            sums[:, 0],
            sums[:, 1],
            self.reference[:, 0],
            self.reference[:, 1],
            beta=preference.beta,
            kind=preference.kind,
            weights=preference.kind_weights,
            label_smoothing=preference.label_smoothing,
            discopop_tau=preference.discopop_tau,
            chosen_lengths=lengths[:, 0],
            rejected_lengths=lengths[:, 1],
        )
        named = {"loss": loss, **statistics, "chosen_logp": sums[:, 0].mean(), "rejected_logp": sums[:, 1].mean()}
        return loss, {f"preference/{name}": float(value.detach()) for name, value in named.items()}

    def naive(self):
        """The value and gradient of each term, and the pairs' statistics."""
        loss, statistics = self.preference()
        values, coefs = {}, self.recipe.loss
        if coefs.policy_coef or coefs.kl_coef:
            handle, inputs = self.updater.handle, self.inputs
            values = naive_terms(handle, self.batch, self.group_advantages, self.prompts, self.recipe, **inputs)
            values["policy"] = coefs.policy_coef * values["policy"]
        if not coefs.policy_coef:
            values.pop("policy", None)
        values["preference"] = self.recipe.preference.weight * loss
        gradients = {name: gradient_of_term(self.model, value) for name, value in values.items()}
        return {name: float(value.detach()) for name, value in values.items()}, gradients, statistics


def gradient_of_term(model, value):
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, weights, retain_graph=True), strict=True))


def sum_of(gradients):
    return {name: torch.stack([gradient[name] for gradient in gradients]).sum(0) for name in gradients[0]}


def norm_of(gradient):
    return math.sqrt(sum(float(value.square().sum()) for value in gradient.values()))


def make_case(settings=None, *, prompts=PROMPTS, model=None, budget=10**6, dataset=None, naive=True, **options):
    """``naive``: also compute the inputs of the naive version."""
    recipe = short_recipe({**TERM, **(settings or {})})
    sampled = make_batch(cut=[1, 3, 12], kept=recipe.masks.keep_sampling_mask, **options)
    group_advantages = compute_group_advantages(sampled, recipe, [1.0])
    updater = make_updater(recipe, model=model, budget=budget, reference=True)
    if dataset is None:
        dataset = [] if recipe.preference.pairs == "group" else data_pairs()
    minibatch = build_minibatch(sampled, group_advantages, prompts, recipe, DatasetPairs(dataset))
    case = Case(recipe, sampled, group_advantages, updater, minibatch, dataset, tuple(prompts), {}, None)
    samples = recipe.loss.policy_coef or recipe.loss.kl_coef

    def logps():
        return naive_logps(updater.handle, sampled, prompts, recipe)["logps"] if samples else None

    with torch.no_grad():
        if naive:
            case.reference, case.inputs["ref"] = case.sums(), logps()
        perturb(case.model, seed=2, size=0.02)
        if naive:
            case.inputs["old"] = logps()
    updater.precompute_logps(minibatch, recipe, old=True)
    perturb(case.model, seed=3, size=0.02)
    return case


def check_against_naive(case, budgets=BUDGETS):
    values, gradients, statistics = case.naive()
    wanted = sum_of(list(gradients.values()))
    assert norm_of(gradients["preference"]) > 1e-3 * norm_of(wanted)  # large enough to notice errors
    for budget in budgets:
        case.updater.token_budget = budget
        result = case.updater.update(case.minibatch, case.recipe)
        assert_same(last_gradient(case.updater), wanted)
        assert {name for name, value in result.values.items() if value} == {n for n, value in values.items() if value}
        for name, value in values.items():
            assert result.values.get(name, 0.0) == pytest.approx(value, rel=1e-9, abs=1e-12), name
        for name, value in statistics.items():
            assert result.statistics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert result.grad_norm == pytest.approx(norm_of(wanted), rel=1e-9)


def settings_of(kind):
    smoothed = {"preference.label_smoothing": 0.1} if kind in SMOOTHED_KINDS else {}
    return {"preference.kind": kind, **smoothed}


# --- the gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["both", *SLOW_SOURCES])
def test_the_gradient_is_the_naive_one_for_every_source_of_pairs(source):
    case = make_case(SOURCES[source])
    assert len(case.minibatch.pairs) == {"group": 3, "data": 5, "both": 8}[source]
    check_against_naive(case, (1, 40, 10**6))


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK_KINDS else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_the_gradient_is_the_naive_one_for_every_kind(kind):
    check_against_naive(make_case({**SOURCES["both"], **settings_of(kind)}), (1,))


def test_kinds_are_added_with_their_weights():
    kinds = {"preference.kind": ["ipo", "sft"], "preference.kind_weights": [1.5, -0.2]}
    check_against_naive(make_case({**SOURCES["both"], **kinds}), (40,))


@pytest.mark.parametrize("loss", ["dapo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gspo", "cispo"))])
def test_beside_other_losses_and_masks(loss):
    settings = {"loss.name": loss, "masks.truncated": True, "masks.off_policy": "v3.2", "loss.entropy_coef": 0.1}
    check_against_naive(make_case({**SOURCES["both"], **settings, "masks.off_policy_threshold": 0.8}), (40,))


def test_with_the_exact_kl_the_reference_of_pairs_is_computed_separately():
    case = make_case({**SOURCES["both"], "loss.kl": "full"})
    assert case.minibatch.ref_logps is None
    torch.testing.assert_close(case.minibatch.pairs.reference, case.reference, rtol=1e-9, atol=1e-9)
    _, statistics = case.preference()
    result = case.updater.update(case.minibatch, case.recipe)
    assert result.statistics["preference/loss"] == pytest.approx(statistics["preference/loss"], rel=1e-9)


# --- packs ------------------------------------------------------------------------------------------------------------


def plan_of(case, budget):
    case.updater.token_budget = budget
    updater, minibatch = case.updater, case.minibatch
    budget = updater._budget(minibatch)
    share = share_of(minibatch, updater.ranks)
    return plan_pair_layout(
        updater.handle, minibatch, share, case.recipe, budget, updater._all_pair_logps, updater.ranks
    )


@pytest.mark.parametrize("plain", [False, True], ids=["packed", "plain"])
@pytest.mark.parametrize("source", ["both", *SLOW_SOURCES])
def test_the_token_budget_changes_nothing(source, plain):
    """From one pack to one sample per pack: with pairs in one pack, and with pairs split over packs."""
    model = prepare(small_llama(), plain=True) if plain else None
    settings = {**SOURCES[source], "preference.kind": ["sigmoid", "ipo"], "loss.entropy_coef": 0.1}
    dataset = [] if source == "group" else data_pairs(4, 20, 20)
    case = make_case(settings, lengths=LONG, model=model, dataset=dataset, naive=False)
    minibatch, updater, paths, results, gradients = case.minibatch, case.updater, set(), [], []
    for budget in (1, 52, 75, 110, 10**6):
        plan = plan_of(case, budget)
        paths |= {index.precomputed is None for index in plan if len(index.rows)}
        results.append(updater.update(minibatch, case.recipe))
        gradients.append(last_gradient(updater))
    assert paths == {True, False}
    updater.token_budget = 1
    dataset = pair_completions(minibatch.pairs.dataset.pairs)
    for prompts, completions in ((minibatch.prompts, minibatch.completions), dataset):
        packs = pack_members(updater.handle, prompts, completions, updater._budget(minibatch))
        assert all(len(members) == 1 for members in packs)
    for update, gradient in zip(results[:-1], gradients[:-1], strict=True):
        assert_same(gradient, gradients[-1])
        assert update.values == pytest.approx(results[-1].values, rel=1e-9)
        assert update.statistics == pytest.approx(results[-1].statistics, rel=1e-9, abs=1e-12)


def test_a_model_without_packing():
    model = prepare(small_llama(), plain=True)
    check_against_naive(make_case(SOURCES["both"], model=model))


def test_pairs_in_one_pack_are_computed_once(monkeypatch):
    """The log-probs are only computed beforehand if a pair is split over packs or the loss couples pairs."""
    asked = []
    real = Updater._all_pair_logps

    def sums(self, minibatch, recipe):
        asked.append(recipe.preference.kind)
        return real(self, minibatch, recipe)

    monkeypatch.setattr(Updater, "_all_pair_logps", sums)
    for kind in QUICK_KINDS:
        case = make_case({**SOURCES["both"], **settings_of(kind)}, naive=False)
        case.updater.update(case.minibatch, case.recipe)
    assert asked == [kind for kind in QUICK_KINDS if kind in BATCH_KINDS]
    case = make_case(SOURCES["data"], budget=1, dataset=data_pairs(3, 20, 20), naive=False)
    case.updater.update(case.minibatch, case.recipe)
    assert asked[-1] == "sigmoid"


# --- how log-probs are computed ---------------------------------------------------------------------------------------


def test_group_pairs_have_the_sampling_temperature_and_dataset_pairs_temperature_1():
    case = make_case({**SOURCES["both"], "sampling.temperature": 0.6})
    cold = make_case({**SOURCES["both"], "sampling.temperature": 1.0})
    groups = len(case.sampled)
    torch.testing.assert_close(case.minibatch.pairs.reference, case.reference, rtol=1e-9, atol=1e-9)
    difference = (case.reference - cold.reference).abs()
    assert bool((difference[:groups] > 1e-3).all())
    assert bool((difference[groups:] == 0).all())
    check_against_naive(case, (40,))


def test_kept_sets_apply_to_group_pairs():
    kept = {"masks.keep_sampling_mask": True, "sampling.top_k": 5}
    for settings in (
        {},
        {"loss.kl_coef": 0.0},
    ):  # the reference's log-probs are those of the KL, or computed for the pairs
        case = make_case({**SOURCES["both"], **kept, **settings})
        unfiltered = make_case({**SOURCES["both"], **settings})
        groups = len(case.sampled)
        torch.testing.assert_close(case.minibatch.pairs.reference, case.reference, rtol=1e-9, atol=1e-9)
        assert bool((case.reference[:groups] > unfiltered.reference[:groups] + 1e-3).any())
        check_against_naive(case, (40,))


def test_known_log_probs_of_the_reference_are_not_computed_again(monkeypatch):
    """The data set's are given, the samples' are those of the KL."""
    recipe = short_recipe({**TERM, **SOURCES["both"]})
    batch, pairs = make_batch(), data_pairs()
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    known = torch.arange(10.0, dtype=torch.float64).view(5, 2)
    updater = make_updater(recipe, reference=True)
    calls = []
    monkeypatch.setattr(Updater, "_dataset_pair_logps", lambda *_: calls.append("dataset"))
    monkeypatch.setattr(Updater, "_sampled_pair_logps", lambda *_: calls.append("samples"))
    minibatch = build_minibatch(batch, group_advantages, PROMPTS, recipe, DatasetPairs(pairs, known))
    updater.precompute_logps(minibatch, recipe, old=False)
    assert calls == []
    assert torch.equal(minibatch.pairs.reference[3:], known)
    assert torch.equal(minibatch.pairs.reference[:3], minibatch.ref_logps.sum(1)[minibatch.pairs.rows])


def test_pairs_without_a_reference_are_refused():
    recipe = short_recipe({**TERM, **ALONE})
    batch = make_batch()
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), PROMPTS, recipe)
    updater = make_updater(recipe)
    updater.precompute_logps(minibatch, recipe, old=False)
    with pytest.raises(InputError, match="needs the reference's log-probs"):
        updater.update(minibatch, recipe)


# --- without the policy loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["both", *SLOW_SOURCES])
def test_without_the_policy_loss_only_members_of_pairs_are_computed(source):
    case = make_case({**SOURCES[source], **ALONE})
    assert sorted(case.minibatch.samples) == ([] if source == "data" else [0, 1, 2, 3, 14, 15])
    check_against_naive(case)
    result = case.updater.update(case.minibatch, case.recipe)
    assert "policy" not in result.values
    assert not {"ratio", "approx_kl", "clip_fraction_low"} & set(result.statistics)


def test_without_the_policy_loss_masks_are_not_computed(monkeypatch):
    settings = {"masks.off_policy": "v3.2", "masks.off_policy_threshold": 1e-6, "masks.high_entropy": 0.1}
    asked, real = [], updater_module.completion_logps

    def completion_logps(*arguments, **options):
        asked.append(True)
        return real(*arguments, **options)

    plain = make_case(ALONE, naive=False)
    case = make_case({**ALONE, **settings}, naive=False)
    with monkeypatch.context() as patch:
        patch.setattr(updater_module, "completion_logps", completion_logps)
        result = case.updater.update(case.minibatch, case.recipe)
        assert not asked
        assert result.masked_out == {}
        other = make_case(settings, naive=False)
        assert other.updater.update(other.minibatch, other.recipe).masked_out["off_policy"]
        assert asked
    plain.updater.update(plain.minibatch, plain.recipe)
    for name, gradient in last_gradient(plain.updater).items():
        assert torch.equal(gradient, last_gradient(case.updater)[name])


def test_half_the_policy_coef_is_half_its_gradient():
    gradients, values = {}, {}
    for coefficient in (0.0, 0.5, 1.0):
        case = make_case({**SOURCES["both"], "loss.policy_coef": coefficient}, naive=coefficient == 0.5)
        if coefficient == 0.5:
            check_against_naive(case, (40,))
        values[coefficient] = case.updater.update(case.minibatch, case.recipe).values
        gradients[coefficient] = last_gradient(case.updater)
    assert "policy" not in values[0.0]
    assert values[0.5]["policy"] == pytest.approx(values[1.0]["policy"] / 2, rel=1e-9)
    halfway = {name: (gradients[0.0][name] + gradients[1.0][name]) / 2 for name in gradients[0.0]}
    assert_same(gradients[0.5], halfway)
    assert norm_of({name: gradients[1.0][name] - gradients[0.0][name] for name in halfway}) > 1e-3


@pytest.mark.parametrize("log_term_gradients", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("budget", [1, pytest.param(10**6, marks=pytest.mark.slow)])
def test_samples_without_a_learning_signal_may_be_computed(budget, log_term_gradients):
    """With train.skip_equal_rewards = false there are packs without a pair, and mini-batches without a term."""
    case = make_case({**ALONE, "train.skip_equal_rewards": False}, budget=budget, naive=False)
    assert len(case.minibatch) == 12
    usual = make_case(ALONE, naive=False)
    usual.updater.update(usual.minibatch, usual.recipe)
    result = case.updater.update(case.minibatch, case.recipe, log_term_gradients=log_term_gradients)
    assert_same(last_gradient(case.updater), last_gradient(usual.updater))
    assert result.values["preference"] > 0
    minibatch = build_minibatch(case.batch, case.group_advantages, [1], case.recipe)
    before = {name: weight.clone() for name, weight in case.updater.masters.state_dict().items()}
    case.updater.precompute_logps(minibatch, case.recipe, old=False)
    if not minibatch.empty:
        case.updater.update(minibatch, case.recipe, log_term_gradients=log_term_gradients)
    assert all(torch.equal(weight, before[name]) for name, weight in case.updater.masters.state_dict().items())


# --- mini-batches -----------------------------------------------------------------------------------------------------


def test_each_mini_batch_is_normalised_by_its_own_pairs():
    pairs = data_pairs(5)
    for prompts, dataset, number in (((0,), pairs[:1], 3), ((2, 3), pairs[1:], 6), ((1,), pairs[:2], 2), ((0,), [], 2)):
        case = make_case(SOURCES["both"], prompts=prompts, dataset=dataset)
        assert case.minibatch.totals.pairs == len(case.minibatch.pairs) == number
        check_against_naive(case, (10**6,))


def test_a_mini_batch_without_pairs_has_no_term():
    recipe = short_recipe(TERM)
    batch = make_batch()
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), [1], recipe)
    assert len(minibatch.pairs) == 0
    assert not minibatch.empty  # there is a KL
    updater = make_updater(recipe, reference=True)
    updater.precompute_logps(minibatch, recipe, old=False)
    perturb(updater.handle.model)
    result = updater.update(minibatch, recipe, log_term_gradients=True)
    assert "preference" not in result.values
    assert not any("preference" in name for name in [*result.statistics, *result.term_gradients])
    nothing = short_recipe({**TERM, **ALONE})
    assert build_minibatch(batch, compute_group_advantages(batch, nothing, [1.0]), [1], nothing).empty
    assert not build_minibatch(
        batch, compute_group_advantages(batch, nothing, [1.0]), [1], nothing, DatasetPairs(data_pairs(1))
    ).empty


@pytest.mark.parametrize(("number", "count"), [(5, 2), (4, 4), (2, 3), (0, 2)])
def test_dataset_pairs_are_divided_among_mini_batches(number, count):
    pairs = data_pairs(number)
    reference = torch.arange(2.0 * number).view(number, 2)
    splits = [DatasetPairs(pairs, reference).split(at, count) for at in range(count)]
    assert [pair for split in splits for pair in split.pairs] == pairs
    assert torch.equal(torch.cat([split.reference for split in splits]), reference)
    assert all(len(split.pairs) == len(split.reference) for split in splits)
    sizes = [len(split.pairs) for split in splits]
    assert max(sizes) - min(sizes) <= 1
    assert all(split.reference is None for split in [DatasetPairs(pairs).split(at, count) for at in range(count)])


def metrics_of(settings, cuts, dataset=(), *, iterations=1):
    """The updates of some mini-batches of one step, and the step's metrics."""
    recipe = short_recipe({**TERM, **settings})
    batch = make_batch()
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    updater = make_updater(recipe, reference=True)
    pairs = DatasetPairs(dataset)
    minibatches = [
        build_minibatch(batch, group_advantages, cut, recipe, pairs.split(at, len(cuts))) for at, cut in enumerate(cuts)
    ]
    for minibatch in minibatches:
        updater.precompute_logps(minibatch, recipe, old=True)
    perturb(updater.handle.model)
    updates = [
        updater.update(minibatch, recipe) for _ in range(iterations) for minibatch in minibatches if not minibatch.empty
    ]
    return updates, step_metrics(RolloutResult(batch), group_advantages, {"one": 1.0}, minibatches, updates, recipe)


def test_statistics_are_means_over_the_updates_that_have_pairs():
    updates, metrics = metrics_of({}, [[0], [1], [2, 3]])
    with_pairs = [updates[0], updates[2]]
    assert ["preference" in update.values for update in updates] == [True, False, True]
    for name in ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp"):
        values = [update.statistics[f"preference/{name}"] for update in with_pairs]
        assert metrics[f"preference/{name}"] == pytest.approx(sum(values) / 2, rel=1e-12)
    # The term's value is a mean over all updates; those without pairs count as 0.
    assert metrics["loss/preference"] == pytest.approx(sum(update.values["preference"] for update in with_pairs) / 3)
    assert metrics["preference/loss"] == pytest.approx(metrics["loss/preference"] * 3 / 2 / 0.7)
    assert metrics["preference/weight"] == 0.7
    assert metrics["preference/pairs"] == 4
    assert "preference/pairs_group" not in metrics
    refused = {name: metrics[f"preference/refused/{name}"] for name in ("tie", "margin", "same_answer", "alone")}
    assert refused == {"tie": 4, "margin": 0, "same_answer": 0, "alone": 0}


def test_pairs_are_counted_by_source():
    _, metrics = metrics_of(SOURCES["both"], [[0, 1], [2, 3]], data_pairs(5))
    assert (metrics["preference/pairs"], metrics["preference/pairs_group"], metrics["preference/pairs_data"]) == (
        9,
        4,
        5,
    )
    _, metrics = metrics_of(SOURCES["data"], [[0, 1], [2, 3]], data_pairs(5))
    assert metrics["preference/pairs"] == 5
    assert not any(name.startswith(("preference/refused", "preference/pairs_")) for name in metrics)
    _, metrics = metrics_of({"preference.weight": 0.0}, [[0, 1], [2, 3]])
    assert not any(name.startswith("preference") for name in metrics)


@pytest.mark.parametrize("iterations", [1, 2])
def test_updates_on_dataset_pairs_alone_do_not_count_in_mask_ratios(iterations):
    """The second mini-batch has no samples to compute."""
    settings = {"masks.off_policy": "v3.2", "masks.off_policy_threshold": 1e-6, "loss.kl_coef": 0.0}
    taken = {}
    for source, dataset in (("group", ()), ("both", data_pairs(4))):
        updates, metrics = metrics_of({**SOURCES[source], **settings}, [[0, 2, 3], [1]], dataset, iterations=iterations)
        assert len(updates) == iterations * (2 if dataset else 1)
        taken[source] = metrics["masks/off_policy"], metrics["mask_ratio"]
    assert taken["group"][0] == 6 / 16
    assert taken["both"] == taken["group"]


# --- gradients of separate terms --------------------------------------------------------------------------------------


def cosine(one, other):
    product = sum(float((one[name] * other[name]).sum()) for name in one)
    return product / (norm_of(one) * norm_of(other))


@pytest.mark.parametrize("budget", [1, pytest.param(10**6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("source", ["both", *SLOW_SOURCES])
def test_norms_and_cosines_of_the_terms_gradients(source, budget):
    case = make_case({**SOURCES[source], "loss.entropy_coef": 0.1}, budget=budget)
    _, gradients, _ = case.naive()
    grpo = sum_of([gradients["policy"], gradients["kl"], gradients["entropy"]])
    joint = case.updater.update(case.minibatch, case.recipe)
    gradient = last_gradient(case.updater)
    result = case.updater.update(case.minibatch, case.recipe, log_term_gradients=True)
    assert_same(last_gradient(case.updater), gradient)
    assert result.values == pytest.approx(joint.values, rel=1e-9)
    assert result.statistics == pytest.approx(joint.statistics, rel=1e-9, abs=1e-12)
    wanted = {f"grad_norm/{name}": norm_of(gradients[name]) for name in gradients}
    for number, one in enumerate(gradients):
        for other in list(gradients)[number + 1 :]:
            wanted[f"grad_cosine/{one}_{other}"] = cosine(gradients[one], gradients[other])
    wanted |= {"grad_norm/grpo": norm_of(grpo), "grad_cosine/grpo_preference": cosine(grpo, gradients["preference"])}
    assert list(gradients) == ["policy", "kl", "entropy", "preference"]
    assert "grad_cosine/policy_preference" in wanted
    assert result.term_gradients == pytest.approx(wanted, rel=1e-8, abs=1e-10)


def test_gradients_by_hand():
    """Two weights: the policy's gradient is along the first, the KL's and the pairs' along the second."""
    directions = {"policy": [3.0, 0.0], "kl": [0.0, 4.0], "preference": [0.0, -2.0]}
    masters = MasterWeights(torch.nn.Linear(1, 1))
    result = gradient_statistics({name: [torch.tensor(direction)] for name, direction in directions.items()}, masters)
    assert result == {
        "grad_norm/policy": 3.0,
        "grad_norm/kl": 4.0,
        "grad_norm/preference": 2.0,
        "grad_cosine/policy_kl": 0.0,
        "grad_cosine/policy_preference": 0.0,
        "grad_cosine/kl_preference": -1.0,
        "grad_norm/grpo": 5.0,
        "grad_cosine/grpo_preference": pytest.approx(-0.8),
    }
    assert "grad_norm/grpo" not in gradient_statistics({"preference": [torch.ones(2)]}, masters)
    assert "grad_norm/grpo" not in gradient_statistics({"policy": [torch.ones(2)], "kl": [torch.ones(2)]}, masters)


def test_there_are_no_cosines_with_pairs_alone():
    case = make_case({**SOURCES["data"], **ALONE})
    wanted = case.naive()[1]["preference"]
    result = case.updater.update(case.minibatch, case.recipe, log_term_gradients=True)
    assert result.term_gradients == {"grad_norm/preference": pytest.approx(norm_of(wanted), rel=1e-9)}
    assert_same(last_gradient(case.updater), wanted)
    # The policy term has a weight, but no sample to apply it to.
    case = make_case({**SOURCES["data"], "loss.kl_coef": 0.0}, prompts=(1,))
    assert len(case.minibatch) == 0
    result = case.updater.update(case.minibatch, case.recipe, log_term_gradients=True)
    assert (result.term_gradients["grad_norm/policy"], result.term_gradients["grad_cosine/grpo_preference"]) == (
        0.0,
        0.0,
    )
    assert_same(last_gradient(case.updater), case.naive()[1]["preference"])


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_term_gradients", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["packs", "sums"])
def test_out_of_memory_halves_the_packs_with_the_same_result(monkeypatch, where, log_term_gradients):
    """In the packs with gradient, and in the log-probs that are computed before them."""
    settings = {**SOURCES["both"], "preference.kind": "aot" if where == "sums" else "sigmoid"}
    lengths, pairs = [[9 + n % 3 for n in range(4)] for _ in range(4)], data_pairs(8, 9, 12)
    small = make_case(settings, lengths=lengths, prompts=range(4), dataset=pairs, budget=75, naive=False)
    large = make_case(settings, lengths=lengths, prompts=range(4), dataset=pairs, budget=151, naive=False)
    wanted = small.updater.update(small.minibatch, small.recipe, check=True, log_term_gradients=log_term_gradients)
    said, budgets = [], []
    name = "iter_packs" if where == "packs" else "completion_logps"
    real = getattr(updater_module, name)

    def check(token_budget, number=1):
        if token_budget > 80 and number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    def iter_packs(*arguments, token_budget, **options):
        budgets.append(token_budget)
        for number, pack in enumerate(real(*arguments, token_budget=token_budget, **options)):
            check(token_budget, number)
            yield pack

    def completion_logps(*arguments, token_budget, **options):
        budgets.append(token_budget)
        check(token_budget)
        return real(*arguments, token_budget=token_budget, **options)

    monkeypatch.setattr(updater_module, name, iter_packs if where == "packs" else completion_logps)
    large.updater.say = said.append
    result = large.updater.update(large.minibatch, large.recipe, check=True, log_term_gradients=log_term_gradients)
    assert budgets[0] == 151
    assert set(budgets[1:]) == {75}
    assert said == ["memory ran out: the step is repeated with a token budget of 75; same result"]
    assert large.updater.token_budget == 75
    gradient = last_gradient(small.updater)
    if where == "packs":
        assert result == wanted
        assert all(torch.equal(value, gradient[name]) for name, value in last_gradient(large.updater).items())
    assert_same(last_gradient(large.updater), gradient)
    assert result.values == pytest.approx(wanted.values, rel=1e-9)


def test_out_of_memory_in_the_middle_of_dataset_pairs(monkeypatch):
    """The samples, which were computed before, are not counted twice."""
    settings = {**SOURCES["both"], **ALONE}
    pairs = data_pairs(12, 9, 12)
    small = make_case(settings, dataset=pairs, budget=75, naive=False)
    wanted = small.updater.update(small.minibatch, small.recipe)
    large = make_case(settings, dataset=pairs, budget=151, naive=False)
    real, failed = updater_module.iter_packs, []

    def iter_packs(handle, prompts, *arguments, token_budget, **options):
        for pack in real(handle, prompts, *arguments, token_budget=token_budget, **options):
            if token_budget == 151 and len(prompts) == 12:
                failed.append(True)
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
            yield pack

    monkeypatch.setattr(updater_module, "iter_packs", iter_packs)
    result = large.updater.update(large.minibatch, large.recipe)
    assert failed == [True]
    assert result == wanted
    assert all(
        torch.equal(value, last_gradient(small.updater)[name]) for name, value in last_gradient(large.updater).items()
    )


# --- not finite -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [10**6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_nan_and_inf_name_the_term_and_change_no_weight(value, budget):
    for settings, at in ((SOURCES["group"], 0), (SOURCES["both"], -1)):
        case = make_case({**settings, "preference.kind": "ipo"}, budget=budget, naive=False)
        case.minibatch.pairs.reference[at, 0] = value
        before = {name: weight.clone() for name, weight in case.updater.masters.state_dict().items()}
        with pytest.raises(NotFiniteError, match=r"\(terms: policy -?[\d.]+.*, preference (nan|inf)\)"):
            case.updater.update(case.minibatch, case.recipe)
        skipping = with_settings(case.recipe, {"train.on_non_finite": "skip"})
        assert case.updater.update(case.minibatch, skipping).skipped
        assert all(torch.equal(weight, before[name]) for name, weight in case.updater.masters.state_dict().items())
        assert all(master.grad is None for master in case.updater.masters.parameters())
