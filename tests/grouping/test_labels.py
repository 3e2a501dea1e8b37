"""Group labels, their statistics and advantages, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import InputError
from groupwise.grouping.labels import (
    compute_group_distribution_per_prompt,
    compute_similarity_group_grpo_outcome_advantage,
    compute_single_member_mask,
    parent_labels,
    similarity_group_labels,
)


def test_labels_are_uid_and_group():
    two = torch.tensor([[[0], [1]], [[0], [0]]])
    assert similarity_group_labels(["a", "b_7"], two) == ["a_0", "a_1", "b_7_0", "b_7_0"]
    assert similarity_group_labels(["p_q"], torch.tensor([[[0, 0], [1, 2]]])) == ["p_q_0_0", "p_q_1_2"]
    assert parent_labels(["p_q_0_0", "p_q_1_2"]) == ["p_q_0", "p_q_1"]
    assert parent_labels(parent_labels(["p_q_1_2"])) == ["p_q"]


@given(st.lists(st.text(max_size=4), min_size=1, max_size=4, unique=True), st.integers(1, 4), st.randoms())
def test_parent_is_the_uid(uids, size, random):
    clusters = torch.tensor([[[random.randrange(size)] for _ in range(size)] for _ in uids])
    labels = similarity_group_labels(uids, clusters)
    assert parent_labels(labels) == [uid for uid in uids for _ in range(size)]


def test_single_member_mask():
    names = ["a_0", "a_1", "a_0", "b_0", "b_1", "b_1"]
    expected = [False, True, False, True, False, False]
    assert compute_single_member_mask(names).tolist() == expected
    assert compute_single_member_mask(np.array(names, dtype=object)).tolist() == expected
    alone = compute_single_member_mask(torch.tensor([3, 3, 5]))
    assert alone.tolist() == [False, False, True]
    assert alone.dtype == torch.bool


def test_group_distribution():
    # Prompt a has three groups (one with a single sample), b one, c_x nine of one sample each.
    names = ["a_0", "a_0", "a_1", "a_2", "a_2", "b_0", "b_0", *(f"c_x_{number}" for number in range(9))]
    metrics = compute_group_distribution_per_prompt(names, scores=torch.tensor([0.5, 0.0, 0.1], dtype=torch.float64))
    counts = {f"similarity_groups/n_prompts_split_into_{k}_groups": float(k in (1, 3, 9)) for k in range(1, 10)}
    assert metrics == {
        **counts,
        "similarity_groups/avg_groups_per_prompt": 13 / 3,
        "similarity_groups/n_single_member_groups": 10.0,
        "similarity_groups/avg_silhouette_score": pytest.approx(0.2),
    }


def test_group_distribution_with_uids():
    # Group 0 of one prompt is not group 0 of the other, and here each of them is alone.
    metrics = compute_group_distribution_per_prompt([0, 0], uids=["a", "b"])
    assert metrics["similarity_groups/n_prompts_split_into_1_groups"] == 2
    assert metrics["similarity_groups/n_single_member_groups"] == 2
    assert metrics["similarity_groups/n_prompts_split_into_8_groups"] == 0
    assert "similarity_groups/n_prompts_split_into_9_groups" not in metrics
    assert "similarity_groups/avg_silhouette_score" not in metrics
    nested = compute_group_distribution_per_prompt(["a_0_0", "a_0_1", "a_1_0"], uids=["a"] * 3)
    assert nested["similarity_groups/avg_groups_per_prompt"] == 3


# Rewards 1, 3 in one group of prompt a, 5 alone, and 2, 2 in one of prompt b: (1 − 2) / (√2 + ε), 0 for the single one,
# 0 for the equal ones.
REWARDS = torch.tensor([[0.0, 1, 0], [1, 1, 1], [5, 0, 0], [0, 2, 0], [2, 0, 0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
UIDS = ["a", "a", "a", "b", "b"]
LABELS = ["a_0", "a_0", "a_1", "b_0", "b_0"]


def by_hand(unit: float) -> torch.Tensor:
    nothing = [0.0, 0, 0]
    return torch.tensor([[-unit, -unit, 0], [unit, unit, unit], nothing, nothing, nothing], dtype=torch.float64)


@pytest.mark.parametrize(
    ("index", "labels"),
    [
        pytest.param(LABELS, None, id="combined in the index"),
        pytest.param(np.array(UIDS, dtype=object), np.array(LABELS, dtype=object), id="combined beside it"),
        pytest.param(UIDS, torch.tensor([0, 0, 1, 0, 0]), id="bare numbers"),
        pytest.param(UIDS, ["0", "0", "1", "0", "0"], id="bare numbers as texts"),
        pytest.param(torch.tensor([4, 4, 4, 9, 9]), np.array([[0, 0], [0, 0], [0, 1], [0, 0], [0, 0]]), id="levels"),
    ],
)
def test_advantage_by_hand(index, labels):
    advantages, returns = compute_similarity_group_grpo_outcome_advantage(REWARDS, MASK, index, labels)
    torch.testing.assert_close(advantages, by_hand(1 / (math.sqrt(2) + 1e-6)), rtol=1e-12, atol=0)
    assert torch.equal(advantages, returns)
    assert advantages.data_ptr() != returns.data_ptr()


@pytest.mark.parametrize(
    "options",
    [
        {"norm_adv_by_std_in_grpo": False},
        {"config": {"norm_adv_by_std_in_grpo": False}},
        {"config": SimpleNamespace(norm_adv_by_std_in_grpo=False)},
        {"norm_adv_by_std_in_grpo": False, "config": {"gamma": 1.0}, "reward_baselines": None},
    ],
    ids=["argument", "mapping", "object", "a config that does not say"],
)
def test_advantage_without_std(options):
    advantages, _ = compute_similarity_group_grpo_outcome_advantage(REWARDS, MASK, LABELS, **options)
    assert torch.equal(advantages, by_hand(1.0))


def test_epsilon_and_dtypes():
    ours, _ = compute_similarity_group_grpo_outcome_advantage(REWARDS.bfloat16(), MASK.bool(), LABELS, epsilon=1.0)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), by_hand(1 / (math.sqrt(2) + 1)), rtol=1e-2, atol=0)
    rewards = REWARDS.clone().requires_grad_()
    assert not compute_similarity_group_grpo_outcome_advantage(rewards, MASK, LABELS)[0].requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: similarity_group_labels(["a"], torch.zeros(2, 2, 1)), "the P = 1 uids"),
        (lambda: similarity_group_labels(["a", "a"], torch.zeros(2, 1, 1)), "two prompts have the uid 'a'"),
        (lambda: similarity_group_labels("ab", [[0], [0]]), "expected one label per sample, got str 'ab'"),
        (lambda: parent_labels(["a_0", "b"]), "the label 'b' has no parent"),
        (lambda: compute_single_member_mask(3), "expected one label per sample, got int '3'"),
        (lambda: compute_group_distribution_per_prompt(["a_0"], uids=["a", "b"]), "2 uids were given for 1 labels"),
        (lambda: compute_group_distribution_per_prompt([]), "0 uids were given for 0 labels"),
        (lambda: compute_group_distribution_per_prompt(["a_0"], scores=[0.1, 0.2]), "2 scores were given for 1 prom"),
        (
            lambda: compute_similarity_group_grpo_outcome_advantage(REWARDS, MASK, LABELS[:4]),
            "index has 4 labels for 5 samples",
        ),
        (
            lambda: compute_similarity_group_grpo_outcome_advantage(REWARDS, MASK, UIDS, [0]),
            "similarity_group_labels has 1 labels for 5 samples",
        ),
        (
            lambda: compute_similarity_group_grpo_outcome_advantage(REWARDS, MASK[:, :2], LABELS),
            r"response_mask has shape \(5, 2\)",
        ),
        (
            lambda: compute_similarity_group_grpo_outcome_advantage(REWARDS[:, 0], MASK, LABELS),
            r"floating-point numbers of shape \(B, T\), got torch.float64 of shape \(5,\)",
        ),
        (
            lambda: compute_similarity_group_grpo_outcome_advantage(REWARDS, None, LABELS),
            "response_mask must be a tensor, got None",
        ),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()
