"""From rewards to advantages: missing rewards, masks and their reasons, custom functions."""

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
    compute_group_advantages,
    find_advantage,
    find_grouping,
    repetition,
)
from tests.training.factories import make_batch, make_trainer, short_recipe

NAN = math.nan
LENGTHS = [[2, 3, 4, 5], [1, 2, 3, 4]]


def batch_of(columns, **more):
    """Two prompts with four samples each; ``columns`` is (8,) or (8, K)."""
    table = torch.tensor(columns, dtype=torch.float64)
    table = table[:, None] if table.dim() == 1 else table
    return make_batch([[0.0] * 4] * 2, LENGTHS, columns=table, **more)


def close(result, wanted):
    assert result.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_advantages_by_hand():
    """Group 0: mean 1, deviations ±1; with n − 1 their standard deviation is √(4/3)."""
    result = compute_group_advantages(batch_of([2, 0, 2, 0, 5, 5, 5, 5]), short_recipe({"advantages.eps": 0.0}), [1.0])
    close(result.advantages, [math.sqrt(0.75), -math.sqrt(0.75)] * 2 + [0.0] * 4)
    assert result.advantages.dtype == torch.float32
    assert result.rewards.tolist() == [2, 0, 2, 0, 5, 5, 5, 5]
    assert result.groups.tolist() == [0] * 4 + [1] * 4
    assert result.equal.tolist() == [False] * 4 + [True] * 4
    assert result.contributes.tolist() == [True] * 4 + [False] * 4
    assert result.skip_reasons() == [None] * 4 + ["equal_rewards"] * 4
    assert result.masked_out == {}
    assert result.graded == {}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"advantages.scale": "none"}, [1.0, -1.0, 1.0, -1.0]),
        ({"advantages.scale": "none", "advantages.baseline": "leave_one_out"}, [4 / 3, -4 / 3, 4 / 3, -4 / 3]),
        ({"advantages.scale": "none", "advantages.baseline": "none"}, [2.0, 0.0, 2.0, 0.0]),
        ({"advantages.unbiased": False, "advantages.eps": 1.0}, [0.5, -0.5, 0.5, -0.5]),
    ],
)
def test_the_settings_of_advantages_are_used(settings, wanted):
    result = compute_group_advantages(batch_of([2, 0, 2, 0, 5, 5, 5, 5]), short_recipe(settings), [1.0])
    close(result.advantages[:4], wanted)


def test_samples_without_a_reward_are_ignored():
    """Sample 1 has no reward: the mean of the others is 2, and its advantage is 0."""
    result = compute_group_advantages(
        batch_of([1, NAN, 3, 2, 0, 0, 0, NAN]), short_recipe({"advantages.scale": "none"}), [1.0]
    )
    close(result.advantages, [-1, 0, 1, 0, 0, 0, 0, 0])
    assert math.isnan(result.rewards[1])
    assert result.equal.tolist() == [False] * 4 + [True] * 4
    assert result.skip_reasons() == [None, "no_advantage", None, "no_advantage"] + ["equal_rewards"] * 4


def test_several_rewards_are_summed_by_weight_and_none_adds_nothing():
    """Samples 0 and 3 have no second reward, sample 2 has none."""
    columns = [[1, NAN], [0, 2], [NAN, NAN], [3, NAN]] + [[0, 0]] * 4
    result = compute_group_advantages(batch_of(columns), short_recipe({"advantages.scale": "none"}), [1.0, 0.5])
    assert result.rewards[[0, 1, 3]].tolist() == [1.0, 1.0, 3.0]
    assert math.isnan(result.rewards[2])
    close(result.advantages[:4], [-2 / 3, -2 / 3, 0.0, 4 / 3])


def test_rewards_can_be_normalised_before_they_are_summed():
    columns = [[1, 10], [0, 20], [1, 30], [0, 40]] + [[0, 0]] * 4
    settings = {"advantages.combine": "normalize_then_sum", "advantages.scale": "none"}
    batch = batch_of(columns)
    result = compute_group_advantages(batch, short_recipe(settings), [2.0, 0.1])
    close(result.advantages[:4], [2 * 0.5 - 1.5, -2 * 0.5 - 0.5, 2 * 0.5 + 0.5, -2 * 0.5 + 1.5])


