"""Diversity metrics: by hand, and against loops over all pairs."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.grouping.cluster import cosine_distances
from groupwise.grouping.diversity import diversity, effective_clusters, is_good
from groupwise.grouping.grouper import GroupingResult, map_positions


def grouped(vectors: torch.Tensor, labels: list[list[int]]) -> GroupingResult:
    """The grouping result of these vectors (P, G, D) with these clusters."""
    distances = cosine_distances(vectors)
    answers = vectors.shape[1]
    pairs = distances.sum((1, 2)) / (answers * (answers - 1))
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    positions = map_positions(unit)
    return GroupingResult(torch.tensor(labels)[..., None], torch.zeros(len(vectors)), pairs, unit.mean(1), positions)


def test_effective_clusters_by_hand():
    labels = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 1]])[..., None]
    uneven = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert effective_clusters(labels).tolist() == pytest.approx([1, 2, 4, uneven])


def test_effective_clusters_use_the_finest_level():
    labels = torch.tensor([[[0, 0], [0, 1], [1, 0], [1, 0]]])
    assert effective_clusters(labels).tolist() == pytest.approx([math.exp(0.5 * math.log(4) + 0.5 * math.log(2))])


def test_distances_are_means_over_all_pairs():
    torch.manual_seed(0)
    vectors = torch.randn(5, 4, 7, dtype=torch.float64)
    metrics = diversity(grouped(vectors, [[0, 0, 1, 1]] * 5))
    flat = vectors.reshape(-1, 7)
    within, between = [], []
    for i in range(20):
        for j in range(20):
            distance = 1 - float(torch.cosine_similarity(flat[i], flat[j], dim=0))
            if i // 4 != j // 4:
                between.append(distance)
            elif i != j:
                within.append(distance)
    assert metrics["diversity/mean_distance"] == pytest.approx(sum(within) / len(within))
    assert metrics["diversity/distance_between_prompts"] == pytest.approx(sum(between) / len(between))
    assert metrics["diversity/effective_clusters"] == pytest.approx(2)


def test_one_prompt_and_no_prompt():
    one = grouped(torch.eye(3)[None], [[0, 1, 2]])
    assert set(diversity(one)) == {"diversity/mean_distance", "diversity/effective_clusters"}
    assert diversity(one.take([])) == {}


@pytest.mark.parametrize(
    ("counts", "silhouette", "good"),
    [
        ({1: 1, 3: 2, 4: 2}, 0.21, True),
        ({1: 1, 3: 2, 4: 2}, 0.2, False),
        ({1: 2, 3: 3, 4: 3}, 0.5, False),
        ({2: 3, 4: 3}, 0.5, False),
        ({2: 3, 5: 4}, 0.5, True),
        ({6: 9}, 0.5, False),
        ({}, 0.5, False),
    ],
)
def test_good_diversity(counts, silhouette, good):
    metrics = {f"similarity_groups/n_prompts_split_into_{k}_groups": float(n) for k, n in counts.items()}
    assert is_good({**metrics, "similarity_groups/avg_silhouette_score": silhouette}) is good
