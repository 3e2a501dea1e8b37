"""Learning curves averaged over runs that were evaluated at different times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.control.comparison.runs import AXES, MEASURES, ComparedRun
from groupwise.stats import FloatArray, Interval, bootstrap_interval

MAX_POINTS = 200


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
