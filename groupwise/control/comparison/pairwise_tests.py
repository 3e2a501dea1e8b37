"""Two algorithms on one environment: which is better, and is the difference significant?

A verdict is a paired sign-flip test over the seeds that both have. With n pairs its smallest p-value is 2 / 2^n, which
is 0.0625 for five and 0.03125 for six: with fewer than six seeds there is no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from groupwise.control.comparison.runs import ComparedRun, RunsByEnvironment
from groupwise.stats import Interval, PairedTest, paired_test, probability_of_improvement

SIGNIFICANT = 0.05
MIN_SEEDS = 6
MAX_FOR_ALL_PAIRS = 5

Runs = list[ComparedRun]  # of one algorithm on one environment


@dataclass(frozen=True)
class PairwiseTest:
    """``probability`` is that of a run of the first algorithm beating one of the second."""

    environment: str
    first: str
    second: str
    probability: Interval
    test: PairedTest | None  # None: they have no seed in common

    @property
    def seeds(self) -> int:
        return self.test.pairs if self.test else 0

    @property
    def winner(self) -> str | None:
        """The better algorithm; None if the difference is not significant."""
        if self.test is None or self.seeds < MIN_SEEDS or self.test.p_value >= SIGNIFICANT:
            return None
        return self.first if self.test.difference.estimate > 0 else self.second


def final_return_tests(groups: RunsByEnvironment) -> list[PairwiseTest]:
    """Pairs of algorithms, compared by the final greedy return of their runs."""
    return [_test(a, b, [run.last("greedy_return") for run in (*a, *b)]) for a, b in _pairs(groups)]


def speed_tests(groups: RunsByEnvironment) -> list[PairwiseTest]:
    """Pairs of algorithms with at least one solved run, compared by the environment steps until solved."""
    pairs = [(a, b) for a, b in _pairs(groups) if any(run.solved_at for run in (*a, *b))]
    return [_test(a, b, _speed_ranks([*a, *b])) for a, b in pairs]


def _pairs(groups: RunsByEnvironment) -> Iterator[tuple[Runs, Runs]]:
    """All pairs of a few algorithms; of many, the first with each of the others (a baseline and its variants)."""
    for by_algorithm in groups.values():
        pairs = list(combinations(by_algorithm.values(), 2))
        yield from pairs if len(by_algorithm) <= MAX_FOR_ALL_PAIRS else pairs[: len(by_algorithm) - 1]


def _speed_ranks(runs: Runs) -> list[float]:
    """For each run, the number of runs that it was faster than, minus the number that were faster.

    Runs that were not solved tie behind the others. Swapping the two runs of a seed swaps their ranks and changes no
    other, so a sign-flip test of the ranks is exact.
    """
    steps = np.array([run.time_to_solve[0] for run in runs])
    ranks = (steps[:, None] < steps).sum(axis=1) - (steps[:, None] > steps).sum(axis=1)
    return [float(rank) for rank in ranks]


def _test(a: Runs, b: Runs, scores: Sequence[float]) -> PairwiseTest:
    """``scores`` are those of all runs of ``a``, then of ``b``; higher is better."""
    first = {run.seed: score for run, score in zip(a, scores[: len(a)], strict=True)}
    second = {run.seed: score for run, score in zip(b, scores[len(a) :], strict=True)}
    shared = [seed for seed in first if seed in second]
    test = paired_test([first[seed] for seed in shared], [second[seed] for seed in shared]) if shared else None
    probability = probability_of_improvement([*first.values()], [*second.values()])
    return PairwiseTest(a[0].environment, a[0].algorithm, b[0].algorithm, probability, test)
