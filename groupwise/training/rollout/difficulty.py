"""Weights by difficulty: groups that are rarely correct, or correct about half the time, can weigh more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from groupwise.core import group_statistics

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "hard": lambda correct: 1.5 - correct,
    "uncertain": lambda correct: 4 * correct * (1 - correct) + 0.5,
}
"""From the share of a group's completions that are correct to its weight, 0.5 to 1.5."""


def difficulty_weights(name: str, correct: Tensor, groups: Tensor, contributes: Tensor) -> Tensor:
    """The factor of each sample's advantage ``(B,)``; the mean over the groups that contribute is 1.

    correct: 0 to 1 per sample, NaN if unknown. contributes: which samples have a learning signal.
    """
    statistics = group_statistics(correct, groups)
    weights = WEIGHTS[name](statistics.mean.nan_to_num())
    contributing = torch.unique(statistics.index[contributes])
    if not len(contributing):
        return torch.ones_like(correct)
    return (weights / weights[contributing].mean())[statistics.index]


def correctness(graded: Sequence[bool | None] | None, rewards: Tensor) -> Tensor:
    """How correct each sample is, 0 to 1 or NaN: the task's grade, or the reward scaled to the batch's range."""
    if graded is not None:
        correct = torch.tensor([float(bool(result)) for result in graded], dtype=torch.float64)
        return torch.where(rewards.isnan(), torch.nan, correct)
    scored = rewards[~rewards.isnan()]
    if not len(scored) or float(scored.max()) == float(scored.min()):
        return rewards * 0.0 + 0.5
    rewards, least, most = rewards / 2, scored.min() / 2, scored.max() / 2  # half: their range may be beyond a float
    return (rewards - least) / (most - least)
