"""The reward contract: what a reward function receives, what it may return, and how its result is checked.

A reward is ``def reward(prompts, completions, **columns) -> list[float | None]``, plain or async: one number per
completion, None where it does not apply. Functions written for TRL 1.16 work unchanged. Three differences are
deliberate: a function without ``**kwargs`` gets only the arguments it names, NaN is refused (return None instead), and
a failed row is an error or is dropped and counted; it never becomes a reward of 0.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from inspect import Parameter
from itertools import islice
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import DataError, InputError, RewardError, did_you_mean
from groupwise.rewards.options import is_finite_number
from groupwise.text import excerpt, printable
from groupwise.user_code import describe_failure

LISTS = ("prompts", "completions", "completion_ids")
HELPERS = ("trainer_state", "log_extra", "log_metric")
HIDDEN_COLUMNS = ("prompt", "completion", "completion_ids")  # as in TRL: the lists hold them already


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its name and its weight in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"a reward's name must be a text, got {self.name!r}")
        if not callable(self.function):
            raise InputError(f"reward {self.name!r} must be a function, got {excerpt(self.function)}")
        if not is_finite_number(self.weight):
            raise InputError(f"the weight of reward {self.name!r} must be a finite number, got {self.weight!r}")

    @property
    def remedy(self) -> str:
        """What an error suggests if some completions cannot be scored."""
        return "scoring.on_error = 'drop' would leave them out"

    def check(self, result: Any, rows: int) -> list[RowReward]:
        """The rewards in what a call returned, or a `BatchFailure` if they cannot be assigned to rows."""
        return check_rewards(self.name, result, rows)

    @property
    def is_async(self) -> bool:
        """Whether a call returns a coroutine: an ``async def``, also as a method, in a partial or as ``__call__``."""
        function = _without_partial(self.function)
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def choose_arguments(self, available: Sequence[str]) -> tuple[list[str], list[str]]:
        """The names of the positional and of the keyword arguments to pass, or a `RewardError` if one is missing.

        All are passed by keyword, as TRL does, except to positional-only parameters. The first two of these are the
        prompts and the completions, whatever their names are; these two also go to a function with only ``*args`` and
        to a builtin without a signature.
        """
        try:
            parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):
            return ["prompts", "completions"], []
        kinds = [parameter.kind for parameter in parameters]
        if kinds == [Parameter.VAR_POSITIONAL]:
            return ["prompts", "completions"], []
        names = {parameter.name for parameter in parameters}
        positional: list[str] = []
        keywords: list[str] = []
        for place, parameter in enumerate(parameters):
            name, chosen = parameter.name, keywords
            if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                continue
            if parameter.kind is Parameter.POSITIONAL_ONLY:
                chosen = positional
                if name not in available and place < 2 and LISTS[place] not in names:
                    name = LISTS[place]
            if name in available and (chosen is keywords or len(positional) == place):  # without a gap before it
                chosen.append(name)
            elif parameter.default is Parameter.empty:
                raise RewardError(
                    f"reward {self.name!r} needs the argument {name!r}, which does not exist"
                    f"{did_you_mean(name, available)} (there are: {', '.join(map(repr, available))})"
                )
        if Parameter.VAR_KEYWORD in kinds:
            keywords = [name for name in available if name not in positional]
        return positional, keywords


def named(function: Callable[..., Any], weight: float = 1.0, name: str | None = None) -> RewardFunction:
    """The function as a `RewardFunction`; its name is the function's unless ``name`` is given."""
    inner = _without_partial(function)
    return RewardFunction(getattr(inner, "__name__", type(inner).__name__) if name is None else name, function, weight)


def split_rewards(rewards: Any) -> tuple[list[RewardFunction], list[dict[str, Any]]]:
    """One reward or several, as Python code gives them: the functions, and the entries of a recipe's ``[[rewards]]``.

    A reward is a function, (function, weight), a name as in a recipe, or a table of ``[[rewards]]``.
    """
    is_one = callable(rewards) or isinstance(rewards, (str, Mapping, RewardFunction)) or _has_weight(rewards)
    functions: list[RewardFunction] = []
    entries: list[dict[str, Any]] = []
    for reward in [rewards] if is_one else list(rewards):
        if isinstance(reward, str):
            entries.append({"function": reward})
        elif isinstance(reward, Mapping):
            entries.append(dict(reward))
        elif isinstance(reward, RewardFunction):
            functions.append(reward)
        elif _has_weight(reward):
            functions.append(named(reward[0], reward[1]))
        else:
            functions.append(named(reward))
    return functions, entries