def test_dropped_samples_are_ignored():
    """The group's mean is that of the others, and they are masked with a reason."""
    batch = batch_of([9, 0, 1, 2, 0, 0, 0, 7], dropped=[0, 7])
    result = compute_group_advantages(batch, short_recipe({"advantages.scale": "none"}), [1.0])
    close(result.advantages, [0, -1, 0, 1, 0, 0, 0, 0])
    assert result.masked_out["dropped"].tolist() == [True] + [False] * 6 + [True]
    assert math.isnan(result.rewards[0])
    assert result.equal.tolist() == [False] * 4 + [True] * 4
    assert result.skip_reasons()[0] == "dropped"
    assert result.contributes.tolist() == [False, True, False, True, False, False, False, False]


def test_none_and_failures_of_a_reward_function_in_a_run(tmp_path):
    """None is left out of the mean and the baseline; a failed reward is dropped, reported and counted."""

    def reward(prompts, completions, **_):
        values = [0.0, 1.0, None, 2.0] * (len(completions) // 4)
        values[0] = NAN
        return values

    settings = {"train.steps": 1, "scoring.on_error": "drop", "advantages.scale": "none"}
    with make_trainer(tmp_path, settings, reward=reward) as trainer:
        (report,) = trainer.steps()
    close(report.group_advantages.advantages, [0, -0.5, 0, 0.5, -1, 0, 0, 1])
    assert report.group_advantages.skip_reasons()[0] == "dropped"
    assert report.metrics["rewards_failed"] == 1
    assert report.metrics["masks/dropped"] == 1 / 8
    assert report.metrics["reward"] == pytest.approx((1 + 2 + 0 + 1 + 2) / 5)
    assert any("failed; the first: reward: " in text for text in trainer.display.said)


# --- masks ------------------------------------------------------------------------------------------------------------


def test_truncated_samples_are_masked_and_stay_in_the_baseline():
    batch = batch_of([2, 0, 2, 0, 1, 0, 0, 0], cut=[1, 4])
    off = compute_group_advantages(batch, short_recipe(), [1.0])
    on = compute_group_advantages(batch, short_recipe({"masks.truncated": True}), [1.0])
    assert torch.equal(on.advantages, off.advantages)
    assert off.masked_out == {}
    assert on.masked_out["truncated"].tolist() == [i in (1, 4) for i in range(8)]
    assert on.allowed.tolist() == [i not in (1, 4) for i in range(8)]
    assert on.skip_reasons() == [None, "truncated", None, None, "truncated", None, None, None]


TEXTS = ["short", "a b c a b c a b c", "no answer here", "all is well: 4", *["fine and long enough 1"] * 4]


@pytest.mark.parametrize("metric", ["right", None])
def test_the_validity_mask_gives_its_reasons(metric):
    """Too short, repetitive, or without an answer (the main grade is None); the first reason is reported."""
    grades = {
        "right": lambda row, text: text.endswith("4") if any(c.isdigit() for c in text) else None,
        "other": lambda row, text: None,
    }
    recipe = short_recipe({"masks.validity": True, "masks.max_repetition": 0.3})
    batch = batch_of([2, 0, 2, 0, 1, 0, 0, 0], texts=TEXTS)
    result = compute_group_advantages(batch, recipe, [1.0], grades=grades, metric=metric)
    assert result.masked_out["too_short"].tolist() == [True] + [False] * 7
    assert result.masked_out["repetitive"].tolist() == [False, True] + [False] * 6
    if metric is None:
        assert "no_answer" not in result.masked_out
        assert result.skip_reasons()[:4] == ["too_short", "repetitive", None, None]
    else:
        assert result.masked_out["no_answer"].tolist() == [True, True, True] + [False] * 5
        assert result.skip_reasons()[:4] == ["too_short", "no_answer", "no_answer", None]
    assert result.graded == {"right": [None, None, None, True] + [False] * 4, "other": [None] * 8}


def test_the_minimum_length_is_a_setting():
    batch = batch_of([2, 0, 2, 0, 1, 0, 0, 0], texts=["12345", "1234", "", "123456"] * 2)
    result = compute_group_advantages(batch, short_recipe({"masks.validity": True, "masks.min_length": 5}), [1.0])
    assert result.masked_out["too_short"].tolist() == [False, True, True, False] * 2


def test_grades_see_the_row_of_each_sample():
    batch = batch_of([2, 0, 2, 0, 1, 0, 0, 0])
    result = compute_group_advantages(
        batch, short_recipe(), [1.0], grades={"g": lambda row, text: row["prompt"] == "row 1"}, metric="g"
    )
    assert result.graded["g"] == [False] * 4 + [True] * 4


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


# --- custom functions -------------------------------------------------------------------------------------------------


def test_a_custom_advantage_function():
    """It gets the rewards, NaN for dropped samples, the groups and the weights, and its result is used."""
    seen = []

    def advantage(rewards, groups, weights):
        seen.append((rewards, groups, weights))
        return torch.arange(8.0)

    columns = [[float(i), NAN] for i in range(8)]
    result = compute_group_advantages(batch_of(columns, dropped=[3]), short_recipe(), [1.0, 2.0], advantage=advantage)
    rewards, groups, weights = seen[0]
    assert rewards.shape == (8, 2)
    assert bool(rewards[3].isnan().all())
    assert rewards[2].tolist()[0] == 2.0
    assert groups.tolist() == [0] * 4 + [1] * 4
    assert weights.tolist() == [1.0, 2.0]
    assert result.advantages.tolist() == [0, 1, 2, 0, 4, 5, 6, 7]


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
def test_advantages_may_be_any_list_of_numbers(returned):
    result = compute_group_advantages(batch_of([0.0] * 8), short_recipe(), [1.0], advantage=lambda *_: returned)
    assert result.advantages.tolist() == list(range(8))
    assert result.advantages.dtype == torch.float32
    assert not result.advantages.requires_grad


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "returned NoneType, not one number per sample"),
        ("12345678", "returned str, not one number per sample"),
        ([1.0] * 7 + [None], "returned list, not one number per sample"),
        (["1"] * 8, "returned list, not one number per sample"),
        ([[1.0], [1.0, 2.0]], "returned list, not one number per sample"),
        ({"a": 1.0}, "returned dict, not one number per sample"),
        ((x for x in range(8)), "returned generator, not one number per sample"),
        ([10**400] * 8, "returned list, not one number per sample"),
        (1.0, r"returned shape \(\); expected \(8,\)"),
        ([], r"returned shape \(0,\); expected \(8,\)"),
        ([1.0] * 7, r"returned shape \(7,\); expected \(8,\)"),
        (torch.zeros(8, 1), r"returned shape \(8, 1\); expected \(8,\)"),
        ([0.0, 0.0, NAN, 0.0, 0.0, 0.0, 0.0, NAN], "returned nan for sample 2"),
        ([0.0] * 7 + [-math.inf], "returned -inf for sample 7"),
    ],
)
def test_advantages_that_cannot_be_used(returned, sentence):
    with pytest.raises(RewardError, match=f"the advantage function {sentence}"):
        compute_group_advantages(batch_of([0.0] * 8), short_recipe(), [1.0], advantage=lambda *_: returned)


