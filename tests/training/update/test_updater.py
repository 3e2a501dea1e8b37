"""One update: its gradient is the naive one however samples are packed, and it changes all weights or none."""

from __future__ import annotations

import math

import pytest
import torch

import groupwise.training.update.updater as updater_module
from groupwise.core.filters import filter_logits
from groupwise.core.losses import LOSSES, Loss, TokenTerm
from groupwise.errors import NotFiniteError
from groupwise.training.errors import SMALLEST_BUDGET, OutOfMemoryError
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.trainer import Callback
from groupwise.training.update.correction import correction_metrics
from groupwise.training.update.minibatch import build_minibatch
from groupwise.training.update.optimizer import make_optimizer
from groupwise.training.update.policy_masks import on_policy_samples
from groupwise.training.update.updater import Updater
from tests.training.factories import (
    BUDGETS,
    PROMPTS,
    assert_same,
    check_update,
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
    small_llama,
)

MLX_LM = {"sampling.order": "mlx_lm"}
QUICK_LOSSES = ("grpo", "gspo", "cispo")
CASES = {
    "on policy": {},
    "kl": {"loss.kl_coef": 0.3, "loss.kl": "unbiased"},
    "entropy": {"loss.entropy_coef": 0.2, "sampling.temperature": 0.7},
    "masks": {"masks.truncated": True, "masks.off_policy": "v3.2", "masks.off_policy_threshold": 0.8},
    "high entropy": {"masks.high_entropy": 0.4},
    "mask denominator": {
        "masks.truncated": True,
        "masks.off_policy": "v3.2",
        "masks.off_policy_threshold": 0.8,
        "loss.denominator": "policy_mask",
        "loss.kl_coef": 0.3,
    },
    "entropy denominator": {"masks.truncated": True, "masks.high_entropy": 0.4, "loss.denominator": "policy_mask"},
    "reference_drift": {
        "masks.off_policy": "reference_drift",
        "masks.off_policy_threshold": 0.2,
        "loss.denominator": "policy_mask",
    },
    "importance": {"loss.importance_cap": 1.05},
    "IcePop": {"loss.importance_sampling": "token_mask", "loss.importance_floor": 0.1, "loss.importance_cap": 2.0},
    "sequence TIS": {"loss.importance_sampling": "sequence_truncate", "loss.importance_cap": 0.01},
    "sequence mask": {
        "loss.importance_sampling": "sequence_mask",
        "loss.importance_floor": 1e-4,
        "loss.importance_cap": 0.1,
        "loss.denominator": "policy_mask",
    },
    "geometric rejection": {"loss.rejection_low": 0.1, "loss.rejection_high": 0.5, "loss.denominator": "policy_mask"},
    "TIS and rejection": {"loss.importance_cap": 1.05, "loss.rejection_low": 0.1, "loss.name": "grpo"},
    "normalised weights": {"loss.importance_cap": 1.05, "loss.importance_normalize": True},
    "product rejection": {"loss.rejection": "product", "loss.rejection_low": 1e-4, "loss.denominator": "policy_mask"},
    "token veto": {"loss.rejection": "any_token", "loss.rejection_low": 0.02},
    "k3 rejection": {"loss.rejection": "k3", "loss.rejection_high": 1.2},
    "prompt mean": {"loss.aggregation": "prompt_mean", "loss.kl_coef": 0.3, "masks.truncated": True},
    "ScaleRL": {
        "loss.name": "cispo",
        "loss.aggregation": "prompt_mean",
        "advantages.scale": "batch_advantages",
        "masks.drop_equal_rewards": True,
    },
    "equal rewards dropped": {
        "loss.name": "grpo",
        "masks.drop_equal_rewards": True,
        "masks.truncated": True,
        "loss.denominator": "policy_mask",
        "loss.kl_coef": 0.3,
        "loss.entropy_coef": 0.2,
        "loss.importance_cap": 1.05,
    },
    "other aggregation": {"loss.name": "cispo", "loss.aggregation": "sequence_sum", "loss.kl_coef": 0.3},
    "DPPO, TV": {"masks.divergence": "tv", "masks.divergence_threshold": 0.02},
    "DPPO, KL": {"loss.name": "cispo", "masks.divergence": "kl", "loss.aggregation": "prompt_mean"},
    "DPPO, decoupled": {"masks.divergence": "tv", "loss.importance_cap": 1.05, "masks.truncated": True},
    "product ratio": {"loss.name": "grpo", "loss.ratio": "sequence_product", "masks.truncated": True},
    "kept sets": {"masks.keep_sampling_mask": True, "sampling.top_k": 5},
}
RICH = {
    "loss.kl_coef": 0.3,
    "loss.kl": "unbiased",
    "loss.entropy_coef": 0.2,
    "loss.importance_cap": 1.05,
    "masks.truncated": True,
    "masks.off_policy": "v3.2",
    "masks.off_policy_threshold": 0.8,
}
SHORT = {"sampling.max_new_tokens": 2}  # where bfloat16 is slow


