"""Losses, averages, corrections and advantages in their limits: groups of one, equal rewards, nothing but masked
tokens, empty completions, and float32 in place of float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core import (
    IMPORTANCE_MODES,
    LOSSES,
    DivergenceLimit,
    adaptive_length_penalty,
    group_advantages,
    importance_weights,
    pass_at_k_advantages,
    policy_loss,
    prompt_totals,
    rejection_mask,
)
from groupwise.core.advantages import SCALES
from groupwise.core.aggregation import AGGREGATIONS, aggregation_weights
from groupwise.core.importance import REJECTIONS
from groupwise.errors import InputError

from .cases import random_batch

seeds = st.integers(0, 10_000)


def loss_and_gradient(batch, mask, name, aggregation, **options):
    value, statistics = policy_loss(
        batch.logps,
        batch.old_logps,
        batch.advantages,
        mask,
        loss=name,
        aggregation=aggregation,
        max_length=8,
        prompts=prompt_totals(mask, 1),
        **options,
    )
    return value, torch.autograd.grad(value, batch.logps)[0], statistics


# --- advantages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
@given(rewards=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_groups_of_one_have_no_advantage(scale, rewards):
    values = torch.tensor(rewards, dtype=torch.float64)
    assert group_advantages(values, 1, scale=scale).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_no_advantage(scale, value, dtype):
    """Also where some samples are not scored, and beside a group whose rewards differ."""
    rewards = torch.tensor([value, value, value, math.nan], dtype=dtype)
    assert group_advantages(rewards, 4, scale=scale).tolist() == [0.0] * 4
    beside = torch.cat([rewards, torch.tensor([0.0, 1.0, 2.0, 1.0], dtype=dtype)])
    assert group_advantages(beside, 4, scale=scale)[:4].tolist() == [0.0] * 4


@pytest.mark.parametrize("scale", SCALES)
def test_a_batch_without_scored_samples_has_no_advantage(scale):
    assert group_advantages(torch.full((6,), math.nan), 3, scale=scale).tolist() == [0.0] * 6


@pytest.mark.parametrize("scale", SCALES)
@given(rewards=st.lists(st.floats(0, 10, width=32), min_size=8, max_size=8))
def test_float32_rewards_have_the_advantages_of_float64(scale, rewards):
    single = torch.tensor(rewards, dtype=torch.float32)
    one, other = (group_advantages(values, 4, scale=scale, eps=1e-3) for values in (single, single.double()))
    assert one.dtype == torch.float32
    # In float32, rewards that differ in the last places are equal, which changes groups of next to equal rewards.
    if all(len(set(group)) == 1 or max(group) - min(group) > 1e-3 for group in (rewards[:4], rewards[4:])):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", ["batch", "batch_advantages"])
@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_batch_scales_of_rewards_beyond_the_squares_of_floats(scale, size):
    rewards = torch.tensor([0.0, 2.0, 4.0, 6.0, 1.0, 1.0], dtype=torch.float64)
    plain, scaled = (group_advantages(values, 2, scale=scale, eps=0.0) for values in (rewards, rewards * size))
    torch.testing.assert_close(scaled, plain)
    # eps is nothing beside large rewards, and everything beside small ones; and groups may differ in size.
    with_eps = group_advantages(rewards * size, 2, scale=scale)
    expected = plain if size > 1 else torch.zeros_like(plain)
    torch.testing.assert_close(with_eps, expected, rtol=1e-12, atol=1e-12)
    mixed = torch.cat([rewards[:4] * size, rewards[:2]])
    largest = [0.0, 2 * size, 4 * size, 6 * size, 0.0, 0.0] if size > 1 else [0.0, 0.0, 0.0, 0.0, 0.0, 2.0]
    expected = group_advantages(torch.tensor(largest, dtype=torch.float64), 2, scale=scale, eps=0.0)
    torch.testing.assert_close(group_advantages(mixed, 2, scale=scale, eps=0.0), expected)


@given(seed=seeds, k=st.integers(1, 6))
def test_pass_at_k_of_equal_samples(seed, k):
    """All succeed, all fail, or a sample is alone: nothing to learn. Float32 is float64, rounded."""
    for value in (0.0, 1.0):
        assert pass_at_k_advantages(torch.full((6,), value), 6, k).tolist() == [0.0] * 6
        assert pass_at_k_advantages(torch.full((6,), value), 1, k).tolist() == [0.0] * 6
    rewards = (torch.rand(12, generator=torch.Generator().manual_seed(seed)) < 0.4).float()
    one, other = (pass_at_k_advantages(values, 6, k) for values in (rewards, rewards.double()))
    torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-7)
    assert pass_at_k_advantages(torch.full((4,), math.nan), 2, k).tolist() == [0.0] * 4


def test_the_length_penalty_of_samples_without_a_reward_and_of_empty_completions():
    rewards = torch.tensor([math.nan, math.nan, 1.0, 0.0])
    penalty = adaptive_length_penalty(rewards, torch.tensor([3, 4, 0, 8]), 2, max_length=8)
    assert penalty[:2].isnan().all()
    assert penalty[2:].tolist() == [0.0, -0.5]


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
@given(seed=seeds)
def test_a_batch_without_tokens_has_the_loss_0(name, aggregation, seed):
    batch = random_batch(seed)
    value, gradient, statistics = loss_and_gradient(batch, torch.zeros_like(batch.mask), name, aggregation)
    assert value.item() == 0.0
    assert (gradient == 0).all()
    assert all(number.isfinite() for number in statistics.values())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_everything_masked_has_the_loss_0_with_both_denominators(name, aggregation):
    batch = random_batch(5)
    for denominator in ("completion_mask", "policy_mask"):
        if aggregation == "prompt_mean" and denominator == "policy_mask":
            continue
        value, gradient, _ = loss_and_gradient(
            batch,
            batch.mask,
            name,
            aggregation,
            policy_mask=torch.zeros_like(batch.mask),
            denominator=denominator,
        )
        assert value.item() == 0.0
        assert (gradient == 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
@given(seed=seeds)
def test_an_empty_completion_adds_nothing(name, aggregation, seed):
    """Its NaN log-probs have no effect; only means over completions count it."""
    batch = random_batch(seed)
    empty = torch.full((1, batch.logps.shape[1]), math.nan, dtype=torch.float64)
    logps = torch.cat([batch.logps.detach(), empty]).requires_grad_()
    more = batch._replace(
        logps=logps,
        old_logps=torch.cat([batch.old_logps, empty]),
        advantages=torch.cat([batch.advantages, batch.advantages.new_ones(1)]),
        mask=torch.cat([batch.mask, torch.zeros_like(batch.mask[:1])]),
    )
    value, gradient, _ = loss_and_gradient(batch, batch.mask, name, aggregation)
    with_empty, more_gradient, _ = loss_and_gradient(more, more.mask, name, aggregation)
    rows = len(batch.mask)
    counted = aggregation in ("sequence_mean", "sequence_sum", "constant")
    factor = rows / (rows + 1) if counted else 1.0
    torch.testing.assert_close(with_empty, value * factor)
    torch.testing.assert_close(more_gradient[:rows], gradient * factor)
    assert (more_gradient[rows] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
@given(seed=seeds)
def test_float32_has_the_loss_of_float64(name, seed):
    batch = random_batch(seed)
    single = batch._replace(
        logps=batch.logps.detach().float().requires_grad_(),
        old_logps=batch.old_logps.float(),
        advantages=batch.advantages.float(),
    )
    double = batch._replace(
        logps=single.logps.detach().double().requires_grad_(),
        old_logps=single.old_logps.double(),
        advantages=single.advantages.double(),
    )
    options = {"clip_high": 50.0, "clip_low": 0.999} if name != "vespo" else {}  # no ratio at the bound by rounding
    one, gradient, _ = loss_and_gradient(single, batch.mask, name, None, **options)
    other, expected, _ = loss_and_gradient(double, batch.mask, name, None, **options)
    assert one.dtype == torch.float32
    torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(seed=seeds, cuts=st.lists(st.integers(0, 6), max_size=3))
def test_the_weights_of_micro_batches_are_those_of_the_mini_batch(aggregation, seed, cuts):
    """With the totals of the mini-batch, whatever is in a micro-batch."""
    mask = random_batch(seed).mask
    totals = prompt_totals(mask, torch.arange(len(mask)) // 2)
    lengths = torch.full((len(mask),), float(mask.sum()) / len(mask), dtype=torch.float64)
    options = {"max_length": 8, "total_tokens": int(mask.sum()), "total_sequences": len(mask), "dtype": torch.float64}
    expected = aggregation_weights(mask, aggregation, prompts=totals, local_lengths=lengths, **options)
    torch.testing.assert_close(expected, aggregation_weights(mask, aggregation, prompts=totals, **options))
    bounds = sorted({0, len(mask), *(min(cut, len(mask)) for cut in cuts)})
    parts = [
        aggregation_weights(
            mask[start:stop],
            aggregation,
            prompts=totals._replace(tokens=totals.tokens[start:stop]),
            local_lengths=lengths[start:stop],
            **options,
        )
        for start, stop in pairwise(bounds)
    ]
    torch.testing.assert_close(torch.cat(parts), expected)


@pytest.mark.parametrize("total", [0, torch.tensor(0)], ids=["int", "tensor"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_totals_of_0_do_not_divide_by_0(aggregation, total):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    options = {"max_length": 3, "total_tokens": total, "total_sequences": total}
    totals = prompt_totals(mask, 1)._replace(prompts=total)
    assert aggregation_weights(mask, aggregation, prompts=totals, **options).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("name", ["cispo", "dapo", "grpo"])
def test_a_ratio_at_its_bound_is_not_clipped(name):
    """On-policy with bounds of 1: every ratio is at both of them."""
    batch = random_batch(7)
    bounds = {"clip_low": 0.0, "clip_high": 1.0 if name == "cispo" else 0.0}
    _, gradient, statistics = loss_and_gradient(
        batch._replace(old_logps=batch.logps.detach()), batch.mask, name, None, **bounds
    )
    assert statistics["clip_fraction_low"] == statistics["clip_fraction_high"] == 0
    assert (gradient != 0).any()


# --- corrections and limits -------------------------------------------------------------------------------------------


@given(seed=seeds)
def test_equal_log_probs_are_not_corrected(seed):
    """Also by bounds that are the ratio itself, 1: both ends of an interval belong to it."""
    batch = random_batch(seed)
    logps = batch.logps.detach()
    for mode in IMPORTANCE_MODES:
        for normalize in (False, True):
            weights = importance_weights(logps, logps, batch.mask, mode=mode, low=1.0, high=1.0, normalize=normalize)
            torch.testing.assert_close(weights, torch.ones_like(weights))
    for statistic in REJECTIONS:
        bounds = {"high": 1e-12} if statistic == "k3" else {"low": 1.0, "high": 1.0}
        assert rejection_mask(logps, logps, batch.mask, statistic=statistic, **bounds).all()


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
@given(seed=seeds)
def test_corrections_in_float32_and_of_nothing(mode, seed):
    batch = random_batch(seed)
    logps, sampler = batch.logps.detach(), batch.old_logps
    one, other = (
        importance_weights(a, b, batch.mask, mode=mode)
        for a, b in ((logps.float(), sampler.float()), (logps.float().double(), sampler.float().double()))
    )
    assert one.dtype == torch.float32
    torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    nothing = torch.zeros_like(batch.mask)
    assert (importance_weights(logps, sampler, nothing, mode=mode, low=2.0, high=3.0, normalize=True) == 1).all()


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_a_token_at_the_limit_of_the_divergence_is_kept(kind):
    """The limit is the divergence itself, as it is computed."""
    sampler, policy = (torch.tensor([[p]], dtype=torch.float64).log() for p in (0.5, 0.75))
    others = [math.log((1 - p) + 1e-8) for p in (float(sampler.exp()), float(policy.exp()))]
    distance = float((sampler.exp() - policy.exp()).abs())
    if kind == "kl":
        distance = float(sampler.exp() * (sampler - policy)) + (1 - float(sampler.exp())) * (others[0] - others[1])
    arguments = policy, torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    below, above = distance * (1 - 1e-9), distance * (1 + 1e-9)
    assert DivergenceLimit(sampler, kind, below).exceeded(*arguments)[1].item()
    assert not DivergenceLimit(sampler, kind, above).exceeded(*arguments)[1].item()
    if kind == "tv":
        assert not DivergenceLimit(sampler, kind, distance).exceeded(*arguments)[1].item()


def test_errors_name_the_argument():
    with pytest.raises(InputError, match="k must be"):
        pass_at_k_advantages(torch.ones(2), 2, 0)
    with pytest.raises(InputError, match="max_length"):
        aggregation_weights(torch.ones(1, 2), "constant", max_length=0)
