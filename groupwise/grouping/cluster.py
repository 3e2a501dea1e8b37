"""Clusters of similar answers to one prompt, and their silhouette scores.

The default is average linkage on cosine distances; see `similarity_groups`. ``method="ward_rows"`` is scikit-learn's
``AgglomerativeClustering(k).fit_predict(1 − similarity)``, scored by ``silhouette_score(embeddings, labels)``. It is
not the default: Ward's criterion needs Euclidean coordinates, and the rows of a distance matrix are not (SciPy warns
about it); and the score uses other distances than the clustering.

All prompts are clustered at once, in float64 on the CPU. Partitions and scores equal scikit-learn's, except: equally
close pairs may merge in another order; cosine distances below 1e-9 are 0; two zero vectors are equal; answers that
are all equal, or fewer than three, are one cluster with score 0, where scikit-learn raises an error or cuts at random;
DBSCAN's noise becomes clusters of one; and labels count from 0 in order of appearance.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.core._checks import is_number
from groupwise.errors import InputError, check_choice, check_integer
from groupwise.grouping.linkage import average_linkage, numbered, ward_linkage

METHODS = ("average", "ward_rows", "threshold", "adaptive", "dbscan")

SAME = 1e-9  # smaller cosine distances are round-off between equal texts
TIE = 1e-12  # scores that differ by at most this are equal up to round-off


class SimilarityGroups(NamedTuple):
    """Each answer's cluster, and each prompt's silhouette."""

    labels: Tensor  # (P, G) int64, from 0 within each prompt, in order of appearance
    scores: Tensor  # (P,) float64


def cosine_distances(embeddings: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """The cosine distances ``(P, G, G)`` in float64 between the answers ``(P, G, D)`` to each prompt.

    A zero vector (an empty text may have one) has distance 1 to all others and 0 to another zero vector.
    """
    return _distances(_similarities(_vectors(embeddings)))


def similarity_groups(
    embeddings: Tensor | np.ndarray[Any, Any],
    *,
    max_groups: int = 7,
    min_silhouette: float = 0.1,
    method: str = "average",
    threshold: float = 0.7,
    min_samples: int = 2,
) -> SimilarityGroups:
    """Clusters among the G answers to each of P prompts, from their embeddings ``(P, G, D)``.

    ``"average"``: average linkage on cosine distances, cut into 2 to ``max_groups`` clusters (at most G − 1). The cut
        with the best silhouette is used; on a tie, the one with the fewest clusters. Below ``min_silhouette`` all
        answers are one cluster, and the score is still that of the best cut.
    ``"ward_rows"``: Ward's linkage on the Euclidean distances between the rows of 1 − cosine similarity, chosen by the
        silhouette of the embeddings; otherwise as ``"average"``.
    ``"adaptive"``: the tree of ``"average"``, cut at the largest jump in height between merges, so that each prompt
        has its own distance threshold; on a tie, the fewest clusters. The limits of ``"average"`` apply. The height
        of the first merge is not a jump: with long vectors it is often the largest, and every answer would be alone.
    ``"threshold"``: average linkage while the mean distance between clusters is below 1 − ``threshold``.
        ``max_groups`` and ``min_silhouette`` are ignored.
    ``"dbscan"``: DBSCAN over answers with a cosine similarity of at least ``threshold``; ``min_samples`` of them, the
        answer itself included, make a core. Noise becomes clusters of one. The same two settings are ignored.

    The score is the mean silhouette over the method's distances; 0 if every answer is alone or the method itself
    found one cluster.
    """
    check_choice("method", method, METHODS)
    check_integer("max_groups", max_groups, 2)
    check_integer("min_samples", min_samples, 1)
    for name, value in (("min_silhouette", min_silhouette), ("threshold", threshold)):
        if not is_number(value) or not -1 <= value <= 1:
            raise InputError(f"{name} must be a number from -1 to 1, got {value!r}")
    vectors = _vectors(embeddings)
    if method in ("threshold", "dbscan"):
        return _within_reach(vectors, method, 1 - threshold, min_samples)
    return _best_cut(vectors, method, max_groups, min_silhouette)


def nested_groups(
    embeddings: Tensor | np.ndarray[Any, Any], *, levels: int = 2, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Nested clusters: labels ``(P, G, levels − 1)``, coarse to fine, and the scores ``(P,)`` of the coarsest.

    The prompt is the first of the ``levels``, the clusters of :func:`similarity_groups` (which takes ``settings``) the
    second. Each further level clusters the members of every cluster of three or more by the same method. Labels count
    within the parent cluster; a cluster that is not split has label 0 there. ``"threshold"`` splits only once.
    """
    check_integer("levels", levels, 2)
    vectors = _vectors(embeddings)
    labels, scores = similarity_groups(vectors, **settings)
    prompts, size = labels.shape
    path = torch.arange(prompts).unsqueeze(1) * size + labels  # one number per cluster of the batch
    nested = [labels]
    for _ in range(levels - 2):
        finer = _cut_again(vectors, path, settings)
        nested.append(finer)
        path = torch.unique(path * size + finer, return_inverse=True)[1]
    return torch.stack(nested, dim=2), scores