# --- the gradient -----------------------------------------------------------------------------------------------------


def check_against_naive(settings, *, old=True, budgets=BUDGETS):
    recipe, batch, group_advantages, updater, minibatch, inputs = moved_minibatch(settings, old=old)
    assert (minibatch.old_logps is None) is not old
    terms = naive_terms(updater.handle, batch, group_advantages, PROMPTS, recipe, **inputs)
    check_update(updater, minibatch, recipe, terms, budgets)


@pytest.mark.parametrize(
    "loss", [loss if loss in QUICK_LOSSES else pytest.param(loss, marks=pytest.mark.slow) for loss in LOSSES]
)
def test_the_gradient_is_the_naive_one_for_every_loss_however_samples_are_packed(loss):
    """The naive one computes each sample on its own and applies the formulas to all of them at once."""
    check_against_naive({"loss.name": loss, **RICH})


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_the_naive_one_for_every_term_and_mask(case):
    check_against_naive(CASES[case], budgets=(40,))


@pytest.mark.parametrize(
    "loss", ["gspo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "reinforce"))]
)
def test_the_gradient_is_the_naive_one_with_mask_denominators(loss):
    check_against_naive({"loss.name": loss, **CASES["mask denominator"]})


@pytest.mark.parametrize(("case", "masked_out"), [("masks", 3), ("mask denominator", 3), ("reference_drift", 3)])
def test_the_masks_of_these_cases_drop_some_samples_but_not_all(case, masked_out):
    recipe, _, _, updater, minibatch, _ = moved_minibatch(CASES[case], naive=False)
    result = updater.update(minibatch, recipe).masked_out
    assert list(result) == ["off_policy"]
    assert len(result["off_policy"]) == masked_out < len(minibatch)
    assert set(result["off_policy"]) <= set(minibatch.samples)


@pytest.mark.parametrize("loss", ["dapo", "gspo", "cispo"])
def test_asynchronous_rollouts_are_learned_by_the_ratio_to_their_sampler(loss):
    """Older weights have sampled: π_θ / π_sampler, also where a batch is used once and the ratio would be 1."""
    settings = {"loss.name": loss, "loss.kl_coef": 0.3, "loss.kl": "unbiased", "train.max_staleness": 2}
    recipe, batch, group_advantages, updater, minibatch, inputs = moved_minibatch(settings, old=False)
    inputs["old"] = naive_logps(updater.handle, batch, PROMPTS, recipe)["sampler"]
    terms = naive_terms(updater.handle, batch, group_advantages, PROMPTS, recipe, **inputs)
    (result, *_) = check_update(updater, minibatch, recipe, terms, (40, 10**6))
    assert abs(result.statistics["ratio"] - 1) > 0.01


@pytest.mark.parametrize("old", [True, False])
def test_with_an_importance_weight_they_are_learned_by_the_ratio_to_the_current_policy(old):
    check_against_naive({"train.max_staleness": 2, "loss.importance_cap": 1.05}, old=old, budgets=(40,))


def test_some_importance_weights_of_these_cases_are_capped():
    _, _, _, _, minibatch, _ = moved_minibatch(CASES["importance"], naive=False)
    assert 0 < (minibatch.weights[minibatch.mask] == 1.05).double().mean() < 1


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("IcePop", {"sampler/importance_masked"}),
        ("sequence TIS", {"sampler/importance_truncated"}),
        ("sequence mask", {"sampler/importance_masked"}),
        ("geometric rejection", {"sampler/rejected"}),
        ("TIS and rejection", {"sampler/importance_truncated", "sampler/rejected"}),
        ("product rejection", {"sampler/rejected"}),
        ("token veto", {"sampler/rejected"}),
        ("k3 rejection", {"sampler/rejected"}),
    ],
)
def test_the_corrections_of_these_cases_change_some_tokens_but_not_all(case, changed):
    recipe, _, _, _, minibatch, _ = moved_minibatch(CASES[case], naive=False)
    metrics = correction_metrics([minibatch.correction], recipe)
    assert set(metrics) == {"sampler/importance_mean", *changed}
    assert all(0 < metrics[name] < 1 for name in changed)
    # One weight per token, or with a mode of sequences one per sequence.
    weights = minibatch.weights[:, 0] if case.startswith("sequence") else minibatch.weights[minibatch.mask]
    assert metrics["sampler/importance_mean"] == pytest.approx(float(weights.mean()))
    if "mask" in case:
        assert metrics["sampler/importance_masked"] == pytest.approx(float((weights == 0).double().mean()))
    if case == "geometric rejection":
        assert metrics["sampler/rejected"] == float((minibatch.weights == 0).all(1).double().mean()) == 0.5


