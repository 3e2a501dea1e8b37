"""Rousseeuw's silhouette of clusters, with scikit-learn's conventions where it is 0 / 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def silhouettes(distances: Tensor, labels: Tensor) -> Tensor:
    """The mean silhouette ``(P, K)`` of each of K sets of labels ``(P, K, G)``.

    For one answer it is (b − a) / max(a, b), with a its mean distance to the rest of its cluster and b to the nearest
    other cluster. It is 0 for an answer that is alone, if a and b are 0, and with a single cluster.
    """
    prompts, number, size = labels.shape
    clusters = int(labels.max()) + 1 if labels.numel() else 1
    member = torch.nn.functional.one_hot(labels, clusters).double()  # (P, K, G, C)
    counts = member.sum(dim=2, keepdim=True)  # (P, K, 1, C)
    columns = member.permute(0, 2, 1, 3).reshape(prompts, size, number * clusters)
    sums = (distances @ columns).view(prompts, size, number, clusters).transpose(1, 2)  # (P, K, G, C)
    cluster = labels.unsqueeze(3)
    cluster_size = counts.expand_as(sums).gather(3, cluster).squeeze(3)
    within = sums.gather(3, cluster).squeeze(3) / (cluster_size - 1).clamp(min=1)
    others = torch.where((member == 1) | (counts == 0), math.inf, sums / counts)
    nearest = others.amin(dim=3)
    largest = torch.maximum(within, nearest)
    defined = (cluster_size > 1) & (largest > 0) & nearest.isfinite()
    return torch.where(defined, (nearest - within) / largest, 0.0).mean(dim=2)
