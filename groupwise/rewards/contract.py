"""The scoring contract: what a reward function is given, what it may return, and what happens if it breaks that.

A reward is ``def reward(prompts, completions, **columns) -> list[float | None]``, plain or async: one number per
completion, None where it does not apply. Functions written for TRL 1.16 work unchanged: they are called with the same
keywords. What deviates is on purpose: a function without ``**kwargs`` gets only what it names, NaN is refused (None
says it), and a fault is either an error that names its row or a row that is left out and counted, never a 0.
"""

from __future__ import annotations

import difflib
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from groupwise.errors import InputError, RewardError, check_choice
from groupwise.rewards.calls import Call, Outcome, bind, innermost, is_async, run_async, run_sync
from groupwise.rewards.rows import (
    LISTS,
    SERVICES,
    Batch,
    BatchFailure,
    Log,
    RowFailure,
    RowReward,
    cell_of,
    cells_of,
    joined,
    make_batch,
    reason_of,
    seen_columns,
)
from groupwise.rewards.text import excerpt

ON_ERROR = ("stop", "drop")
LOST_BATCHES = 3  # as many batches in a row without one scored row stop the run, whatever on_error says


@dataclass(frozen=True)
class RewardFunction:
    """A reward with its name and the weight that its numbers get in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"a reward's name must be a text, got {self.name!r}")
        if not callable(self.function):
            raise InputError(f"reward {self.name!r} must be a function, got {excerpt(self.function)}")
        if not _is_number(self.weight):
            raise InputError(f"the weight of reward {self.name!r} must be a finite number, got {self.weight!r}")


def named(function: Callable[..., Any], weight: float = 1.0, name: str | None = None) -> RewardFunction:
    """A reward that is called what its function is called, unless ``name`` says otherwise."""
    if name is None:
        inner = innermost(function)
        name = getattr(inner, "__name__", type(inner).__name__)
    return RewardFunction(name, function, weight)


@dataclass(frozen=True)
class Failure:
    """A row that a function could not score.

    Without a row: the function failed on the batch, but on none of its rows alone, so all of them were kept.
    """

    function: str
    row: int | None
    reason: str


@dataclass(frozen=True)
class Scores:
    """What the K functions said of B completions."""

    rewards: Tensor  # (B, K) float64 on the CPU; NaN where a function returned None, and in dropped rows
    dropped: Tensor  # (B,) bool: a function failed here, so the row counts nowhere
    failures: tuple[Failure, ...]
    extra: dict[str, list[Any]]  # from log_extra: a column of B values
    metrics: dict[str, float]  # from log_metric: the mean of what was logged
    seconds: dict[str, float]  # per function


class Scorer:
    """Scores batches with some reward functions, in their order.

    ``timeout`` is the time in seconds that a function has for one batch; functions then run in threads of their own.
    With None there is no limit, and plain functions run in the caller's thread. ``on_error`` says what happens to a
    row that a function cannot score: ``"stop"`` raises a `RewardError`, ``"drop"`` leaves the row out.
    """

    def __init__(
        self,
        functions: Iterable[RewardFunction | Callable[..., Any]],
        *,
        timeout: float | None = 60.0,
        on_error: str = "stop",
    ) -> None:
        self.functions = tuple(each if isinstance(each, RewardFunction) else named(each) for each in functions)
        if not self.functions:
            raise InputError("there is no reward function to score with; give at least one")
        names = [each.name for each in self.functions]
        for name in names:
            if names.count(name) > 1:
                raise InputError(
                    f"{names.count(name)} reward functions have the name {name!r}; give each a name of its own: "
                    "named(function, name='…')"
                )
        if timeout is not None and not (_is_number(timeout) and 0 < timeout <= threading.TIMEOUT_MAX):
            raise InputError(f"timeout must be a number of seconds above 0, or None for no limit, got {timeout!r}")
        check_choice("on_error", on_error, ON_ERROR)
        self.timeout = timeout
        self.on_error = on_error
        self._lost = 0

    def check_arguments(self, columns: Iterable[str]) -> None:
        """Raise a `RewardError` unless every function gets what it asks for from data that has these columns."""
        self._check_names([*LISTS, *SERVICES, *seen_columns(columns)])

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[Any] | None = None,
        trainer_state: Any = None,
    ) -> Scores:
        """Call every function on the batch: the plain ones one after the other, then the async ones all at once."""
        batch = make_batch(prompts, completions, columns, completion_ids, trainer_state)
        scored: dict[str, _Column] = {}
        if len(batch):
            self._check_names(batch.names)
            plain = [each for each in self.functions if not is_async(each.function)]
            for each in plain:
                scored[each.name] = self._judge(each, batch, self._call(each, batch, self.timeout))
            at_once = [each for each in self.functions if is_async(each.function)]
            ended = self._call_async([(each, batch) for each in at_once])
            for each, end in zip(at_once, ended, strict=True):
                scored[each.name] = self._judge(each, batch, end)
        return self._scores([scored.get(each.name, _Column(each.name, [])) for each in self.functions], batch)

    def _check_names(self, names: Sequence[str]) -> None:
        for each in self.functions:
            missing = bind(each.function, names).missing
            if missing:
                columns = [name for name in names if name not in LISTS and name not in SERVICES]
                nearest = difflib.get_close_matches(missing[0], names, n=1)
                raise RewardError(
                    f"reward {each.name!r} needs the argument {missing[0]!r}, which there is not"
                    f"{f'; did you mean {nearest[0]!r}?' if nearest else ''} (columns of the data: "
                    f"{', '.join(map(repr, columns)) or 'none'}; besides these: "
                    f"{', '.join(map(repr, (name for name in names if name not in columns)))})"
                )

    def _call(self, each: RewardFunction, batch: Batch, timeout: float | None) -> _End:
        log = Log()
        return _End(run_sync(_ready(each, batch, log), timeout), log)

    def _call_async(self, calls: Sequence[tuple[RewardFunction, Batch]]) -> list[_End]:
        logs = [Log() for _ in calls]
        ready = [_ready(each, batch, log) for (each, batch), log in zip(calls, logs, strict=True)]
        outcomes = run_async(ready, self.timeout) if ready else []
        return [_End(outcome, log) for outcome, log in zip(outcomes, logs, strict=True)]

    def _judge(self, each: RewardFunction, batch: Batch, end: _End) -> _Column:
        """A function's column from its call on the batch, and where that failed from calls row by row."""
        outcome, stop = end.outcome, self.on_error == "stop"
        if outcome.late is not None:
            if stop:
                self._refuse(each, batch, outcome.late)
            return _Column(each.name, [RowFailure(outcome.late)] * len(batch), seconds=outcome.seconds)
        if outcome.error is None:
            column = _Column(each.name, outcome.value, end.log, outcome.seconds)
        elif stop and isinstance(outcome.error, BatchFailure):
            self._refuse(each, batch, str(outcome.error))
        else:
            column = self._row_by_row(each, batch, outcome.seconds)
            if not column.failures:
                reason = f"{reason_of(outcome.error)}; each of its rows by itself can be scored"
                if stop:
                    self._refuse(each, batch, reason, outcome.error)
                column.failures.append(Failure(each.name, None, reason))
        if stop and column.failures:
            self._refuse_rows(each, batch, column)
        return column

    def _row_by_row(self, each: RewardFunction, batch: Batch, seconds: float) -> _Column:
        """Which rows of a failed batch can be scored alone. Together they get as much time as the batch had."""
        rows = [batch.row(number) for number in range(len(batch))]
        start = time.perf_counter()
        if is_async(each.function):
            ends = self._call_async([(each, row) for row in rows])
        else:
            ends = []
            for row in rows:
                left = None if self.timeout is None else self.timeout - (time.perf_counter() - start)
                if left is None or left > 0:
                    ends.append(self._call(each, row, left))
                else:
                    ends.append(_End(Outcome(late=f"not tried: the rows before it took the {self.timeout:g} s"), Log()))
        cells = [cell_of(end.outcome) for end in ends]
        log = joined([None if isinstance(cell, RowFailure) else end.log for cell, end in zip(cells, ends, strict=True)])
        return _Column(each.name, cells, log, seconds + time.perf_counter() - start)

    def _refuse(self, each: RewardFunction, batch: Batch, reason: str, error: BaseException | None = None) -> NoReturn:
        raise RewardError(
            f"reward {each.name!r} failed on a batch of {len(batch)} (first completion {batch.excerpt(0)}): {reason}"
        ) from error

    def _refuse_rows(self, each: RewardFunction, batch: Batch, column: _Column) -> NoReturn:
        first = column.failures[0]
        cell = column.cells[first.row or 0]
        raise RewardError(
            f"reward {each.name!r} failed on row {first.row} (completion {batch.excerpt(first.row or 0)}): "
            f"{first.reason}; it fails on {len(column.failures)} of {len(batch)} rows "
            "(on_error='drop' would leave them out)"
        ) from (cell.error if isinstance(cell, RowFailure) else None)

    def _scores(self, columns: Sequence[_Column], batch: Batch) -> Scores:
        failures = tuple(failure for column in columns for failure in column.failures)
        rewards = torch.full((len(batch), len(columns)), torch.nan, dtype=torch.float64)
        dropped = torch.zeros(len(batch), dtype=torch.bool)
        extra: dict[str, list[Any]] = {}
        metrics: dict[str, list[float]] = {}
        for number, column in enumerate(columns):
            if column.cells:
                numbers = [math.nan if cell is None or isinstance(cell, RowFailure) else cell for cell in column.cells]
                rewards[:, number] = torch.tensor(numbers, dtype=torch.float64)
                dropped |= torch.tensor([isinstance(cell, RowFailure) for cell in column.cells])
            for name, values in column.log.extra.items():  # a column that an earlier function has is not mixed with it
                extra[name if name not in extra else f"{column.name}/{name}"] = values
            for name, logged in column.log.metrics.items():
                metrics.setdefault(name, []).extend(logged)
        rewards[dropped] = torch.nan
        if len(batch):
            self._lost = self._lost + 1 if bool(dropped.all()) else 0
        if self._lost >= LOST_BATCHES:
            raise RewardError(
                f"no row of the last {self._lost} batches could be scored; reward {failures[0].function!r} "
                f"(completion {batch.excerpt(failures[0].row or 0)}): {failures[0].reason}"
            )
        return Scores(
            rewards=rewards,
            dropped=dropped,
            failures=failures,
            extra=extra,
            metrics={name: sum(numbers) / len(numbers) for name, numbers in metrics.items()},
            seconds={column.name: column.seconds for column in columns},
        )


@dataclass(frozen=True)
class _End:
    """How a call ended, and what was logged in it."""

    outcome: Outcome
    log: Log


@dataclass
class _Column:
    """A function's cells of a batch."""

    name: str
    cells: list[RowReward]
    log: Log = field(default_factory=Log)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.failures = [
            Failure(self.name, row, cell.reason) for row, cell in enumerate(self.cells) if isinstance(cell, RowFailure)
        ]


def weighted_total(rewards: Tensor, weights: Sequence[float]) -> Tensor:
    """One reward per sample ``(B,)`` from ``(B, K)``: the weighted sum of what was scored, NaN where nothing was."""
    factors = rewards.new_tensor(list(weights))
    return torch.where(rewards.isnan().all(1), math.nan, (rewards * factors).nansum(1))


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def _ready(each: RewardFunction, batch: Batch, log: Log) -> Call:
    return Call(batch.call(each.function, log), lambda result: cells_of(result, len(batch), log))
