"""What is compared: the runs, and whether comparing them is fair."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real

import numpy as np

from groupwise.errors import InputError
from groupwise.stats import Array

AXES = {"env_steps": "environment steps", "cpu_seconds": "CPU seconds"}
MEASURES = {"greedy_return": "greedy return", "sampled_return": "sampled return"}


@dataclass(frozen=True)
class Run:
    """One training run: what it was, and what it measured on the way."""

    environment: str
    algorithm: str  # the label under which it is compared
    seed: int
    rows: Sequence[Mapping[str, float]]  # one per evaluation, in order; a diagnostic may be absent, NaN or None
    budget: int  # environment steps it was allowed
    threshold: float | None  # the return that counts as solved; None: the environment has none
    solved_at: tuple[int, float] | None  # environment steps and CPU seconds; None: not solved

    def __str__(self) -> str:
        return f"{self.algorithm!r} on {self.environment!r} (seed {self.seed})"

    @property
    def time_to_solve(self) -> tuple[float, float]:
        """Environment steps and CPU seconds, infinite if it was not solved."""
        return self.solved_at or (math.inf, math.inf)

    def column(self, name: str) -> Array:
        """An axis or a measure, which every row has."""
        return np.array([row[name] for row in self.rows], dtype=np.float64)

    def last(self, name: str) -> float:
        """The same, at the run's end."""
        return float(self.rows[-1][name])


Row = dict[str, list[Run]]  # one environment's runs, by algorithm
Cells = dict[str, Row]  # all runs, by environment


def cells_of(runs: Iterable[Run]) -> Cells:
    """The runs by environment and algorithm, each in the order in which they were given."""
    cells: Cells = {}
    for run in runs:
        cells.setdefault(run.environment, {}).setdefault(run.algorithm, []).append(run)
    return cells


def algorithms_of(cells: Cells) -> list[str]:
    return list(dict.fromkeys(algorithm for row in cells.values() for algorithm in row))


def any_run(row: Row) -> Run:
    """One that stands for its environment: all have the same budget and threshold."""
    return next(iter(row.values()))[0]


def is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def check_runs(runs: Sequence[Run]) -> None:
    """Raise InputError unless each run is whole, none is there twice, and those of an environment are comparable."""
    if not runs:
        raise InputError("there are no runs to compare")
    seen: set[tuple[str, str, int]] = set()
    first: dict[str, Run] = {}
    for run in runs:
        _check_whole(run)
        if (run.environment, run.algorithm, run.seed) in seen:
            raise InputError(f"{run} was given twice; leave one out, or give it another label")
        seen.add((run.environment, run.algorithm, run.seed))
        _check_fair(first.setdefault(run.environment, run), run)


def _check_whole(run: Run) -> None:
    if not run.rows:
        raise InputError(f"{run} has no rows: it was never evaluated")
    for number, row in enumerate(run.rows, start=1):
        for name in (*AXES, *MEASURES):
            if not is_number(row.get(name)):
                raise InputError(f"{run}: row {number} needs a finite number as {name}, got {row.get(name)!r}")
    for name in AXES:
        if any(later < earlier for earlier, later in pairwise(run.column(name))):
            raise InputError(f"{run}: {name} falls from one row to the next; rows must be in order")
    if run.threshold is None and run.solved_at is not None:
        raise InputError(f"{run} is said to be solved, but has no threshold")


def _check_fair(one: Run, other: Run) -> None:
    for name in ("budget", "threshold"):
        if getattr(one, name) != getattr(other, name):
            raise InputError(
                f"{one} has the {name} {getattr(one, name)}, {other} has {getattr(other, name)}; runs on one "
                "environment can be compared only if they have the same"
            )
