"""What a health check looks at, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from groupwise.config import Recipe
from groupwise.stats import mean

WINDOW = 10  # steps that means are taken over
SOLVED = 0.95  # share of right answers in training from which little spread and entropy are what was asked for
MORE_SPREAD = "use easier or harder questions, raise <sampling.samples_per_prompt>, or <sampling.temperature>"

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of the main held-out metric with its 95 % interval, and the training reward at that time."""

    step: int
    value: float
    low: float
    high: float
    reward: float | None


@dataclass(frozen=True)
class RecentSteps:
    """The metrics of the last `WINDOW` steps, the settings of the newest, and how the run was at its start."""

    step: int
    rows: Sequence[Mapping[str, float]]  # finite metrics, one row per step, without timings
    recipe: Recipe
    metric: str | None  # the task's grade
    prompts: int  # in all these steps
    start: Mapping[str, float] = field(default_factory=dict)  # means of the first `WINDOW` steps; empty if not known
    varied: frozenset[str] = frozenset()  # reward functions whose values have differed at least once in this run
    newest: Mapping[str, float] = field(default_factory=dict)  # metrics of the newest step, with timings
    held_out: str | None = None  # the main metric of evaluations
    best: Evaluated | None = None  # the best evaluation so far
    last: Evaluated | None = None  # the newest one

    @cached_property
    def _means(self) -> dict[str, tuple[float, int]]:
        """The mean of each metric over the steps that report it, and their number."""
        values: dict[str, list[float]] = {}
        for row in self.rows:
            for name, value in row.items():
                values.setdefault(name, []).append(value)
        return {name: (_mean(column), len(column)) for name, column in values.items()}

    def mean(self, name: str) -> float | None:
        """The mean over the steps that report a metric; None if none does."""
        return self._means[name][0] if name in self._means else None

    def means(self, prefix: str, *, missing_as_zero: bool = False) -> dict[str, float]:
        """The means of all metrics with a prefix, by the rest of their names."""
        steps = len(self.rows)
        return {
            name.removeprefix(prefix): average * (count / steps if missing_as_zero else 1)
            for name, (average, count) in self._means.items()
            if name.startswith(prefix)
        }

    @property
    def solved(self) -> bool:
        """Whether nearly all answers are right, so that little is left to learn."""
        right = self.mean(self.metric) if self.metric else None
        return right is not None and right >= SOLVED


def _mean(values: Sequence[float]) -> float:
    """Rounded once, so that the mean of equal numbers is that number; finite even if the sum is not."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return mean(values)


@dataclass(frozen=True)
class Problem:
    """What a check found, and what to change. A setting in angle brackets is shown with its present value:
    "raise <loss.kl_coef>" becomes "raise loss.kl_coef, now 0.3"."""

    message: str
    remedy: str = ""
    evidence: Mapping[str, float] = field(default_factory=dict)  # by metric
    severity: Severity = "warning"

    @classmethod
    def of(cls, result: Problem | str | None) -> Problem | None:
        """A check's result. A task's check may return a text: what is wrong, a semicolon, and what to change."""
        if not isinstance(result, str):
            return result
        message, _, remedy = result.partition("; ")
        return cls(message, remedy)

    @property
    def text(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


CheckFunction = Callable[[RecentSteps], "Problem | str | None"]


@dataclass(frozen=True)
class Check:
    """A named check. ``at_once``: it does not wait until `WINDOW` steps are done."""

    look: CheckFunction
    title: str
    at_once: bool = False