@pytest.mark.parametrize("case", ["DPPO, TV", "DPPO, KL", "DPPO, decoupled"])
def test_the_divergence_of_these_cases_masks_some_tokens_but_not_all(case):
    recipe, _, _, updater, minibatch, _ = moved_minibatch(CASES[case], naive=False)
    assert (minibatch.old_logps is minibatch.sampler_logps) is (case != "DPPO, decoupled")
    statistics = updater.update(minibatch, recipe).statistics
    assert 0 < statistics["clip_fraction_low"] + statistics["clip_fraction_high"] < 1


def test_a_batch_that_is_used_once_needs_no_old_logps():
    check_against_naive({"loss.name": "grpo"}, old=False)


def test_each_mini_batch_is_normalised_by_its_own_samples():
    recipe = short_recipe({"loss.name": "dapo"})
    batch = make_batch()
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    for prompts in ([0], [2, 3]):
        updater = make_updater(recipe, budget=20)
        minibatch = build_minibatch(batch, group_advantages, prompts, recipe)
        value = naive_terms(updater.handle, batch, group_advantages, prompts, recipe)["policy"]
        wanted = gradient_of(updater.handle.model, value)
        updater.update(minibatch, recipe)
        assert_same(last_gradient(updater), wanted)


def test_gradients_are_clipped_and_the_norm_before_is_reported():
    recipe = short_recipe({"optimizer.max_grad_norm": 1e-3})
    batch = make_batch()
    updater = make_updater(recipe)
    result = updater.update(
        build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), [0, 1, 2, 3], recipe), recipe
    )
    clipped = math.sqrt(sum(float(g.square().sum()) for g in last_gradient(updater).values()))
    assert clipped == pytest.approx(1e-3, rel=1e-3)
    assert result.grad_norm > 1e-2


# --- skipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        *("masks", "high entropy", "entropy denominator", "reference_drift", "importance", "DPPO, TV"),
        *("DPPO, KL", "normalised weights"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("on policy", "kept sets")),
    ],
)
def test_skipping_equal_groups_changes_nothing(case):
    gradients = {}
    for skip in (True, False):
        settings = {**CASES[case], "train.skip_equal_rewards": skip}
        recipe, _, _, updater, minibatch, _ = moved_minibatch(settings, budget=40, naive=False)
        updater.update(minibatch, recipe)
        gradients[skip] = last_gradient(updater)
        assert (len(minibatch) < 12) is (skip and case not in ("reference_drift", "normalised weights"))
    assert_same(gradients[True], gradients[False], 1e-12)


def test_what_is_skipped_is_not_computed(monkeypatch):
    """Samples with equal rewards, masked ones and those with advantage 0 are left out of the forward pass."""
    seen = []

    def spy(model, prompts, completions, **options):
        seen.append((prompts.tolist(), [list(map(len, members)) for members in completions]))
        yield from real(model, prompts, completions, **options)

    real = updater_module.iter_packs
    monkeypatch.setattr(updater_module, "iter_packs", spy)
    batch = make_batch(cut=[0])
    for settings, wanted in (
        ({}, [[3, 7, 1, 5], [8, 1], [5, 2, 7, 7]]),
        ({"masks.truncated": True}, [[7, 1, 5], [8, 1], [5, 2, 7, 7]]),
        ({"train.skip_equal_rewards": False}, [[3, 7, 1, 5], [4, 4, 2, 6], [8, 1, 3, 2], [5, 2, 7, 7]]),
        ({"loss.kl_coef": 0.1}, [[3, 7, 1, 5], [4, 4, 2, 6], [8, 1, 3, 2], [5, 2, 7, 7]]),
        ({"loss.entropy_coef": 0.1}, [[3, 7, 1, 5], [4, 4, 2, 6], [8, 1, 3, 2], [5, 2, 7, 7]]),
        ({"loss.entropy_coef": -0.1}, [[3, 7, 1, 5], [4, 4, 2, 6], [8, 1, 3, 2], [5, 2, 7, 7]]),
    ):
        recipe = short_recipe(settings)
        updater = make_updater(recipe, reference=True)
        minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
        updater.precompute_logps(minibatch, recipe, old=False)
        updater.update(minibatch, recipe)
        prompts, lengths = seen.pop()
        assert lengths == wanted, settings
        assert prompts == [list(batch.prompts[n].ids) for n in ((0, 2, 3) if len(wanted) == 3 else (0, 1, 2, 3))]
        assert not seen


