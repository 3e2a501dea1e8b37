"""The runs of a comparison, and the checks that they are comparable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real

import numpy as np

from groupwise.errors import InputError
from groupwise.stats import FloatArray

AXES = {"env_steps": "environment steps", "cpu_seconds": "CPU seconds"}
MEASURES = {"greedy_return": "greedy return", "sampled_return": "sampled return"}


@dataclass(frozen=True)
class ComparedRun:
    """One finished training run and its evaluations."""

    environment: str
    algorithm: str  # its label in the comparison
    seed: int
    rows: Sequence[Mapping[str, float]]  # one per evaluation, in order; a diagnostic may be absent, NaN or None
    budget: int  # environment steps
    threshold: float | None  # the return that counts as solved; None: the environment has none
    solved_at: tuple[int, float] | None  # environment steps and CPU seconds; None: not solved

    def __str__(self) -> str:
        return f"{self.algorithm!r} on {self.environment!r} (seed {self.seed})"

    @property
    def time_to_solve(self) -> tuple[float, float]:
        """Environment steps and CPU seconds; infinite if the run was not solved."""
        return self.solved_at or (math.inf, math.inf)

    def column(self, name: str) -> FloatArray:
        """The values of an axis or a measure, one per row."""
        return np.array([row[name] for row in self.rows], dtype=np.float64)

    def last(self, name: str) -> float:
        """The final value of an axis or a measure."""
        return float(self.rows[-1][name])


RunsByAlgorithm = dict[str, list[ComparedRun]]  # of one environment
RunsByEnvironment = dict[str, RunsByAlgorithm]


def group_runs(runs: Iterable[ComparedRun]) -> RunsByEnvironment:
    """The runs by environment and algorithm, in the order of ``runs``."""
    groups: RunsByEnvironment = {}
    for run in runs:
        groups.setdefault(run.environment, {}).setdefault(run.algorithm, []).append(run)
    return groups


def list_algorithms(groups: RunsByEnvironment) -> list[str]:
    return list(dict.fromkeys(algorithm for by_algorithm in groups.values() for algorithm in by_algorithm))


def any_run(by_algorithm: RunsByAlgorithm) -> ComparedRun:
    """Any run of an environment: all have the same budget and threshold."""
    return next(iter(by_algorithm.values()))[0]


def is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def check_runs(runs: Sequence[ComparedRun]) -> None:
    """Raise InputError unless every run is complete and unique, and the runs of an environment are comparable."""
    if not runs:
        raise InputError("there are no runs to compare")
    seen: set[tuple[str, str, int]] = set()
    first: dict[str, ComparedRun] = {}
    for run in runs:
        _check_complete(run)
        if (run.environment, run.algorithm, run.seed) in seen:
            raise InputError(f"{run} was given twice; leave one out, or give it another label")
        seen.add((run.environment, run.algorithm, run.seed))
        _check_comparable(first.setdefault(run.environment, run), run)


def _check_complete(run: ComparedRun) -> None:
    if not run.rows:
        raise InputError(f"{run} has no rows: it was never evaluated")
    for number, row in enumerate(run.rows, start=1):
        for name in (*AXES, *MEASURES):
            if not is_number(row.get(name)):
                raise InputError(f"{run}: row {number} needs a finite number as {name}, got {row.get(name)!r}")
    for name in AXES:
        if any(later < earlier for earlier, later in pairwise(run.column(name))):
            raise InputError(f"{run}: {name} decreases from one row to the next; rows must be in order")
    if run.threshold is None and run.solved_at is not None:
        raise InputError(f"{run} is marked as solved, but has no threshold")


def _check_comparable(run: ComparedRun, other: ComparedRun) -> None:
    for name in ("budget", "threshold"):
        if getattr(run, name) != getattr(other, name):
            raise InputError(
                f"{run} has the {name} {getattr(run, name)}, {other} has {getattr(other, name)}; runs on one "
                "environment can be compared only if they have the same"
            )
