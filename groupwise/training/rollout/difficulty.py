"""Weights by difficulty: groups that are seldom right, or right about half the time, may weigh more than others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from groupwise.core import group_index

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "hard": lambda right: 1.5 - right,
    "uncertain": lambda right: 4 * right * (1 - right) + 0.5,
}
"""From the share of a group's answers that are right to its weight, 0.5 to 1.5, by the name in the recipe."""


def difficulty_weights(name: str, right: Tensor, groups: Tensor, contributes: Tensor) -> Tensor:
    """What each sample's advantage is multiplied by ``(B,)``; the mean over the groups that teach is 1.

    right: how right each sample is, 0 to 1, NaN where nobody knows. contributes: which samples have something to teach.
    """
    index, count = group_index(groups, len(groups))
    known = ~right.isnan()
    total = right.new_zeros(count).index_add(0, index, torch.where(known, right, 0.0))
    number = right.new_zeros(count).index_add(0, index, known.to(right.dtype))
    weights = WEIGHTS[name](total / number.clamp(min=1))
    teaching = torch.zeros(count, dtype=torch.bool)
    teaching[index[contributes]] = True
    return (weights / weights[teaching].mean() if bool(teaching.any()) else torch.ones_like(weights))[index]


def how_right(graded: Sequence[bool | None] | None, rewards: Tensor) -> Tensor:
    """How right each sample is, 0 to 1: what the task's grade says, or the reward between the batch's least and most.

    NaN where a sample has no reward: it counts nowhere.
    """
    if graded is not None:
        right = torch.tensor([float(bool(result)) for result in graded], dtype=torch.float64)
        return torch.where(rewards.isnan(), torch.nan, right)
    known = rewards[~rewards.isnan()]
    if not len(known) or float(known.max()) == float(known.min()):
        return rewards * 0.0 + 0.5
    return (rewards - known.min()) / (known.max() - known.min())
