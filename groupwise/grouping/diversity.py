"""How different the answers to a prompt are, in numbers that can be followed over a run."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.grouping.grouper import Grouped

MOST, FEW = 0.5, 0.2  # of the prompts, in the document's reading of good diversity
GOOD_GROUPS, GOOD_SILHOUETTE = (3, 5), 0.2


def diversity(found: Grouped) -> dict[str, float]:
    """Means over the prompts of a batch: the distance of two answers, and how many clusters they effectively make.

    Two answers to different prompts are unrelated whatever the embedder's idea of distance, so the distance between
    prompts is the yardstick for the distance within them. One prompt alone has no such yardstick.
    """
    if not len(found.distances):
        return {}
    metrics = {
        "diversity/mean_distance": float(found.distances.mean()),
        "diversity/effective_clusters": float(effective_clusters(found.labels).mean()),
    }
    prompts, centres = len(found.centres), found.centres.double()
    if prompts > 1:
        alike = (centres.sum(0).square().sum() - centres.square().sum()) / (prompts * (prompts - 1))
        metrics["diversity/distance_between_prompts"] = 1 - float(alike)
    return metrics


def effective_clusters(labels: Tensor) -> Tensor:
    """The exponential of the entropy of the cluster sizes, for each prompt ``(P,)``; labels are ``(P, G, L)``.

    Eight answers in two clusters of four are two clusters; seven and one are 1.46.
    """
    same = (labels[:, :, None] == labels[:, None, :]).all(-1)  # (P, G, G): answers of the same cluster, at all levels
    share = same.double().mean(-1)  # (P, G): of the answer's own cluster
    return torch.exp(-share.log().mean(-1))


def is_good(metrics: dict[str, float]) -> bool:
    """The document's good diversity: most prompts split into 3 to 5 groups, few do not split, silhouette above 0.2."""
    start, end = "similarity_groups/n_prompts_split_into_", "_groups"
    counts = {
        int(name.removeprefix(start).removesuffix(end)): value
        for name, value in metrics.items()
        if name.startswith(start)
    }
    prompts = max(1.0, sum(counts.values()))
    good = sum(counts.get(k, 0.0) for k in range(GOOD_GROUPS[0], GOOD_GROUPS[1] + 1))
    clear = metrics.get("similarity_groups/avg_silhouette_score", 0.0) > GOOD_SILHOUETTE
    return good / prompts > MOST and counts.get(1, 0.0) / prompts <= FEW and clear
