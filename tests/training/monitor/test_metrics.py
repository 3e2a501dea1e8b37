"""The metrics of a step, computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from groupwise.config import make_recipe
from groupwise.model.precision import MasterWeights
from groupwise.tasks import Task
from groupwise.training.monitor.metrics import rollout_table, step_metrics, with_aliases
from groupwise.training.monitor.weight_sample import WeightSample
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.rollout.batch import GroupAdvantages
from groupwise.training.rollout.collector import RolloutResult
from groupwise.training.trainer import Trainer
from groupwise.training.update.minibatch import build_minibatch
from groupwise.training.update.result import LogProbMismatch, UpdateResult
from tests.training.factories import SMALL, make_batch, make_trainer, short_recipe, spread
from tests.training.runs import RecordingDisplay

NAN = math.nan
LENGTHS = [[2, 3, 4, 5], [1, 2, 3, 4]]  # with prompts of 3 and 5 tokens
COLUMNS = [[1, 0], [0, NAN], [3, 2], [0, 0], [5, NAN], [5, NAN], [5, NAN], [NAN, NAN]]


def odd(row, text):
    return len(text) % 2 == 1


def step(
    settings=None, updates=(), *, cut=(1, 3), dropped=(), grades=None, metric=None, filtered_probability=None, **sampled
):
    """Metrics of two prompts with four samples; the second group's rewards are equal."""
    recipe = short_recipe({"advantages.scale": "none", **(settings or {})})
    batch = make_batch(
        [[0.0] * 4] * 2, LENGTHS, columns=torch.tensor(COLUMNS, dtype=torch.float64), cut=cut, dropped=dropped
    )
    batch = replace(
        batch, filtered_probability=None if filtered_probability is None else torch.tensor(filtered_probability)
    )
    group_advantages = compute_group_advantages(batch, recipe, [1.0, 0.5], grades=grades, metric=metric)
    minibatches = [
        build_minibatch(batch, group_advantages, [0], recipe),
        build_minibatch(batch, group_advantages, [1], recipe),
    ]
    return step_metrics(
        RolloutResult(batch, **sampled),
        group_advantages,
        {"right": 1.0, "form": 0.5},
        minibatches,
        list(updates),
        recipe,
    )


def test_rewards():
    metrics = step()
    # Sums: 1, 0, 4, 0 and 5, 5, 5, nothing.
    assert metrics["reward"] == pytest.approx(20 / 7)
    # Group 0: mean 5/4, squared deviations 1/16, 25/16, 121/16, 25/16; group 1: none.
    assert metrics["reward_std"] == pytest.approx((math.sqrt(172 / 16 / 3) + 0) / 2)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["advantage/largest"] == pytest.approx(4 - 1.25)
    assert metrics["rewards/right/mean"] == pytest.approx(19 / 7)
    right = [1, 0, 3, 0, 5, 5, 5]
    assert metrics["rewards/right/std"] == pytest.approx(math.sqrt(sum((x - 19 / 7) ** 2 for x in right) / 6))
    assert metrics["rewards/form/mean"] == pytest.approx(2 / 3)
    assert metrics["rewards/form/std"] == pytest.approx(math.sqrt((4 / 9 + 16 / 9 + 4 / 9) / 2))


def test_a_group_with_one_score_has_no_standard_deviation():
    """Only groups with at least two scores enter the mean standard deviation."""
    metrics = step(dropped=[4, 5])
    assert metrics["reward_std"] == pytest.approx(math.sqrt(172 / 16 / 3))
    assert metrics["masks/dropped"] == 2 / 8


def test_no_scores():
    batch = make_batch([[0.0] * 4] * 2, LENGTHS, columns=torch.full((8, 2), NAN, dtype=torch.float64))
    recipe = short_recipe()
    group_advantages = compute_group_advantages(batch, recipe, [1.0, 1.0])
    minibatches = [build_minibatch(batch, group_advantages, [0, 1], recipe)]
    metrics = step_metrics(RolloutResult(batch), group_advantages, {"right": 1.0, "form": 0.5}, minibatches, [], recipe)
    assert (metrics["reward"], metrics["reward_std"], metrics["frac_reward_zero_std"]) == (0.0, 0.0, 1.0)
    assert (metrics["rewards/right/mean"], metrics["rewards/form/std"]) == (0.0, 0.0)
    assert (metrics["updates"], metrics["loss"], metrics["grad_norm"]) == (0.0, 0.0, 0.0)
    not_measured = {"ratio", "approx_kl", "entropy", *LogProbMismatch().metrics()}
    assert {name for name, value in metrics.items() if not math.isfinite(value)} == not_measured


