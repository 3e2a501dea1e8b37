"""Which choice paid: the forks of a group's tree, by how much of the spread of advantages each explains.

The squared deviations of a group's advantages from their mean are the sum, over all forks, of those between a fork's
branches, plus those within leaves (identical answers with different advantages). A fork's share is its part of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from groupwise.analysis.tree import Branch


@dataclass(frozen=True)
class Fork:
    """A place where answers part."""

    before: str  # the text that they share until there
    share: float  # of the spread of advantages, from 0 to 1
    branches: list[Branch]


def forks_by_share(tree: Branch, advantages: Mapping[int, float]) -> list[Fork]:
    """The forks of a tree, the most decisive first. ``advantages``: by sample. None if all advantages are equal."""
    mean = fmean(advantages.values()) if advantages else 0.0
    total = sum((value - mean) ** 2 for value in advantages.values())
    if total <= 0:
        return []
    forks = [Fork(before, _between(branch, advantages) / total, branch.children) for before, branch in _walk(tree, "")]
    return sorted(forks, key=lambda fork: -fork.share)


def _between(branch: Branch, advantages: Mapping[int, float]) -> float:
    """The squared deviations of the branches' means from their common mean, each counted once per sample."""
    mean = fmean(advantages[sample] for sample in branch.samples)
    return sum(
        len(child.samples) * (fmean(advantages[sample] for sample in child.samples) - mean) ** 2
        for child in branch.children
    )


def _walk(branch: Branch, before: str) -> Iterator[tuple[str, Branch]]:
    """Every branch that parts again, with the text up to there."""
    if branch.children:
        yield before + branch.text, branch
    for child in branch.children:
        yield from _walk(child, before + branch.text)