@pytest.mark.parametrize(
    "labels",
    [
        ["x", "y"] * 4,
        [("a", 1), None] * 4,
        torch.tensor([7, 3] * 4),
        np.array(["x", "y"] * 4),
    ],
)
def test_a_custom_grouping(labels):
    """Even and odd samples are compared among themselves, across prompts."""
    result = compute_group_advantages(
        batch_of([0, 5, 0, 5, 2, 5, 2, 5]), short_recipe({"advantages.scale": "none"}), [1.0], grouping=lambda _: labels
    )
    close(result.advantages, [-1, 0, -1, 0, 1, 0, 1, 0])
    assert result.equal.tolist() == [False, True] * 4
    assert len(set(result.groups[::2].tolist())) == 1
    assert result.groups[0] != result.groups[1]


def test_a_grouping_may_be_a_group_size():
    result = compute_group_advantages(
        batch_of([0, 2, 5, 5, 0, 4, 1, 1]), short_recipe({"advantages.scale": "none"}), [1.0], grouping=lambda _: 2
    )
    close(result.advantages, [-1, 1, 0, 0, -2, 2, 0, 0])


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
        compute_group_advantages(batch_of([0.0] * 8), short_recipe(), [1.0], grouping=lambda _: labels)


CUSTOM = """
def doubled(rewards, groups, weights):
    return [2.0 * number for number in range(len(groups))]

def one_group(batch):
    return [0] * len(batch)
"""


