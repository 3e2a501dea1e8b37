"""Warnings about a run that goes wrong: each has a name, says what was measured and which settings to change.

Most checks look at means over the last `WINDOW` steps, so a single odd batch does not trigger them, and several compare
with the start of the run. The same warning is given at most once in `QUIET` steps. What the checks remember is saved
with the run: a resumed run gives the same warnings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from numbers import Real
from typing import Any

from groupwise.config import Recipe
from groupwise.text import Say
from groupwise.training.monitor.checks import CHECKS, EVALUATION_CHECKS
from groupwise.training.monitor.checks.base import WINDOW, Check, CheckFunction, Evaluated, Problem, RecentSteps
from groupwise.training.monitor.timing_names import is_timing

QUIET = 50  # steps before the same warning is given again


class HealthChecks:
    """Runs the checks after each step and evaluation.

    metric: the task's grade. extra: the task's own checks, by name. held_out: the main metric of evaluations.
    """

    def __init__(
        self,
        metric: str | None = None,
        extra: Mapping[str, CheckFunction] | None = None,
        *,
        held_out: str | None = None,
    ) -> None:
        self.metric, self.held_out = metric, held_out
        own = {name: Check(look, name.replace("_", " ")) for name, look in (extra or {}).items()}
        self.checks: dict[str, Check] = {**CHECKS, **own}
        self._window: list[dict[str, float]] = []
        self._prompts: list[int] = []
        self._warned_at: dict[str, int] = {}
        self._start: dict[str, float] = {}
        self._varied: set[str] = set()
        self._best: Evaluated | None = None

    def observe(self, step: int, metrics: Mapping[str, Any], recipe: Recipe) -> dict[str, str]:
        """The warnings after a step (counted from 1), by name, given its metrics and its settings."""
        return self._not_repeated(step, self.look(step, metrics, recipe))

    def observe_evaluation(self, step: int, metrics: Mapping[str, Any], recipe: Recipe) -> dict[str, str]:
        """The warnings after an evaluation, by name."""
        return self._not_repeated(step, self.look_at_evaluation(step, metrics, recipe))

    @property
    def warned(self) -> list[str]:
        """The names of the warnings that were given so far."""
        return list(self._warned_at)

    def look(self, step: int, metrics: Mapping[str, Any], recipe: Recipe) -> dict[str, Problem]:
        """Everything that is wrong after a step, also if it was said before."""
        newest = {name: float(value) for name, value in metrics.items() if _is_finite(value)}
        self._window = [*self._window, {name: v for name, v in newest.items() if not is_timing(name)}][-WINDOW:]
        self._prompts = [*self._prompts, recipe.train.prompts_per_step][-WINDOW:]
        self._varied |= _rewards({name: value for name, value in newest.items() if value})
        recent = self._recent(step, recipe, newest)
        full = len(self._window) == WINDOW
        if full and not self._start and step < 2 * WINDOW:
            self._start = recent.means("")
            recent = replace(recent, start=self._start)
        return _problems({name: check for name, check in self.checks.items() if full or check.at_once}, recent)

    def look_at_evaluation(self, step: int, metrics: Mapping[str, Any], recipe: Recipe) -> dict[str, Problem]:
        """Everything that is wrong after an evaluation, also if it was said before."""
        names = [f"{self.held_out}{bound}" for bound in ("", "_low", "_high")]
        if not all(_is_finite(metrics.get(name)) for name in names):
            return {}
        recent, (value, low, high) = self._recent(step, recipe, {}), (float(metrics[name]) for name in names)
        last = Evaluated(step, value, low, high, recent.mean("reward"))
        best = self._best
        if best is not None and best.reward is None:  # measured before the first step
            best = replace(best, reward=self._start.get("reward"))
        problems = _problems(EVALUATION_CHECKS, replace(recent, held_out=self.held_out, best=best, last=last))
        if best is None or last.value > best.value:
            self._best = last
        return problems

    def state(self) -> dict[str, Any]:
        return {
            "window": list(self._window),
            "questions": list(self._prompts),
            "said": dict(self._warned_at),
            "start": dict(self._start),
            "varied": sorted(self._varied),
            "best": None if self._best is None else asdict(self._best),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. One of an earlier version lacks the start: what compares with it is silent."""
        self._window, self._prompts = list(state["window"]), list(state["questions"])
        self._warned_at = dict(state["said"])
        self._start = dict(state.get("start", {}))
        self._varied = set(state.get("varied", _rewards(*self._window)))
        best = state.get("best")
        self._best = None if best is None else Evaluated(**best)

    def _recent(self, step: int, recipe: Recipe, newest: Mapping[str, float]) -> RecentSteps:
        start, varied = self._start, frozenset(self._varied)
        return RecentSteps(step, self._window, recipe, self.metric, sum(self._prompts), start, varied, newest)

    def _not_repeated(self, step: int, problems: Mapping[str, Problem]) -> dict[str, str]:
        warnings = {}
        for name, problem in problems.items():
            if name not in self._warned_at or step - self._warned_at[name] >= QUIET:
                self._warned_at[name] = step
                warnings[name] = problem.text
        return warnings


def say_warnings(warnings: Mapping[str, str], step: int, say: Say) -> dict[str, float]:
    """Say each warning; returns the metrics that record them."""
    for name, message in warnings.items():
        say(f"step {step}: warning {name}: {message}")
    return {f"warnings/{name}": 1.0 for name in warnings}


def with_values(text: str, recipe: Recipe) -> str:
    """A text with the present values of the settings in it: "<loss.kl_coef>" becomes "loss.kl_coef, now 0.3"."""

    def shown(match: re.Match[str]) -> str:
        value = recipe.get(match[1])
        return f"{match[1]}, now {value:g}" if isinstance(value, float) else f"{match[1]}, now {value!r}"

    return re.sub(r"<(\w+\.\w+)>", shown, text)


def _problems(checks: Mapping[str, Check], recent: RecentSteps) -> dict[str, Problem]:
    problems = {}
    for name, check in checks.items():
        problem = Problem.of(check.look(recent))
        if problem is not None:
            message, remedy = (with_values(text, recent.recipe) for text in (problem.message, problem.remedy))
            problems[name] = replace(problem, message=message, remedy=remedy)
    return problems


def _rewards(*rows: Mapping[str, float]) -> set[str]:
    """The reward functions whose standard deviation is in one of these rows."""
    matches = (re.fullmatch(r"rewards/(.+)/std", name) for row in rows for name in row)
    return {match[1] for match in matches if match}


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float, Real)) and math.isfinite(value)
