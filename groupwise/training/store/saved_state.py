"""What ``state.json`` of a checkpoint holds: its parts, their types and their bounds.

Everything that a resumed run computes with is checked here, so that a part that is missing, of another type or absurd
is a damaged checkpoint, and not an error in the middle of a later step.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from groupwise.errors import CheckpointError
from groupwise.text import excerpt

Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
Step = Annotated[int, Field(ge=-1, lt=2**53)]  # -1: not yet
Metrics = dict[str, float | str | None]
ROLLOUTS, UPDATES = "rollouts", "updates"


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Best(_Part):
    step: Count
    value: float | str | None
    metrics: Metrics


class _Train(_Part):
    step: Count
    tokens: Count
    first: Metrics
    first_evaluated_at: Step
    last: Metrics
    evaluated_at: Step
    evaluations: Count
    best: _Best | None
    evaluations_since_improvement: Count


class _Order(_Part):
    rows: Positive
    shuffle: bool
    seed: Count
    epoch: Count
    position: Count
    deferred: list[Count]
    looked: Count = 0  # of an order by pass rates
    skipped: Count = 0

    @model_validator(mode="after")
    def _check_rows(self) -> _Order:
        if self.position > self.rows or any(row >= self.rows for row in self.deferred):
            raise ValueError(f"it has rows beyond the {self.rows} that there are")
        return self


class _HealthChecks(_Part):
    window: list[dict[str, float]]
    questions: list[Count]
    said: dict[str, Count]
    # Checkpoints of earlier versions do not have these.
    start: dict[str, float] = Field(default_factory=dict)
    varied: list[str] = Field(default_factory=list)
    best: dict[str, float | None] | None = None


class _Rollouts(_Part):
    next_number: Count
    redraw: list[Count]
    lost: list[Count]
    ready: list[Count]
    unfinished: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]  # group and row

    @model_validator(mode="after")
    def _check_numbers(self) -> _Rollouts:
        numbers = [*self.lost, *self.ready, *(number for number, _ in self.unfinished)]
        if len(set(numbers)) < len(numbers) or any(number >= self.next_number for number in numbers):
            raise ValueError(f"its groups are not distinct numbers below {self.next_number}")
        return self


class _Updates(_Part):
    rollouts: Count | None
    iterations: Positive
    made: Count
    values: dict[str, float | int]
    totals: list[dict[str, int | float]]  # `read_minibatches` checks them

    @model_validator(mode="after")
    def _check_made(self) -> _Updates:
        if self.made >= max(1, self.iterations * len(self.totals)):
            raise ValueError(f"it has made {self.made} of {self.iterations * len(self.totals)} updates")
        return self


class _Entropy(_Part):
    coefficient: float
    entropy: float


class _UserOptimizer(_Part):
    groups: list[dict[str, Any]]
    scheduler: dict[str, Any] | None


class _State(_Part):
    step: Count
    refreshes: Count
    train: _Train
    order: _Order
    pairs: _Order | None
    schedule: dict[str, Any]  # `Schedule.load_state` checks it
    health_checks: _HealthChecks
    questions: dict[Annotated[str, Field(pattern=r"^[0-9]{1,15}$")], list[float]]
    token_budget: Positive
    max_num_seqs: Positive
    threads: Annotated[int, Field(ge=1, le=4096)]
    supervised: bool
    rollouts: _Rollouts | None = None  # of an asynchronous run
    updates: _Updates | None = None  # of a run with train.update_per_step
    entropy: _Entropy | None = None  # of a run with loss.entropy_target
    user_optimizer: _UserOptimizer | None = None

    @model_validator(mode="after")
    def _check_steps(self) -> _State:
        if self.train.step != self.step:
            raise ValueError(f"it is of step {self.step} and of step {self.train.step}")
        return self


def check_state(state: dict[str, Any], step: int, file: Any) -> dict[str, Any]:
    """The state of the checkpoint of ``step``, as it was read from ``file``, or a CheckpointError that names a part."""
    try:
        checked = _State.model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        part = ".".join(map(str, first["loc"])) or "the state"
        got = "" if first["type"] == "missing" else f", got {excerpt(first['input'])}"
        raise CheckpointError(f"{file} is damaged: {part[:100]}: {first['msg']}{got}") from error
    except RecursionError as error:
        raise CheckpointError(f"{file} is damaged: it is nested too deeply") from error
    if checked.step != step:
        raise CheckpointError(f"{file} is damaged: it is of step {checked.step}, not of step {step}")
    return state
