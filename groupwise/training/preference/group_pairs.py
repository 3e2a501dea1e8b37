"""Pairs out of a group of sampled answers: the best against the worst, by reward.

CompletionBatch to different prompts are never paired. What is refused is counted by its reason: equal rewards say nothing about
which answer is better, a small difference may be noise, and the same answer twice has no better half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

REASONS = ("tie", "margin", "same_answer", "alone")


@dataclass(frozen=True)
class GroupPairs:
    """Pairs of samples of a batch, by their numbers, and why others that were asked for are not there."""

    chosen: Tensor  # (n,)
    rejected: Tensor  # (n,)
    refused: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.chosen)

    def members(self, samples: int) -> Tensor:
        """Which of so many samples are in a pair, bool."""
        found = torch.zeros(samples, dtype=torch.bool)
        found[self.chosen] = True
        found[self.rejected] = True
        return found

    def roles(self, samples: int) -> list[str | None]:
        """What each sample is in its pair; None for the others."""
        found: list[str | None] = [None] * samples
        for name, members in (("chosen", self.chosen), ("rejected", self.rejected)):
            for sample in members.tolist():
                found[sample] = name
        return found


def build_group_pairs(
    rewards: Tensor,
    groups: Tensor,
    prompts: Tensor,
    answers: Sequence[Tensor],
    allowed: Tensor,
    *,
    per_group: int = 1,
    min_margin: float = 0.0,
) -> GroupPairs:
    """The best answer of each group and prompt against its worst, the second best against the second worst, and so on.

    rewards ``(B,)``: NaN has no place in the order. allowed ``(B,)``: a sample that may not teach is in no pair.
    Among equal rewards the answer that was sampled first counts as the better one.
    """
    chosen: list[int] = []
    rejected: list[int] = []
    refused = dict.fromkeys(REASONS, 0)
    values = rewards.tolist()
    usable = (allowed & ~rewards.isnan()).tolist()
    members: dict[tuple[int, int], list[int]] = {}
    for sample, place in enumerate(zip(prompts.tolist(), groups.tolist(), strict=True)):
        own = members.setdefault(place, [])
        if usable[sample]:
            own.append(sample)
    for own in members.values():
        if len(own) < 2:
            refused["alone"] += 1
        order = sorted(own, key=lambda sample: -values[sample])
        for better, worse in zip(order[: min(per_group, len(order) // 2)], reversed(order), strict=False):
            margin = values[better] - values[worse]
            if margin == 0:
                refused["tie"] += 1
            elif margin <= min_margin:
                refused["margin"] += 1
            elif torch.equal(answers[better], answers[worse]):
                refused["same_answer"] += 1
            else:
                chosen.append(better)
                rejected.append(worse)
    return GroupPairs(
        torch.tensor(chosen, dtype=torch.long),
        torch.tensor(rejected, dtype=torch.long),
        {reason: number for reason, number in refused.items() if number},
    )