def _cut_again(vectors: Tensor, path: Tensor, settings: dict[str, Any]) -> Tensor:
    """The labels ``(P, G)`` of each answer among those with the same number in ``path`` ``(P, G)``."""
    answers = vectors.flatten(0, 1)
    labels = torch.zeros(len(answers), dtype=torch.int64)
    order = path.flatten().argsort(stable=True)  # cluster by cluster, members in order
    counts = torch.unique(path, return_counts=True)[1]
    starts = counts.cumsum(0) - counts
    for count in counts.unique().tolist():
        if count >= 3:  # all clusters of one size at once
            members = order[starts[counts == count].unsqueeze(1) + torch.arange(count)]
            labels[members] = similarity_groups(answers[members], **settings).labels
    return labels.view(path.shape)


def _within_reach(vectors: Tensor, method: str, reach: float, min_samples: int) -> SimilarityGroups:
    distances = _distances(_similarities(vectors))
    if method == "dbscan":
        labels = _density_clusters(distances, reach, min_samples)
    else:
        tree = average_linkage(distances)
        left = distances.shape[1] - (tree.heights < reach).sum(dim=1, keepdim=True)
        labels = tree.cut(left).squeeze(1)
    return SimilarityGroups(labels, silhouettes(distances, labels.unsqueeze(1)).squeeze(1))


def _density_clusters(distances: Tensor, reach: float, min_samples: int) -> Tensor:
    """DBSCAN's labels ``(P, G)``, with a cluster of one for each noise answer.

    Answers at most ``reach`` apart are neighbours; one with ``min_samples`` neighbours, itself included, is a core.
    Connected cores form a cluster. Any other answer joins the cluster of a neighbouring core; of several clusters,
    the one with the lowest-numbered core, as in scikit-learn.
    """
    prompts, size, _ = distances.shape
    near = distances <= reach
    core = near.sum(dim=2) >= min_samples
    to_core = near & core.unsqueeze(1)
    answers = torch.arange(size).repeat(prompts, 1)
    none = torch.full_like(answers, size)

    def lowest(clusters: Tensor) -> Tensor:
        """The lowest cluster among those of an answer's neighbouring cores."""
        return torch.where(to_core, clusters.unsqueeze(1), size).amin(dim=2)

    clusters = torch.where(core, answers, none)
    for _ in range(size):  # the longest possible chain of cores
        spread = torch.where(core, lowest(clusters), none)
        if torch.equal(spread, clusters):
            break
        clusters = spread
    clusters = torch.where(core, clusters, lowest(clusters))
    clusters = torch.where(clusters == size, answers, clusters)
    # Clusters are identified by their first core; number them by their first member.
    return numbered((clusters.unsqueeze(2) == clusters.unsqueeze(1)).int().argmax(dim=2))


