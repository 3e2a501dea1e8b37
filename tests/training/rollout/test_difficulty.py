"""Weights by difficulty, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.training.monitor.metrics import step_metrics
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.rollout.collector import RolloutResult
from groupwise.training.rollout.difficulty import correctness, difficulty_weights
from groupwise.training.update.minibatch import build_minibatch
from tests.training.factories import make_batch, short_recipe

NAN = math.nan


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # Shares correct 1/4, 1/2 and 1; the third group does not contribute, so the first two have a mean of 1.
        ("hard", (1.25 / 1.125, 1.0 / 1.125, 0.5 / 1.125)),
        ("uncertain", (1.25 / 1.375, 1.5 / 1.375, 0.5 / 1.375)),
    ],
)
def test_weights_by_hand(name, weights):
    correct = tensor(1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1)
    groups = torch.arange(3).repeat_interleave(4)
    result = difficulty_weights(name, correct, groups, groups < 2)
    assert result.tolist() == pytest.approx([weight for weight in weights for _ in range(4)])
    assert difficulty_weights(name, correct, groups, torch.zeros(12, dtype=torch.bool)).tolist() == [1.0] * 12


def test_a_group_contributes_if_one_of_its_samples_does():
    result = difficulty_weights("hard", tensor(0, 0, 1, 1), torch.tensor([7, 7, 2, 2]), torch.tensor([1, 0, 0, 1]) == 1)
    assert result.tolist() == pytest.approx([1.5, 1.5, 0.5, 0.5])


def test_correctness():
    assert correctness([True, False, None, True], tensor(0, 5, 1, 2)).tolist() == [1.0, 0.0, 0.0, 1.0]
    assert correctness(None, tensor(-1, 3, 1)).tolist() == [0.0, 1.0, 0.5]
    assert correctness(None, tensor(2, 2)).tolist() == [0.5, 0.5]
    assert correctness([True, True], tensor(NAN, 1)).isnan().tolist() == [True, False]
    assert correctness(None, tensor(NAN, 1, 2)).isnan().tolist() == [True, False, False]


def test_samples_without_a_reward_are_ignored():
    correct, groups = tensor(1, NAN, 0, 0), torch.tensor([0, 0, 1, 1])
    assert difficulty_weights("hard", correct, groups, groups >= 0).tolist() == pytest.approx([0.5, 0.5, 1.5, 1.5])


def test_advantages_are_multiplied_and_the_same_samples_contribute():
    """Rewards 1, 0, 0, 0 and 1, 1, 1, 0: the harder group weighs 1.25, the easier 0.75."""
    batch = make_batch([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]], [[2] * 4] * 2)
    plain = compute_group_advantages(batch, short_recipe(), [1.0])
    recipe = short_recipe({"advantages.difficulty": "hard"})
    graded = compute_group_advantages(
        batch, recipe, [1.0], grades={"right": lambda row, text: text in ("text 0", "text 4", "text 5", "text 6")},
        metric="right",
    )  # fmt: skip
    by_reward = compute_group_advantages(batch, recipe, [1.0])
    factors = torch.tensor([1.25] * 4 + [0.75] * 4)
    for result in (graded, by_reward):
        torch.testing.assert_close(result.advantages, plain.advantages * factors)
        assert torch.equal(result.contributes, plain.contributes)
    minibatches = [build_minibatch(batch, graded, [0, 1], recipe)]
    assert step_metrics(RolloutResult(batch), graded, {"r": 1.0}, minibatches, [], recipe)[
        "difficulty/weight_max"
    ] == pytest.approx(1.25)
    assert "difficulty/weight_max" not in step_metrics(RolloutResult(batch), plain, {"r": 1.0}, minibatches, [], recipe)
    assert plain.difficulty is None