def test_grades():
    """An answer that cannot be found counts as wrong, and is counted separately."""
    answers = iter([True, False, None, True, None, None, True, False])
    metrics = step(grades={"accuracy": lambda row, text: next(answers)}, metric="accuracy")
    assert metrics["accuracy"] == 3 / 8
    assert metrics["accuracy_no_answer"] == 3 / 8


def test_completions():
    metrics = step()
    assert metrics["completions/mean_length"] == 24 / 8
    assert metrics["completions/min_length"] == 1
    assert metrics["completions/max_length"] == 5
    assert metrics["completions/mean_terminated_length"] == (24 - 3 - 5) / 6
    assert metrics["completions/clipped_ratio"] == 2 / 8
    metrics = step(cut=range(8))
    assert metrics["completions/mean_terminated_length"] == 0.0
    assert metrics["completions/clipped_ratio"] == 1.0


def test_signal():
    metrics = step()
    assert metrics["signal/contributing"] == 4 / 8
    # 8 prompt tokens and 24 of answers; the second prompt's 5 and its answers' 10 are not computed.
    assert metrics["signal/tokens_not_computed"] == pytest.approx(15 / 32)
    assert metrics["rewards_failed"] == 0
    assert not [name for name in metrics if name.startswith(("masks/", "resample/"))]
    masked = step({"masks.truncated": True})
    assert masked["signal/contributing"] == 2 / 8
    assert masked["signal/tokens_not_computed"] == pytest.approx((15 + 3 + 5) / 32)
    assert masked["masks/truncated"] == 2 / 8
    assert step({"train.skip_equal_rewards": False})["signal/tokens_not_computed"] == 0.0
    assert step({"loss.kl_coef": 0.1})["signal/tokens_not_computed"] == 0.0


def test_metrics_of_resampling_and_of_rewards():
    metrics = step(tokens=40, rounds=2, replaced=3, failures=["a", "b"], metrics={"mine": 4.5})
    assert metrics["resample/rounds"] == 2
    assert metrics["resample/replaced"] == 3
    assert metrics["resample/extra_tokens"] == 40 - 24
    assert metrics["rewards_failed"] == 2
    assert metrics["mine"] == 4.5


def test_updates():
    """Means over the updates that were not skipped; the mismatch is that of the first update."""
    mismatch = LogProbMismatch(tokens=4, total=2.0, largest=1.5)
    updates = [
        UpdateResult(
            values={"policy": 1.0, "kl": 0.5},
            statistics={"clip_fraction_low": 0.1, "clip_fraction_high": 0.0, "ratio": 1.0, "kl": 2.0},
            grad_norm=3.0,
            mismatch=mismatch,
            term_gradients={"grad_norm/policy": 7.0},
        ),
        UpdateResult(
            values={"policy": 2.0, "kl": 0.0},
            statistics={"clip_fraction_low": 0.3, "clip_fraction_high": 0.2, "ratio": 2.0, "kl": 4.0},
            grad_norm=5.0,
        ),
        UpdateResult(values={"policy": NAN}, skipped=True),
    ]
    metrics = step(updates=updates)
    assert (metrics["updates"], metrics["updates_not_finite"]) == (2, 1)
    assert metrics["loss"] == pytest.approx((1.5 + 2.0) / 2)
    assert (metrics["loss/policy"], metrics["loss/kl"]) == (1.5, 0.25)
    assert metrics["clip_ratio/low_mean"] == pytest.approx(0.2)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(0.1)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(0.3)
    assert (metrics["ratio"], metrics["kl"], metrics["grad_norm"]) == (1.5, 3.0, 4.0)
    assert (metrics["sampler/logp_difference_mean"], metrics["sampler/logp_difference_max"]) == (0.5, 1.5)
    assert metrics["grad_norm/policy"] == 7.0
    assert not any(name.startswith("clip_fraction") for name in metrics)


