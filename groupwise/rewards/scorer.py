"""Calling reward functions: threads, an event loop, time limits, and what happens when a call fails.

With a time limit, a plain function runs in a thread; async ones run on an event loop in a background thread. These are
daemons, so a function that hangs does not keep the process alive. A single C call that holds the interpreter lock, such
as a regular expression with catastrophic backtracking, cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from groupwise.errors import InputError, RewardError, check_choice
from groupwise.redaction import hide_secrets
from groupwise.rewards.contract import (
    HELPERS,
    LISTS,
    BatchFailure,
    RewardFunction,
    RewardTimeout,
    RowFailure,
    RowReward,
    Scores,
    count,
    named,
    reward_error_reason,
    visible_columns,
)
from groupwise.rewards.options import is_finite_number
from groupwise.rewards.text import completion_excerpt, prompt_messages
from groupwise.text import excerpt

ON_ERROR = ("stop", "drop")
LOST_BATCHES = 3  # this many batches in a row without a scored row stop the run, even with on_error="drop"
PROMPT_WIDTH = 40  # characters of a prompt in an error
GRACE = 2.0  # seconds for cancelled coroutines to clean up


class Scorer:
    """Scores batches with reward functions.

    ``timeout`` is each function's limit for one batch, in seconds; without one, plain functions run in the caller's
    thread. If a function cannot score a row, ``on_error`` ``"stop"`` raises a `RewardError`, ``"drop"`` leaves it out.
    """

    def __init__(
        self,
        functions: Iterable[RewardFunction | Callable[..., Any]],
        *,
        timeout: float | None = 60.0,
        on_error: str = "stop",
    ) -> None:
        self.functions = tuple(reward if isinstance(reward, RewardFunction) else named(reward) for reward in functions)
        if not self.functions:
            raise InputError("there is no reward function to score with; give at least one")
        name, number = Counter(reward.name for reward in self.functions).most_common(1)[0]
        if number > 1:
            raise InputError(f"{number} reward functions have the name {name!r}; use named(function, name='…')")
        if timeout is not None and not (is_finite_number(timeout) and 0 < timeout <= threading.TIMEOUT_MAX):
            raise InputError(f"timeout must be a number of seconds above 0, or None for no limit, got {timeout!r}")
        check_choice("on_error", on_error, ON_ERROR)
        self.timeout = timeout
        self.on_error = on_error
        self.on_call: Callable[[str], None] | None = None  # called with the names of the functions that are called next
        self.lost_limit = LOST_BATCHES
        self._lost_batches = 0
        self._lock = threading.Lock()  # asynchronous rollouts score several groups at a time

    def check_arguments(self, columns: Iterable[str]) -> None:
        """Raise a `RewardError` unless data with these columns has every argument that the functions require."""
        available = [*LISTS, *visible_columns(columns), *HELPERS]
        for reward in self.functions:
            reward.choose_arguments(available)

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[Any] | None = None,
        trainer_state: Any = None,
        places: Sequence[str] | None = None,
    ) -> Scores:
        """Call every function on the batch: the plain ones one after the other, then the async ones concurrently.

        ``places`` name the completions in errors, such as ``"rows.jsonl, line 3, completion 2"``; by default their
        numbers, from 1.
        """
        scores = self.score_batch(
            prompts, completions, columns, completion_ids=completion_ids, trainer_state=trainer_state, places=places
        )
        self.check_lost(scores, lambda row: completion_excerpt(completions[row]))
        return scores

    def score_batch(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[Any] | None = None,
        trainer_state: Any = None,
        places: Sequence[str] | None = None,
    ) -> Scores:
        """`score` without `check_lost`, for a part of a batch."""
        lists: dict[str, Any] = {"prompts": prompts, "completions": completions}
        if completion_ids is not None:
            lists["completion_ids"] = completion_ids
        lists |= {name: columns[name] for name in visible_columns(columns)}
        for name, values in lists.items():
            if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
                raise InputError(f"{name} must be a list with one entry per completion, got {excerpt(values)}")
            if len(values) != len(completions):
                raise InputError(f"{name} has {len(values)} entries for {len(completions)} completions")
        lists = {name: list(values) for name, values in lists.items()}
        places = places or [f"row {number}" for number in range(1, len(completions) + 1)]
        calls = {reward.name: RewardCall(reward, lists, trainer_state, places) for reward in self.functions}
        if len(completions):
            for reward in self.functions:
                reward.choose_arguments([*lists, *HELPERS])
            for call in list(calls.values()):
                if not call.reward.is_async:
                    self._announce([call])
                    calls[call.reward.name] = self._handle_failure(call.run(self.timeout))
            concurrent = [call for call in calls.values() if call.reward.is_async]
            self._announce(concurrent)
            for call in run_concurrently(concurrent, self.timeout):
                calls[call.reward.name] = self._handle_failure(call)
        return self._combine(list(calls.values()))

    def _announce(self, calls: Sequence[RewardCall]) -> None:
        if self.on_call is not None and calls:
            self.on_call(", ".join(call.reward.name for call in calls))

    def _handle_failure(self, call: RewardCall) -> RewardCall:
        """Retry a failed batch row by row; with on_error="stop", raise an error if anything failed."""
        error, stop = call.error, self.on_error == "stop"
        if isinstance(error, BatchFailure) and stop:
            call.fail(None, str(error))
        if isinstance(error, RewardTimeout):
            call.rewards = [RowFailure(call.reward.name, row, str(error)) for row in range(len(call))]
        elif error is not None:
            call = self._score_rows(call)
            if not call.failures:
                reason = f"{reward_error_reason(error)}; each of its rows by itself can be scored"
                if stop:
                    call.fail(None, reason, error)
                call.batch_failure = RowFailure(call.reward.name, None, reason)
        if stop and call.failures:
            share = f"it fails on {len(call.failures)} of {count(len(call), 'completion')}"
            reason = f"{call.failures[0].reason}; {share} ({call.reward.remedy})"
            call.fail(call.failures[0].row, reason, error)
        return call

    def _score_rows(self, batch: RewardCall) -> RewardCall:
        """Call the function on each row alone. All rows together have the time limit of one batch."""
        start = time.perf_counter()
        rows = [batch.row(number) for number in range(len(batch))]
        if batch.reward.is_async:
            rows = run_concurrently(rows, self.timeout)
        else:
            for row, call in enumerate(rows):
                left = None if self.timeout is None else self.timeout - (time.perf_counter() - start)
                if left is None or left > 0:
                    rows[row] = call.run(left)
                else:
                    call.error = RewardTimeout(f"not tried: the rows before it took the {self.timeout:g} s")
        result = batch.copy()
        for row, call in enumerate(rows):
            if call.error is not None:
                reason = reward_error_reason(call.error, call.lists["completions"][0])
                result.rewards.append(RowFailure(call.reward.name, row, reason))
            elif isinstance(call.rewards[0], RowFailure):
                result.rewards.append(replace(call.rewards[0], row=row))
            else:
                result.rewards.append(call.rewards[0])
                for column, values in call.extra.items():  # None for rows that did not log this column
                    result.extra.setdefault(column, [None] * len(batch))[row] = values[0]
                for name, numbers in call.metrics.items():
                    result.metrics.setdefault(name, []).extend(numbers)
        return result

    def _combine(self, calls: Sequence[RewardCall]) -> Scores:
        rows = len(calls[0])
        rewards = torch.full((rows, len(calls)), torch.nan, dtype=torch.float64)
        dropped = torch.zeros(rows, dtype=torch.bool)
        failures: list[RowFailure] = []
        extra: dict[str, list[Any]] = {}
        metrics: dict[str, list[float]] = {}
        for column, call in enumerate(calls):
            failures += call.failures if call.batch_failure is None else [call.batch_failure]
            given = [
                math.nan if reward is None or isinstance(reward, RowFailure) else reward for reward in call.rewards
            ]
            if given:
                rewards[:, column] = torch.tensor(given, dtype=torch.float64)
            failed = [row for row, reward in enumerate(call.rewards) if isinstance(reward, RowFailure)]
            dropped[failed] = True
            for name, values in call.extra.items():  # the second function that logs a column gets a prefix
                extra[name if name not in extra else f"{call.reward.name}/{name}"] = values
            for name, logged in call.metrics.items():
                metrics.setdefault(name, []).extend(logged)
        failures += self._check_sums(calls, rewards, dropped)
        rewards[dropped] = math.nan
        means = {name: sum(numbers) / len(numbers) for name, numbers in metrics.items()}
        counts = {name: len(numbers) for name, numbers in metrics.items()}
        return Scores(rewards, dropped, tuple(failures), extra, means, counts)

    def check_lost(self, scores: Scores, show: Callable[[int], str]) -> None:
        """Raise an error after several batches in a row in which nothing could be scored; ``show`` gives a completion
        of the batch."""
        with self._lock:
            if len(scores.dropped):
                self._lost_batches = self._lost_batches + 1 if bool(scores.dropped.all()) else 0
            lost = self._lost_batches
        if lost >= self.lost_limit:
            failure = scores.failures[0]
            raise RewardError(
                f"no row of the last {lost} batches could be scored; reward {failure.function!r} "
                f"(completion {show(failure.row or 0)}): {failure.reason}"
            )

    def _check_sums(self, calls: Sequence[RewardCall], rewards: Tensor, dropped: Tensor) -> list[RowFailure]:
        """Drop the rows whose weighted sum is beyond the largest float, or raise an error for the first of them."""
        products = rewards * rewards.new_tensor([reward.weight for reward in self.functions])
        failures = []
        for row in (~products.nansum(1).isfinite()).nonzero().flatten().tolist():
            call = calls[int(products[row].abs().nan_to_num().argmax())]
            reason = (
                f"its reward {call.rewards[row]:g}, times its weight {call.reward.weight:g}, takes the sum of the "
                "rewards beyond the largest float; scale it, or lower its weight"
            )
            if self.on_error == "stop":
                call.fail(row, reason)
            failures.append(RowFailure(call.reward.name, row, reason))
            dropped[row] = True
        return failures


@dataclass
class RewardCall:
    """One call of a reward function, on a batch or on a single row, and its result."""

    reward: RewardFunction
    lists: dict[str, list[Any]]
    trainer_state: Any
    places: Sequence[str]  # of the completions, for errors
    rewards: list[RowReward] = field(default_factory=list)
    error: BaseException | None = None
    batch_failure: RowFailure | None = None  # the batch failed, but none of its rows
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    awaitable: Any = None  # what a plain function returned, if it has to be awaited

    def __len__(self) -> int:
        return len(self.lists["completions"])

    @property
    def failures(self) -> list[RowFailure]:
        return [reward for reward in self.rewards if isinstance(reward, RowFailure)]

    def copy(self) -> RewardCall:
        """The same call without a result."""
        return RewardCall(self.reward, self.lists, self.trainer_state, self.places)

    def row(self, number: int) -> RewardCall:
        """The call on one row alone."""
        lists = {name: [values[number]] for name, values in self.lists.items()}
        return RewardCall(self.reward, lists, self.trainer_state, [self.places[number]])

    def excerpt(self, row: int) -> str:
        return completion_excerpt(self.lists["completions"][row])

    def prompt_excerpt(self, row: int) -> str:
        """The beginning of a prompt, or of its last message."""
        prompt = self.lists["prompts"][row]
        try:
            return excerpt(prompt_messages(prompt)[-1]["content"], PROMPT_WIDTH)
        except (InputError, IndexError):  # no text and no list of messages, or an empty one
            return excerpt(prompt, PROMPT_WIDTH)

    def fail(self, row: int | None, reason: str, cause: BaseException | None = None) -> NoReturn:
        if row is None:
            place = f"a batch of {len(self)} (first completion {self.excerpt(0)})"
        else:
            place = f"{self.places[row]} (prompt {self.prompt_excerpt(row)}, completion {self.excerpt(row)})"
        raise RewardError(f"reward {self.reward.name!r} failed on {place}: {reason}") from cause

    def run(self, timeout: float | None) -> RewardCall:
        """Call a plain function, in a thread if there is a limit. If it returns an awaitable, that is awaited."""
        if timeout is None:
            self._run()
        else:
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(self._run,), name="groupwise-reward", daemon=True)
            thread.start()
            thread.join(timeout)
            if thread.is_alive():
                return self.timed_out(timeout, "; its thread is left behind and may go on until the process ends")
        if self.awaitable is not None:
            return run_concurrently([self], timeout)[0]
        return _check_interrupt(self)

    def _run(self) -> None:
        try:
            result = self._start()
            if inspect.isawaitable(result):
                self.awaitable = result
            else:
                self._finish(result)
        except BaseException as error:
            self.error = error

    async def run_async(self, timeout: float | None) -> RewardCall:
        """Await the function, and cancel it at the limit."""
        try:
            async with asyncio.timeout(timeout) as limit:
                self._finish(await (self._start() if self.awaitable is None else self.awaitable))
        except BaseException as error:  # a SystemExit would end the event loop
            self.error = error
        return self.timed_out(timeout or 0.0, "; it was cancelled") if limit.expired() else self

    def timed_out(self, timeout: float, outcome: str) -> RewardCall:
        """The result of a call that took too long; a function that is still running keeps the old object."""
        call = self.copy()
        call.error = RewardTimeout(f"did not return within {timeout:g} s{outcome}")
        return call

    def _start(self) -> Any:
        """Call the function with copies of the lists, which it may change."""
        arguments: dict[str, Any] = {name: list(values) for name, values in self.lists.items()}
        arguments |= {"trainer_state": self.trainer_state, "log_extra": self._log_extra, "log_metric": self._log_metric}
        positional, keywords = self.reward.choose_arguments(list(arguments))
        by_keyword = {name: arguments[name] for name in keywords}
        return self.reward.function(*(arguments[name] for name in positional), **by_keyword)

    def _finish(self, result: Any) -> None:
        rewards = self.reward.check(result, len(self))
        for column, logged in self.extra.items():
            if len(logged) != len(self):
                raise BatchFailure(f"logged {count(len(logged), 'value')} as {column!r} for {count(len(self), 'row')}")
        self.rewards = rewards

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        if not isinstance(column, str) or isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise InputError(f"log_extra needs a column's name and a list of values, got {column!r}, {excerpt(values)}")
        rows = values.tolist() if hasattr(values, "tolist") else values
        self.extra.setdefault(column, []).extend(hide_secrets(row) if isinstance(row, str) else row for row in rows)

    def _log_metric(self, name: str, value: float) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InputError(f"log_metric({name!r}, …) needs a number, got {excerpt(value)}") from error
        self.metrics.setdefault(hide_secrets(str(name)), []).append(number)


def run_concurrently(calls: Sequence[RewardCall], timeout: float | None) -> list[RewardCall]:
    """Run async calls at the same time on the background loop."""
    if not calls:
        return []
    thread = _running_loop()
    futures: list[Future[RewardCall]] = []
    try:
        futures += (asyncio.run_coroutine_threadsafe(call.run_async(timeout), thread.loop) for call in calls)
        ended, running = wait(futures, None if timeout is None else timeout + GRACE)
        if running:  # not even the cancellation came through: the next call gets a new loop
            thread.blocked = True
    finally:
        for future in futures:
            future.cancel()  # after Ctrl-C, or what a blocked loop has not started; nothing if it is done
    stuck = (
        " and cannot be cancelled: it or another async reward blocks the event loop, or ignores that it is cancelled; "
        "the loop is left behind (await what takes long, or write a plain function)"
    )
    return [
        _check_interrupt(future.result()) if future in ended else call.timed_out(timeout or 0.0, stuck)
        for call, future in zip(calls, futures, strict=True)
    ]


def _check_interrupt(call: RewardCall) -> RewardCall:
    if isinstance(call.error, KeyboardInterrupt):
        raise call.error
    return call


class _LoopThread(threading.Thread):
    """The event loop of async rewards: one per process, because clients are bound to the loop they were used in."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.blocked = False
        super().__init__(target=self.loop.run_forever, name="groupwise-async-rewards", daemon=True)
        self.start()


_loop_thread: _LoopThread | None = None
_loop_lock = threading.Lock()


def _running_loop() -> _LoopThread:
    global _loop_thread
    with _loop_lock:
        if _loop_thread is None or _loop_thread.blocked or not _loop_thread.is_alive():  # not alive after a fork
            _loop_thread = _LoopThread()
        return _loop_thread