def _best_cut(vectors: Tensor, method: str, max_groups: int, min_silhouette: float) -> SimilarityGroups:
    prompts, size, _ = vectors.shape
    if size < 3:
        return SimilarityGroups(
            torch.zeros(prompts, size, dtype=torch.int64), torch.zeros(prompts, dtype=torch.float64)
        )
    similarities = _similarities(vectors)
    distances = space = _distances(similarities)
    if method == "ward_rows":
        tree = ward_linkage(_euclidean(1 - similarities))
        space = _euclidean(vectors)
    else:
        tree = average_linkage(distances)
    counts = torch.arange(2, min(max_groups, size - 1) + 1)  # (K,)
    cuts = tree.cut(counts.repeat(prompts, 1))
    scores = silhouettes(space, cuts)
    jumps = tree.heights[:, size - counts] - tree.heights[:, size - counts - 1]
    chosen = _first_largest(jumps if method == "adaptive" else scores).unsqueeze(1)
    labels = cuts.gather(1, chosen.unsqueeze(2).expand(-1, -1, size)).squeeze(1)
    alike = (distances == 0).flatten(1).all(dim=1)
    best = torch.where(alike, 0.0, scores.gather(1, chosen).squeeze(1))
    return SimilarityGroups(torch.where((alike | (best < min_silhouette)).unsqueeze(1), 0, labels), best)


def _first_largest(values: Tensor) -> Tensor:
    """The index of each row's largest value; of values equal up to round-off, the first."""
    return (values >= values.amax(dim=1, keepdim=True) - TIE).int().argmax(dim=1)


def silhouettes(distances: Tensor, labels: Tensor) -> Tensor:
    """The mean silhouette ``(P, K)`` of each of K sets of labels ``(P, K, G)``.

    For one answer it is (b − a) / max(a, b), with a its mean distance to the rest of its cluster and b to the nearest
    other cluster. As in scikit-learn it is 0 for an answer that is alone, if a and b are 0, and with a single cluster.
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


def _similarities(vectors: Tensor) -> Tensor:
    """The cosines ``(P, G, G)``, exactly symmetric; 0 for a zero vector, with itself too, as in scikit-learn."""
    scaled = _scaled(vectors, dim=(2,))
    products = scaled @ scaled.transpose(1, 2)
    lengths = products.diagonal(dim1=1, dim2=2).sqrt()
    lengths = torch.where(lengths > 0, lengths, 1.0)
    return (products + products.transpose(1, 2)) / (2 * lengths.unsqueeze(1) * lengths.unsqueeze(2))


def _distances(similarities: Tensor) -> Tensor:
    """Cosine distances from cosines; see :func:`cosine_distances`."""
    empty = similarities.diagonal(dim1=1, dim2=2) == 0
    distances = (1 - similarities).clamp(max=2.0)
    return distances.masked_fill((distances < SAME) | (empty.unsqueeze(1) & empty.unsqueeze(2)), 0.0)


def _euclidean(vectors: Tensor) -> Tensor:
    """Euclidean distances ``(P, G, G)`` up to a factor per prompt, which changes neither tree nor silhouette."""
    scaled = _scaled(vectors, dim=(1, 2))
    # The faster matrix product would put equal vectors up to 1e-8 apart.
    return torch.cdist(scaled, scaled, compute_mode="donot_use_mm_for_euclid_dist")


def _scaled(vectors: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Divided by the largest absolute value, so that squares neither overflow nor underflow."""
    largest = torch.linalg.vector_norm(vectors, math.inf, dim=dim, keepdim=True)
    return vectors / torch.where(largest > 0, largest, 1.0)


def _vectors(embeddings: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """The embeddings in float64 on the CPU, checked."""
    if isinstance(embeddings, np.ndarray) and embeddings.dtype.kind == "f":
        # A copy, since the array may be read-only or have negative strides.
        embeddings = torch.from_numpy(np.array(embeddings, dtype=np.float64))
    if not isinstance(embeddings, Tensor) or not embeddings.is_floating_point():
        kind = getattr(embeddings, "dtype", type(embeddings).__name__)
        raise InputError(f"embeddings must be a tensor or a NumPy array of floating-point numbers, got {kind}")
    vectors = embeddings.detach()
    if vectors.dim() != 3 or not vectors.shape[1] or not vectors.shape[2]:
        raise InputError(f"embeddings has shape {tuple(vectors.shape)}; expected (P, G, D), with G and D at least 1")
    vectors = vectors.to(device="cpu", dtype=torch.float64)
    bad = ~torch.linalg.vector_norm(vectors, math.inf, dim=2).isfinite()
    if bool(bad.any()):
        prompt, answer = bad.nonzero()[0].tolist()
        raise InputError(f"the embedding of answer {answer} to prompt {prompt} (both counted from 0) has NaN or inf")
    return vectors
