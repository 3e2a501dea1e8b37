"""Group-relative advantages: hand-computed cases, properties and errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core import group_advantages, group_index, group_statistics
from groupwise.errors import GroupwiseError, InputError

NAN = math.nan


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(ours, *expected):
    torch.testing.assert_close(ours, tensor(*expected), rtol=1e-12, atol=1e-12)


def test_by_hand():
    # Rewards 1, 0, 0, 0: mean 1/4, squared deviations 9/16 + 3/16 = 3/4, variance 1/4, std 1/2.
    close(group_advantages(tensor(1, 0, 0, 0), 4, eps=0), 1.5, -0.5, -0.5, -0.5)
    close(group_advantages(tensor(1, 0, 0, 0), 4), 0.75 / 0.5001, *[-0.25 / 0.5001] * 3)
    close(group_advantages(tensor(1, 0, 0, 0), 4, scale="none"), 0.75, -0.25, -0.25, -0.25)
    # Population: variance 3/16.
    std = math.sqrt(3) / 4
    close(group_advantages(tensor(1, 0, 0, 0), 4, unbiased=False, eps=0), 0.75 / std, *[-0.25 / std] * 3)
    # Leave one out: 1 − 0 and 0 − 1/3.
    close(group_advantages(tensor(1, 0, 0, 0), 4, baseline="leave_one_out", scale="none"), 1, *[-1 / 3] * 3)


def test_batch_scale_by_hand():
    # All four rewards 0, 2, 4, 6: variance (9 + 1 + 1 + 9) / 3 = 20/3.
    std = math.sqrt(20 / 3)
    close(group_advantages(tensor(0, 2, 4, 6), 2, scale="batch", eps=0), -1 / std, 1 / std, -1 / std, 1 / std)


def test_scale_by_the_batch_s_advantages_by_hand():
    # Centred: −1, 1, −2, 2, 0, 0; variance (1 + 1 + 4 + 4) / 5 = 2. The group of equal rewards counts with zeros.
    rewards = tensor(10, 12, 3, 7, 5, 5)
    std = math.sqrt(2)
    expected = [-1 / std, 1 / std, -2 / std, 2 / std, 0, 0]
    close(group_advantages(rewards, 2, scale="batch_advantages", eps=0), *expected)
    close(group_advantages(rewards, 2, scale="batch_advantages", eps=0.5), *[a * std / (std + 0.5) for a in expected])
    # Samples without a reward do not count, also not in a group that is otherwise equal: variance 2 / 3.
    rewards = tensor(1, 3, NAN, 5, 5, NAN)
    close(group_advantages(rewards, 3, scale="batch_advantages", eps=0), *[-math.sqrt(1.5), math.sqrt(1.5), 0, 0, 0, 0])


def literal_scaled_by_advantages(rewards, size, baseline, unbiased, eps):
    """One group after another, then the standard deviation of all that was scored."""
    centred = []
    for start in range(0, len(rewards), size):
        group = [reward for reward in rewards[start : start + size] if not math.isnan(reward)]
        for reward in rewards[start : start + size]:
            if math.isnan(reward):
                centred.append(NAN)
            elif len(group) < 2:
                centred.append(0.0)
            else:
                others = (sum(group) - reward) / (len(group) - 1)
                centred.append(reward - (sum(group) / len(group) if baseline == "mean" else others))
    scored = [value for value in centred if not math.isnan(value)]
    mean = sum(scored) / max(1, len(scored))
    freedom = max(1, len(scored) - unbiased)
    std = math.sqrt(sum((value - mean) ** 2 for value in scored) / freedom)
    return [0.0 if math.isnan(value) or std == 0 else value / (std + eps) for value in centred]


@given(
    values=st.lists(st.one_of(st.integers(-4, 4), st.just(NAN)), min_size=12, max_size=12),
    size=st.sampled_from([1, 2, 3, 4, 12]),
    baseline=st.sampled_from(["mean", "leave_one_out"]),
    unbiased=st.booleans(),
    eps=st.sampled_from([0.0, 1e-4, 0.3]),
)
def test_scale_by_the_batch_s_advantages_equals_the_literal_version(values, size, baseline, unbiased, eps):
    ours = group_advantages(
        tensor(*values), size, scale="batch_advantages", baseline=baseline, unbiased=unbiased, eps=eps
    )
    expected = literal_scaled_by_advantages([float(value) for value in values], size, baseline, unbiased, eps)
    torch.testing.assert_close(ours, tensor(*expected), rtol=1e-10, atol=1e-10)


def test_differences_between_groups_do_not_count_in_the_scale_by_advantages():
    easy_and_hard = tensor(0, 1, 0, 0, 10, 11, 10, 10)
    shifted = tensor(0, 1, 0, 0, 0, 1, 0, 0)
    for scale, equal in (("batch_advantages", True), ("batch", False)):
        one, other = (group_advantages(rewards, 4, scale=scale) for rewards in (easy_and_hard, shifted))
        assert torch.allclose(one, other) is equal


def test_scale_by_advantages_without_a_baseline_is_the_scale_by_rewards():
    rewards = tensor(1, 2, 4, 8, 3, 3)
    one, other = (group_advantages(rewards, 2, scale=s, baseline="none") for s in ("batch", "batch_advantages"))
    assert torch.equal(one, other)


def test_labels_in_any_order_and_groups_of_any_size():
    rewards = tensor(1, 5, 3, 9, 2, 7)
    labels = torch.tensor([7, -2, 7, 40, 7, -2])
    ours = group_advantages(rewards, labels, scale="none")
    close(ours, -1, -1, 1, 0, 0, 1)
    names = ["a", "b", "a", "single", "a", "b"]
    assert torch.equal(ours, group_advantages(rewards, names, scale="none"))
    assert torch.equal(ours, group_advantages(rewards, np.array(names, dtype=object), scale="none"))


def test_not_scored():
    # The mean and std of 1 and 3 alone; the unscored sample gets 0.
    close(group_advantages(tensor(1, NAN, 3), 3, eps=0), -1 / math.sqrt(2), 0, 1 / math.sqrt(2))
    close(group_advantages(tensor(NAN, NAN, 4, 6), 2, scale="none"), 0, 0, -1, 1)
    close(group_advantages(tensor(NAN, 2, 4, 6), 2, scale="none"), 0, 0, -1, 1)  # a single scored sample gets 0


@pytest.mark.parametrize("scale", ["group", "batch", "batch_advantages", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_rewards_and_single_samples_get_exactly_zero(scale, baseline, dtype):
    equal = torch.tensor([0.1] * 7 + [0.3], dtype=dtype)  # seven equal rewards, and a single sample
    ours = group_advantages(equal, torch.tensor([0] * 7 + [1]), scale=scale, baseline=baseline)
    assert torch.equal(ours, torch.zeros_like(ours))


def test_round_off_is_not_a_difference():
    """0.1 + 0.2 and 0.3 are the same reward, although they differ in the last bit."""
    assert 0.1 + 0.2 != 0.3
    assert torch.equal(group_advantages(tensor(0.1 + 0.2, 0.3), 2), tensor(0, 0))
    both = torch.tensor([[0.1, 0.2], [0.3, 0.0]], dtype=torch.float64)
    assert torch.equal(group_advantages(both, 2), tensor(0, 0))
    assert group_advantages(tensor(0.3, 0.3 + 1e-12), 2)[1] > 0


def test_without_a_baseline_an_equal_group_keeps_its_rewards():
    close(group_advantages(tensor(1, 1, 0, 2), 2, baseline="none", scale="none"), 1, 1, 0, 2)
    # The equal group is not divided; the other one has std √2.
    close(group_advantages(tensor(1, 1, 0, 2), 2, baseline="none", eps=0), 1, 1, 0, math.sqrt(2))
    close(group_advantages(tensor(5), 1, baseline="none"), 5)
    close(group_advantages(tensor(3, 3), 2, baseline="none", scale="batch"), 3, 3)


def test_several_rewards():
    rewards = torch.tensor([[1.0, 10], [0, 30], [1, 20], [0, 20]], dtype=torch.float64)
    summed = group_advantages(rewards, 2, weights=[1, 0.1], scale="none")
    close(summed, -0.5, 0.5, 0.5, -0.5)  # 2 against 3, and 3 against 2
    # Each by itself: (1, −1) and (−1, 1)/√2 cancel in the first group; only the first reward differs in the second.
    after = group_advantages(rewards, 2, weights=[1, 1], combine="normalize_then_sum", eps=0)
    assert after[:2].abs().max() < 1e-12
    assert after[2] == -after[3] > 0
    # A function that did not score a sample contributes nothing to it.
    rewards[2, 1] = NAN
    close(group_advantages(rewards, 2, weights=[1, 0.1], scale="none")[2:], (1 - 2) / 2, (2 - 1) / 2)


def test_statistics():
    result = group_statistics(tensor(1, 3, NAN, 4, 4, NAN), ["a", "a", "a", "b", "b", "c"])
    assert result.count.tolist() == [2, 2, 0]
    assert result.mean[:2].tolist() == [2, 4]
    assert result.mean[2].isnan()
    torch.testing.assert_close(result.std, tensor(math.sqrt(2), 0, 0))
    assert result.equal.tolist() == [False, True, True]
    assert result.index.tolist() == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_types(dtype):
    ours = group_advantages(torch.tensor([1, 0, 0, 0]).to(dtype), 4)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), group_advantages(tensor(1, 0, 0, 0), 4), rtol=1e-6, atol=1e-6)


def test_rewards_get_no_gradient():
    rewards = tensor(1, 0).requires_grad_()
    assert not group_advantages(rewards, 2).requires_grad


numbers = st.integers(-50, 50).map(lambda n: n / 8)  # exact in floating point, so that shifting loses nothing


@st.composite
def groups_of_rewards(draw):
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    rewards = draw(st.lists(st.one_of(numbers, st.just(NAN)), min_size=len(labels), max_size=len(labels)))
    order = draw(st.permutations(range(len(labels))))
    return tensor(*rewards), torch.tensor(labels), torch.tensor(order)


SCALES_OF_ALL_REWARDS = ["group", "batch", "batch_advantages", "none"]
options = {"scale": st.sampled_from(SCALES_OF_ALL_REWARDS), "baseline": st.sampled_from(["mean", "leave_one_out"])}


@given(case=groups_of_rewards(), **options)
def test_sum_to_zero_per_group(case, scale, baseline):
    rewards, labels, _ = case
    ours = group_advantages(rewards, labels, scale=scale, baseline=baseline)
    assert ours.isfinite().all()
    assert (ours[rewards.isnan()] == 0).all()
    sums = torch.zeros(int(labels.max()) + 1, dtype=torch.float64).index_add(0, labels, ours)
    assert sums.abs().max() < 1e-9


@given(case=groups_of_rewards(), shift=numbers, **options)
def test_shifting_rewards_leaves_advantages_unchanged(case, shift, scale, baseline):
    rewards, labels, _ = case
    ours = group_advantages(rewards, labels, scale=scale, baseline=baseline)
    shifted = group_advantages(rewards + shift, labels, scale=scale, baseline=baseline)
    torch.testing.assert_close(shifted, ours, rtol=1e-9, atol=1e-9)


@given(case=groups_of_rewards(), **options)
def test_order_of_samples_does_not_matter(case, scale, baseline):
    rewards, labels, order = case
    ours = group_advantages(rewards, labels, scale=scale, baseline=baseline)
    renamed = 1000 - 7 * labels
    again = group_advantages(rewards[order], renamed[order], scale=scale, baseline=baseline)
    torch.testing.assert_close(again, ours[order], rtol=1e-9, atol=1e-9)


@given(case=groups_of_rewards(), factor=st.sampled_from([0.25, 2.0, 1024.0]))
def test_group_scaling_is_invariant_to_the_scale_of_rewards(case, factor):
    rewards, labels, _ = case
    ours = group_advantages(rewards, labels, eps=0)
    torch.testing.assert_close(group_advantages(rewards * factor, labels, eps=0), ours, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: group_advantages(r, 3), "4 rewards do not divide into groups of 3"),
        (lambda r: group_advantages(r, None), "groups must be an int or one label per sample, got None"),
        (lambda r: group_advantages(r, 1.5), "groups must be an int or one label per sample, got 1.5"),
        (lambda r: group_advantages(r, 2, weights=["a"]), "weights must be one number per reward function"),
        (lambda r: group_advantages(r, 0), "group size must be at least 1, got 0"),
        (lambda r: group_advantages(r, True), "groups must be an int or one label per sample, got True"),
        (
            lambda r: group_advantages(r, torch.tensor([0, 1])),
            r"groups has shape \(2,\); expected one label per reward",
        ),
        (lambda r: group_advantages(r, torch.rand(4)), "must be integers, got torch.float32"),
        (lambda r: group_advantages(r, ["a"]), "1 group labels were given for 4 rewards"),
        (lambda r: group_advantages(r, 2, scale="groups"), "did you mean 'group'"),
        (lambda r: group_advantages(r, 2, baseline="median"), "unknown baseline 'median'"),
        (lambda r: group_advantages(r, 2, combine="sum"), "unknown combine 'sum'"),
        (lambda r: group_advantages(r, 2, eps=-1), "eps must be a finite number of at least 0, got -1"),
        (lambda r: group_advantages(r, 2, weights=[1, 2]), "one weight per reward function"),
        (lambda r: group_advantages(r, 2, weights=[NAN]), "weights must be finite"),
        (lambda r: group_advantages(r.view(1, 2, 2), 2), r"expected \(B,\) or \(B, K\)"),
        (lambda r: group_advantages(r[:0], 2), "at least one sample"),
        (lambda r: group_advantages([1.0, 2.0], 2), "must be a tensor, got list"),
        (lambda r: group_advantages(r / 0, 2), r"the reward at \[0\] is inf; use NaN"),
        (lambda r: group_statistics(r.view(2, 2), 2), r"expected \(B,\)"),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises(InputError, match=message) as error:
        call(torch.ones(4))
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, GroupwiseError)


def test_group_index():
    index, number = group_index(2, 6)
    assert index.tolist() == [0, 0, 1, 1, 2, 2]
    assert number == 3


@pytest.mark.parametrize("size", [1.0, 1e200, 1.7e308, 1e-200, 5e-324])
def test_rewards_of_any_size_by_hand(size):
    """Two equal and opposite rewards are ±1/√2 standard deviations (n − 1) from their mean, whatever their size."""
    got = group_advantages(torch.tensor([size, -size], dtype=torch.float64), 2, eps=0.0)
    torch.testing.assert_close(got, torch.tensor([1.0, -1.0], dtype=torch.float64) / 2**0.5)


def test_groups_of_different_sizes_do_not_disturb_each_other():
    rewards = torch.tensor([1.7e308, -1.7e308, 1e-200, 3e-200, 1.0, 2.0], dtype=torch.float64)
    got = group_advantages(rewards, 2, eps=0.0)
    torch.testing.assert_close(got.abs(), torch.full((6,), 0.5**0.5, dtype=torch.float64))
    groups = group_statistics(rewards, 2, unbiased=False)
    torch.testing.assert_close(groups.mean, torch.tensor([0.0, 2e-200, 1.5], dtype=torch.float64))
    torch.testing.assert_close(groups.std, torch.tensor([1.7e308, 1e-200, 0.5], dtype=torch.float64))


def test_what_is_beyond_a_float_is_refused():
    large = torch.tensor([1.7e308, -1.7e308], dtype=torch.float64)
    with pytest.raises(InputError, match=r"the weighted sum of the rewards of sample 0 is inf.*lower them"):
        group_advantages(large, 2, weights=[2.0])
    with pytest.raises(InputError, match="the advantage of sample 0 is"):
        group_advantages(torch.tensor([3e38, -3e38, -3e38]), 3, scale="none")


# --- MaxRL ------------------------------------------------------------------------------------------------------------


def test_maxrl_by_hand():
    """One success of four: the mean is 1/4, so (1 − 1/4) / (1/4) = 3, and −1 for each failure."""
    close(group_advantages(tensor(1, 0, 0, 0), 4, scale="mean", eps=0), 3, -1, -1, -1)
    close(group_advantages(tensor(1, 0, 0, 0), 4, scale="mean", eps=0.25), 1.5, -0.5, -0.5, -0.5)
    close(group_advantages(tensor(1, 1, 0, 0, 2, 2), [0, 0, 1, 1, 2, 2], scale="mean", eps=0), *[0] * 6)
    close(group_advantages(tensor(1, NAN, 0), 3, scale="mean", eps=0), 1, 0, -1)
    # Without the baseline: 1/K for each of K successes, times the number of samples.
    close(group_advantages(tensor(1, 1, 0, 0, 0, 0), 3, scale="mean", baseline="none", eps=0), 1.5, 1.5, 0, 0, 0, 0)


@given(successes=st.lists(st.integers(0, 1), min_size=1, max_size=12))
def test_maxrl_is_the_papers_estimator(successes):
    """n · (r/K − 1/n) for K successes of n samples, and nothing without one (arXiv 2602.02710)."""
    n, k = len(successes), sum(successes)
    expected = [n * (reward / k - 1 / n) if k else 0.0 for reward in successes]
    close(
        group_advantages(tensor(*successes), n, scale="mean", eps=0), *(0.0 if k == n else value for value in expected)
    )


@given(rewards=st.lists(st.floats(0, 10), min_size=6, max_size=6), factor=st.floats(1e-3, 1e3))
def test_maxrl_does_not_depend_on_the_scale_of_the_rewards(rewards, factor):
    ours = group_advantages(tensor(*rewards), 3, scale="mean", eps=0)
    scaled = group_advantages(tensor(*rewards) * factor, 3, scale="mean", eps=0)
    torch.testing.assert_close(scaled, ours, rtol=1e-9, atol=1e-9)
    assert (ours >= -1).all()
    assert (ours <= 2 + 1e-9).all()  # n − 1


def test_maxrl_with_rewards_that_it_cannot_divide():
    with pytest.raises(InputError, match="sample 1 is negative"):
        group_advantages(tensor(1, -0.1), 2, scale="mean")
    with pytest.raises(InputError, match="sum_then_normalize"):
        group_advantages(torch.ones(2, 2), 2, scale="mean", combine="normalize_then_sum")
