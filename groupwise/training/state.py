"""The state of a run besides its weights: how far it has come, and the states of its stateful parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from groupwise.rundir import from_json
from groupwise.text import plural


class Stateful(Protocol):
    """A part of a run that a checkpoint has to remember."""

    def state(self) -> Any: ...

    def load_state(self, state: Any) -> None: ...


class StatefulFiles(Stateful, Protocol):
    """A part whose state is in files of the checkpoint, too."""

    def write_files(self, folder: Path) -> None: ...

    def read_files(self, folder: Path) -> None: ...


@dataclass
class TrainState:
    """How far a run has come."""

    step: int = 0  # finished steps
    tokens: int = 0  # sampled tokens
    first: dict[str, float] = field(default_factory=dict)  # metrics of the first evaluation
    first_evaluated_at: int = -1  # its step; 0 is before training
    last: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation
    evaluated_at: int = -1  # its step
    evaluations: int = 0  # of trained weights, from which the best is selected
    best: dict[str, Any] | None = None  # {"step": …, "value": …, "metrics": {…}} of the best evaluation
    evaluations_since_improvement: int = 0

    def add_evaluation(self, metrics: dict[str, float], metric: str) -> bool:
        """Take in an evaluation of the current weights; whether it is the best of the trained ones so far.

        Of equal ones the last is the best, as it was trained longest, but it is no improvement.
        """
        self.evaluated_at, self.last = self.step, metrics
        if not self.first:
            self.first, self.first_evaluated_at = metrics, self.step
        if not self.step:
            return False
        self.evaluations += 1
        value, previous = metrics[metric], None if self.best is None else self.best["value"]
        if math.isnan(value):  # is not better than anything
            self.evaluations_since_improvement += 1
            return False
        if previous is not None and value <= previous:
            self.evaluations_since_improvement += 1
            if value < previous:
                return False
        else:
            self.evaluations_since_improvement = 0
        self.best = {"step": self.step, "value": value, "metrics": metrics}
        return True

    @property
    def measured(self) -> dict[str, float]:
        """The metrics of the exported policy: the best evaluation's, or the last one's."""
        return self.last if self.best is None else dict(self.best["metrics"])

    @property
    def exported_step(self) -> int:
        """The step of the exported policy."""
        return self.step if self.best is None else int(self.best["step"])

    @property
    def first_label(self) -> str:
        """What the first evaluation measured."""
        step = self.first_evaluated_at
        return "before training" if step == 0 else f"after {plural(step, 'step')} (first)"

    @property
    def measured_label(self) -> str:
        """What `measured` is. The best of several evaluations on the same rows is an optimistic figure."""
        step = self.evaluated_at if self.best is None else self.best["step"]
        return f"after {plural(int(step), 'step')}" + (f" (best of {self.evaluations})" if self.evaluations > 1 else "")

    def load_json(self, values: Mapping[str, Any]) -> None:
        """Take all values from a saved state, which `asdict` gave."""
        for entry in fields(self):
            setattr(self, entry.name, from_json(values[entry.name]))
