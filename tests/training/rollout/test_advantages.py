"""From rewards to advantages: what is not scored, what is masked_out and why, and functions of one's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from groupwise.core import group_advantages
from groupwise.errors import ConfigError, RewardError
from groupwise.training.rollout.advantages import (
    ADVANTAGES,
    GROUPINGS,
    compare,
    find_advantage,
    find_grouping,
    repetition,
    with_overlong_penalty,
)
from tests.training.factories import made_batch, made_recipe, made_trainer

NAN = math.nan
LENGTHS = [[2, 3, 4, 5], [1, 2, 3, 4]]


def batch_of(columns, **more):
    """Two prompts with four samples each; ``columns`` is (8,) or (8, K)."""
    table = torch.tensor(columns, dtype=torch.float64)
    table = table[:, None] if table.dim() == 1 else table
    return made_batch([[0.0] * 4] * 2, LENGTHS, columns=table, **more)


def close(found, wanted):
    assert found.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_advantages_by_hand():
    """Group 0: mean 1, deviations ±1; with n − 1 their standard deviation is √(4/3)."""
    found = compare(batch_of([2, 0, 2, 0, 5, 5, 5, 5]), made_recipe({"advantages.eps": 0.0}), [1.0])
    close(found.advantages, [math.sqrt(0.75), -math.sqrt(0.75)] * 2 + [0.0] * 4)
    assert found.advantages.dtype == torch.float32
    assert found.rewards.tolist() == [2, 0, 2, 0, 5, 5, 5, 5]
    assert found.groups.tolist() == [0] * 4 + [1] * 4
    assert found.equal.tolist() == [False] * 4 + [True] * 4
    assert found.contributes.tolist() == [True] * 4 + [False] * 4
    assert found.skip_reasons() == [None] * 4 + ["equal_rewards"] * 4
    assert found.masked_out == {}
    assert found.graded == {}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"advantages.scale": "none"}, [1.0, -1.0, 1.0, -1.0]),
        ({"advantages.scale": "none", "advantages.baseline": "leave_one_out"}, [4 / 3, -4 / 3, 4 / 3, -4 / 3]),
        ({"advantages.scale": "none", "advantages.baseline": "none"}, [2.0, 0.0, 2.0, 0.0]),
        ({"advantages.unbiased": False, "advantages.eps": 1.0}, [0.5, -0.5, 0.5, -0.5]),
    ],
)
def test_the_settings_of_advantages_reach_them(settings, wanted):
    found = compare(batch_of([2, 0, 2, 0, 5, 5, 5, 5]), made_recipe(settings), [1.0])
    close(found.advantages[:4], wanted)


def test_what_was_not_scored_takes_no_part():
    """Sample 1 has no reward at all: the others' mean is 2, and it is neither better nor worse."""
    found = compare(batch_of([1, NAN, 3, 2, 0, 0, 0, NAN]), made_recipe({"advantages.scale": "none"}), [1.0])
    close(found.advantages, [-1, 0, 1, 0, 0, 0, 0, 0])
    assert math.isnan(found.rewards[1])
    assert found.equal.tolist() == [False] * 4 + [True] * 4
    assert found.skip_reasons() == [None, "no_advantage", None, "no_advantage"] + ["equal_rewards"] * 4


def test_several_rewards_are_summed_by_weight_and_none_counts_nothing():
    """Column 1 says nothing about samples 0 and 3, and no column about sample 2."""
    columns = [[1, NAN], [0, 2], [NAN, NAN], [3, NAN]] + [[0, 0]] * 4
    found = compare(batch_of(columns), made_recipe({"advantages.scale": "none"}), [1.0, 0.5])
    assert found.rewards[[0, 1, 3]].tolist() == [1.0, 1.0, 3.0]
    assert math.isnan(found.rewards[2])
    close(found.advantages[:4], [-2 / 3, -2 / 3, 0.0, 4 / 3])


def test_rewards_can_be_normalised_before_they_are_summed():
    columns = [[1, 10], [0, 20], [1, 30], [0, 40]] + [[0, 0]] * 4
    settings = {"advantages.combine": "normalize_then_sum", "advantages.scale": "none"}
    batch = batch_of(columns)
    found = compare(batch, made_recipe(settings), [2.0, 0.1])
    close(found.advantages[:4], [2 * 0.5 - 1.5, -2 * 0.5 - 0.5, 2 * 0.5 + 0.5, -2 * 0.5 + 1.5])


