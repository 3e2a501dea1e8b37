"""The runs of a comparison, and their learning curves averaged over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.stats import FloatArray, Interval, bootstrap_interval

AXES = {"env_steps": "environment steps", "cpu_seconds": "CPU seconds"}
MEASURES = {"greedy_return": "greedy return", "sampled_return": "sampled return"}
MAX_POINTS = 200


@dataclass(frozen=True)
class ComparedRun:
    """One finished training run and its evaluations. The runs of an environment have the same budget and threshold."""

    environment: str
    algorithm: str  # its label in the comparison
    seed: int
    rows: Sequence[Mapping[str, float]]  # one per evaluation, in order; a diagnostic may be absent or NaN
    budget: int  # environment steps
    threshold: float | None  # the return that counts as solved; None: the environment has none
    solved_at: tuple[int, float] | None  # environment steps and CPU seconds; None: not solved

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
    return next(iter(by_algorithm.values()))[0]


@dataclass(frozen=True)
class MeanCurve:
    """The mean over runs with its interval, at each of ``x``."""

    x: FloatArray
    mean: Interval
    runs: int


MeanCurves = dict[tuple[str, str], MeanCurve]  # of one algorithm, by axis and measure


def mean_curve(runs: Sequence[ComparedRun], axis: str, measure: str) -> MeanCurve:
    """The mean of ``measure`` over the runs, along ``axis``.

    A run keeps its value until its next evaluation, and after its end. The curve starts where every run has a value
    and stops where half of the runs have ended, so that it never shows mostly the last values of finished runs.
    """
    times = [run.column(axis) for run in runs]
    grid = _grid(times)
    latest = [np.searchsorted(time, grid, side="right") - 1 for time in times]
    values = [run.column(measure)[rows] for run, rows in zip(runs, latest, strict=True)]
    return MeanCurve(grid, bootstrap_interval(values), len(runs))


def mean_curves(runs: Sequence[ComparedRun]) -> MeanCurves:
    """The mean curve of each measure along each axis."""
    return {(axis, measure): mean_curve(runs, axis, measure) for axis in AXES for measure in MEASURES}


def _grid(times: Sequence[FloatArray]) -> FloatArray:
    """The times of all evaluations between the curve's start and end, thinned out to `MAX_POINTS`."""
    start = max(time[0] for time in times)
    ends = sorted(time[-1] for time in times)
    end = max(start, ends[(len(ends) - 1) // 2])
    grid = np.unique(np.concatenate(times))
    grid = grid[(start <= grid) & (grid <= end)]
    kept = np.linspace(0, len(grid) - 1, min(len(grid), MAX_POINTS)).round().astype(int)
    return np.take(grid, kept)