def test_a_step_without_a_learning_signal_changes_no_weight(tmp_path):
    def same(prompts, completions, **_):
        return [1.0] * len(completions)

    with make_trainer(tmp_path, {"optimizer.weight_decay": 0.5}, reward=same) as trainer:
        before = {name: weight.clone() for name, weight in trainer.masters.state_dict().items()}
        reports = list(trainer.steps())
    assert [report.metrics["updates"] for report in reports] == [0.0, 0.0]
    assert all(report.metrics["signal/tokens_not_computed"] == 1.0 for report in reports)
    assert all(report.metrics["grad_norm"] == 0 for report in reports)
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.masters.state_dict().items())
    assert not trainer.optimizer.state


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # Advantages without scaling: +1/2, −1/2 and 0, 0; lengths 2, 3 and 4, 5; at ratio 1 a token's loss is −A.
        ({"loss.name": "dapo"}, -(0.5 * 2 - 0.5 * 3) / 14),
        ({"loss.name": "grpo"}, -(0.5 - 0.5) / 4),
        ({"loss.name": "dr_grpo"}, -(0.5 * 2 - 0.5 * 3) / (4 * 8)),
        ({"loss.name": "luspo"}, -(0.5 * 2 - 0.5 * 3) / 4),
        # Sample 1 was truncated: it still counts in the baseline and in the denominator …
        ({"loss.name": "dapo", "masks.truncated": True}, -(0.5 * 2) / 14),
        ({"loss.name": "grpo", "masks.truncated": True}, -0.5 / 4),
        ({"loss.name": "dr_grpo", "masks.truncated": True}, -(0.5 * 2) / (4 * 8)),
        # … unless the denominator is the policy mask; the group with equal rewards still counts there.
        ({"loss.name": "dapo", "masks.truncated": True, "loss.denominator": "policy_mask"}, -(0.5 * 2) / 11),
        ({"loss.name": "grpo", "masks.truncated": True, "loss.denominator": "policy_mask"}, -0.5 / 3),
        ({"loss.name": "dr_grpo", "masks.truncated": True, "loss.denominator": "policy_mask"}, -(0.5 * 2) / (3 * 8)),
    ],
)
def test_masked_and_skipped_samples_stay_in_denominators_and_baselines(settings, wanted):
    batch = make_batch([[1.0, 0.0], [1.0, 1.0]], [[2, 3], [4, 5]], cut=[1])
    recipe = short_recipe({"advantages.scale": "none", **settings})
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    assert group_advantages.advantages.tolist() == [0.5, -0.5, 0.0, 0.0]
    minibatch = build_minibatch(batch, group_advantages, [0, 1], recipe)
    assert minibatch.samples == ([0] if recipe.masks.truncated else [0, 1])
    result = make_updater(recipe, budget=4).update(minibatch, recipe)
    assert result.values["policy"] == pytest.approx(wanted, rel=1e-6, abs=1e-9)


# --- old log-probs and the ratio --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iterations", "count"), [(1, 1), (2, 2), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((2, 1), (1, 2)))]
)
def test_old_logps_are_computed_before_the_first_update(tmp_path, monkeypatch, iterations, count):
    """For all mini-batches; a batch that is used once needs none."""
    done, minibatches = [], []

    class Spy(Updater):
        def precompute_logps(self, minibatch, recipe, *, old):
            super().precompute_logps(minibatch, recipe, old=old)
            done.append("precompute")
            minibatches.append(minibatch)

        def update(self, minibatch, recipe, **options):
            done.append("update")
            return super().update(minibatch, recipe, **options)

    monkeypatch.setattr("groupwise.training.trainer.Updater", Spy)
    settings = {
        "train.steps": 1,
        "train.iterations": iterations,
        "train.mini_batches": count,
        "loss.clip_low": 1e-4,
        "train.batch_size": 4,
    }
    with make_trainer(tmp_path, settings) as trainer:
        (report,) = trainer.steps()
    assert done == ["precompute"] * count + ["update"] * (count * iterations)
    assert report.metrics["updates"] == count * iterations
    computed = [sample for minibatch in minibatches for sample in minibatch.samples]
    assert sorted(computed) == [
        i for i, contributes in enumerate(report.group_advantages.contributes.tolist()) if contributes
    ]
    if iterations * count == 1:
        assert minibatches[0].old_logps is None
        assert report.metrics["approx_kl"] == 0.0
        assert report.metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
        assert report.metrics["clip_ratio/region_mean"] == 0.0
        return
    for minibatch in minibatches:
        sampler = minibatch.sampler_logps[minibatch.mask]
        torch.testing.assert_close(minibatch.old_logps[minibatch.mask], sampler, rtol=0, atol=1e-4)
    assert report.metrics["approx_kl"] > 0
    assert report.metrics["clip_ratio/region_mean"] > 0