def test_dropped_samples_count_nowhere():
    """Their group's mean is that of the others, and they are masked_out with their reason."""
    batch = batch_of([9, 0, 1, 2, 0, 0, 0, 7], dropped=[0, 7])
    found = compare(batch, made_recipe({"advantages.scale": "none"}), [1.0])
    close(found.advantages, [0, -1, 0, 1, 0, 0, 0, 0])
    assert found.masked_out["dropped"].tolist() == [True] + [False] * 6 + [True]
    assert math.isnan(found.rewards[0])
    assert found.equal.tolist() == [False] * 4 + [True] * 4
    assert found.skip_reasons()[0] == "dropped"
    assert found.contributes.tolist() == [False, True, False, True, False, False, False, False]


def test_none_and_failures_of_a_reward_function_in_a_run(tmp_path):
    """None is left out of mean and baseline; a row that fails is dropped, said and counted."""

    def reward(prompts, completions, **_):
        values = [0.0, 1.0, None, 2.0] * (len(completions) // 4)
        values[0] = NAN
        return values

    settings = {"train.steps": 1, "scoring.on_error": "drop", "advantages.scale": "none"}
    with made_trainer(tmp_path, settings, reward=reward) as trainer:
        (report,) = trainer.steps()
    close(report.group_advantages.advantages, [0, -0.5, 0, 0.5, -1, 0, 0, 1])
    assert report.group_advantages.skip_reasons()[0] == "dropped"
    assert report.metrics["rewards_failed"] == 1
    assert report.metrics["masks/dropped"] == 1 / 8
    assert report.metrics["reward"] == pytest.approx((1 + 2 + 0 + 1 + 2) / 5)
    assert any("failed; the first: reward: " in text for text in trainer.display.said)


def test_the_overlong_penalty_is_a_column_of_its_own():
    """Up to 6 of 8 tokens free, then −1/2 and −1, times the weight."""
    now = made_recipe({"scoring.overlong_buffer": 2, "scoring.overlong_weight": 0.5})
    rewards = torch.tensor([[1.0], [2.0], [NAN], [4.0]], dtype=torch.float64)
    found = with_overlong_penalty(rewards, [1, 6, 7, 8], now)
    assert found[:, 1].tolist() == [0.0, 0.0, -0.25, -0.5]
    assert found[:2, 0].tolist() == [1.0, 2.0]
    wide = made_recipe({"scoring.overlong_buffer": 100})
    assert with_overlong_penalty(rewards, [0, 4, 8, 2], wide)[:, 1].tolist() == [0.0, -0.5, -1.0, -0.25]


def test_the_overlong_penalty_in_a_run(tmp_path):
    settings = {"train.steps": 1, "scoring.overlong_buffer": 4, "scoring.overlong_weight": 2.0}
    with made_trainer(tmp_path, settings, reward=lambda prompts, completions, **_: [1.0] * len(completions)) as trainer:
        (report,) = trainer.steps()
    assert trainer.sampler.names[-1] == "overlong"
    assert trainer.sampler.weights == [1.0, 1.0]
    full = [reason == "length" for reason in report.batch.stop_reasons]
    assert sum(full) > 4
    assert [total == -1.0 for total in report.group_advantages.rewards.tolist()] == full
    assert report.metrics["rewards/overlong/mean"] < -1


# --- masks ------------------------------------------------------------------------------------------------------------


def test_truncated_answers_are_silenced_and_stay_in_the_baseline():
    batch = batch_of([2, 0, 2, 0, 1, 0, 0, 0], cut=[1, 4])
    off = compare(batch, made_recipe(), [1.0])
    on = compare(batch, made_recipe({"masks.truncated": True}), [1.0])
    assert torch.equal(on.advantages, off.advantages)
    assert off.masked_out == {}
    assert on.masked_out["truncated"].tolist() == [i in (1, 4) for i in range(8)]
    assert on.allowed.tolist() == [i not in (1, 4) for i in range(8)]
    assert on.skip_reasons() == [None, "truncated", None, None, "truncated", None, None, None]


TEXTS = ["short", "a b c a b c a b c", "no answer here", "all is well: 4", *["fine and long enough 1"] * 4]


@pytest.mark.parametrize("metric", ["right", None])
def test_validity_says_why(metric):
    """Too short, repetitive, without an answer (None of the grade that judges); each sample's first reason is told."""
    grades = {
        "right": lambda row, text: text.endswith("4") if any(c.isdigit() for c in text) else None,
        "other": lambda row, text: None,
    }
    now = made_recipe({"masks.validity": True, "masks.max_repetition": 0.3})
    batch = batch_of([2, 0, 2, 0, 1, 0, 0, 0], texts=TEXTS)
    found = compare(batch, now, [1.0], grades=grades, metric=metric)
    assert found.masked_out["too_short"].tolist() == [True] + [False] * 7
    assert found.masked_out["repetitive"].tolist() == [False, True] + [False] * 6
    if metric is None:
        assert "no_answer" not in found.masked_out
        assert found.skip_reasons()[:4] == ["too_short", "repetitive", None, None]
    else:
        assert found.masked_out["no_answer"].tolist() == [True, True, True] + [False] * 5
        assert found.skip_reasons()[:4] == ["too_short", "no_answer", "no_answer", None]
    assert found.graded == {"right": [None, None, None, True] + [False] * 4, "other": [None] * 8}


def test_the_fewest_characters_are_a_setting():
    batch = batch_of([2, 0, 2, 0, 1, 0, 0, 0], texts=["12345", "1234", "", "123456"] * 2)
    found = compare(batch, made_recipe({"masks.validity": True, "masks.min_length": 5}), [1.0])
    assert found.masked_out["too_short"].tolist() == [False, True, True, False] * 2


def test_grades_see_the_row_of_each_sample():
    batch = batch_of([2, 0, 2, 0, 1, 0, 0, 0])
    found = compare(batch, made_recipe(), [1.0], grades={"g": lambda row, text: row["prompt"] == "row 1"}, metric="g")
    assert found.graded["g"] == [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", 0.0),
        ("one two three", 0.0),
        ("one two three four", 0.0),
        ("a b a b a b", 1 - 2 / 4),
        ("x x x x x x", 1 - 1 / 4),
        ("a  b\na b\ta", 1 - 2 / 3),
    ],
)
def test_repetition_is_the_share_of_word_triples_seen_before(text, wanted):
    assert repetition(text) == pytest.approx(wanted)