def test_all_updates_skipped():
    metrics = step(updates=[UpdateResult(skipped=True), UpdateResult(skipped=True)])
    assert (metrics["updates"], metrics["updates_not_finite"]) == (0, 2)
    assert math.isnan(metrics["loss"])
    assert math.isnan(metrics["grad_norm"])


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_mask_of_the_updates_is_a_share_of_the_batch(iterations):
    """In two mini-batches 1 and 2 samples are masked in each pass: 3 of 8 for any number of passes."""
    settings = {"train.skip_equal_rewards": False}
    both = [UpdateResult(masked_out={"off_policy": [1]}), UpdateResult(masked_out={"off_policy": [4, 6]})]
    assert step(settings, both * iterations)["masks/off_policy"] == 3 / 8
    # Only the first mini-batch contributes, so there is one update per pass.
    assert step(updates=both[:1] * iterations)["masks/off_policy"] == 1 / 8


def test_the_share_that_all_masks_leave():
    """Samples 1 and 3 are truncated; the off-policy mask drops sample 0 in both passes and sample 2 in one."""
    right = {"accuracy": lambda row, text: text in ("text 0", "text 2", "text 3", "text 5")}
    updates = [UpdateResult(masked_out={"off_policy": [0, 2]}), UpdateResult(masked_out={"off_policy": [0]})]
    settings = {"masks.truncated": True, "masks.off_policy": "v3.2"}
    metrics = step(settings, updates, grades=right, metric="accuracy")
    assert metrics["masks/truncated"] == 2 / 8
    assert metrics["masks/off_policy"] == 1.5 / 8
    assert metrics["mask_ratio"] == pytest.approx(4.5 / 8)
    assert metrics["accuracy"] == 4 / 8
    assert metrics["accuracy_masked"] == pytest.approx((0.5 + 1) / 4.5)  # half of sample 2, and sample 5
    assert "mask_ratio" not in step(grades=right, metric="accuracy")
    assert "accuracy_masked" not in step(grades=right, metric="accuracy")
    assert step({"masks.off_policy": "v3.2"})["mask_ratio"] == 1.0


def test_no_masked_accuracy_if_no_sample_is_left():
    metrics = step({"masks.truncated": True}, cut=range(8), grades={"accuracy": lambda *_: True}, metric="accuracy")
    assert metrics["mask_ratio"] == 0.0
    assert "accuracy_masked" not in metrics
    assert metrics["accuracy"] == 1.0


def test_the_probability_cut_by_sampling_filters_is_a_mean_over_tokens():
    settings = {"masks.keep_sampling_mask": True, "sampling.top_k": 3}
    metrics = step(settings, filtered_probability=[0.2, 0.3, 0.0, 0.5, 0.1, 0.1, 0.0, 0.0])
    assert metrics["masks/keep_sampling_mask"] == pytest.approx(1.2 / 24)
    assert metrics["mask_ratio"] == 1.0
    assert "masks/keep_sampling_mask" not in step(settings)


@pytest.mark.slow
def test_the_probability_cut_by_sampling_filters_in_a_run(tmp_path):
    """With top_k = 1 all but the likeliest token is cut; with a huge top_k nothing."""
    settings = {"train.steps": 1, "masks.keep_sampling_mask": True, "train.skip_equal_rewards": False}
    shares = {}
    for k in (1, 10**6):
        with make_trainer(tmp_path / str(k), {**settings, "sampling.top_k": k}) as trainer:
            (report,) = trainer.steps()
        shares[k] = report.metrics["masks/keep_sampling_mask"]
        largest = report.batch.sampler_logps.values.exp()
        if k == 1:
            assert largest.tolist() == pytest.approx([1.0] * len(largest))
    assert shares[10**6] == pytest.approx(0.0, abs=1e-6)
    assert 0.1 < shares[1] < 1


def test_aliases_of_metrics():
    metrics = with_aliases({"kl": 0.25, "reward": 1.0}, {"kl_divergence": "kl", "policy_loss": "loss/policy"})
    assert metrics == {"kl": 0.25, "reward": 1.0, "kl_divergence": 0.25}


