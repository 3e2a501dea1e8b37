"""Two algorithms on one environment: which is better, and is the difference significant?

A verdict is a paired sign-flip test over the seeds that both have. With n pairs its smallest p-value is 2 / 2^n, which
is 0.0625 for five and 0.03125 for six: with fewer than six seeds there is no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from groupwise.control.comparison.runs import ComparedRun, RunsByEnvironment
from groupwise.stats import Interval, PairedTest, paired_test, probability_of_improvement

SIGNIFICANT = 0.05
MIN_SEEDS = 6
MAX_FOR_ALL_PAIRS = 5

BySeed = Mapping[int, float]  # a score for each seed; higher is better


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
    return [
        _pairwise_test(environment, (first, second), _final_returns(runs[first]), _final_returns(runs[second]))
        for environment, runs in groups.items()
        for first, second in _pairs(list(runs))
    ]


def speed_tests(groups: RunsByEnvironment) -> list[PairwiseTest]:
    """Pairs of algorithms with at least one solved run, compared by the environment steps until solved."""
    return [
        _pairwise_test(environment, (first, second), *_speed_ranks(runs[first], runs[second]))
        for environment, runs in groups.items()
        for first, second in _pairs(list(runs))
        if any(run.solved_at for run in (*runs[first], *runs[second]))
    ]


def _pairs(algorithms: list[str]) -> list[tuple[str, str]]:
    """All pairs of a few algorithms; of many, the first with each of the others (a baseline and its variants)."""
    pairs = list(combinations(algorithms, 2))
    return pairs if len(algorithms) <= MAX_FOR_ALL_PAIRS else pairs[: len(algorithms) - 1]


def _final_returns(runs: list[ComparedRun]) -> BySeed:
    return {run.seed: run.last("greedy_return") for run in runs}


def _speed_ranks(a: list[ComparedRun], b: list[ComparedRun]) -> tuple[BySeed, BySeed]:
    """For each run, the number of runs that it was faster than, minus the number that were faster.

    Runs that were not solved tie behind the others. Swapping the two runs of a seed swaps their ranks and changes no
    other, so a sign-flip test of the ranks is exact.
    """
    steps = np.array([run.time_to_solve[0] for run in (*a, *b)])
    ranks = (steps[:, None] < steps).sum(axis=1) - (steps[:, None] > steps).sum(axis=1)
    return (
        {run.seed: float(rank) for run, rank in zip(a, ranks[: len(a)], strict=True)},
        {run.seed: float(rank) for run, rank in zip(b, ranks[len(a) :], strict=True)},
    )


def _pairwise_test(environment: str, names: tuple[str, str], a: BySeed, b: BySeed) -> PairwiseTest:
    shared = [seed for seed in a if seed in b]
    test = paired_test([a[seed] for seed in shared], [b[seed] for seed in shared]) if shared else None
    return PairwiseTest(environment, *names, probability_of_improvement([*a.values()], [*b.values()]), test)
