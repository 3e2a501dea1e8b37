"""Diversity metrics: how different the answers to a prompt are."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.grouping.grouper import GroupingResult

# Diversity is good if more than half of the prompts split into 3 to 5 groups, at most a fifth do not split, and the
# mean silhouette is above 0.2.
MIN_WELL_SPLIT, MAX_UNSPLIT = 0.5, 0.2
GOOD_GROUPS, GOOD_SILHOUETTE = (3, 5), 0.2


def diversity(groups: GroupingResult) -> dict[str, float]:
    """Means over the prompts of a batch: the distance between two answers, and the effective number of clusters.

    Answers to different prompts are unrelated, so the distance between prompts shows what a large distance is for this
    embedder. It needs at least two prompts.
    """
    if not len(groups.distances):
        return {}
    metrics = {
        "diversity/mean_distance": float(groups.distances.mean()),
        "diversity/effective_clusters": float(effective_clusters(groups.labels).mean()),
    }
    prompts, centres = len(groups.centres), groups.centres.double()
    if prompts > 1:
        alike = (centres.sum(0).square().sum() - centres.square().sum()) / (prompts * (prompts - 1))
        metrics["diversity/distance_between_prompts"] = 1 - float(alike)
    return metrics


def effective_clusters(labels: Tensor) -> Tensor:
    """The exponential of the entropy of the cluster sizes, for each prompt ``(P,)``; labels are ``(P, G, L)``.

    Eight answers in two clusters of four are two clusters; seven and one are 1.46.
    """
    same = (labels[:, :, None] == labels[:, None, :]).all(-1)  # (P, G, G): in the same cluster at all levels
    share = same.double().mean(-1)  # (P, G): of the answer's cluster
    return torch.exp(-share.log().mean(-1))


def is_good(metrics: dict[str, float]) -> bool:
    """Whether a batch's ``similarity_groups/`` metrics show good diversity."""
    start, end = "similarity_groups/n_prompts_split_into_", "_groups"
    counts = {
        int(name.removeprefix(start).removesuffix(end)): value
        for name, value in metrics.items()
        if name.startswith(start)
    }
    prompts = max(1.0, sum(counts.values()))
    good = sum(counts.get(k, 0.0) for k in range(GOOD_GROUPS[0], GOOD_GROUPS[1] + 1))
    clear = metrics.get("similarity_groups/avg_silhouette_score", 0.0) > GOOD_SILHOUETTE
    return good / prompts > MIN_WELL_SPLIT and counts.get(1, 0.0) / prompts <= MAX_UNSPLIT and clear
