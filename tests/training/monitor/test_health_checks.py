"""Health warnings: each is given beyond its threshold, says what to change, and is not repeated all the time."""

from __future__ import annotations

import json
import math

import pytest

from groupwise.tasks import Task
from groupwise.training.monitor.checks import WINDOW
from groupwise.training.monitor.checks.completions import SPLIT
from groupwise.training.monitor.checks.preference import COSINE, REFUSED
from groupwise.training.monitor.health_checks import QUIET, HealthChecks
from tests.training.factories import make_trainer, short_recipe
from tests.training.runs import even, metrics_of, run_steps, small_trainer

KL = {"loss.kl_coef": 0.02}
PAIRS = {"preference.weight": 0.1}
NO_PAIRS = {"preference/weight": 0.1, "preference/pairs": 0.0}
UNSPLIT = {f"{SPLIT}1_groups": 3.0, f"{SPLIT}2_groups": 1.0}


def warned(metrics, settings=None, *, steps=WINDOW, start=1, metric="accuracy"):
    """The warnings in steps with the same metrics, as (step, name), and the messages by name."""
    checks, recipe = HealthChecks(metric), short_recipe(settings)
    warnings = [(step, checks.observe(step, metrics, recipe)) for step in range(start, start + steps)]
    messages = {name: message for _, said in warnings for name, message in said.items()}
    return [(step, name) for step, said in warnings for name in said], messages


