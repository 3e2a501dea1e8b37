"""Warnings while a run goes: each fires on its side of its limit, says what to change, and is not said all the time."""

from __future__ import annotations

import json
import math

import pytest

from groupwise.errors import CheckpointError
from groupwise.tasks import Task
from groupwise.training.monitor.health_checks import CHECKS, COSINE, QUIET, REFUSED, SPLIT, WINDOW, HealthChecks
from tests.training.factories import made_recipe, made_trainer
from tests.training.runs import even, go, metrics_of, small_trainer

KL = {"loss.kl_coef": 0.02}
LETTERS = {"letters/A": 0.7, "letters/B": 0.3}
PAIRS = {"preference.weight": 0.1}
NO_PAIRS = {"preference/weight": 0.1, "preference/pairs": 0.0}
UNSPLIT = {f"{SPLIT}1_groups": 3.0, f"{SPLIT}2_groups": 1.0}


def warned(metrics, settings=None, *, steps=WINDOW, start=1, metric="accuracy"):
    """What is said in so many steps of the same metrics, as (step, name) and the sentences by name."""
    checks, now = HealthChecks(metric), made_recipe(settings)
    found = [(step, w) for step in range(start, start + steps) for w in checks.observe(step, metrics, now)]
    return [(step, w.name) for step, w in found], {w.name: w.sentence for _, w in found}