# --- the self-check ---------------------------------------------------------------------------------------------------


class ChangesWeights(Callback):
    """Changes the weights between sampling and training."""

    def on_rollout(self, trainer, batch, group_advantages):
        perturb(trainer.components.model, size=0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling.temperature": 0.7},
        {"sampling.temperature": 0.7, "sampling.top_k": 20},
        {"sampling.temperature": 0.7, "sampling.top_k": 20, "masks.keep_sampling_mask": True},
        {"sampling.temperature": 1.3, "sampling.top_p": 0.8, "masks.keep_sampling_mask": True, "train.iterations": 2},
        {"sampling.temperature": 1.3, "sampling.top_p": 0.8, "masks.keep_sampling_mask": True, **MLX_LM},
        {"sampling.temperature": 1.3, "sampling.top_p": 0.8, **MLX_LM},
    ],
)
def test_sampler_and_trainer_agree(tmp_path, settings):
    with make_trainer(tmp_path, settings) as trainer:
        perturb(trainer.components.model, size=0.1)  # at the first weights all tokens are equally likely
        reports = list(trainer.steps())
    for report in reports:
        assert report.metrics["sampler/logp_difference_mean"] < 1e-4
        assert report.metrics["sampler/logp_difference_max"] < 1e-3
        assert report.metrics["entropy"] < 5.4
    assert trainer.display.said == []