@pytest.mark.parametrize(
    ("name", "metrics", "settings", "parts"),
    [
        ("kl_high", {"kl": 0.51}, KL,
         ["the KL to the reference is 0.51", "raise loss.kl_coef, now 0.02", "optimizer.learning_rate, now 0.001",
          "raise run.kl_warning, now 0.5"]),
        ("kl_high", {"kl": 1.41}, {**KL, "run.kl_warning": 1.4}, ["is 1.41", "run.kl_warning, now 1.4"]),
        ("masked", {"mask_ratio": 0.69, "masks/off_policy": 0.3, "masks/too_short": 0.01},
         {"masks.off_policy": "reference_drift", "reference.refresh_every": 100},
         ["69%", "off_policy masks 30%", "lower reference.refresh_every, now 100"]),
        ("masked", {"mask_ratio": 0.5, "masks/off_policy": 0.5}, {"masks.off_policy": "reference_drift"},
         ["set reference.refresh_every, such as 100"]),
        ("masked", {"mask_ratio": 0.5, "masks/off_policy": 0.5}, {"masks.off_policy": "v3.2", "train.iterations": 4},
         ["lower train.iterations, now 4, or optimizer.learning_rate"]),
        ("masked", {"mask_ratio": 0.5, "masks/off_policy": 0.1, "masks/truncated": 0.4}, {"masks.off_policy": "v3.2"},
         ["truncated masks 40%", "raise sampling.max_new_tokens, now 8"]),
        ("masked", {"mask_ratio": 0.5, "masks/no_answer": 0.5, "masks/keep_sampling_mask": 0.9},
         {"masks.validity": True},
         ["no_answer masks 50%", "in the prompt (data.system_prompt)", "sampling.max_new_tokens, now 8"]),
        ("masked", {"mask_ratio": 0.5, "masks/dropped": 0.5}, {}, ["check the reward function"]),
        ("masked", {"mask_ratio": 0.5}, {}, ["switch off a mask"]),
        ("no_answer", {"accuracy_no_answer": 0.11}, {}, ["11%", "data.system_prompt", "[[rewards]]"]),
        ("no_answer", {"accuracy_no_answer": 0.5, "completions/clipped_ratio": 0.2}, {},
         ["50%", "20% are cut off", "raise sampling.max_new_tokens, now 8"]),
        ("no_learning_signal", {"signal/contributing": 0.0}, {},
         ["10 steps", "sampling.samples_per_prompt, now 4", "sampling.temperature, now 1", "are all equal; use"]),
        ("no_learning_signal", {"signal/contributing": 0.0, "mask_ratio": 0.9}, {}, ["answers that differ are masked"]),
        ("stale", {"async/staleness_max": 2.0, "clip_ratio/region_mean": 0.25, "sampler/logp_difference_mean": 0.1},
         {"train.max_staleness": 2}, ["of 25% of the tokens", "train.max_staleness, now 2", "learning_rate, now"]),
        ("stale", {"async/staleness_max": 1.0, "sampler/logp_difference_mean": 0.4}, {"train.max_staleness": 1},
         ["differs by 0.4"]),
        ("answers_alike", {**UNSPLIT, "diversity/mean_distance": 0.2, "diversity/distance_between_prompts": 0.5}, {},
         ["to 75% of the prompts are all alike", "distance is 0.20", "different prompts 0.50",
          "sampling.temperature, now 1", "loss.kl_coef, now 0"]),
        ("answers_alike", {**UNSPLIT, "diversity/mean_distance": 0.49}, {},
         ["distance is 0.49)"]),
        ("answers_unrelated", {**UNSPLIT, "diversity/mean_distance": 0.3, "diversity/distance_between_prompts": 0.5,
                               "similarity_groups/avg_silhouette_score": 0.04}, {},
         ["75%", "no clusters (silhouette 0.04)", "sampling.samples_per_prompt, now 4", "'BAAI/bge-m3'"]),
        ("answers_unrelated", {**UNSPLIT, "diversity/mean_distance": 0.5}, {"grouping.method": "threshold"},
         ["raise grouping.threshold, now 0.7, or try"]),
        ("answers_scattered", {f"{SPLIT}4_groups": 2.0, "similarity_groups/n_single_member_groups": 4.1}, {},
         ["51% of the answers are alone", "grouping.max_groups, now 7", "advantages.shrinkage, now 0"]),
        ("no_learning_signal", {"signal/contributing": 0.0, "preference/weight": 0.1, "preference/pairs": 4.0}, {},
         ["for 10 steps nothing was learned from the sampled answers, only from the data set's pairs"]),
        ("no_pairs", {**NO_PAIRS, f"{REFUSED}tie": 2.0, f"{REFUSED}alone": 1.0}, PAIRS,
         ["for 10 steps there was no pair", "are all equal; use easier or harder", "samples_per_prompt, now 4",
          "sampling.temperature, now 1"]),
        ("no_pairs", {**NO_PAIRS, f"{REFUSED}tie": 1.0, f"{REFUSED}margin": 2.0},
         {**PAIRS, "preference.min_margin": 0.5},
         ["too close; lower preference.min_margin, now 0.5, or raise sampling.samples_per_prompt, now 4"]),
        ("no_pairs", {**NO_PAIRS, f"{REFUSED}same_answer": 2.0}, PAIRS,
         ["the same text with different rewards; raise sampling.temperature, now 1"]),
        ("no_pairs", {**NO_PAIRS, f"{REFUSED}alone": 2.0}, PAIRS,
         ["fewer than two answers", "(masks.*) and failed rewards, or raise sampling.samples_per_prompt, now 4"]),
        ("no_pairs", {**NO_PAIRS, f"{REFUSED}alone": 2.0}, {**PAIRS, "advantages.grouping": "similarity"},
         ["failed rewards, lower grouping.max_groups, or raise"]),
        ("no_pairs", {**NO_PAIRS, f"{REFUSED}alone": 2.0},
         {**PAIRS, "advantages.grouping": "similarity", "grouping.method": "dbscan"},
         ["failed rewards, lower grouping.threshold, or raise"]),
        ("no_pairs", NO_PAIRS, {**PAIRS, "preference.pairs": "data"}, ["check preference.pairs, now 'data', and"]),
        ("preference_opposed", {COSINE: -0.31}, PAIRS,
         ["cosine of their gradients is -0.31; lower preference.weight, now 0.1, by hand or by a rule ([[rules]])"]),
        ("chosen_unlikely", {"preference/chosen_reward": -1.4, "preference/margin": 0.01}, PAIRS,
         ["less likely too, by 14 in log-prob", "lower optimizer.learning_rate, now 0.001",
          "preference.weight, now 0.1", "preference.beta, now 0.1",
          "add the kind 'sft' with a small weight (preference.kind_weights)"]),
        ("chosen_unlikely", {"preference/chosen_reward": -1.4, "preference/margin": 3.0},
         {**PAIRS, "preference.kind": ["sigmoid", "sft"], "preference.beta": 0.5},
         ["by 2.8 in log-prob", "raise the weight of the kind 'sft' (preference.kind_weights)"]),
        ("truncated", {"completions/clipped_ratio": 0.51}, {}, ["51%", "raise sampling.max_new_tokens, now 8"]),
        ("answers_identical", {"completions/identical": 0.6}, {},
         ["for 60% of the prompts", "sampling.temperature, now 1", "optimizer.learning_rate, now 0.001"]),
        ("zero_spread", {"frac_reward_zero_std": 0.6, "signal/contributing": 0.3, "reward": 0.9}, {},
         ["60% of the groups", "reward is 0.9", "train.resample_rounds, now 0"]),
        # 4 prompts with 3 clusters each, 6 of the 12 with one answer: 5 of the 6 others are equal.
        ("zero_spread", {"frac_reward_zero_std": 11 / 12, "signal/contributing": 0.3, f"{SPLIT}3_groups": 4.0,
                         "similarity_groups/avg_groups_per_prompt": 3.0,
                         "similarity_groups/n_single_member_groups": 6.0}, {"advantages.grouping": "similarity"},
         ["83% of the groups"]),
        ("reward_constant", {"rewards/a/std": 0.0, "rewards/a/mean": 2.0, "rewards/b/std": 0.1}, {},
         ["the reward a has been the same", "(2)"]),
        ("reward_constant", {"rewards/a/std": 0.0, "rewards/b/std": 0.0}, {}, ["the rewards a and b have been"]),
        ("reward_dominates", {"rewards/a/std": 1.0, "rewards/b/std": 1.0, "rewards/a/variance_share": 0.96,
                              "rewards/b/variance_share": 0.04}, {},
         ["the reward a has 96.0%", "b hardly matters", "advantages.combine, now 'sum_then_normalize'"]),
        ("rewards_failed", {"rewards_failed": 1.0}, {"scoring.on_error": "drop"}, ["of 12% of the completions failed"]),
        ("weights_unchanged", {"weights_changed": 0.4, "updates": 1.0, "learning_rate": 1e-9}, {},
         ["only 40.0% of the weights", "1e-09", "optimizer.learning_rate, now 0.001"]),
    ],
)  # fmt: skip
def test_each_warning_says_what_to_change(name, metrics, settings, parts):
    warnings, messages = warned(metrics, settings)
    assert warnings == [(WINDOW, name)]
    for part in parts:
        assert part in messages[name]


