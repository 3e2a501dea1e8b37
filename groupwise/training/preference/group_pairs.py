"""Preference pairs out of a group of samples: the best against the worst, by reward.

Only completions of the same prompt are paired. Pairs that are not made are counted by reason: equal rewards, a margin
that is too small, the same completion twice, or a sample that is alone in its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

REASONS = ("tie", "margin", "same_answer", "alone")


@dataclass(frozen=True)
class GroupPairs:
    """Pairs of samples of a batch, by index, and how many were refused for each reason."""

    chosen: Tensor  # (n,)
    rejected: Tensor  # (n,)
    refused: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.chosen)

    def members(self, samples: int) -> Tensor:
        """Which of ``samples`` samples are in a pair, bool."""
        return torch.tensor([role is not None for role in self.roles(samples)], dtype=torch.bool)

    def roles(self, samples: int) -> list[str | None]:
        """For each sample "chosen", "rejected", or None if it is in no pair."""
        roles: list[str | None] = [None] * samples
        for role, members in (("chosen", self.chosen), ("rejected", self.rejected)):
            for sample in members.tolist():
                roles[sample] = role
        return roles


def build_group_pairs(
    rewards: Tensor,
    groups: Tensor,
    prompts: Tensor,
    completions: Sequence[Tensor],
    allowed: Tensor,
    *,
    per_group: int = 1,
    min_margin: float = 0.0,
) -> GroupPairs:
    """The best completion of each group and prompt against its worst, the second best against the second worst, ...

    Samples whose reward ``(B,)`` is NaN or that are not ``allowed`` ``(B,)`` are in no pair. Among equal rewards the
    completion that was sampled first ranks higher.
    """
    pairs: list[tuple[int, int]] = []
    refused = dict.fromkeys(REASONS, 0)
    values = rewards.tolist()
    usable = (allowed & ~rewards.isnan()).tolist()
    members_of: dict[tuple[int, int], list[int]] = {}
    for sample, group in enumerate(zip(prompts.tolist(), groups.tolist(), strict=True)):
        members = members_of.setdefault(group, [])
        if usable[sample]:
            members.append(sample)
    for members in members_of.values():
        if len(members) < 2:
            refused["alone"] += 1
        ranked = sorted(members, key=lambda sample: -values[sample])
        for better, worse in zip(ranked[: min(per_group, len(ranked) // 2)], reversed(ranked), strict=False):
            margin = values[better] - values[worse]
            if margin == 0:
                refused["tie"] += 1
            elif margin <= min_margin:
                refused["margin"] += 1
            elif torch.equal(completions[better], completions[worse]):
                refused["same_answer"] += 1
            else:
                pairs.append((better, worse))
    chosen, rejected = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
    return GroupPairs(chosen, rejected, {reason: number for reason, number in refused.items() if number})
