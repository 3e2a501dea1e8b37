"""Agglomerative trees: the closest two clusters join, again and again, until there is one.

The distance to the joined cluster is Lance and Williams' update: the mean over pairs of members (average linkage), or
by how much a merge makes the squared error grow (Ward). All prompts go together, from distances ``(P, G, G)`` that are
symmetric and in float64; only merges come one after another. Without ties these are scikit-learn's trees, which SciPy
grows in another way, along chains of nearest neighbours. Where pairs are equally close, any of them may join first:
round-off decides, then the order of the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# The distances of the joined cluster to every other, (P, G), from those of its two parts (P, G), the distance between
# the parts (P, 1), the sizes of the parts (P, 1) and the sizes of the others (P, G).
Update = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Tree(NamedTuple):
    """What a linkage joined, merge after merge."""

    labels: Tensor  # (P, G, G) int64: [:, m] are the clusters after m merges, which are G − m
    heights: Tensor  # (P, G−1) float64: how far apart the two clusters of a merge were

    def cut(self, counts: Tensor) -> Tensor:
        """The labels ``(P, K, G)`` where each prompt has ``counts`` ``(P, K)`` clusters."""
        size = self.labels.shape[2]
        return self.labels.gather(1, (size - counts).unsqueeze(2).expand(-1, -1, size))


def average_linkage(distances: Tensor) -> Tree:
    """The tree in which two clusters are as far apart as their members are on average."""
    return _linkage(distances, _average_update)


def ward_linkage(distances: Tensor) -> Tree:
    """The tree in which each merge adds the least to the squared error; the distances must be Euclidean."""
    tree = _linkage(distances.square(), _ward_update)
    return tree._replace(heights=tree.heights.sqrt())


def _average_update(
    to_first: Tensor, to_second: Tensor, apart: Tensor, first: Tensor, second: Tensor, others: Tensor
) -> Tensor:
    return (first * to_first + second * to_second) / (first + second)


def _ward_update(
    to_first: Tensor, to_second: Tensor, apart: Tensor, first: Tensor, second: Tensor, others: Tensor
) -> Tensor:
    total = (first + others) * to_first + (second + others) * to_second - others * apart
    return total / (first + second + others)


def _linkage(distances: Tensor, update: Update) -> Tree:
    prompts, size, _ = distances.shape
    every = torch.arange(prompts)
    apart = distances.clone()
    apart.diagonal(dim1=1, dim2=2).fill_(math.inf)  # infinity: not a pair, or one part is gone
    sizes = torch.ones(prompts, size, dtype=torch.float64)
    leaders = torch.arange(size).repeat(prompts, 1)  # each answer's cluster, by its lowest-numbered member
    stages, heights = [leaders], []
    for _ in range(size - 1):
        height, pair = apart.flatten(1).min(dim=1)
        first, second = torch.minimum(pair // size, pair % size), torch.maximum(pair // size, pair % size)
        first_size, second_size = sizes[every, first].unsqueeze(1), sizes[every, second].unsqueeze(1)
        joined = update(apart[every, first], apart[every, second], height.unsqueeze(1), first_size, second_size, sizes)
        apart[every, first] = joined
        apart[every, :, first] = joined
        apart[every, second] = math.inf
        apart[every, :, second] = math.inf
        sizes[every, first] += second_size.squeeze(1)
        leaders = torch.where(leaders == second.unsqueeze(1), first.unsqueeze(1), leaders)
        stages.append(leaders)
        heights.append(height)
    joined_at = torch.stack(heights, dim=1) if heights else distances.new_zeros(prompts, 0)
    return Tree(numbered(torch.stack(stages, dim=1)), joined_at)


def numbered(leaders: Tensor) -> Tensor:
    """Labels 0, 1, ... in the order of appearance, from each answer's lowest-numbered companion ``(..., G)``."""
    leads = leaders == torch.arange(leaders.shape[-1])
    return (leads.cumsum(dim=-1) - 1).gather(-1, leaders)
