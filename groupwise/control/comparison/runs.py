"""The runs of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.stats import FloatArray

AXES = {"env_steps": "environment steps", "cpu_seconds": "CPU seconds"}
MEASURES = {"greedy_return": "greedy return", "sampled_return": "sampled return"}


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