@pytest.mark.parametrize("algorithm", ["enhanced_grpo", pytest.param("enhanced_grpo_literal", marks=pytest.mark.slow)])
def test_the_metrics_of_enhanced_grpo_in_a_run(tmp_path, algorithm):
    small = {**SMALL, "algorithm": algorithm, "optimizer": {"learning_rate": 1e-4}, "masks": {"min_length": 0}}
    task = Task("made", [{"prompt": f"Say {n}: "} for n in range(4)], grades={"accuracy": odd}, metric="accuracy")
    with Trainer(
        make_recipe(small), task=task, rewards=[spread], folder=tmp_path / "run", display=RecordingDisplay()
    ) as trainer:
        first, second = (report.metrics for report in trainer.steps())
    for metrics in (first, second):
        names = {"loss", "policy_loss", "kl_penalty", "kl_divergence", "accuracy", "avg_reward", "mask_ratio"}
        assert names <= metrics.keys()
        assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + metrics["kl_penalty"])
        assert metrics["avg_reward"] == metrics["reward"]
        assert metrics["kl_penalty"] == pytest.approx(metrics["kl_coef"] * metrics["kl_divergence"], rel=1e-5)
        assert metrics["kl_divergence"] == metrics["kl" if algorithm == "enhanced_grpo" else "kl_ratio_weighted"]
        assert 0 <= metrics["accuracy_masked"] <= 1
        assert ("masks/keep_sampling_mask" in metrics) is (algorithm == "enhanced_grpo")
        assert ("masks/too_short" in metrics) is (algorithm == "enhanced_grpo_literal")
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl"] > 1e-8


def test_the_off_policy_mask_in_a_run(tmp_path):
    """With a threshold near 0 the mask may drop every sample below its group's mean."""
    settings = {"train.steps": 1, "masks.off_policy": "v3.2", "masks.off_policy_threshold": 1e-9}
    settings |= {"train.mini_batches": 2, "train.iterations": 2, "optimizer.learning_rate": 0.05}
    with make_trainer(tmp_path, settings) as trainer:
        (report,) = trainer.steps()
    worse = float((report.group_advantages.advantages < 0).double().mean())
    assert 0 < report.metrics["masks/off_policy"] <= worse


