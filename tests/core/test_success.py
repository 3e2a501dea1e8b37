"""Advantages of pass@k and the length penalty: against literal versions, by hand, and in their limits."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core import adaptive_length_penalty, group_advantages, pass_at_k_advantages
from groupwise.errors import InputError

NAN = math.nan
binary = st.lists(st.integers(0, 1), min_size=1, max_size=8)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def literal(rewards, k):
    """Every set of k samples has the reward of its best; an advantage is the mean over the sets with the sample."""
    sets = list(combinations(range(len(rewards)), k))
    best = {members: max(rewards[i] for i in members) for members in sets}
    mean, sigma = fmean(best.values()), pstdev(best.values())
    return [
        (fmean(best[members] for members in sets if i in members) - mean) / sigma if sigma else 0.0
        for i in range(len(rewards))
    ]


@given(rewards=binary, k=st.integers(1, 8))
def test_equals_the_mean_over_all_sets_of_k_samples(rewards, k):
    advantages = pass_at_k_advantages(doubles(rewards), len(rewards), k, eps=0.0)
    assert advantages.tolist() == pytest.approx(literal(rewards, min(k, len(rewards))), abs=1e-12)


def test_by_hand():
    """One success of four, k = 2: three of six pairs have it, R = σ = 1/2; of a failure's three pairs one has it."""
    advantages = pass_at_k_advantages(doubles([1, 0, 0, 0]), 4, 2, eps=0.0)
    assert advantages.tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    undivided = pass_at_k_advantages(doubles([1, 0, 0, 0]), 4, 2, scale="none")
    assert undivided.tolist() == pytest.approx([0.5, -1 / 6, -1 / 6, -1 / 6])


@given(rewards=st.lists(binary.filter(lambda group: len(group) == 5), min_size=1, max_size=4))
def test_k_1_is_grpo(rewards):
    """With the standard deviation of n."""
    flat = doubles([reward for group in rewards for reward in group])
    expected = group_advantages(flat, 5, unbiased=False)
    torch.testing.assert_close(pass_at_k_advantages(flat, 5, 1), expected)


@given(rewards=binary, k=st.integers(1, 8), seed=st.integers(0, 99))
def test_advantages_add_up_to_0_and_follow_their_samples(rewards, k, seed):
    size = len(rewards)
    advantages = pass_at_k_advantages(doubles(rewards), size, k)
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-9)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(pass_at_k_advantages(doubles(rewards)[order], size, k), advantages[order])


def test_groups_that_any_k_samples_solve_have_no_signal():
    """With 3 successes of 4, any two samples contain one; with none, no pair does."""
    assert pass_at_k_advantages(doubles([1, 1, 1, 0, 0, 0, 0, 0]), 4, 2).tolist() == [0.0] * 8
    harder = pass_at_k_advantages(doubles([1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]), 8, 4, scale="none")
    assert harder[0] > harder[8] > 0  # rare successes count more


def test_labels_thresholds_and_unscored_samples():
    rewards = torch.tensor([0.9, 0.2, NAN, 0.4, 0.3, 1.1])
    labels = ["a", "a", "a", "b", "b", "a"]
    advantages = pass_at_k_advantages(rewards, labels, 2, threshold=0.35, eps=0.0)
    # a: one failure of three; b: one of two. Any two samples have a success.
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([0.0] * 6, abs=1e-6)
    advantages = pass_at_k_advantages(rewards, labels, 2, threshold=1.0, eps=0.0)  # a: one success of three
    expected = literal([0, 0, 1], 2)
    assert advantages[[0, 1, 5]].tolist() == pytest.approx(expected, abs=1e-6)
    assert advantages[2] == 0


def test_large_groups_are_exact():
    """C(400, 200) is beyond the largest float."""
    rewards = doubles([1.0] * 3 + [0.0] * 397)
    advantages = pass_at_k_advantages(rewards, 400, 200)
    assert advantages.isfinite().all()
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-9)


def test_the_length_penalty_by_hand():
    """p = 1/2, 0 and 1: the rates are 1/2, 1/n = 1/4 and 1."""
    rewards = doubles([1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1])
    penalty = adaptive_length_penalty(rewards, torch.full((12,), 50), 4, max_length=100)
    assert penalty.tolist() == [-0.25] * 4 + [-0.125] * 4 + [-0.5] * 4
    by_length = adaptive_length_penalty(doubles([1, 1]), torch.tensor([0, 100]), 2, max_length=100)
    assert by_length.tolist() == [0.0, -1.0]


@given(rewards=binary, seed=st.integers(0, 99), threshold=st.sampled_from([-1.0, 0.5, 1.0, 2.0]))
def test_the_length_penalty_equals_the_literal_version(rewards, seed, threshold):
    lengths = torch.randint(0, 60, (len(rewards),), generator=torch.Generator().manual_seed(seed))
    penalty = adaptive_length_penalty(doubles(rewards), lengths, len(rewards), max_length=60, threshold=threshold)
    rate = max(sum(reward >= threshold for reward in rewards) / len(rewards), 1 / len(rewards))
    assert penalty.tolist() == pytest.approx([-(length / 60) * rate for length in lengths.tolist()])
    assert (penalty <= 0).all()
    assert (penalty >= -1).all()


def test_errors():
    with pytest.raises(InputError, match="k must be"):
        pass_at_k_advantages(doubles([1, 0]), 2, 0)
    with pytest.raises(InputError, match="'none'"):
        pass_at_k_advantages(doubles([1, 0]), 2, 1, scale="non")
    with pytest.raises(InputError, match=r"shape \(2, 1\)"):
        pass_at_k_advantages(doubles([[1], [0]]), 2, 1)
    with pytest.raises(InputError, match="threshold"):
        pass_at_k_advantages(doubles([1, 0]), 2, 1, threshold=NAN)
    with pytest.raises(InputError, match="lengths"):
        adaptive_length_penalty(doubles([1, 0]), torch.tensor([1]), 2, max_length=3)