# --- functions of one's own -------------------------------------------------------------------------------------------


def test_an_advantage_of_ones_own_sees_everything():
    """Rewards by function with NaN for what was dropped, groups and weights; what it returns is used."""
    seen = []

    def advantage(rewards, groups, weights):
        seen.append((rewards, groups, weights))
        return torch.arange(8.0)

    columns = [[float(i), NAN] for i in range(8)]
    found = compare(batch_of(columns, dropped=[3]), made_recipe(), [1.0, 2.0], advantage=advantage)
    rewards, groups, weights = seen[0]
    assert rewards.shape == (8, 2)
    assert bool(rewards[3].isnan().all())
    assert rewards[2].tolist()[0] == 2.0
    assert groups.tolist() == [0] * 4 + [1] * 4
    assert weights.tolist() == [1.0, 2.0]
    assert found.advantages.tolist() == [0, 1, 2, 0, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "returned",
    [
        list(range(8)),
        tuple(float(i) for i in range(8)),
        np.arange(8),
        torch.arange(8),
        torch.arange(8, dtype=torch.float64, requires_grad=True),
        torch.arange(8, dtype=torch.bfloat16),
    ],
)
def test_an_advantage_may_be_any_list_of_numbers(returned):
    found = compare(batch_of([0.0] * 8), made_recipe(), [1.0], advantage=lambda *_: returned)
    assert found.advantages.tolist() == list(range(8))
    assert found.advantages.dtype == torch.float32
    assert not found.advantages.requires_grad


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "returned NoneType, not one number each"),
        ("12345678", "returned str, not one number each"),
        ([1.0] * 7 + [None], "returned list, not one number each"),
        (["1"] * 8, "returned list, not one number each"),
        ([[1.0], [1.0, 2.0]], "returned list, not one number each"),
        ({"a": 1.0}, "returned dict, not one number each"),
        ((x for x in range(8)), "returned generator, not one number each"),
        ([10**400] * 8, "returned list, not one number each"),
        (1.0, r"returned shape \(\); expected \(8,\)"),
        ([], r"returned shape \(0,\); expected \(8,\)"),
        ([1.0] * 7, r"returned shape \(7,\); expected \(8,\)"),
        (torch.zeros(8, 1), r"returned shape \(8, 1\); expected \(8,\)"),
        ([0.0, 0.0, NAN, 0.0, 0.0, 0.0, 0.0, NAN], "returned nan for sample 2"),
        ([0.0] * 7 + [-math.inf], "returned -inf for sample 7"),
    ],
)
def test_an_advantage_that_cannot_be_used(returned, sentence):
    with pytest.raises(RewardError, match=f"the advantage function {sentence}"):
        compare(batch_of([0.0] * 8), made_recipe(), [1.0], advantage=lambda *_: returned)


