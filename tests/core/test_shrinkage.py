"""Shrinkage of small groups towards the groups that enclose them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core import group_advantages
from groupwise.errors import InputError

PROMPT = [0, 0, 0, 0, 0, 0]
CLUSTER = [0, 0, 0, 1, 1, 2]
REWARDS = torch.tensor([1.0, 2.0, 6.0, 4.0, 5.0, 9.0], dtype=torch.float64)  # mean 4.5, squared deviations 41.5


def test_a_single_sample_by_hand():
    result = group_advantages(REWARDS, CLUSTER, within=[PROMPT], shrinkage=2.0, eps=0.0)
    # The mean (9 + 2·4.5) / 3 = 6 and the prompt's variance 41.5 / 5,.
    assert result[5].item() == pytest.approx((9 - 6) / math.sqrt(41.5 / 5))


def test_a_small_cluster_by_hand():
    result = group_advantages(REWARDS, CLUSTER, within=[PROMPT], shrinkage=2.0, eps=0.0)
    mean, variance = (9 + 2 * 4.5) / 4, (0.5 + 2 * 8.3) / (1 + 2)
    assert result[3].item() == pytest.approx((4 - mean) / math.sqrt(variance))


def test_by_hand_without_the_spread():
    result = group_advantages(REWARDS, CLUSTER, within=[PROMPT], shrinkage=1.0, scale="none")
    expected = [1 - 3.375, 2 - 3.375, 6 - 3.375, 4 - 4.5, 5 - 4.5, 9 - 6.75]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


def literal(rewards: list[float], chains: list[tuple[int, ...]], kappa: float, unbiased: bool) -> list[float]:
    """Sample by sample and level by level: ``chains`` has each sample's groups, the largest first."""
    result = []
    for reward, chain in zip(rewards, chains, strict=True):
        everyone = [r for r, other in zip(rewards, chains, strict=True) if other[:1] == chain[:1]]
        mean = sum(everyone) / len(everyone)
        free = max(len(everyone) - unbiased, 1)
        variance = sum((r - mean) ** 2 for r in everyone) / free
        equal = max(everyone) == min(everyone)
        for depth in range(2, len(chain) + 1):
            members = [r for r, other in zip(rewards, chains, strict=True) if other[:depth] == chain[:depth]]
            center = sum(members) / len(members)
            squares = sum((r - center) ** 2 for r in members)
            mean = (sum(members) + kappa * mean) / (len(members) + kappa)
            variance = (squares + kappa * variance) / (len(members) - unbiased + kappa)
        result.append(0.0 if equal else (reward - mean) / (math.sqrt(variance) + 1e-4))
    return result


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=24),
    st.data(),
    st.sampled_from([0.25, 1.0, 7.0]),
    st.booleans(),
)
def test_three_levels_equal_the_literal_formula(chains, data, kappa, unbiased):
    rewards = data.draw(st.lists(st.integers(-8, 8), min_size=len(chains), max_size=len(chains)))
    result = group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        [str(chain) for chain in chains],
        within=[[chain[0] for chain in chains], [str(chain[:2]) for chain in chains]],
        shrinkage=kappa,
        unbiased=unbiased,
    )
    expected = literal([float(reward) for reward in rewards], chains, kappa, unbiased)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_zero_shrinkage_has_no_effect():
    plain = group_advantages(REWARDS, CLUSTER)
    assert torch.equal(group_advantages(REWARDS, CLUSTER, within=[PROMPT], shrinkage=0.0), plain)
    assert plain[5] == 0


@pytest.mark.parametrize("scale", ["group", "batch", "batch_advantages", "none"])
def test_large_shrinkage_compares_within_the_prompt(scale):
    result = group_advantages(REWARDS, CLUSTER, within=[PROMPT], shrinkage=1e9, scale=scale)
    torch.testing.assert_close(result, group_advantages(REWARDS, PROMPT, scale=scale), rtol=1e-6, atol=1e-6)


def test_equal_rewards_get_zero_in_a_prompt_but_not_in_a_cluster():
    rewards = torch.tensor([3.0, 3.0, 3.0, 7.0, 7.0, 7.0, 2.0, 2.0])
    result = group_advantages(
        rewards, [0, 0, 0, 1, 1, 1, 2, 3], within=[[0, 0, 0, 0, 0, 0, 1, 1]], shrinkage=1.0, scale="none"
    )
    assert result.tolist() == [-0.5, -0.5, -0.5, 0.5, 0.5, 0.5, 0.0, 0.0]


def test_unscored_samples_are_left_out():
    rewards = torch.tensor([1.0, 3.0, math.nan, 5.0, math.nan])
    result = group_advantages(rewards, [0, 0, 0, 1, 2], within=[[0] * 5], shrinkage=1.0, scale="none")
    assert result.tolist() == pytest.approx([1 - 7 / 3, 3 - 7 / 3, 0.0, 5 - 4, 0.0])


def test_several_rewards_are_shrunk_separately():
    two = torch.stack([REWARDS, REWARDS.flip(0)], dim=1)
    settings = {"within": [PROMPT], "shrinkage": 1.0, "combine": "normalize_then_sum", "scale": "none"}
    result = group_advantages(two, CLUSTER, **settings)
    each = [group_advantages(two[:, k], CLUSTER, within=[PROMPT], shrinkage=1.0, scale="none") for k in (0, 1)]
    torch.testing.assert_close(result, each[0] + each[1])


def test_invalid_arguments():
    with pytest.raises(InputError, match="spans several of the groups"):
        group_advantages(REWARDS, CLUSTER, within=[[0, 0, 1, 1, 1, 1]], shrinkage=1.0)
    with pytest.raises(InputError, match="needs the baseline 'mean', not 'leave_one_out'"):
        group_advantages(REWARDS, CLUSTER, within=[PROMPT], shrinkage=1.0, baseline="leave_one_out")
    with pytest.raises(InputError, match="shrinkage"):
        group_advantages(REWARDS, CLUSTER, within=[PROMPT], shrinkage=-1.0)
