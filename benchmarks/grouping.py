"""Clusters of answers: the document's loop of scikit-learn calls and `similarity_groups`, side by side.

Usage::

    python benchmarks/grouping.py                        # 128 prompts × 8 answers, vectors of 384 and 1,024 numbers
    python benchmarks/grouping.py --answers 16 --threads 2

The document's way is, for each prompt, the cosine similarities and for each k a clustering and its silhouette. The
labels of both must be the same, or nothing is printed. Times are medians of rounds taken in turn in one process, so
that a busy machine slows all alike: read the ratios. Every way gets float64 and the same number of threads; with more
than one, torch waits for all of them in each step, which is slower where other programs use the processor.
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
    """Unit vectors, as an embedder gives: each prompt's answers are around one to four centres, not far apart."""
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


def document_loop(embeddings: np.ndarray) -> Labels:
    found = []
    for vectors in embeddings:
        similarity = cosine_similarity(vectors)
        found.append(
            best_of(
                lambda number, x=1 - similarity: AgglomerativeClustering(number).fit_predict(x),
                lambda labels, x=vectors: silhouette_score(x, labels),
                len(vectors),
            )
        )
    return found


def average_loop(embeddings: np.ndarray) -> Labels:
    found = []
    for vectors in embeddings:
        distances = cosine_distances(vectors)
        found.append(
            best_of(
                lambda number, x=distances: AgglomerativeClustering(
                    number, metric="precomputed", linkage="average"
                ).fit_predict(x),
                lambda labels, x=distances: silhouette_score(x, labels, metric="precomputed"),
                len(vectors),
            )
        )
    return found


def ours(method: str) -> Callable[[np.ndarray], Labels]:
    def work(embeddings: np.ndarray) -> Labels:
        how = {"max_groups": MAX_GROUPS, "min_silhouette": MIN_SILHOUETTE, "method": method}
        return similarity_groups(embeddings, **how).labels.tolist()

    return work


# The loop that each is compared with comes first.
VARIANTS: dict[str, dict[str, Callable[[np.ndarray], Labels]]] = {
    "ward_rows": {"scikit-learn, one by one": document_loop, "similarity_groups": ours("ward_rows")},
    "average": {"scikit-learn, one by one": average_loop, "similarity_groups": ours("average")},
}


def numbered(labels: list[int]) -> list[int]:
    """Labels from 0 in the order of appearance, so that equal partitions are equal lists."""
    names: dict[int, int] = {}
    return [names.setdefault(label, len(names)) for label in labels]


def measure(embeddings: np.ndarray, rounds: int) -> dict[tuple[str, str], list[float]]:
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for method, ways in VARIANTS.items():
            found = []
            for way, work in ways.items():
                start = time.perf_counter()
                labels = work(embeddings)
                if turn:  # the first round warms up
                    seconds.setdefault((method, way), []).append(time.perf_counter() - start)
                found.append([numbered(row) for row in labels])
            peer, mine = found
            if different := [prompt for prompt in range(len(peer)) if peer[prompt] != mine[prompt]]:
                raise SystemExit(f"{method}: other labels than scikit-learn's for prompts {different}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--width", type=int, nargs="+", default=[384, 1024])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    threadpool_limits(args.threads)  # NumPy's and scikit-learn's
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", ClusterWarning)  # SciPy's, of the document's distances in the place of features

    print(
        f"{args.prompts} prompts × {args.answers} answers, torch {torch.__version__}, scikit-learn "
        f"{sklearn.__version__}, {args.threads} thread(s), medians of {args.repeat} rounds; labels checked in each"
    )
    print(f"{'width':>5}  {'method':10} {'':26} {'time':>10} {'fastest':>10} {'slowest':>10} {'times as fast':>14}")
    for width in args.width:
        seconds = measure(made_embeddings(args.prompts, args.answers, width), args.repeat)
        for (method, way), taken in seconds.items():
            loop = statistics.median(seconds[method, "scikit-learn, one by one"])
            middle = statistics.median(taken)
            print(
                f"{width:5}  {method:10} {way:26} {middle * 1e3:8.1f}ms {min(taken) * 1e3:8.1f}ms "
                f"{max(taken) * 1e3:8.1f}ms {loop / middle:14.1f}"
            )


if __name__ == "__main__":
    main()