@pytest.mark.parametrize(
    ("metrics", "settings"),
    [
        ({}, KL),
        ({"kl": 0.5, "mask_ratio": 0.7, "accuracy_no_answer": 0.1, "signal/contributing": 0.01}, KL),
        ({"accuracy": 0.0, "chance": 0.25, "letters/A": 1.0}, {}),  # only a task of multiple choice checks these
        ({"kl": 1.4}, {**KL, "run.kl_warning": 1.4}),
        ({"kl": math.nan, "mask_ratio": math.inf}, KL),
        ({"other_no_answer": 1.0}, {}),
        ({f"{SPLIT}1_groups": 2.0, f"{SPLIT}3_groups": 2.0, "diversity/mean_distance": 0.01}, {}),
        ({f"{SPLIT}4_groups": 2.0, "similarity_groups/n_single_member_groups": 4.0}, {}),
        ({"preference/weight": 0.1, "preference/pairs": 0.1, f"{REFUSED}tie": 7.0}, PAIRS),
        ({"preference/pairs": 0.0, f"{REFUSED}tie": 7.0}, PAIRS),
        ({"async/staleness_max": 2.0, "clip_ratio/region_mean": 0.2, "sampler/logp_difference_mean": 0.3}, {}),
        ({"async/staleness_max": 0.0, "clip_ratio/region_mean": 0.5}, {}),  # several passes over a fresh batch
        ({COSINE: -0.3}, PAIRS),
        ({COSINE: math.nan}, PAIRS),
        ({"preference/chosen_reward": -1.0, "preference/margin": 0.5}, PAIRS),
        ({"preference/chosen_reward": -5.0, "preference/margin": 0.0}, PAIRS),
        ({"preference/chosen_reward": -5.0}, PAIRS),
        ({"preference/weight": 1.0, "preference/pairs": 16.0, "preference/margin": 0.2}, PAIRS),  # all that DPO reports
        ({"completions/clipped_ratio": 0.5, "completions/identical": 0.5, "frac_reward_zero_std": 0.5}, {}),
        ({"completions/clipped_ratio": 1.0}, {"sampling.min_new_tokens": 8}),  # a fixed length was asked for
        # Solved: little spread and entropy are what was asked for.
        ({"accuracy": 0.96, "completions/identical": 0.9, "frac_reward_zero_std": 0.9, "signal/contributing": 0.1}, {}),
        ({"rewards/a/std": 0.1, "rewards/overlong/std": 0.0, "rewards/a/variance_share": 1.0}, {}),  # no penalty needed
        ({"rewards/a/std": 0.1, "rewards/a/variance_share": 1.0}, {}),  # a single reward
        # 6 of 12 clusters have one answer, and half of the others are equal.
        ({"frac_reward_zero_std": 9 / 12, "signal/contributing": 0.3, f"{SPLIT}3_groups": 4.0,
          "similarity_groups/avg_groups_per_prompt": 3.0, "similarity_groups/n_single_member_groups": 6.0},
         {"advantages.grouping": "similarity"}),
        ({"weights_changed": 0.0, "updates": 0.0}, {}),  # steps without a learning signal
        ({"weights_changed": 0.5, "updates": 1.0, "rewards_failed": 0.4}, {}),
        ({"memory/train": 7.5, "device_memory": 8.0, "memory_estimate": 8.0, "token_budget": 512.0}, {}),
        ({"sampler/logp_difference_mean": 0.05}, {}),
        ({"sampler/logp_difference_mean": math.nan}, {}),
        ({"sampler/logp_difference_mean": 0.2, "async/staleness_max": 1.0}, {}),
    ],
)  # fmt: skip
def test_no_warning_without_a_reason(metrics, settings):
    assert warned(metrics, settings)[0] == []