def test_functions_are_found_by_name_or_by_file(tmp_path, monkeypatch):
    (tmp_path / "custom.py").write_text(CUSTOM)
    custom = lambda *_: None  # noqa: E731
    monkeypatch.setitem(ADVANTAGES, "mine", custom)
    monkeypatch.setitem(GROUPINGS, "ours", custom)
    assert find_advantage(None) is None
    assert find_advantage("mine") is custom
    assert find_advantage(f"{tmp_path}/custom.py:doubled")(None, [0, 0], None) == [0.0, 2.0]
    assert find_grouping("prompt") is None
    assert find_grouping("ours") is custom
    assert find_grouping(f"{tmp_path}/custom.py:one_group")([1, 2, 3]) == [0, 0, 0]


def test_unknown_names(monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "mine", lambda *_: None)
    with pytest.raises(ConfigError, match=r"unknown advantages\.function 'mime'; did you mean 'mine'\?"):
        find_advantage("mime")
    with pytest.raises(ConfigError, match=r"unknown advantages\.grouping 'promt'; did you mean 'prompt'\?"):
        find_grouping("promt")
    with pytest.raises(ConfigError, match="advantage 'json:absent': there is no 'absent'"):
        find_advantage("json:absent")
    with pytest.raises(ConfigError, match="grouping 'json:absent': there is no 'absent'"):
        find_grouping("json:absent")


def test_custom_functions_in_a_run(tmp_path):
    """The batch is one group, and the custom advantages are used although all rewards are equal."""
    (tmp_path / "custom.py").write_text(CUSTOM)
    settings = {
        "train.steps": 1,
        "advantages.function": f"{tmp_path}/custom.py:doubled",
        "advantages.grouping": f"{tmp_path}/custom.py:one_group",
    }
    with make_trainer(tmp_path, settings, reward=lambda prompts, completions, **_: [1.0] * len(completions)) as trainer:
        (report,) = trainer.steps()
    assert report.group_advantages.advantages.tolist() == [2.0 * number for number in range(8)]
    assert report.group_advantages.groups.tolist() == [0] * 8
    assert report.metrics["frac_reward_zero_std"] == 1.0
    assert report.metrics["signal/contributing"] == 7 / 8
    assert report.metrics["updates"] == 1


def test_groups_of_equal_rewards_can_be_dropped():
    """They count neither in the standard deviation of the batch nor in any other number."""
    batch = batch_of([2, 0, 2, 0, 5, 5, 5, 5])
    settings = {"masks.drop_equal_rewards": True, "advantages.eps": 0.0}
    for scale in ("batch_advantages", "batch"):
        result = compute_group_advantages(batch, short_recipe({**settings, "advantages.scale": scale}), [1.0])
        close(result.advantages, [math.sqrt(0.75), -math.sqrt(0.75)] * 2 + [0.0] * 4)
        assert result.skip_reasons() == [None] * 4 + ["equal_rewards"] * 4
        assert result.allowed.tolist() == [True] * 4 + [False] * 4
    kept = compute_group_advantages(
        batch, short_recipe({"advantages.eps": 0.0, "advantages.scale": "batch_advantages"}), [1.0]
    )
    close(kept.advantages, [math.sqrt(7 / 4), -math.sqrt(7 / 4)] * 2 + [0.0] * 4)
    assert kept.allowed.all()


def test_a_batch_without_any_learning_signal_may_be_dropped():
    settings = {"masks.drop_equal_rewards": True, "advantages.scale": "batch_advantages"}
    result = compute_group_advantages(batch_of([1, 1, 1, 1, 0, 0, 0, 0]), short_recipe(settings), [1.0])
    assert result.advantages.tolist() == [0.0] * 8
    assert not result.contributes.any()
    without_rewards = compute_group_advantages(
        batch_of(torch.zeros(8, 0).tolist()), short_recipe({"masks.drop_equal_rewards": True}), []
    )
    assert without_rewards.allowed.all()


def test_the_built_in_advantages_are_the_core_s():
    columns = torch.rand(8, 3, dtype=torch.float64)
    columns[2, 1] = NAN
    result = compute_group_advantages(
        batch_of(columns.tolist()), short_recipe({"advantages.scale": "batch"}), [1.0, -2.0, 0.5]
    )
    wanted = group_advantages(columns, 4, scale="batch", weights=[1.0, -2.0, 0.5])
    close(result.advantages, wanted.tolist())