@pytest.mark.parametrize(
    ("name", "metrics", "settings", "says"),
    [
        ("kl_high", {"kl": 0.51}, KL,
         ["the KL to the reference is 0.51", "raise loss.kl_coef, now 0.02", "optimizer.learning_rate, now 0.001"]),
        ("masked", {"mask_ratio": 0.69, "masks/off_policy": 0.3, "masks/too_short": 0.01},
         {"masks.off_policy": "reference_drift", "reference.refresh_every": 100},
         ["69%", "off_policy takes 30%", "lower reference.refresh_every, now 100"]),
        ("masked", {"mask_ratio": 0.5, "masks/off_policy": 0.5}, {"masks.off_policy": "reference_drift"},
         ["set reference.refresh_every, such as 100"]),
        ("masked", {"mask_ratio": 0.5, "masks/off_policy": 0.5}, {"masks.off_policy": "v3.2", "train.iterations": 4},
         ["lower train.iterations, now 4, or optimizer.learning_rate"]),
        ("masked", {"mask_ratio": 0.5, "masks/off_policy": 0.1, "masks/truncated": 0.4}, {"masks.off_policy": "v3.2"},
         ["truncated takes 40%", "raise sampling.max_new_tokens, now 8"]),
        ("masked", {"mask_ratio": 0.5, "masks/no_answer": 0.5, "masks/keep_sampling_mask": 0.9}, {"masks.validity": True},
         ["no_answer takes 50%", "in the prompt (data.system_prompt)", "sampling.max_new_tokens, now 8"]),
        ("masked", {"mask_ratio": 0.5, "masks/dropped": 0.5}, {}, ["look at the reward function"]),
        ("masked", {"mask_ratio": 0.5}, {}, ["switch off a mask"]),
        ("no_answer", {"accuracy_no_answer": 0.11}, {}, ["11%", "data.system_prompt", "[[rewards]]"]),
        ("no_answer", {"accuracy_no_answer": 0.5, "completions/clipped_ratio": 0.2}, {},
         ["50%", "20% are cut off", "raise sampling.max_new_tokens, now 8"]),
        # 10 steps of 2 × 1 questions: two standard errors are 2 · √(0.25 · 0.75 / 20) = 0.1936.
        ("below_chance", {"accuracy": 0.05, "chance": 0.25}, {}, ["5.0%", "25.0%", "letters", "learning_rate"]),
        ("one_letter", LETTERS, {}, ["70%", "are A", "loss.entropy_coef, now 0", "sampling.temperature, now 1",
                                     "loss.kl_coef, now 0", "shuffle the options"]),
        ("one_letter", {**LETTERS, "letters_right/A": 0.34}, {}, ["are A"]),
        ("nothing_taught", {"signal/teaching": 0.0}, {}, ["10 steps", "sampling.samples_per_prompt, now 4",
                                                          "sampling.temperature, now 1", "are all equal; use"]),
        ("nothing_taught", {"signal/teaching": 0.0, "mask_ratio": 0.9}, {}, ["or masks took the answers that differ"]),
        ("answers_alike", {**UNSPLIT, "diversity/mean_distance": 0.2, "diversity/distance_between_prompts": 0.5}, {},
         ["to 75% of the prompts are all alike", "at a distance of 0.20, answers to different prompts at 0.50",
          "sampling.temperature, now 1", "loss.kl_coef, now 0"]),
        ("answers_alike", {**UNSPLIT, "diversity/mean_distance": 0.49}, {},
         ["(two of them are at a distance of 0.49)"]),
        ("answers_unrelated", {**UNSPLIT, "diversity/mean_distance": 0.3, "diversity/distance_between_prompts": 0.5,
                               "similarity_groups/avg_silhouette_score": 0.04}, {},
         ["75%", "make no clusters (silhouette 0.04)", "sampling.samples_per_prompt, now 4", "'BAAI/bge-m3'"]),
        ("answers_scattered", {f"{SPLIT}4_groups": 2.0, "similarity_groups/n_single_member_groups": 4.1}, {},
         ["51% of the answers are alone", "grouping.max_groups, now 7", "advantages.shrinkage, now 0"]),
        ("nothing_taught", {"signal/teaching": 0.0, "preference/weight": 0.1, "preference/pairs": 4.0}, {},
         ["for 10 steps nothing was learned from the sampled answers, only from the data set's pairs: the rewards in"]),
        ("no_pairs", {**NO_PAIRS, f"{REFUSED}tie": 2.0, f"{REFUSED}alone": 1.0}, PAIRS,
         ["for 10 steps there was not one pair", "are all equal; use easier or harder", "samples_per_prompt, now 4",
          "sampling.temperature, now 1"]),
        ("no_pairs", {**NO_PAIRS, f"{REFUSED}tie": 1.0, f"{REFUSED}margin": 2.0},
         {**PAIRS, "preference.min_margin": 0.5},
         ["too close; lower preference.min_margin, now 0.5, or raise sampling.samples_per_prompt, now 4"]),
        ("no_pairs", {**NO_PAIRS, f"{REFUSED}same_answer": 2.0}, PAIRS,
         ["the same answer with another reward; raise sampling.temperature, now 1, and see why the reward"]),
        ("no_pairs", {**NO_PAIRS, f"{REFUSED}alone": 2.0}, PAIRS,
         ["fewer than two answers that may teach; see what the masks (masks.*) and failed rewards take, or raise "
          "sampling.samples_per_prompt, now 4"]),
        ("no_pairs", {**NO_PAIRS, f"{REFUSED}alone": 2.0}, {**PAIRS, "advantages.grouping": "similarity"},
         ["failed rewards take, lower grouping.max_groups, or raise"]),
        ("no_pairs", NO_PAIRS, {**PAIRS, "preference.pairs": "data"}, ["preference.pairs, now 'data', and at"]),
        ("preference_opposed", {COSINE: -0.31}, PAIRS,
         ["the cosine of their gradients is -0.31; lower preference.weight, now 0.1, by hand or by a rule ([[rules]])",
          "want the same"]),
        ("chosen_unlikely", {"preference/chosen_reward": -1.4, "preference/margin": 0.01}, PAIRS,
         ["less likely too, by 14 in log-prob", "lower optimizer.learning_rate, now 0.001",
          "preference.weight, now 0.1", "preference.beta, now 0.1",
          "add the kind 'sft' with a small weight (preference.kind_weights)"]),
        ("chosen_unlikely", {"preference/chosen_reward": -1.4, "preference/margin": 3.0},
         {**PAIRS, "preference.kind": ["sigmoid", "sft"], "preference.beta": 0.5},
         ["by 2.8 in log-prob", "raise the weight of the kind 'sft' (preference.kind_weights)"]),
    ],
)  # fmt: skip
def test_each_says_what_to_change(name, metrics, settings, says):
    said, sentences = warned(metrics, settings)
    assert said == [(WINDOW, name)]
    for part in says:
        assert part in sentences[name]


@pytest.mark.parametrize(
    ("metrics", "settings"),
    [
        ({}, KL),
        ({"kl": 0.5, "mask_ratio": 0.7, "accuracy_no_answer": 0.1, "signal/teaching": 0.01}, KL),
        ({"accuracy": 0.06, "chance": 0.25}, {}),
        ({"accuracy": 0.06, "chance": 0.25}, {"sampling.samples_per_prompt": 64}),
        ({"accuracy": 0.0}, {}),
        ({"chance": 0.25}, {}),
        ({"letters/A": 0.6, "letters/B": 0.4}, {}),
        ({**LETTERS, "letters_right/A": 0.36}, {}),
        ({"kl": math.nan, "mask_ratio": math.inf}, KL),
        ({"other_no_answer": 1.0}, {}),
        ({f"{SPLIT}1_groups": 2.0, f"{SPLIT}3_groups": 2.0, "diversity/mean_distance": 0.01}, {}),
        ({f"{SPLIT}4_groups": 2.0, "similarity_groups/n_single_member_groups": 4.0}, {}),
        ({"preference/weight": 0.1, "preference/pairs": 0.1, f"{REFUSED}tie": 7.0}, PAIRS),
        ({"preference/pairs": 0.0, f"{REFUSED}tie": 7.0}, PAIRS),
        ({COSINE: -0.3}, PAIRS),
        ({COSINE: math.nan}, PAIRS),
        ({"preference/chosen_reward": -1.0, "preference/margin": 0.5}, PAIRS),
        ({"preference/chosen_reward": -5.0, "preference/margin": 0.0}, PAIRS),
        ({"preference/chosen_reward": -5.0}, PAIRS),
        ({"preference/weight": 1.0, "preference/pairs": 16.0, "preference/margin": 0.2}, PAIRS),  # all that DPO reports
    ],
)
def test_nothing_is_said_without_a_reason(metrics, settings):
    assert warned(metrics, settings)[0] == []


