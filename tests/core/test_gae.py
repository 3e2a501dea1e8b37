"""GAE: by hand, against a literal loop, and at both kinds of episode end."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core import gae, value_loss
from groupwise.errors import InputError


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


NO = torch.tensor([False, False, False])


def test_by_hand():
    # γ = λ = 1/2. δ = 1 + 2/2 − 1 = 1, 1 + 4/2 − 2 = 1, 1 + 6/2 − 4 = 0; A = δ + A'/4.
    advantages, returns = gae(tensor(1, 1, 1), tensor(1, 2, 4), NO, NO, last_values=6.0, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [1 + 0.25, 1, 0]
    assert returns.tolist() == [2.25, 3, 4]


def test_termination_stops_and_truncation_bootstraps():
    rewards, values, after = tensor(1, 1, 1), tensor(0, 0, 0), tensor(10, 10, 10)
    ended = torch.tensor([False, True, False])
    one, _ = gae(rewards, values, ended, NO, next_values=after, gamma=1.0, lam=1.0)
    assert one.tolist() == [1 + 10 + 1, 1, 1 + 10]  # no value after a termination
    two, _ = gae(rewards, values, NO, ended, next_values=after, gamma=1.0, lam=1.0)
    assert two.tolist() == [1 + 10 + 1 + 10, 1 + 10, 1 + 10]  # a truncation bootstraps, but ends the sum
    both, _ = gae(rewards, values, ended, ended, next_values=after, gamma=1.0, lam=1.0)
    assert both.tolist() == one.tolist()


def test_value_after_the_end_is_never_read():
    after = tensor(5, math.nan, 5)
    advantages, _ = gae(tensor(1, 1, 1), tensor(0, 0, 0), torch.tensor([0, 1, 0]), NO, next_values=after)
    assert advantages.isfinite().all()


def literal(rewards, values, terminated, truncated, next_values, gamma, lam, mask):
    """The sum of GAE, step by step from the end."""
    advantages = torch.zeros_like(rewards)
    for column in range(rewards.shape[1]):
        running = 0.0
        for t in reversed(range(len(rewards))):
            if not mask[t, column]:
                running = 0.0
                continue
            ahead = 0.0 if terminated[t, column] else next_values[t, column].item()
            delta = rewards[t, column].item() + gamma * ahead - values[t, column].item()
            if terminated[t, column] or truncated[t, column]:
                running = 0.0
            running = delta + gamma * lam * running
            advantages[t, column] = running
    return advantages


@given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 40),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_equals_the_literal_loop(seed, steps, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, after = (torch.randn(steps, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    terminated, truncated, hidden = (torch.rand(steps, 3, generator=generator) < 0.15 for _ in range(3))
    advantages, returns = gae(
        rewards, values, terminated, truncated, next_values=after, gamma=gamma, lam=lam, mask=~hidden
    )
    expected = literal(rewards, values, terminated, truncated, after, gamma, lam, ~hidden)
    torch.testing.assert_close(advantages, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(returns, torch.where(hidden, 0.0, expected + values), rtol=1e-10, atol=1e-10)
    flat, _ = gae(
        rewards[:, 0],
        values[:, 0],
        terminated[:, 0],
        truncated[:, 0],
        next_values=after[:, 0],
        gamma=gamma,
        lam=lam,
        mask=~hidden[:, 0],
    )
    torch.testing.assert_close(flat, expected[:, 0], rtol=1e-10, atol=1e-10)


def test_without_values_it_is_the_reward_to_go():
    """Zero values and λ = 1: the discounted sum of later rewards, as GRPO with reward-to-go uses it."""
    ends = torch.tensor([False, True, False, True])
    advantages, _ = gae(tensor(1, 2, 3, 4), torch.zeros(4, dtype=torch.float64), ends, ~ends & ends, gamma=0.5, lam=1.0)
    assert advantages.tolist() == [1 + 0.5 * 2, 2, 3 + 0.5 * 4, 4]


def test_values_get_no_gradient():
    values = tensor(1, 2, 3).requires_grad_()
    advantages, returns = gae(tensor(1, 1, 1), values, NO, NO, last_values=values[0])
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_value_loss():
    values = tensor(1, 3).requires_grad_()
    assert value_loss(values, tensor(2, 5)).item() == pytest.approx((1 + 4) / 2)
    # Clamped to within 0.5 of the old values 0 and 3: 0.5 and 3. Errors (1, 1.5²) and (4, 4): the larger of each.
    clipped = value_loss(values, tensor(2, 5), old_values=tensor(0, 3), clip=0.5)
    assert clipped.item() == pytest.approx((2.25 + 4) / 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: gae(x, x, NO, NO, last_values=0.0, gamma=1.1), r"gamma must be in \[0, 1\], got 1.1"),
        (lambda x: gae(x, x, NO, NO, last_values=0.0, lam=-0.1), "lam must be"),
        (lambda x: gae(x, x[:2], NO, NO), "values has shape"),
        (lambda x: gae(x, x, NO[:2], NO), "terminated has shape"),
        (lambda x: gae(x, x, NO, NO[:2]), "truncated has shape"),
        (lambda x: gae(x, x, NO, NO, next_values=x[:2]), "next_values has shape"),
        (lambda x: gae(x, x, NO, NO), "give last_values"),
        (lambda x: gae(x, x, NO, torch.tensor([0, 1, 0]), last_values=0.0), r"step \[1\] was truncated"),
        (lambda x: gae(x[:0], x[:0], NO[:0], NO[:0]), "T at least 1"),
        (lambda x: gae(x.view(1, 1, 3), x.view(1, 1, 3), NO, NO), r"expected \(T,\) or \(T, N\)"),
        (lambda x: value_loss(x, x[:2]), "returns has shape"),
        (lambda x: value_loss(x, x, clip=0.2), "needs old_values"),
        (lambda x: value_loss(x, x, old_values=x, clip=-1.0), "clip must be"),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call(torch.ones(3))