def test_a_low_kl_is_reported_once_it_should_have_grown():
    assert warned({"kl": 9e-5}, KL, steps=60)[0] == [(50, "kl_low")]
    assert "lower loss.kl_coef, now 0.02" in warned({"kl": -9e-5}, KL, steps=60)[1]["kl_low"]
    assert warned({"kl": 1.1e-4}, KL, steps=60)[0] == []
    assert warned({"kl": -1.0}, KL, steps=60)[0] == []
    assert warned({"kl": 0.0}, {"loss.kl_coef": 0.0}, steps=60)[0] == []


def test_a_kl_that_a_refresh_has_reset_gets_time_to_grow():
    """With a refresh at step 100, 50 steps with the same reference are over at step 150."""
    settings = {**KL, "reference.refresh_every": 100}
    assert warned({"kl": 1e-6}, settings, start=95, steps=60)[0] == [(150, "kl_low")]
    assert warned({"kl": 1e-6}, {**KL, "reference.refresh_every": 20}, steps=120)[0] == []


def test_checks_use_the_mean_of_the_window():
    """Nine steps at 0.4 and one at 1.5 have a mean of 0.51."""
    checks, recipe = HealthChecks(), short_recipe(KL)
    values = [0.4] * 9 + [1.5] + [0.4] * 30
    warned_in = [bool(checks.observe(step, {"kl": kl}, recipe)) for step, kl in enumerate(values, 1)]
    assert warned_in == [False] * 9 + [True] + [False] * 30
    values[9] = 1.4  # a mean of 0.5 is not above
    checks = HealthChecks()
    assert not any(checks.observe(step, {"kl": kl}, recipe) for step, kl in enumerate(values, 1))


def test_steps_that_do_not_report_a_metric_do_not_count():
    checks, recipe = HealthChecks(), short_recipe(KL)
    rows = [{"kl": 0.6}, {}] * 5
    assert [bool(checks.observe(step, row, recipe)) for step, row in enumerate(rows, 1)] == [False] * 9 + [True]