def test_a_low_kl_is_told_once_it_should_have_grown():
    assert warned({"kl": 9e-5}, KL, steps=60)[0] == [(50, "kl_low")]
    assert "lower loss.kl_coef, now 0.02" in warned({"kl": -9e-5}, KL, steps=60)[1]["kl_low"]
    assert warned({"kl": 1.1e-4}, KL, steps=60)[0] == []
    assert warned({"kl": -1.0}, KL, steps=60)[0] == []
    assert warned({"kl": 0.0}, {"loss.kl_coef": 0.0}, steps=60)[0] == []


def test_a_kl_that_a_refresh_has_reset_is_given_time_to_grow():
    """The reference of steps 101 to 200 is that of step 100: 50 steps with it are over at step 150, not before."""
    settings = {**KL, "reference.refresh_every": 100}
    assert warned({"kl": 1e-6}, settings, start=95, steps=60)[0] == [(150, "kl_low")]
    assert warned({"kl": 1e-6}, {**KL, "reference.refresh_every": 20}, steps=120)[0] == []


def test_the_mean_of_the_window_counts():
    """Nine steps at 0.4 and one at 1.5 have a mean of 0.51; a step later, with 0.4 in its place, it is still in."""
    checks, now = HealthChecks(), made_recipe(KL)
    values = [0.4] * 9 + [1.5] + [0.4] * 30
    said = [bool(checks.observe(step, {"kl": kl}, now)) for step, kl in enumerate(values, 1)]
    assert said == [False] * 9 + [True] + [False] * 30
    values[9] = 1.4  # a mean of 0.5 is not above
    checks = HealthChecks()
    assert not any(checks.observe(step, {"kl": kl}, now) for step, kl in enumerate(values, 1))


def test_steps_that_do_not_report_a_metric_do_not_count_and_a_letter_that_is_not_named_was_not_given():
    checks, now = HealthChecks(), made_recipe(KL)
    rows = [{"kl": 0.6}, {}] * 5
    assert [bool(checks.observe(step, row, now)) for step, row in enumerate(rows, 1)] == [False] * 9 + [True]
    checks = HealthChecks()
    rows = [{"letters/A": 1.0}, {"letters/B": 1.0}] * 5
    assert not any(checks.observe(step, row, now) for step, row in enumerate(rows, 1))


def test_the_same_is_said_again_after_a_while():
    said, _ = warned({"kl": 1.0, "signal/teaching": 0.0}, KL, steps=WINDOW + QUIET)
    first = [(WINDOW, "kl_high"), (WINDOW, "nothing_taught")]
    assert said == [*first, (WINDOW + QUIET, "kl_high"), (WINDOW + QUIET, "nothing_taught")]


@pytest.mark.parametrize("at", [4, 10, 25])
def test_a_run_that_goes_on_says_the_same(at):
    rows = [{"kl": 0.4 + step / 50, "accuracy": step / 100, "chance": 0.25, **LETTERS} for step in range(70)]
    now, whole, broken = made_recipe(KL), HealthChecks("accuracy"), HealthChecks("accuracy")
    wanted = [whole.observe(step, row, now) for step, row in enumerate(rows, 1)]
    found = [broken.observe(step, row, now) for step, row in enumerate(rows[:at], 1)]
    again = HealthChecks("accuracy")
    again.load_state(json.loads(json.dumps(broken.state())))
    found += [again.observe(step, row, now) for step, row in enumerate(rows[at:], at + 1)]
    assert found == wanted
    assert again.state() == whole.state()
    assert sum(map(len, wanted)) >= 4


@pytest.mark.parametrize("state", [{}, {"window": [3], "questions": [], "said": {}}, {"window": None}])
def test_a_damaged_state(state):
    with pytest.raises(CheckpointError, match="the saved checks are damaged"):
        HealthChecks().load_state(state)