@pytest.mark.parametrize(
    "labels",
    [
        ["x", "y"] * 4,
        [("a", 1), None] * 4,
        torch.tensor([7, 3] * 4),
        np.array(["x", "y"] * 4),
    ],
)
def test_a_grouping_of_ones_own(labels):
    """Even samples against even ones, odd against odd, across prompts."""
    found = compare(
        batch_of([0, 5, 0, 5, 2, 5, 2, 5]), made_recipe({"advantages.scale": "none"}), [1.0], grouping=lambda _: labels
    )
    close(found.advantages, [-1, 0, -1, 0, 1, 0, 1, 0])
    assert found.equal.tolist() == [False, True] * 4
    assert len(set(found.groups[::2].tolist())) == 1
    assert found.groups[0] != found.groups[1]


def test_a_grouping_may_be_a_number_of_neighbours():
    found = compare(
        batch_of([0, 2, 5, 5, 0, 4, 1, 1]), made_recipe({"advantages.scale": "none"}), [1.0], grouping=lambda _: 2
    )
    close(found.advantages, [-1, 1, 0, 0, -2, 2, 0, 0])


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (None, "must be an int or one label per sample, got None"),
        (True, "must be an int or one label per sample, got True"),
        (1.5, "must be an int or one label per sample"),
        ({1, 2}, "must be an int or one label per sample"),
        (0, "the group size must be at least 1, got 0"),
        (3, "8 rewards do not divide into groups of 3"),
        (["x"] * 7, "7 group labels were given for 8 rewards"),
        (torch.zeros(8), "group labels must be integers"),
        (torch.zeros(8, 1, dtype=torch.long), r"groups has shape \(8, 1\)"),
        ([[1]] * 8, "unhashable type"),
    ],
)
def test_a_grouping_that_cannot_be_used(labels, sentence):
    with pytest.raises(ConfigError, match=f"the grouping function returned labels that cannot be used: .*{sentence}"):
        compare(batch_of([0.0] * 8), made_recipe(), [1.0], grouping=lambda _: labels)


OWN = """
def doubled(rewards, groups, weights):
    return [2.0 * number for number in range(len(groups))]

def everybody(batch):
    return [0] * len(batch)
"""


def test_functions_are_found_by_name_or_by_file(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    own = lambda *_: None  # noqa: E731
    monkeypatch.setitem(ADVANTAGES, "mine", own)
    monkeypatch.setitem(GROUPINGS, "ours", own)
    assert find_advantage(None) is None
    assert find_advantage("mine") is own
    assert find_advantage(f"{tmp_path}/own.py:doubled")(None, [0, 0], None) == [0.0, 2.0]
    assert find_grouping("prompt") is None
    assert find_grouping("ours") is own
    assert find_grouping(f"{tmp_path}/own.py:everybody")([1, 2, 3]) == [0, 0, 0]


def test_names_that_are_not_known(monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "mine", lambda *_: None)
    with pytest.raises(ConfigError, match=r"unknown advantages\.function 'mime'; did you mean 'mine'\?"):
        find_advantage("mime")
    with pytest.raises(ConfigError, match=r"unknown advantages\.grouping 'promt'; did you mean 'prompt'\?"):
        find_grouping("promt")
    with pytest.raises(ConfigError, match="advantage 'json:absent': there is no 'absent'"):
        find_advantage("json:absent")
    with pytest.raises(ConfigError, match="grouping 'json:absent': there is no 'absent'"):
        find_grouping("json:absent")


def test_functions_of_ones_own_in_a_run(tmp_path):
    """The whole batch is one group, and the function's advantages teach though all rewards are equal."""
    (tmp_path / "own.py").write_text(OWN)
    settings = {
        "train.steps": 1,
        "advantages.function": f"{tmp_path}/own.py:doubled",
        "advantages.grouping": f"{tmp_path}/own.py:everybody",
    }
    with made_trainer(tmp_path, settings, reward=lambda prompts, completions, **_: [1.0] * len(completions)) as trainer:
        (report,) = trainer.steps()
    assert report.group_advantages.advantages.tolist() == [2.0 * number for number in range(8)]
    assert report.group_advantages.groups.tolist() == [0] * 8
    assert report.metrics["frac_reward_zero_std"] == 1.0
    assert report.metrics["signal/teaching"] == 7 / 8
    assert report.metrics["updates"] == 1


def test_the_built_in_advantages_are_the_core_s():
    columns = torch.rand(8, 3, dtype=torch.float64)
    columns[2, 1] = NAN
    found = compare(batch_of(columns.tolist()), made_recipe({"advantages.scale": "batch"}), [1.0, -2.0, 0.5])
    wanted = group_advantages(columns, 4, scale="batch", weights=[1.0, -2.0, 0.5])
    close(found.advantages, wanted.tolist())