def test_a_task_can_add_checks():
    """They see the means, the task's metric and the number of prompts, and are quiet like the others."""

    def too_slow(recent):
        assert recent.means("laps/", missing_as_zero=True) == {"a": 1.0, "b": 0.5}
        assert recent.means("laps/") == {"a": 1.0, "b": 1.0}
        return f"{recent.metric} after {recent.prompts} prompts" if recent.mean("pace") < 1 else None

    checks, recipe = HealthChecks("speed", {"too_slow": too_slow}), short_recipe(KL)
    rows = [{"pace": 0.5, "laps/a": 1.0, **({"laps/b": 1.0} if step % 2 else {})} for step in range(60)]
    warnings = {step: checks.observe(step, row, recipe) for step, row in enumerate(rows, 1)}
    assert {step for step, said in warnings.items() if said} == {10, 60}
    assert warnings[10] == warnings[60] == {"too_slow": "speed after 20 prompts"}


def test_timings_are_not_saved():
    """They differ from run to run, and a resumed run must save the same state."""
    checks = HealthChecks()
    checks.observe(1, {"kl": 0.5, "time/sample": 1.0, "memory/train": 2.0, "step_time": 3.0}, short_recipe(KL))
    assert checks.state()["window"] == [{"kl": 0.5}]


def test_a_warning_is_repeated_after_a_while():
    said, _ = warned({"kl": 1.0, "signal/contributing": 0.0}, KL, steps=WINDOW + QUIET)
    first = [(WINDOW, "kl_high"), (WINDOW, "no_learning_signal")]
    assert said == [*first, (WINDOW + QUIET, "kl_high"), (WINDOW + QUIET, "no_learning_signal")]


@pytest.mark.parametrize("at", [4, 10, 25])
def test_a_resumed_run_gives_the_same_warnings(at):
    rows = [{"kl": 0.4 + step / 50, "accuracy_no_answer": step / 100, "mask_ratio": 0.6} for step in range(70)]
    recipe, uninterrupted, first = short_recipe(KL), HealthChecks("accuracy"), HealthChecks("accuracy")
    expected = [uninterrupted.observe(step, row, recipe) for step, row in enumerate(rows, 1)]
    warnings = [first.observe(step, row, recipe) for step, row in enumerate(rows[:at], 1)]
    resumed = HealthChecks("accuracy")
    resumed.load_state(json.loads(json.dumps(first.state())))
    warnings += [resumed.observe(step, row, recipe) for step, row in enumerate(rows[at:], at + 1)]
    assert warnings == expected
    assert resumed.state() == uninterrupted.state()
    assert sum(map(len, expected)) >= 4


@pytest.mark.parametrize(
    ("name", "metrics", "settings", "parts"),
    [
        ("log_prob_mismatch", {"sampler/logp_difference_mean": 0.2}, {},
         ["differ by 0.200", "train.max_logp_mismatch is 0.05", "check what changes the weights"]),
        ("log_prob_mismatch", {"sampler/logp_difference_mean": 0.2}, {"model.dtype": "bfloat16"},
         ["with bfloat16 weights (model.dtype, now 'bfloat16')", "model.float32_head = true", "importance_cap = 2.0"]),
        ("log_prob_mismatch", {"sampler/logp_difference_mean": 0.2}, {"model.lora": {"rank": 2, "dropout": 0.1}},
         ["set model.lora.dropout = 0"]),
        ("not_finite", {"updates_not_finite": 1.0, "updates": 3.0}, {}, ["25% of the updates"]),
        ("memory", {"token_budget": 256.0, "token_budget_full": 1024.0}, {},
         ["256 tokens instead of 1,024", "train.token_budget, now None", "model.gradient_checkpointing = true"]),
        ("memory", {"memory/train": 7.7, "memory/generate": 7.0, "device_memory": 8.0}, {},
         ["7.7 of 8.0 GiB at the peak of train"]),
        ("memory", {"memory/train": 2.0, "memory_estimate": 9.0, "device_memory": 8.0}, {},
         ["may need 9.0 GiB", "there are 8.0 GiB"]),
    ],
)  # fmt: skip
def test_some_warnings_do_not_wait(name, metrics, settings, parts):
    warnings, messages = warned(metrics, settings, steps=1)
    assert warnings == [(1, name)]
    for part in parts:
        assert part in messages[name]