def test_names_are_those_that_metrics_get():
    assert list(CHECKS) == [
        "kl_high",
        "kl_low",
        "masked",
        "no_answer",
        "below_chance",
        "one_letter",
        "nothing_taught",
        "answers_alike",
        "answers_unrelated",
        "answers_scattered",
        "no_pairs",
        "preference_opposed",
        "chosen_unlikely",
    ]


def test_a_preference_term_that_has_just_come_in_is_given_time_to_find_pairs():
    """A ramp brings it in at step 6: ten steps with it are over at step 15."""
    checks, now = HealthChecks(), made_recipe(PAIRS)
    rows = [{"reward": 1.0}] * 5 + [{**NO_PAIRS, f"{REFUSED}tie": 2.0}] * 10
    said = [[sign.name for sign in checks.observe(step, row, now)] for step, row in enumerate(rows, 1)]
    assert said == [[]] * 14 + [["no_pairs"]]


def test_the_cosine_counts_by_the_steps_that_measured_it():
    """Of ten steps two know it: their mean is −0.35, and over all ten it would be −0.07."""
    checks, now = HealthChecks(), made_recipe(PAIRS)
    rows = [{COSINE: -0.9}, {}, {}, {}, {}, {COSINE: 0.2}, {}, {}, {}, {}]
    said = [checks.observe(step, row, now) for step, row in enumerate(rows, 1)]
    assert [sign.name for sign in said[-1]] == ["preference_opposed"]
    assert "is -0.35;" in said[-1][0].sentence


def test_a_checkpoint_from_before_there_were_pairs():
    """Its window knows nothing of them, and is filled up step by step."""
    checks, now = HealthChecks("accuracy"), made_recipe(PAIRS)
    checks.load_state({"window": [{"kl": 0.1, "signal/teaching": 0.5}] * 10, "questions": [2] * 10, "said": {}})
    said = [[sign.name for sign in checks.observe(step, NO_PAIRS, now)] for step in range(11, 21)]
    assert said == [[]] * 9 + [["no_pairs"]]


def same(completions, **_):
    return [1.0] * len(completions)


def test_in_a_run_it_is_said_and_recorded(tmp_path):
    with made_trainer(tmp_path, {"train.steps": 11, "sampling.max_new_tokens": 2}, reward=same) as trainer:
        reports = list(trainer.steps())
        (sentence,) = [text for text in trainer.display.said if "warning" in text]
    assert sentence.startswith("step 10: warning nothing_taught: for 10 steps nothing was learned")
    assert [report.metrics.get("warnings/nothing_taught") for report in reports] == [None] * 9 + [1.0, None]


def test_a_resumed_run_does_not_say_it_twice(tmp_path):
    task = Task("try", [{"prompt": "Say: "}])
    changes = {"train": {"steps": 12, "batch_size": 1}, "sampling": {"max_new_tokens": 1}, "evaluate": {"every": 0}}
    for name, first in (("early", 8), ("late", 11)):
        go(small_trainer(tmp_path / name, changes, task=task, rewards=[same]), first)
        small_trainer(tmp_path / name, changes, task=task, rewards=[same], resume=True).run()
        steps = [row["step"] for row in metrics_of(tmp_path / name) if "warnings/nothing_taught" in row]
        assert steps == [10]


def test_in_a_run_the_reason_why_there_are_no_pairs_is_found(tmp_path):
    """All groups have answers that differ, by less than is asked for."""
    settings = {**PAIRS, "preference.min_margin": 5.0, "train.steps": 10, "sampling.max_new_tokens": 4}
    with made_trainer(tmp_path, settings, reward=even) as trainer:
        reports = list(trainer.steps())
    assert {report.metrics["preference/pairs"] for report in reports} == {0.0}
    (sentence,) = [text for text in trainer.display.said if "no_pairs" in text]
    assert sentence.startswith("step 10: warning no_pairs: for 10 steps there was not one pair to learn from: the best")
    assert "lower preference.min_margin, now 5, " in sentence
    assert not trainer.display.heard("nothing_taught")


def test_in_a_run_on_pairs_alone_only_what_is_true_is_said(tmp_path):
    """Nothing is sampled, so nothing is said of groups. Far too large steps drive the better answers away too."""
    pairs = [{"prompt": f"Say {n}: ", "chosen": f"{n} a b c", "rejected": f"{n} d"} for n in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    changes = {
        "algorithm": "dpo",
        "preference": {"train": str(tmp_path / "pairs.jsonl"), "batch_size": 4, "cache": False},
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
    assert loud.display.heard("warning chosen_unlikely: the better answers of pairs become less likely too")
    assert not loud.display.heard("nothing_taught")
