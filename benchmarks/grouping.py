"""Clusters of answers: a loop of scikit-learn calls against `similarity_groups`.

Usage::

    python benchmarks/grouping.py                        # 128 prompts × 8 answers, vectors of 384 and 1,024 numbers
    python benchmarks/grouping.py --answers 16 --threads 2

The loop computes, for each prompt, the cosine similarities, and for each k a clustering and its silhouette. Both must
give the same labels. Times are medians of rounds taken in turn in one process; compare the ratios. All use float64 and
the same number of threads; with more than one, torch waits for all of them in each operation, which is slow on a busy
machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import sklearn
import torch
from scipy.cluster.hierarchy import ClusterWarning
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import silhouette_score
from sklearn.metrics.pairwise import cosine_distances, cosine_similarity
from threadpoolctl import threadpool_limits

from groupwise.grouping.cluster import similarity_groups

MAX_GROUPS, MIN_SILHOUETTE = 7, 0.1
Labels = list[list[int]]


def made_embeddings(prompts: int, answers: int, width: int) -> np.ndarray:
    """Unit vectors: each prompt's answers lie around one to four centres."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(prompts, 4, width))
    which = rng.integers(rng.integers(1, 5, size=(prompts, 1)), size=(prompts, answers))
    noise = rng.normal(size=(prompts, answers, width)) * rng.uniform(0.3, 1.5, size=(prompts, 1, 1))
    vectors = np.take_along_axis(centres, which[..., None], axis=1) + noise
    return vectors / np.linalg.norm(vectors, axis=2, keepdims=True)


def best_of(fit: Callable[[int], np.ndarray], score: Callable[[np.ndarray], float], answers: int) -> list[int]:
    best, chosen = -1.0, np.zeros(answers, dtype=int)
    for number in range(2, min(MAX_GROUPS, answers - 1) + 1):
        labels = fit(number)
        value = score(labels)
        if value > best:
            best, chosen = value, labels
    return chosen.tolist() if best >= MIN_SILHOUETTE else [0] * answers


def ward_rows_loop(embeddings: np.ndarray) -> Labels:
    labels = []
    for vectors in embeddings:
        similarity = cosine_similarity(vectors)
        labels.append(
            best_of(
                lambda number, x=1 - similarity: AgglomerativeClustering(number).fit_predict(x),
                lambda cut, x=vectors: silhouette_score(x, cut),
                len(vectors),
            )
        )
    return labels


def average_loop(embeddings: np.ndarray) -> Labels:
    labels = []
    for vectors in embeddings:
        distances = cosine_distances(vectors)
        labels.append(
            best_of(
                lambda number, x=distances: AgglomerativeClustering(
                    number, metric="precomputed", linkage="average"
                ).fit_predict(x),
                lambda cut, x=distances: silhouette_score(x, cut, metric="precomputed"),
                len(vectors),
            )
        )
    return labels


def batched(method: str) -> Callable[[np.ndarray], Labels]:
    def work(embeddings: np.ndarray) -> Labels:
        result = similarity_groups(embeddings, max_groups=MAX_GROUPS, min_silhouette=MIN_SILHOUETTE, method=method)
        return result.labels.tolist()

    return work


# The loop comes first.
VARIANTS: dict[str, dict[str, Callable[[np.ndarray], Labels]]] = {
    "ward_rows": {"scikit-learn, one by one": ward_rows_loop, "similarity_groups": batched("ward_rows")},
    "average": {"scikit-learn, one by one": average_loop, "similarity_groups": batched("average")},
}


def numbered(labels: list[int]) -> list[int]:
    """Labels from 0 in order of appearance, so that equal partitions are equal lists."""
    names: dict[int, int] = {}
    return [names.setdefault(label, len(names)) for label in labels]


def measure(embeddings: np.ndarray, rounds: int) -> dict[tuple[str, str], list[float]]:
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for method, variants in VARIANTS.items():
            partitions = []
            for variant, work in variants.items():
                start = time.perf_counter()
                labels = work(embeddings)
                if turn:  # the first round warms up
                    seconds.setdefault((method, variant), []).append(time.perf_counter() - start)
                partitions.append([numbered(row) for row in labels])
            theirs, ours = partitions
            if different := [prompt for prompt in range(len(theirs)) if theirs[prompt] != ours[prompt]]:
                raise SystemExit(f"{method}: labels differ from scikit-learn's for prompts {different}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--width", type=int, nargs="+", default=[384, 1024])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    threadpool_limits(args.threads)  # of NumPy and scikit-learn
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", ClusterWarning)  # distances instead of features

    print(
        f"{args.prompts} prompts × {args.answers} answers, torch {torch.__version__}, scikit-learn "
        f"{sklearn.__version__}, {args.threads} thread(s), medians of {args.repeat} rounds; labels checked in each"
    )
    print(f"{'width':>5}  {'method':10} {'':26} {'time':>10} {'fastest':>10} {'slowest':>10} {'times as fast':>14}")
    for width in args.width:
        seconds = measure(made_embeddings(args.prompts, args.answers, width), args.repeat)
        for (method, variant), taken in seconds.items():
            loop = statistics.median(seconds[method, "scikit-learn, one by one"])
            middle = statistics.median(taken)
            print(
                f"{width:5}  {method:10} {variant:26} {middle * 1e3:8.1f}ms {min(taken) * 1e3:8.1f}ms "
                f"{max(taken) * 1e3:8.1f}ms {loop / middle:14.1f}"
            )


if __name__ == "__main__":
    main()
