"""GiGPO's advantages of turns, by hand and against a literal version."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.ragged import Ragged
from groupwise.core.turn_advantages import discounted_returns, turn_advantages
from groupwise.errors import InputError


def test_returns_by_hand():
    rewards = Ragged.of([torch.tensor([0.0, 0.0, 1.0]), torch.tensor([2.0]), torch.tensor([1.0, -1.0])])
    assert discounted_returns(rewards, 0.5).tolist() == [[0.25, 0.5, 1.0], [2.0], [0.5, -1.0]]
    assert discounted_returns(rewards, 0.0).tolist() == rewards.tolist()
    assert discounted_returns(rewards, 1.0).tolist() == [[1.0, 1.0, 1.0], [2.0], [0.0, -1.0]]


@pytest.mark.parametrize("discount", [-0.1, 1.1, float("nan")])
def test_a_discount_outside_of_0_to_1_is_refused(discount):
    with pytest.raises(InputError, match="discount"):
        discounted_returns(Ragged.of([torch.tensor([1.0])]), discount)


def test_turns_at_one_state_are_compared():
    """Two games start alike; one wins. Only their first turns were at the same state, and those of one group."""
    returns = Ragged.of([torch.tensor([0.5, 1.0]), torch.tensor([0.0]), torch.tensor([3.0])])
    states = ["start", "near", "start", "start"]
    groups = torch.tensor([0, 0, 1])
    got = turn_advantages(returns, states, groups, scale="none")
    assert got.tolist() == [[0.25, 0.0], [-0.25], [0.0]]
    scaled = turn_advantages(returns, states, groups, eps=0.0).tolist()
    assert scaled[0][0] == pytest.approx(0.25 / math.sqrt(2 * 0.25**2))
    assert scaled[0][1] == scaled[2][0] == 0.0


def test_a_state_that_is_not_known_is_like_no_other():
    returns = Ragged.of([torch.tensor([1.0]), torch.tensor([0.0])])
    assert turn_advantages(returns, [None, None], torch.tensor([0, 0])).tolist() == [[0.0], [0.0]]


def test_a_state_may_occur_twice_in_a_conversation():
    returns = Ragged.of([torch.tensor([1.0, 3.0])])
    assert turn_advantages(returns, ["a", "a"], torch.tensor([0]), scale="none").tolist() == [[-1.0, 1.0]]


def test_numbers_that_do_not_fit_are_refused():
    returns = Ragged.of([torch.tensor([1.0])])
    with pytest.raises(InputError, match="1 turns of 1 conversations have 2 states"):
        turn_advantages(returns, ["a", "b"], torch.tensor([0]))
    with pytest.raises(InputError, match="2 groups"):
        turn_advantages(returns, ["a"], torch.tensor([0, 1]))


turns = st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 2)), min_size=1, max_size=4)


@given(st.lists(st.tuples(turns, st.integers(0, 1)), min_size=1, max_size=6), st.floats(0, 1))
def test_against_a_literal_version(conversations, discount):
    rewards = Ragged.of([torch.tensor([reward for reward, _ in one], dtype=torch.float64) for one, _ in conversations])
    groups = torch.tensor([group for _, group in conversations])
    returns = discounted_returns(rewards, discount)
    states = [state for one, _ in conversations for _, state in one]
    got = turn_advantages(returns, states, groups, scale="none").tolist()
    at: dict[tuple[int, int], list[float]] = {}
    every: list[list[tuple[tuple[int, int], float]]] = []
    for one, group in conversations:
        row = []
        for place, (_, state) in enumerate(one):
            value = sum(discount**k * reward for k, (reward, _) in enumerate(one[place:]))
            at.setdefault((group, state), []).append(value)
            row.append(((group, state), value))
        every.append(row)
    for row, values in zip(every, got, strict=True):
        for (key, value), advantage in zip(row, values, strict=True):
            assert advantage == pytest.approx(value - sum(at[key]) / len(at[key]), abs=1e-9)