def _has_weight(reward: Any) -> bool:
    return isinstance(reward, tuple) and len(reward) == 2 and isinstance(reward[1], Real)


def _without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


@dataclass(frozen=True)
class RowFailure:
    """A row that a function could not score."""

    function: str
    row: int | None  # None: the function failed on the batch but on none of its rows alone, which are all kept
    reason: str


RowReward = float | None | RowFailure


class BatchFailure(Exception):
    """A function's result cannot be assigned to rows: it is not a list, or has the wrong length."""


class RewardTimeout(BatchFailure):
    """A function did not return in time."""


@dataclass(frozen=True)
class Scores:
    rewards: Tensor  # (B, K) float64 on the CPU; NaN where a function returned None, and in dropped rows
    dropped: Tensor  # (B,) bool: a function failed on this row
    failures: tuple[RowFailure, ...]
    extra: dict[str, list[Any]]  # from log_extra: columns of B values
    metrics: dict[str, float]  # from log_metric: the mean of the logged values
    metric_counts: dict[str, int]  # and their number


def no_scores(samples: int) -> Scores:
    """The scores of completions that no function scores."""
    return Scores(torch.zeros(samples, 0, dtype=torch.float64), torch.zeros(samples, dtype=torch.bool), (), {}, {}, {})


def weighted_total(rewards: Tensor, weights: Sequence[float]) -> Tensor:
    """One reward per sample ``(B,)`` from ``(B, K)``: the weighted sum of its rewards, NaN if it has none."""
    factors = rewards.new_tensor(list(weights))
    return torch.where(rewards.isnan().all(1), math.nan, (rewards * factors).nansum(1))


def visible_columns(columns: Iterable[str]) -> list[str]:
    """The data's columns that rewards receive, or a `DataError` if one has the name of another argument."""
    visible = [name for name in columns if name not in HIDDEN_COLUMNS]
    for name in visible:
        if not isinstance(name, str):
            raise DataError(f"the data has a column {name!r}; rewards get columns by name, so it must be a text")
        if name in LISTS or name in HELPERS:
            raise DataError(f"the data has a column {name!r}, which is an argument of every reward; rename it")
    return visible


def check_rewards(function: str, result: Any, rows: int) -> list[RowReward]:
    """The rewards in a function's result, or a `BatchFailure` if they cannot be assigned to rows."""
    kind = type(result).__name__
    if hasattr(result, "shape") and hasattr(result, "tolist"):  # a tensor, an array, a column of a table
        shape = tuple(result.shape)
        if shape != (rows,):
            raise BatchFailure(f"returned a {kind} of shape {shape}; expected ({rows},), one per completion")
        values = list(result.tolist())
    elif not isinstance(result, Iterable) or isinstance(result, (str, bytes, Mapping, Set)):
        hint = "; is a return missing?" if result is None else ""
        raise BatchFailure(f"returned {excerpt(result)} ({kind}), not a list with one number per completion{hint}")
    else:
        sized = hasattr(result, "__len__")
        values = list(result if sized else islice(result, rows + 1))  # a generator may be endless
        if len(values) != rows:
            number = count(len(values), "value") if sized or len(values) < rows else f"more than {count(rows, 'value')}"
            raise BatchFailure(f"returned {number} for {count(rows, 'row')}; one per completion is needed")
    return [_check_reward(function, row, value) for row, value in enumerate(values)]


def _check_reward(function: str, row: int, value: Any) -> RowReward:
    if value is None:
        return None
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a single number of torch or NumPy
        value = value.item()
    if isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:  # a huge integer
            number = math.inf
        if math.isfinite(number):
            return number
    kind = "" if isinstance(value, float) else f" ({type(value).__name__})"
    reason = f"returned {excerpt(value)}{kind}; a reward is a finite number, or None where it does not apply"
    return RowFailure(function, row, reason)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def reward_error_reason(error: BaseException, completion: Any = None) -> str:
    """Why a reward failed: the function's own error, or what is wrong with the value that it returned.

    completion: the one it failed on, for a hint if the function took a list of messages for a text.
    """
    if isinstance(error, BatchFailure):
        return printable(str(error))
    reason = describe_failure(error)
    if "only works in main thread" in str(error):
        reason += "; to run it in the caller's thread, set the time limit to None"
    if isinstance(completion, list) and isinstance(error, (AttributeError, TypeError)) and "list" in str(error):
        reason += "; the completion is a list of messages, groupwise.rewards.text_of(completion) is its text"
    return reason
