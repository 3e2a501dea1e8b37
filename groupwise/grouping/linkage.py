"""Agglomerative clustering: the two closest clusters are merged until one is left.

Distances to a merged cluster follow the Lance-Williams update: the mean over pairs of members (average linkage), or the
increase of the squared error (Ward). All prompts are processed together, from symmetric float64 distances
``(P, G, G)``. Without ties the trees equal scikit-learn's. Of equally close pairs, round-off decides, then the order of
the answers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Tree(NamedTuple):
    """The merges of a linkage, in order."""

    labels: Tensor  # (P, G, G) int64: [:, m] are the G − m clusters after m merges
    heights: Tensor  # (P, G−1) float64: the distance between the two clusters of each merge

    def cut(self, counts: Tensor) -> Tensor:
        """The labels ``(P, K, G)`` with ``counts`` ``(P, K)`` clusters per prompt."""
        size = self.labels.shape[2]
        return self.labels.gather(1, (size - counts).unsqueeze(2).expand(-1, -1, size))


def average_linkage(distances: Tensor) -> Tree:
    """The distance of two clusters is the mean distance of their members."""
    return _linkage(distances, ward=False)


def ward_linkage(distances: Tensor) -> Tree:
    """Each merge adds as little as possible to the squared error; the distances must be Euclidean."""
    tree = _linkage(distances.square(), ward=True)
    return tree._replace(heights=tree.heights.sqrt())


def _linkage(distances: Tensor, ward: bool) -> Tree:
    prompts, size, _ = distances.shape
    every = torch.arange(prompts)
    apart = distances.clone()
    apart.diagonal(dim1=1, dim2=2).fill_(math.inf)  # infinity: not a pair, or already merged
    sizes = torch.ones(prompts, size, dtype=torch.float64)
    leaders = torch.arange(size).repeat(prompts, 1)  # each answer's cluster, by its lowest-numbered member
    stages, heights = [leaders], []
    for _ in range(size - 1):
        height, pair = apart.flatten(1).min(dim=1)
        first, second = torch.minimum(pair // size, pair % size), torch.maximum(pair // size, pair % size)
        first_size, second_size = sizes[every, first].unsqueeze(1), sizes[every, second].unsqueeze(1)
        to_first, to_second = apart[every, first], apart[every, second]
        if ward:
            total = (first_size + sizes) * to_first + (second_size + sizes) * to_second - sizes * height.unsqueeze(1)
            joined = total / (first_size + second_size + sizes)
        else:
            joined = (first_size * to_first + second_size * to_second) / (first_size + second_size)
        apart[every, first] = joined
        apart[every, :, first] = joined
        apart[every, second] = math.inf
        apart[every, :, second] = math.inf
        sizes[every, first] += second_size.squeeze(1)
        leaders = torch.where(leaders == second.unsqueeze(1), first.unsqueeze(1), leaders)
        stages.append(leaders)
        heights.append(height)
    merge_heights = torch.stack(heights, dim=1) if heights else distances.new_zeros(prompts, 0)
    return Tree(numbered(torch.stack(stages, dim=1)), merge_heights)


def numbered(leaders: Tensor) -> Tensor:
    """Labels 0, 1, ... in order of appearance, from the first member of each answer's cluster ``(..., G)``."""
    leads = leaders == torch.arange(leaders.shape[-1])
    return (leads.cumsum(dim=-1) - 1).gather(-1, leaders)
