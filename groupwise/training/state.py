"""The state of a run besides its weights: how far it has come, and the states of its stateful parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from groupwise.errors import CheckpointError


class Stateful(Protocol):
    """A part of a run that a checkpoint has to remember."""

    def state(self) -> Any: ...

    def load_state(self, state: Any) -> None: ...


@dataclass
class TrainState:
    """How far a run has come."""

    step: int = 0  # finished steps
    tokens: int = 0  # sampled tokens
    first: dict[str, float] = field(default_factory=dict)  # metrics of the first evaluation
    last: dict[str, float] = field(default_factory=dict)  # and of the last one
    evaluated_at: int = -1  # the last evaluation's step
    best: dict[str, Any] | None = None  # {"step": …, "value": …, "metrics": {…}} of the best evaluation
    evaluations_since_best: int = 0

    def add_evaluation(self, metrics: dict[str, float], metric: str) -> bool:
        """Take in an evaluation of the current weights; whether it is the best of the trained ones so far."""
        self.evaluated_at, self.last = self.step, metrics
        self.first = self.first or metrics
        if not self.step:
            return False
        if self.best is not None and metrics[metric] <= self.best["value"]:
            self.evaluations_since_best += 1
            return False
        self.best, self.evaluations_since_best = {"step": self.step, "value": metrics[metric], "metrics": metrics}, 0
        return True

    @property
    def measured(self) -> dict[str, float]:
        """The metrics of the exported policy: the best evaluation's, or the last one's."""
        return self.last if self.best is None else dict(self.best["metrics"])

    @property
    def exported_step(self) -> int:
        """The step of the exported policy."""
        return self.step if self.best is None else int(self.best["step"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def load_json(self, values: Mapping[str, Any]) -> None:
        """Take all values from what `to_json` gave."""
        for entry in fields(self):
            if entry.name not in values:
                raise CheckpointError(f"the checkpoint's state lacks {entry.name!r}; resume from another checkpoint")
            setattr(self, entry.name, values[entry.name])
