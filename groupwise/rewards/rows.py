"""What goes into a call of a reward function and what comes out: a batch of rows, what is logged, a cell per row."""

from __future__ import annotations

import importlib
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

from groupwise.errors import DataError, InputError
from groupwise.rewards.calls import Binding, Outcome, bind
from groupwise.rewards.text import excerpt, text_of

LISTS = ("prompts", "completions", "completion_ids")
SERVICES = ("trainer_state", "log_extra", "log_metric")
NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # as with TRL: what they say is in the lists already


class BatchFailure(Exception):
    """What came back cannot be told apart by rows: not a list, or not as long as the batch."""


@dataclass(frozen=True)
class RowFailure:
    """Stands where a row's reward should be."""

    reason: str
    error: BaseException | None = None


RowReward = float | None | RowFailure


class Log:
    """What a function logs during one call; each call has its own, so that timing cannot mix them."""

    def __init__(self) -> None:
        self.extra: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        if not isinstance(column, str) or isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise InputError(f"log_extra needs a column's name and a list of values, got {column!r}, {excerpt(values)}")
        self.extra.setdefault(column, []).extend(values.tolist() if hasattr(values, "tolist") else values)

    def log_metric(self, name: str, value: float) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"log_metric({name!r}, …) needs a number, got {excerpt(value)}") from error
        self.metrics.setdefault(str(name), []).append(number)


def joined(logs: Sequence[Log | None]) -> Log:
    """The logs of single rows as that of their batch; a row that has none, or not that column, gets None there."""
    whole = Log()
    for row, log in enumerate(logs):
        for column, values in log.extra.items() if log else ():
            whole.extra.setdefault(column, [None] * len(logs))[row] = values[0]
        for name, numbers in log.metrics.items() if log else ():
            whole.metrics.setdefault(name, []).extend(numbers)
    return whole


@dataclass(frozen=True)
class Batch:
    """The lists of a batch by the names of their arguments: prompts, completions, and the columns of the data."""

    lists: dict[str, list[Any]]
    trainer_state: Any = None

    def __len__(self) -> int:
        return len(self.lists["completions"])

    @property
    def names(self) -> list[str]:
        return [*self.lists, *SERVICES]

    def row(self, number: int) -> Batch:
        """One row as a batch of its own."""
        return Batch({name: [values[number]] for name, values in self.lists.items()}, self.trainer_state)

    def excerpt(self, number: int) -> str:
        """The beginning of a row's completion."""
        completion = self.lists["completions"][number]
        try:
            return excerpt(text_of(completion))
        except InputError:
            return excerpt(completion)

    def call(self, function: Callable[..., Any], log: Log) -> Callable[[], Any]:
        """The call of the function on this batch, with lists of its own that it may change as it likes."""
        binding: Binding = bind(function, self.names)
        arguments: dict[str, Any] = {name: list(values) for name, values in self.lists.items()}
        arguments |= {"trainer_state": self.trainer_state, "log_extra": log.log_extra, "log_metric": log.log_metric}
        positional = [arguments[name] for name in binding.positional]
        keywords = {name: arguments[name] for name in binding.keywords}
        return lambda: function(*positional, **keywords)


def make_batch(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    completion_ids: Sequence[Any] | None,
    trainer_state: Any,
) -> Batch:
    """A batch of lists that are equally long, or an `InputError` that names the one that is not."""
    given: dict[str, Sequence[Any]] = {"prompts": prompts, "completions": completions}
    if completion_ids is not None:
        given["completion_ids"] = completion_ids
    given |= {name: columns[name] for name in seen_columns(columns)}
    for name, values in given.items():
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
            raise InputError(f"{name} must be a list with one entry per completion, got {excerpt(values)}")
        if len(values) != len(completions):
            raise InputError(f"{name} has {len(values)} entries for {len(completions)} completions")
    return Batch({name: list(values) for name, values in given.items()}, trainer_state)


def seen_columns(columns: Iterable[str]) -> list[str]:
    """The columns that rewards see; a name that an argument has already is refused."""
    seen = [name for name in columns if name not in NOT_COLUMNS]
    for name in seen:
        if not isinstance(name, str):
            raise DataError(f"the data has a column {name!r}; a reward gets columns by name, so it must be a text")
        if name in LISTS or name in SERVICES:
            raise DataError(f"the data has a column {name!r}, which is an argument of every reward; rename it")
    return seen


def cells_of(result: Any, number: int, log: Log) -> list[RowReward]:
    """What a function returned for ``number`` rows, row by row; `BatchFailure` if it cannot be told apart by rows."""
    values = _listed(result, number)
    for column, logged in log.extra.items():
        if len(logged) != number:
            raise BatchFailure(f"logged {_count(len(logged), 'value')} as {column!r} for {_count(number, 'row')}")
    return [_cell(value) for value in values]


def _listed(result: Any, number: int) -> list[Any]:
    kind = type(result).__name__
    if hasattr(result, "shape") and hasattr(result, "tolist"):  # a tensor, an array, a column of a table
        if tuple(result.shape) != (number,):
            raise BatchFailure(
                f"returned a {kind} of shape {tuple(result.shape)}; expected ({number},), one per completion"
            )
        values: list[Any] = result.tolist()
        return values
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes, Mapping, Set)):
        missing = "; is a return missing?" if result is None else ""
        raise BatchFailure(f"returned {excerpt(result)} ({kind}), not a list with one number per completion{missing}")
    values = list(result if hasattr(result, "__len__") else islice(result, number + 1))
    if len(values) != number:
        more = "more than " if len(values) > number and not hasattr(result, "__len__") else ""
        count = number if more else len(values)
        raise BatchFailure(
            f"returned {more}{_count(count, 'value')} for {_count(number, 'row')}; one per completion is needed"
        )
    return values


def _cell(value: Any) -> RowReward:
    if value is None:
        return None
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a single number of torch or NumPy
        value = value.item()
    if isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    kind = "" if isinstance(value, float) else f" ({type(value).__name__})"
    return RowFailure(f"returned {excerpt(value)}{kind}; a reward is a finite number, or None where it does not apply")


def cell_of(outcome: Outcome) -> RowReward:
    """How a call on a single row ended."""
    if outcome.late is not None:
        return RowFailure(outcome.late)
    if outcome.error is not None:
        return RowFailure(reason_of(outcome.error), outcome.error)
    cell: RowReward = outcome.value[0]
    return cell


def reason_of(error: BaseException) -> str:
    """An exception of a reward function in half a sentence, with the line of its own file."""
    if isinstance(error, BatchFailure):
        return str(error)
    text = str(error)
    reason = f"raised {type(error).__name__}" + (f": {text if len(text) <= 300 else text[:299] + '…'}" if text else "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    if frames:  # what it calls may lie deep in a library; the function's own line says more
        own = [frame for frame in frames if frame.filename == frames[0].filename][-1]
        reason += f" ({Path(own.filename).name}, line {own.lineno})"
    if "only works in main thread" in text:
        reason += "; to run it in the caller's thread, set the time limit to None"
    return reason


def _is_machinery(file: str) -> bool:
    """Whether a line of a traceback is how we call or import a function, rather than the function."""
    ours = Path(__file__).parent
    return file.startswith("<frozen importlib") or Path(file) in (
        *(ours / name for name in ("calls.py", "load.py", "rows.py")),
        Path(importlib.__file__),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
