"""Two algorithms on one environment: which is better, and could it be chance?

A verdict is a paired sign-flip test over the seeds that both have. Of n pairs its smallest p-value is 2 / 2^n, which is
0.0625 for five and 0.03125 for six: with fewer than six there is no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from groupwise.control.comparison.runs import Cells, Run
from groupwise.stats import Interval, PairedTest, paired_test, probability_of_improvement

SIGNIFICANT = 0.05
LEAST_SEEDS = 6
MOST_FOR_ALL_PAIRS = 5

BySeed = Mapping[int, float]  # a number for each seed, of which the higher is the better


@dataclass(frozen=True)
class PairwiseTest:
    """``chance`` is how likely a run of the first is to beat one of the second."""

    environment: str
    first: str
    second: str
    chance: Interval
    test: PairedTest | None  # None: they have no seed in common

    @property
    def seeds(self) -> int:
        return self.test.pairs if self.test else 0

    @property
    def winner(self) -> str | None:
        """The one that is better; None if that may be chance."""
        if self.test is None or self.seeds < LEAST_SEEDS or self.test.p_value >= SIGNIFICANT:
            return None
        return self.first if self.test.difference.estimate > 0 else self.second


def duels_of_endings(cells: Cells) -> list[PairwiseTest]:
    """Pairs of algorithms, by the greedy return with which their runs end."""
    return [
        _duel(environment, (first, second), _endings(row[first]), _endings(row[second]))
        for environment, row in cells.items()
        for first, second in _pairs(list(row))
    ]


def duels_of_speed(cells: Cells) -> list[PairwiseTest]:
    """Pairs of algorithms of which a run was solved, by how few environment steps that took."""
    return [
        _duel(environment, (first, second), *_standings(row[first], row[second]))
        for environment, row in cells.items()
        for first, second in _pairs(list(row))
        if any(run.solved_at for run in (*row[first], *row[second]))
    ]


def _pairs(algorithms: list[str]) -> list[tuple[str, str]]:
    """Every pair, of a few; of more, the first with each of the others, as variants with what they vary."""
    everyone = list(combinations(algorithms, 2))
    return everyone if len(algorithms) <= MOST_FOR_ALL_PAIRS else everyone[: len(algorithms) - 1]


def _endings(runs: list[Run]) -> BySeed:
    return {run.seed: run.last("greedy_return") for run in runs}


def _standings(a: list[Run], b: list[Run]) -> tuple[BySeed, BySeed]:
    """For each run, how many of all these it was sooner than, less how many were sooner: a rank, finite for all.

    Runs that were not solved tie behind the others. Swapping the two runs of a seed swaps their ranks and changes no
    other, so a sign-flip test of the ranks is exact.
    """
    steps = np.array([run.time_to_solve[0] for run in (*a, *b)])
    ranks = (steps[:, None] < steps).sum(axis=1) - (steps[:, None] > steps).sum(axis=1)
    return (
        {run.seed: float(rank) for run, rank in zip(a, ranks[: len(a)], strict=True)},
        {run.seed: float(rank) for run, rank in zip(b, ranks[len(a) :], strict=True)},
    )


def _duel(environment: str, names: tuple[str, str], a: BySeed, b: BySeed) -> PairwiseTest:
    shared = [seed for seed in a if seed in b]
    test = paired_test([a[seed] for seed in shared], [b[seed] for seed in shared]) if shared else None
    return PairwiseTest(environment, *names, probability_of_improvement([*a.values()], [*b.values()]), test)
