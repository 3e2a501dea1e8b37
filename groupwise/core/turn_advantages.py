"""Advantages of single turns: turns at equal states compared with each other.

GiGPO (arXiv 2505.10978): the conversations of a group start alike and often meet the same states again. The turns that
were taken at one state form a group of their own, in which the discounted returns R_t = Σ_k γ^k r_{t+k} are compared as
rewards are in GRPO. A turn's advantage is that of its conversation plus ω times that among the turns at its state, so
credit does not have to be spread evenly over a conversation. A turn at a state that nobody else met gets 0 for the
second part.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from groupwise.core.advantages import group_advantages
from groupwise.core.ragged import Ragged
from groupwise.errors import InputError


def discounted_returns(rewards: Ragged, discount: float) -> Ragged:
    """The discounted sum of the rewards of each turn and of the turns after it, by conversation."""
    if not 0 <= discount <= 1:
        raise InputError(f"discount must be between 0 and 1, got {discount!r}")
    returns = rewards.values.double().clone()
    ends = rewards.lengths.cumsum(0).tolist()
    for end, size in zip(ends, rewards.sizes, strict=True):
        for place in range(end - 2, end - size - 1, -1):
            returns[place] += discount * returns[place + 1]
    return Ragged(returns, rewards.lengths)


def turn_advantages(
    returns: Ragged,
    states: Sequence[Hashable],
    groups: Tensor,
    *,
    scale: str = "group",
    eps: float = 1e-4,
    unbiased: bool = True,
) -> Ragged:
    """The advantage of each turn among the turns of its group at the same state.

    returns: of each conversation's turns. states: of all turns, in order; None for one that is like no other.
    groups: ``(B,)`` the group of each conversation. scale, eps, unbiased: as in `group_advantages`. NaN returns are
    left out.
    """
    if len(states) != len(returns.values) or len(groups) != len(returns):
        raise InputError(
            f"{len(returns.values)} turns of {len(returns)} conversations have {len(states)} states and "
            f"{len(groups)} groups"
        )
    labels: dict[Hashable, int] = {}
    numbers = []
    for place, (group, state) in enumerate(
        zip(groups.repeat_interleave(returns.lengths).tolist(), states, strict=True)
    ):
        key = ("alone", place) if state is None else ("at", group, state)
        numbers.append(labels.setdefault(key, len(labels)))
    if not numbers:
        return Ragged(torch.zeros(0, dtype=torch.float64), returns.lengths)
    values = group_advantages(returns.values, torch.tensor(numbers), scale=scale, eps=eps, unbiased=unbiased)
    return Ragged(values, returns.lengths)