def compared_with_start(before, after, settings=None, *, metric=None):
    """The problems after ten steps with the first metrics and ten with the others."""
    checks, recipe = HealthChecks(metric), short_recipe(settings)
    for step in range(1, 2 * WINDOW + 1):
        problems = checks.look(step, before if step <= WINDOW else after, recipe)
    return problems


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("entropy_collapsed", {"entropy": 0.7}, {"entropy": 0.09}),
        ("entropy_collapsed", {"entropy": 0.2}, {"entropy": 0.029}),
        (None, {"entropy": 0.2}, {"entropy": 0.031}),  # above 15 % of the start
        (None, {"entropy": 5.0}, {"entropy": 0.11}),  # a task with a few possible answers
        ("entropy_exploded", {"entropy": 0.4}, {"entropy": 0.91}),
        (None, {"entropy": 0.4}, {"entropy": 0.89}),
        ("entropy_exploded", {"entropy": 2.0}, {"entropy": 4.1}),
        (None, {"entropy": 2.0}, {"entropy": 3.9}),
        ("answers_longer", {"completions/mean_length": 3.7}, {"completions/mean_length": 5.7}),  # of 8
        (None, {"completions/mean_length": 3.7}, {"completions/mean_length": 5.5}),
        (None, {"completions/mean_length": 5.0}, {"completions/mean_length": 7.0}),
        ("answers_longer", {"completions/mean_length": 2.0, "completions/clipped_ratio": 0.05},
         {"completions/mean_length": 3.1, "completions/clipped_ratio": 0.16}),
        (None, {"completions/mean_length": 2.0, "completions/clipped_ratio": 0.05},
         {"completions/mean_length": 3.1, "completions/clipped_ratio": 0.14}),
        # A reward for the form that has been learned: it varied at the start, and others have the variance now.
        (None, {"rewards/form/std": 0.4, "rewards/right/std": 0.5, "rewards/right/variance_share": 0.6,
                "rewards/form/variance_share": 0.4},
         {"rewards/form/std": 0.0, "rewards/right/std": 0.5, "rewards/right/variance_share": 1.0,
          "rewards/form/variance_share": 0.0}),
        ("reward_dominates", {"rewards/form/std": 0.4, "rewards/right/std": 0.5, "rewards/right/variance_share": 0.6,
                              "rewards/form/variance_share": 0.4},
         {"rewards/form/std": 0.3, "rewards/right/std": 9.0, "rewards/right/variance_share": 0.99,
          "rewards/form/variance_share": 0.01}),
    ],
)  # fmt: skip
def test_some_checks_compare_with_the_start_of_the_run(name, before, after):
    assert list(compared_with_start(before, after)) == ([] if name is None else [name])


def test_a_solved_task_may_have_little_entropy():
    after = {"entropy": 0.01, "accuracy": 0.97}
    assert compared_with_start({"entropy": 1.0}, after, metric="accuracy") == {}
    assert list(compared_with_start({"entropy": 1.0}, after)) == ["entropy_collapsed"]


def test_severities():
    def severity(metrics, name, **more):
        return compared_with_start(metrics, metrics, **more)[name].severity

    assert severity({"completions/clipped_ratio": 0.94}, "truncated") == "warning"
    assert severity({"completions/clipped_ratio": 0.95}, "truncated") == "error"
    assert severity({"signal/contributing": 0.0}, "no_learning_signal") == "error"
    assert severity({"signal/contributing": 0.0, "preference/pairs": 3.0}, "no_learning_signal") == "warning"
    solved = {"signal/contributing": 0.0, "accuracy": 1.0}
    assert severity(solved, "no_learning_signal", metric="accuracy") == "warning"
    assert severity({"rewards/a/std": 0.0}, "reward_constant") == "error"
    assert severity({"rewards/a/std": 0.0, "rewards/b/std": 1.0}, "reward_constant") == "warning"
    assert severity({"sampler/logp_difference_mean": 0.5}, "log_prob_mismatch") == "warning"
    assert severity({"sampler/logp_difference_mean": 0.6}, "log_prob_mismatch") == "error"
    assert severity({"rewards_failed": 5.0}, "rewards_failed") == "error"  # of 8 completions