class CountsKept(Callback):
    """Counts the tokens that passed the filters, and checks the sets against the model's own logits."""

    kept = 0

    def on_rollout(self, trainer, batch, group_advantages):
        sampling, model = trainer.recipe.sampling, trainer.components.model
        for sample, ids in enumerate(batch.ids):
            prompt = torch.tensor(batch.prompts[sample // batch.samples].ids)
            with torch.no_grad():
                logits = model(torch.cat([prompt, ids])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            # A token at the edge of the filters may be kept or not: here it is computed in another batch.
            least, most = (
                filter_logits(logits, temperature=1.5, top_p=0.9 + edge, min_p=0.1 - edge, order=sampling.order)
                for edge in (-1e-5, 1e-5)
            )
            sets = batch.kept.select(batch.token_indices([sample]))
            kept = torch.zeros_like(logits, dtype=torch.bool)
            kept[torch.arange(len(ids)).repeat_interleave(sets.offsets.diff()), sets.ids.long()] = True
            assert (least.isfinite() <= kept).all()
            assert (kept <= most.isfinite()).all()
            logps = most.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            torch.testing.assert_close(batch.sampler_logps[sample], logps, rtol=0, atol=1e-5)
            self.kept += len(sets.ids)


def test_the_order_of_the_filters_is_the_recipes(tmp_path):
    """A temperature above 1 flattens the distribution before top-p, or after it."""
    kept = {}
    for order in ("transformers", "vllm", "mlx_lm"):
        settings = {
            "sampling.temperature": 1.5,
            "sampling.top_p": 0.9,
            "sampling.min_p": 0.1,
            "sampling.order": order,
            "masks.keep_sampling_mask": True,
        }
        counts = CountsKept()
        with make_trainer(tmp_path / order, settings, callbacks=[counts]) as trainer:
            perturb(trainer.components.model, size=0.1)
            reports = list(trainer.steps())
        assert all(report.metrics["sampler/logp_difference_max"] < 1e-3 for report in reports)
        kept[order] = counts.kept
    assert kept["mlx_lm"] < kept["vllm"] < kept["transformers"]


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({}, "what changes the weights in between"),
        ({"model.lora": {"rank": 2, "dropout": 0.1}}, "model.lora.dropout = 0"),
        pytest.param({"model.dtype": "bfloat16", **SHORT}, "loss.importance_cap = 2.0", marks=pytest.mark.slow),
    ],
)
def test_a_mismatch_is_reported_once_with_its_likely_cause(tmp_path, settings, cause):
    with make_trainer(tmp_path, settings, callbacks=[ChangesWeights()]) as trainer:
        reports = list(trainer.steps())
    assert all(report.metrics["sampler/logp_difference_mean"] > 0.1 for report in reports)
    assert all(
        report.metrics["sampler/logp_difference_max"] > report.metrics["sampler/logp_difference_mean"]
        for report in reports
    )
    (sentence,) = [text for text in trainer.display.said if "sampler and trainer differ" in text]
    assert sentence.startswith("step 1: warning log_prob_mismatch: before the update")
    assert "(train.max_logp_mismatch is 0.05)" in sentence
    assert cause in sentence


# --- not finite -------------------------------------------------------------------------------------------------------


def broken(value, after=0):
    """A loss that becomes ``value`` after so many calls."""
    calls = []

    def token_loss(tokens, settings):
        calls.append(None)
        factor = value if len(calls) > after else 1.0
        return TokenTerm(-tokens.advantages * tokens.logps * factor)

    return Loss(token_loss, "token_mean")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (math.nan, "float32"),
        pytest.param(math.inf, "float32", marks=pytest.mark.slow),
        pytest.param(math.nan, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_nan_and_inf_stop_the_run_before_a_weight_changes(tmp_path, value, dtype):
    settings = {"train.steps": 3, "model.dtype": dtype, "optimizer.weight_decay": 0.1, **SHORT}
    with make_trainer(tmp_path, settings) as trainer:
        steps = trainer.steps()
        next(steps)
        trainer.updater.loss = broken(value)
        weights = {name: weight.clone() for name, weight in trainer.components.model.state_dict().items()}
        masters = {name: weight.clone() for name, weight in trainer.masters.state_dict().items()}
        state = [{k: v.clone() for k, v in entry.items()} for entry in trainer.optimizer.state.values()]
        with pytest.raises(NotFiniteError, match=r"norm is .*\(terms: policy .*have not changed.*'skip'"):
            next(steps)
    assert all(torch.equal(weight, weights[name]) for name, weight in trainer.components.model.state_dict().items())
    assert all(torch.equal(weight, masters[name]) for name, weight in trainer.masters.state_dict().items())
    after = list(trainer.optimizer.state.values())
    assert len(after) == len(state) > 0
    assert all(torch.equal(a[k], b[k]) for a, b in zip(after, state, strict=True) for k in a)
    assert all(master.grad is None for master in trainer.masters.parameters())


def test_nan_is_skipped_and_counted(tmp_path):
    """The second of two updates is skipped; the metrics are those of the first one."""
    settings = {"train.steps": 2, "train.iterations": 2, "train.on_non_finite": "skip"}
    with make_trainer(tmp_path, settings) as trainer:
        trainer.updater.loss = broken(math.nan, after=1)
        before = trainer.masters.state_dict()["model.embed_tokens.weight"].clone()
        steps = trainer.steps()
        first = next(steps)
        after = trainer.masters.state_dict()["model.embed_tokens.weight"].clone()
        second = next(steps)
        last = trainer.masters.state_dict()["model.embed_tokens.weight"]
    assert not torch.equal(before, after)
    assert (first.metrics["updates"], first.metrics["updates_not_finite"]) == (1, 1)
    assert all(math.isfinite(value) for value in first.metrics.values())
    assert torch.equal(after, last)
    assert (second.metrics["updates"], second.metrics["updates_not_finite"]) == (0, 2)
    assert math.isnan(second.metrics["loss"])


@pytest.mark.parametrize("kept", [False, True])
def test_a_mask_computes_only_the_samples_that_it_may_drop(monkeypatch, kept):
    """The mask of DeepSeek-V3.2 only drops samples with a negative advantage."""
    settings = {"masks.off_policy": "v3.2", "masks.off_policy_threshold": 0.01, "train.skip_equal_rewards": False}
    recipe = short_recipe({**settings, **({"masks.keep_sampling_mask": True, "sampling.top_k": 5} if kept else {})})
    batch = make_batch(kept=kept)
    minibatch = build_minibatch(
        batch, compute_group_advantages(batch, recipe, [1.0]), range(len(batch.prompts)), recipe
    )
    asked, real = [], updater_module.completion_logps

    def completion_logps(model, prompts, completions, **options):
        asked.append([len(members) for members in completions])
        return real(model, prompts, completions, **options)

    updater = make_updater(recipe)
    perturb(updater.handle.model, size=0.05)
    everything = updater._logps(minibatch, recipe).logps
    wanted = on_policy_samples(minibatch, recipe, everything)
    monkeypatch.setattr(updater_module, "completion_logps", completion_logps)
    result = updater.update(minibatch, recipe)
    worse = (minibatch.allowed & (minibatch.advantages < 0)).tolist()
    groups, numbers = [], iter(worse)
    for members in minibatch.completions:
        groups.append(sum(next(numbers) for _ in members))
    assert asked == [[number for number in groups if number]]
    assert result.masked_out["off_policy"] == [minibatch.samples[row] for row in (~wanted).nonzero().flatten().tolist()]
    assert 0 < len(result.masked_out["off_policy"]) <= sum(worse) < len(minibatch)


# --- memory -----------------------------------------------------------------------------------------------------------


def short_of_memory(monkeypatch, most, error=None, after=0):
    """Packs of more than ``most`` tokens do not fit; fails after ``after`` packs, in the middle of a step."""
    budgets = []
    real = updater_module.iter_packs

    def iter_packs(*arguments, token_budget, **options):
        budgets.append(token_budget)
        for number, pack in enumerate(real(*arguments, token_budget=token_budget, **options)):
            if token_budget > most and number >= after:
                raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            yield pack

    monkeypatch.setattr(updater_module, "iter_packs", iter_packs)
    return budgets


@pytest.mark.parametrize(
    ("error", "log_term_gradients"),
    [
        (None, True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), False),
        pytest.param(None, False, marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_halves_the_packs_and_repeats_the_step(monkeypatch, error, log_term_gradients):
    recipe = short_recipe({"loss.entropy_coef": 0.1})
    batch = make_batch(lengths=[[9 + n % 3 for n in range(4)] for _ in range(4)])
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    minibatch = build_minibatch(batch, group_advantages, range(4), recipe)
    small = make_updater(recipe, budget=75)
    wanted = small.update(minibatch, recipe, check=True, log_term_gradients=log_term_gradients)
    said, released = [], []
    budgets = short_of_memory(monkeypatch, most=80, error=error, after=1)
    updater = make_updater(recipe, budget=151, say=said.append, release=lambda: released.append(True))
    result = updater.update(minibatch, recipe, check=True, log_term_gradients=log_term_gradients)
    assert budgets[0] == 151
    assert set(budgets[1:]) == {75}
    assert said == ["memory ran out: the step is repeated with a token budget of 75; same result"]
    assert released == [True]
    assert updater.token_budget == 75
    gradient = last_gradient(small)
    assert all(torch.equal(value, gradient[name]) for name, value in last_gradient(updater).items())
    assert result == wanted
    updater.update(minibatch, recipe)
    assert budgets[-1] == 75
    assert len(said) == 1


def test_out_of_memory_before_the_first_update(monkeypatch):
    """While old and reference log-probs are computed; afterwards the model has the policy's weights again."""
    recipe = short_recipe({"loss.kl_coef": 0.1})
    batch = make_batch(lengths=[[9, 9, 9, 9]] * 4)
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
    budgets, real = [], updater_module.completion_logps

    def completion_logps(*arguments, token_budget, **options):
        budgets.append(token_budget)
        if token_budget > 70 or (len(budgets) == 3 and token_budget > 64):
            raise torch.OutOfMemoryError("out of memory")
        return real(*arguments, token_budget=token_budget, **options)

    monkeypatch.setattr(updater_module, "completion_logps", completion_logps)
    updater = make_updater(recipe, budget=130, reference=True)
    pointers = {name: weight.data_ptr() for name, weight in updater.handle.model.named_parameters()}
    updater.precompute_logps(minibatch, recipe, old=True)
    assert budgets == [130, 65, 65, 64]
    torch.testing.assert_close(minibatch.old_logps, minibatch.ref_logps)
    assert {name: weight.data_ptr() for name, weight in updater.handle.model.named_parameters()} == pointers


def test_out_of_memory_with_the_smallest_packs_or_a_single_sample_is_an_error(monkeypatch):
    recipe = short_recipe()
    for lengths, longest, wanted in ((9, 9 + 9, [200, 100, SMALLEST_BUDGET]), (90, 90 + 9, [200, 100])):
        batch = make_batch(lengths=[[lengths] * 4] * 4)
        minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
        with monkeypatch.context() as patch:
            budgets = short_of_memory(patch, most=10)
            updater = make_updater(recipe, budget=200)
            before = {name: weight.clone() for name, weight in updater.masters.state_dict().items()}
            with pytest.raises(
                OutOfMemoryError, match=rf"a single sample of {longest} tokens; use a smaller model.*lora"
            ):
                updater.update(minibatch, recipe)
        assert budgets[: len(wanted)] == wanted
        assert len(budgets) <= 4
        assert all(torch.equal(weight, before[name]) for name, weight in updater.masters.state_dict().items())
        assert all(master.grad is None for master in updater.masters.parameters())


def short_optimizer(updater, monkeypatch, failures):
    """An optimizer that runs out of memory in its first steps, with half of its state allocated."""
    real, state = updater.optimizer.step, updater.optimizer.state

    def step():
        if failures:
            failures.pop()
            state[next(updater.masters.parameters())]["exp_avg"] = torch.zeros(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 892 MiB")
        return real()

    monkeypatch.setattr(updater.optimizer, "step", step)


def test_the_optimizer_is_retried_after_generations_memory_is_released(monkeypatch):
    recipe = short_recipe()
    batch = make_batch()
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
    usual, released = make_updater(recipe), []
    wanted = usual.update(minibatch, recipe)
    updater = make_updater(recipe, release=lambda: released.append(True))
    short_optimizer(updater, monkeypatch, [1])
    assert updater.update(minibatch, recipe) == wanted
    assert released == [True]
    for name, weight in updater.masters.state_dict().items():
        assert torch.equal(weight, usual.masters.state_dict()[name])


def test_a_parameter_group_is_not_stepped_twice_if_the_next_runs_out_of_memory(monkeypatch):
    """In AdamW's first step, the norms' group was stepped when the matrices' state does not fit."""
    recipe = short_recipe()
    batch = make_batch()
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
    updaters = [make_updater(recipe) for _ in range(2)]
    for updater in updaters:
        updater.optimizer = make_optimizer(recipe, updater.handle.model, updater.masters)
    usual, short = updaters
    assert len(short.optimizer.param_groups) > 1
    failures, real = [True], short.optimizer._init_group

    def out_of_memory(group, *arguments):
        if group["decays"] and failures:
            failures.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 892 MiB")
        return real(group, *arguments)

    monkeypatch.setattr(short.optimizer, "_init_group", out_of_memory)
    assert usual.update(minibatch, recipe) == short.update(minibatch, recipe)
    for name, weight in short.masters.named_parameters():
        assert torch.equal(weight, dict(usual.masters.named_parameters())[name]), name
        assert int(short.optimizer.state[weight]["step"]) == 1
    assert len(short.optimizer.param_groups) == len(usual.optimizer.param_groups)


def test_an_optimizer_that_does_not_fit_is_an_error(monkeypatch):
    recipe = short_recipe()
    batch = make_batch()
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
    updater = make_updater(recipe)
    short_optimizer(updater, monkeypatch, [1, 1])
    with pytest.raises(OutOfMemoryError, match=r"memory ran out for the optimizer.*lora"):
        updater.update(minibatch, recipe)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("no"), KeyboardInterrupt()])
def test_other_errors_pass_through(monkeypatch, error):
    recipe = short_recipe()
    batch = make_batch()
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe)
    budgets = short_of_memory(monkeypatch, most=10, error=error)
    updater = make_updater(recipe, budget=200)
    with pytest.raises(type(error)) as caught:
        updater.update(minibatch, recipe)
    assert caught.value is error
    assert budgets == [200]
    assert updater.token_budget == 200


def test_out_of_memory_in_a_run(tmp_path, monkeypatch):
    """It is reported, the metric shows the budget, and the result is that of a run with the small budget."""
    ends = {}
    for name, budget in (("small", 80), ("large", 160)):
        with monkeypatch.context() as patch:
            if name == "large":
                short_of_memory(patch, most=100)
            with make_trainer(tmp_path / name, {"train.token_budget": budget, "train.batch_size": 4}) as trainer:
                reports = list(trainer.steps())
            ends[name] = {key: weight.clone() for key, weight in trainer.masters.state_dict().items()}
            assert reports[-1].metrics["token_budget"] == 80
            assert [text for text in trainer.display.said if "token budget of 80" in text] == (
                ["memory ran out: the step is repeated with a token budget of 80; same result"]
                if name == "large"
                else []
            )
    assert all(torch.equal(weight, ends["large"][name]) for name, weight in ends["small"].items())


def test_bfloat16_trains_in_float32_masters():
    """The masters have the gradients, and the model gets the updated weights."""
    recipe = short_recipe()
    batch = make_batch()
    model = small_llama(torch.bfloat16)
    updater = make_updater(recipe, model=model, lr=0.5)
    before = model.lm_head.weight.detach().clone()
    updater.update(build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(4), recipe), recipe)
    assert last_gradient(updater)["lm_head.weight"].dtype == torch.float32
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(model.lm_head.weight, before)
    assert torch.equal(model.lm_head.weight, updater.masters.state_dict()["lm_head.weight"].bfloat16())