def test_log_prob_mismatch():
    mismatch = LogProbMismatch()
    assert all(map(math.isnan, mismatch.metrics().values()))
    logps, mask = torch.tensor([[-1.0, -2.0], [-3.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    mismatch.add(logps, torch.tensor([[-1.5, -2.0], [-1.0, 0.0]]), mask)
    metrics = mismatch.metrics()
    assert metrics["sampler/logp_difference_mean"] == 2.5 / 3
    assert metrics["sampler/logp_difference_max"] == 2.0
    assert metrics["sampler/kl"] == pytest.approx((math.exp(0.5) - 0.5 - 1 + math.exp(-2) + 2 - 1) / 3)
    assert metrics["sampler/sequence_ratio_mean"] == pytest.approx((math.exp(0.5) + math.exp(-2)) / 2)
    assert metrics["sampler/sequence_ratio_max"] == pytest.approx(math.exp(0.5))
    mismatch.add(logps[:1], logps[:1] + 0.25, mask[:1])
    assert (mismatch.tokens, mismatch.total, mismatch.largest, mismatch.sequences) == (5, 3.0, 2.0, 3)
    # Tokens that the sampler gave no log-prob for are left out, and so is the ratio of their sequence.
    mismatch.add(logps[:1], torch.tensor([[math.nan, -2.0]]), mask[:1])
    assert (mismatch.tokens, mismatch.total, mismatch.largest, mismatch.sequences) == (6, 3.0, 2.0, 3)


# --- the table of rollouts --------------------------------------------------------------------------------------------


def test_the_table_has_one_row_per_sample():
    recipe = short_recipe({"advantages.scale": "none", "masks.truncated": True})
    batch = make_batch([[1.0, 0.0, 0.5], [2.0, 2.0, 2.0]], [[2, 3, 4], [1, 2, 3]], cut=[1])
    batch = replace(batch, extra={"judge": list("abcdef"), "reward": ["never"] * 6})
    group_advantages = compute_group_advantages(batch, recipe, [2.0])
    table = rollout_table(7, batch, group_advantages, ["right"])
    assert table == {
        "step": [7] * 6,
        "prompt_number": [0, 0, 0, 1, 1, 1],
        "row": [10, 10, 10, 11, 11, 11],
        "sample": [0, 1, 2, 0, 1, 2],
        "group": [0, 0, 0, 1, 1, 1],
        "prompt": ["prompt 0"] * 3 + ["prompt 1"] * 3,
        "completion": [f"text {number}" for number in range(6)],
        "reward": [2.0, 0.0, 1.0, 4.0, 4.0, 4.0],
        "reward/right": [1.0, 0.0, 0.5, 2.0, 2.0, 2.0],
        "advantage": [1.0, -1.0, 0.0, 0.0, 0.0, 0.0],
        "contributes": [True, False, False, False, False, False],
        "masked_out": [None, "truncated", "no_advantage", "equal_rewards", "equal_rewards", "equal_rewards"],
        "prompt_tokens": [3, 3, 3, 5, 5, 5],
        "completion_tokens": [2, 3, 4, 1, 2, 3],
        "stop_reason": ["eos", "length", "eos", "eos", "eos", "eos"],
        "judge": list("abcdef"),
    }


def test_the_first_skip_reason_is_recorded():
    masked_out = {"dropped": torch.tensor([True, False, False]), "truncated": torch.tensor([True, True, False])}
    group_advantages = GroupAdvantages(
        torch.zeros(3), torch.zeros(3), torch.ones(3), masked_out, torch.tensor([True] * 3)
    )
    assert group_advantages.skip_reasons() == ["dropped", "truncated", None]
    assert group_advantages.allowed.tolist() == [False, False, True]


def test_the_share_of_each_reward_in_the_variance():
    """In group 0, `right` is 1, 0, 3, 0 (mean 1, squares 0 + 1 + 4 + 1), half of `form` is 0, nothing, 1, 0 (mean 1/3,
    squares 1/9 + 4/9 + 1/9); in group 1 `right` does not vary, and `form` was not scored."""
    metrics = step()
    shares = [metrics[f"rewards/{name}/variance_share"] for name in ("right", "form")]
    assert shares == pytest.approx([6 / (6 + 6 / 9), (6 / 9) / (6 + 6 / 9)])
    assert "rewards/right/variance_share" not in step({"advantages.combine": "normalize_then_sum"})


def test_prompts_whose_completions_are_all_the_same():
    rewards = [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    batch = make_batch(rewards, [[2, 2]] * 3, texts=["a", "a", "a", "b", "", ""])
    recipe = short_recipe()
    group_advantages = compute_group_advantages(batch, recipe, [1.0])
    metrics = step_metrics(RolloutResult(batch), group_advantages, {"r": 1.0}, [], [], recipe)
    assert metrics["completions/identical"] == 2 / 3


def test_the_share_of_weights_that_changed():
    """Three of the four sampled numbers change; reading the sample changes nothing."""
    model = nn.Linear(2, 2, bias=False, dtype=torch.float32)
    sample = WeightSample(MasterWeights(model))
    before = sample.read()
    assert sample.changed_since(before) == {"weights_changed": 0.0}
    with torch.no_grad():
        model.weight.add_(torch.tensor([[1.0, 1e-30], [-1.0, 0.5]]))
    assert sample.changed_since(before) == {"weights_changed": 0.75}


def test_a_large_model_is_sampled_evenly():
    model = nn.Sequential(*(nn.Linear(40, 30) for _ in range(200)))
    sample = WeightSample(MasterWeights(model)).read()
    assert 30 * 58 < len(sample) <= 64 * 128


def test_small_updates_add_up_in_the_masters_of_a_bfloat16_model():
    """They are not lost, though the rounded weights of the model do not change yet."""
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    masters = MasterWeights(model)
    sample, weights = WeightSample(masters), model.weight.detach().clone()
    before = sample.read()
    with torch.no_grad():
        for master in masters.parameters():
            master.add_(1e-6)
    masters.sync_to_model()
    assert torch.equal(model.weight, weights)
    assert sample.changed_since(before) == {"weights_changed": 1.0}