def evaluations(*pairs):
    """The warnings after evaluations with an accuracy ± 0.1, each after ten steps with a reward."""
    checks, recipe, step, said = HealthChecks("accuracy", held_out="accuracy"), short_recipe(), 0, []
    for accuracy, reward in pairs:
        for _ in range(WINDOW if reward is not None else 0):
            step += 1
            checks.observe(step, {"reward": reward}, recipe)
        metrics = {"accuracy": accuracy, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1}
        said.append(checks.observe_evaluation(step, metrics, recipe))
    return said


def test_a_reward_that_rises_while_the_held_out_metric_falls():
    said = evaluations((0.3, None), (0.7, 0.5), (0.55, 0.6), (0.45, 0.7))
    assert [list(warnings) for warnings in said] == [[], [], [], ["overfitting"]]
    assert "rose from 0.5 to 0.7 while held-out accuracy fell from 0.7 (step 10) to 0.45" in said[-1]["overfitting"]
    assert "evaluate.patience, now None" in said[-1]["overfitting"]
    assert evaluations((0.3, None), (0.7, 0.5), (0.45, 0.4)) == [{}] * 3  # the reward falls, too
    assert evaluations((0.7, None), (0.6, 0.5), (0.52, 0.9)) == [{}] * 3  # within the intervals
    assert list(evaluations((0.7, None), (0.68, 0.5), (0.4, 0.9))[-1]) == ["overfitting"]  # best before training


def test_what_is_remembered_survives_a_resume():
    """The start, the rewards that varied and the best evaluation; and without them an old state still loads."""
    recipe, checks = short_recipe(), HealthChecks("accuracy", held_out="accuracy")
    for step in range(1, 26):
        checks.observe(step, {"entropy": 1.0, "reward": step / 10, "rewards/a/std": float(step < 3)}, recipe)
    held_out = {"accuracy": 0.9, "accuracy_low": 0.8, "accuracy_high": 1.0}
    checks.observe_evaluation(25, held_out, recipe)
    saved = json.loads(json.dumps(checks.state()))
    resumed, old = (HealthChecks("accuracy", held_out="accuracy") for _ in range(2))
    resumed.load_state(saved)
    old.load_state({name: saved[name] for name in ("window", "questions", "said")})
    assert resumed.state() == saved
    worse = {"accuracy": 0.3, "accuracy_low": 0.2, "accuracy_high": 0.4}
    for step in range(26, 37):
        row = {"entropy": 0.01, "reward": 3.0, "rewards/a/std": 0.0}
        last = [list(each.look(step, row, recipe)) for each in (checks, resumed, old)]
    assert last == [["entropy_collapsed"], ["entropy_collapsed"], []]
    found = [list(each.look_at_evaluation(36, worse, recipe)) for each in (checks, resumed, old)]
    assert found == [["overfitting"], ["overfitting"], []]


def test_a_new_preference_term_gets_time_to_find_pairs():
    """A ramp switches it on at step 6, so ten steps with it are over at step 15."""
    checks, recipe = HealthChecks(), short_recipe(PAIRS)
    rows = [{"reward": 1.0}] * 5 + [{**NO_PAIRS, f"{REFUSED}tie": 2.0}] * 10
    said = [list(checks.observe(step, row, recipe)) for step, row in enumerate(rows, 1)]
    assert said == [[]] * 14 + [["no_pairs"]]


def test_the_cosine_is_averaged_over_the_steps_that_measured_it():
    """Two of ten steps report it: their mean is −0.35; over all ten it would be −0.07."""
    checks, recipe = HealthChecks(), short_recipe(PAIRS)
    rows = [{COSINE: -0.9}, {}, {}, {}, {}, {COSINE: 0.2}, {}, {}, {}, {}]
    said = [checks.observe(step, row, recipe) for step, row in enumerate(rows, 1)]
    assert list(said[-1]) == ["preference_opposed"]
    assert "is -0.35;" in said[-1]["preference_opposed"]


def test_a_checkpoint_older_than_the_preference_metrics():
    checks, recipe = HealthChecks("accuracy"), short_recipe(PAIRS)
    checks.load_state({"window": [{"kl": 0.1, "signal/contributing": 0.5}] * 10, "questions": [2] * 10, "said": {}})
    said = [list(checks.observe(step, NO_PAIRS, recipe)) for step in range(11, 21)]
    assert said == [[]] * 9 + [["no_pairs"]]


def same(completions, **_):
    return [1.0] * len(completions)


def test_a_run_shows_and_records_the_warning(tmp_path):
    settings = {"train.steps": 11, "sampling.max_new_tokens": 2, "sampling.min_new_tokens": 2}
    with make_trainer(tmp_path, settings, reward=same) as trainer:
        reports = list(trainer.steps())
        messages = [text for text in trainer.display.said if "warning" in text]
    assert messages[0].startswith("step 10: warning no_learning_signal: for 10 steps nothing was learned")
    assert messages[1].startswith("step 10: warning reward_constant: the reward same has been the same")
    assert [report.metrics.get("warnings/no_learning_signal") for report in reports] == [None] * 9 + [1.0, None]


@pytest.mark.parametrize("stop", [pytest.param(8, marks=pytest.mark.slow), 11])
def test_a_resumed_run_does_not_warn_twice(tmp_path, stop):
    """The warning is due at step 10: after the interruption, or before it."""
    task = Task("try", [{"prompt": "Say: "}])
    changes = {
        "train": {"steps": 12, "batch_size": 1},
        "sampling": {"max_new_tokens": 1},
        "evaluate": {"every": 0},
        "run": {"checkpoint_every": stop},
    }
    run_steps(small_trainer(tmp_path, changes, task=task, rewards=[same]), stop)
    small_trainer(tmp_path, changes, task=task, rewards=[same], resume=True).run()
    assert [row["step"] for row in metrics_of(tmp_path) if "warnings/no_learning_signal" in row] == [10]


def test_a_run_gives_the_reason_for_missing_pairs(tmp_path):
    """The rewards in all groups differ by less than preference.min_margin."""
    settings = {**PAIRS, "preference.min_margin": 5.0, "train.steps": 10, "sampling.max_new_tokens": 4}
    with make_trainer(tmp_path, settings, reward=even) as trainer:
        reports = list(trainer.steps())
    assert {report.metrics["preference/pairs"] for report in reports} == {0.0}
    (message,) = [text for text in trainer.display.said if "no_pairs" in text]
    assert message.startswith("step 10: warning no_pairs: for 10 steps there was no pair to learn from: the best")
    assert "lower preference.min_margin, now 5, " in message
    assert not trainer.display.heard("no_learning_signal")


@pytest.mark.slow
def test_the_warnings_of_a_run_on_pairs_alone(tmp_path):
    """Nothing is sampled, so there is no warning about groups. A huge learning rate makes chosen answers unlikely."""
    pairs = [{"prompt": f"Say {n}: ", "chosen": f"{n} a b c", "rejected": f"{n} d"} for n in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    changes = {
        "algorithm": "dpo",
        "preference": {"train": str(tmp_path / "pairs.jsonl"), "batch_size": 4, "cache_ref_logps": False},
        "train": {"steps": 12},
        "run": {"checkpoint_every": 0},
    }
    quiet = small_trainer(tmp_path / "quiet", changes, {"optimizer": {"learning_rate": 1e-6}}, task=None)
    quiet.run()
    assert not quiet.display.heard("warning")
    loud = small_trainer(tmp_path / "loud", changes, {"optimizer": {"learning_rate": 0.3}}, task=None)
    loud.run()
    rows = metrics_of(tmp_path / "loud")
    falling = [row["step"] for row in rows if row["preference/chosen_reward"] < -1]
    assert len(falling) >= 5
    assert loud.display.heard("warning chosen_unlikely: ")
    assert not loud.display.heard("no_learning_signal")
