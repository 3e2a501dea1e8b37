"""The base class of displays, and the formatting that they share.

A display never changes a run and never raises: metrics may be missing or no numbers, and the terminal may go away.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from rich.cells import cell_len

from groupwise.text import fixed, format_duration
from groupwise.training.store import EVAL_PREFIX

Clock = Callable[[], float]
SummaryRows = Sequence[str | Sequence[str]]
"""Lines, or rows of cells that are aligned."""

RECENT = 20  # steps that the remaining time is estimated from
SMOOTHING = 0.1  # weight of the newest value in a smoothed curve
BYTES = "bytes"  # the unit of downloads, shown in MB
MAX_DRAWN = 1e30  # larger values are not drawn
MAX_POINTS = 4000  # kept per curve
REWARD, MARGIN = "reward", "preference/margin"  # the curve of a run, and that of a run without rewards
OCCASIONAL = ("grad_cosine/grpo_preference",)  # measured in some steps only; the last value stays visible


@dataclass(frozen=True)
class RunFacts:
    """The description of a run. ``metric`` is the evaluations' metric and ``goal`` its target.

    evaluate_every: steps between two evaluations; 0 if there is only one, after the last step.
    show_samples: how many completions of a step are shown.
    """

    name: str
    model: str
    parameters: int
    device: str
    algorithm: str
    steps: int
    metric: str | None
    folder: str
    goal: float | None = None
    log_every: int = 1
    evaluate_every: int = 0
    show_samples: int = 2


class SampleCompletion(NamedTuple):
    """A completion to show, with the end of its prompt and its reward."""

    prompt: str
    completion: str
    reward: float


@dataclass(frozen=True)
class Activity:
    """What a run is doing. ``done`` of ``total`` are counted in ``unit``; without a total there is no count.

    done: a float counts what is done in part, and is shown in percent.
    began: the time when it began. estimated: whether the time left is proportional to what is left to do.
    detail: is shown with the count, if there is room.
    """

    text: str = ""
    began: float = 0.0
    done: float = 0
    total: int = 0
    unit: str = ""
    estimated: bool = True
    detail: str = ""

    @property
    def count(self) -> str:
        """``256 of 512 rows``, or ``50 % of 512 rows``."""
        if not self.total:
            return ""
        if self.unit == BYTES:
            return f"{self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
        done = f"{math.floor(100 * self.done / self.total)} %" if isinstance(self.done, float) else f"{self.done:,}"
        return f"{done} of {self.total:,} {self.unit}".rstrip()

    @property
    def full_count(self) -> str:
        """``50 % of 512 rows, 1,024 tokens``."""
        return ", ".join(filter(None, (self.count, self.detail)))

    def times(self, now: float) -> str:
        """``stage: 12 s, about 4 s left``; empty in the first two seconds."""
        elapsed = now - self.began
        if elapsed < 2:
            return ""
        left = elapsed / self.done * (self.total - self.done) if self.estimated and self.done and self.total else None
        return format_times("stage", elapsed, left)

    def describe(self, now: float) -> str:
        return " · ".join(filter(None, (self.text, self.full_count, self.times(now))))


class EvaluationPoint(NamedTuple):
    step: int
    value: float
    low: float | None
    high: float | None


class SmoothedCurve(list[tuple[int, float, float]]):
    """Points of a curve: step, value, and an exponential moving average that starts as a plain mean."""

    def __init__(self) -> None:
        super().__init__()
        self._count, self._mean = 0, 0.0

    def add(self, step: int, value: float) -> None:
        self._count += 1
        self._mean += (value - self._mean) * max(SMOOTHING, 1 / self._count)
        self.append((step, value, self._mean))
        if len(self) > MAX_POINTS:
            del self[1::2]


class Display:
    """Keeps the state that displays show. ``memory/…`` is in GiB, ``step_time`` in seconds."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.on_broken_pipe: Callable[[], None] = lambda: None  # called when nobody reads the output any more
        self._lock = threading.RLock()
        self.facts = RunFacts("", "", 0, "", "", 0, None, "")
        self._entered: float | None = None
        self._began = self._mark = clock()  # of the run; and the end of its last step or evaluation
        self._step, self._current = 0, 0  # finished steps; the step that is running, or else the last one
        self._activity = Activity()
        self._metrics: dict[str, float] = {}
        self._rewards, self._margins = SmoothedCurve(), SmoothedCurve()
        self._occasional: dict[str, float] = {}
        self._evaluations: list[EvaluationPoint] = []
        self._evaluated_at: int | None = None
        self._samples: Sequence[SampleCompletion] = ()
        self._step_times = deque[tuple[int, float]](maxlen=RECENT)  # number of steps, seconds
        self._evaluation_times = deque[float](maxlen=RECENT)  # seconds

    def start(self, facts: RunFacts, first_step: int = 0, past: Iterable[Mapping[str, Any]] = ()) -> None:
        """Start. A resumed run continues after ``first_step``; ``past`` are the rows of its metrics."""
        with self._lock:
            self.facts, self._step, self._current, self._activity = facts, first_step, first_step, Activity()
            self._mark = self._clock()
            self._began = self._mark if self._entered is None else self._entered  # what precedes is part of the run
            self._step_times.clear()
            for row in past:
                self._add_points(int(row["step"]), as_numbers(row))

    def begin_step(self, step: int) -> None:
        """A step begins, the first one as 1; it is shown until the next one begins."""
        with self._lock:
            self._step, self._current = step - 1, min(step, max(self.facts.steps, step - 1))

    def expect(self, steps: int) -> None:
        """The number of steps of the run, which may change if it depends on sampled tokens."""
        with self._lock:
            self.facts = replace(self.facts, steps=steps)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is finished."""
        with self._lock:
            count, self._activity, self._metrics = step - self._step, Activity(), as_numbers(metrics)
            self._step = self._current = step
            if self._metrics.get("tokens_per_second") == 0:  # nothing was sampled
                del self._metrics["tokens_per_second"]
            seconds = self._since_mark()
            if count > 0:
                self._step_times.append((count, seconds))
            self._add_points(step, self._metrics)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """An evaluation after ``step`` is finished."""
        with self._lock:
            self._activity, self._evaluated_at = Activity(), step
            self._evaluation_times.append(self._since_mark())
            self._add_points(step, {EVAL_PREFIX + name: number for name, number in as_numbers(metrics).items()})

    def samples(self, samples: Sequence[SampleCompletion]) -> None:
        """Some completions of the step that is about to be reported."""
        with self._lock:
            self._samples = tuple(samples)

    def stage(self, text: str) -> None:
        """The current activity, such as "evaluating"."""

    def progress(
        self, text: str, done: float, total: int, unit: str = "", *, estimated: bool = True, detail: str = ""
    ) -> None:
        """The current activity with a count, such as "evaluating", 256 of 512 "rows".

        done: a float if it counts what is done in part. estimated: show the time left. detail: what else to show, such
        as the number of tokens.
        """
        self.stage(f"{text}: {Activity(text, 0.0, done, total, unit).count}")

    def interrupted(self, text: str) -> None:
        """A signal asked the run to stop. Called in a signal handler, so that it must not wait for anything."""
        self.say(text)

    def say(self, text: str) -> None:
        """A notice that must stay visible."""

    def announce(self, text: str) -> None:
        """Something that takes long; shown only where its progress is not."""

    def finish(self, lines: SummaryRows) -> None:
        """The end of the run, with its summary."""
        self.close()
        for line in align(lines):
            self._print(line)

    def close(self) -> None:
        """Restore the terminal. May be called twice."""

    def _print(self, text: str) -> None:
        """Write a line of the summary."""

    def __enter__(self) -> Display:
        self._entered = self._clock()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def seconds_left(self) -> float | None:
        """The time for the remaining steps at the pace of the last ones, and for the remaining evaluations."""
        step = self._seconds_per_step()
        if step is None:
            return None
        evaluation = sum(self._evaluation_times) / max(1, len(self._evaluation_times))
        evaluations = self._evaluations_left()
        total = max(0, self.facts.steps - self._step) * step + evaluations * evaluation
        current = evaluation if evaluations and self._evaluation_is_due(self._step) else step
        return max(0.0, total - min(self._clock() - self._mark, current))

    def _seconds_per_step(self) -> float | None:
        """The mean of the last steps, without evaluations; None before the first step."""
        count = sum(count for count, _ in self._step_times)
        return sum(seconds for _, seconds in self._step_times) / count if count else None

    def _evaluations_left(self) -> int:
        if self.facts.metric is None:
            return 0
        every, last, step = self.facts.evaluate_every, self.facts.steps, self._step
        left = int(step < last and (not every or last % every > 0))  # after the last step
        left += max(0, last // every - step // every) if every else 0
        return left + self._evaluation_is_due(self._step)

    def _evaluation_is_due(self, step: int) -> bool:
        """Whether ``step`` is evaluated and has not been yet; step 0 is evaluated before a time can be told."""
        every = self.facts.evaluate_every
        at_end = step >= self.facts.steps
        return step > 0 and self._evaluated_at != step and (at_end or bool(every and step % every == 0))

    def _since_mark(self) -> float:
        """The time since the last step or evaluation ended; the next one begins now."""
        before, self._mark = self._mark, self._clock()
        return self._mark - before

    def _begin(
        self, text: str, done: float = 0, total: int = 0, unit: str = "", estimated: bool = True, detail: str = ""
    ) -> bool:
        """Set the current activity; whether it is another one than before."""
        before, now = self._activity, self._clock()
        is_new = text != before.text
        # One assignment: another thread may be drawing it.
        self._activity = Activity(text, now if is_new else before.began, done, total, unit, estimated, detail)
        return is_new

    def _add_points(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a row of metrics to the curves."""
        for name, curve in ((REWARD, self._rewards), (MARGIN, self._margins)):
            point = drawable(numbers.get(name))
            if point is not None:
                curve.add(step, point)
        self._occasional |= {name: numbers[name] for name in OCCASIONAL if name in numbers}
        metric = f"{EVAL_PREFIX}{self.facts.metric}"
        value, low, high = (drawable(numbers.get(metric + end)) for end in ("", "_low", "_high"))
        if value is not None:
            self._evaluations.append(EvaluationPoint(step, value, low, high))

    def _format_metric(self, value: float, signed: bool = False) -> str:
        """A value of the evaluations' metric, in percent if it is a share."""
        sign = "+" if signed else ""
        if self._in_percent():
            return f"{100 * value:{sign}.1f}" + ("" if signed else " %")
        return fixed(value, f"{sign}.3f")

    def _in_percent(self) -> bool:
        return is_share(self.facts.metric or "") and all(point.value <= 1 for point in self._evaluations)

    def _position(self, step: int) -> str:
        """``step 3/6`` for the third step, while it runs and for what is done after it until the next one begins."""
        total = str(self.facts.steps)
        return f"step {step:>{len(total)}}/{total}" if step else "before training"

    def _change(self) -> float | None:
        """The change of the metric from the first evaluation to the last."""
        return self._evaluations[-1].value - self._evaluations[0].value if len(self._evaluations) > 1 else None


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    numbers = {}
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            numbers[name] = float(value)
    return numbers


def drawable(value: float | None) -> float | None:
    return value if value is not None and abs(value) <= MAX_DRAWN else None


def is_share(metric: str) -> bool:
    """Whether a metric is a share by its name, and is shown in percent."""
    return bool(re.search(r"(^|[^a-z])(accuracy|share|rate|ratio|right|correct|pass)([^a-z]|$)", metric))


def format_elapsed(seconds: float) -> str:
    """``42 s``, ``1 min 20 s`` or ``3 h 05 min``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole // 60 % 60:02d} min"


def format_times(name: str, elapsed: float, left: float | None) -> str:
    """``run: 1 min 20 s, about 3 min left``: which time it is, what has passed of it, and what is left."""
    text = f"{name}: {format_elapsed(elapsed)}"
    return text if left is None else f"{text}, about {format_duration(left)} left"


def shorten_start(text: str, width: int) -> str:
    """The end of a text, in at most ``width`` columns."""
    if cell_len(text) <= width:
        return text
    end = text[-width:]
    while cell_len(end) >= max(1, width):
        end = end[1:]
    return f"…{end}"


def format_count(number: int) -> str:
    """``135 M`` for 134,515,008."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{0 if number >= 100 * size else 1}f} {letter}"
    return str(number)


def align(rows: SummaryRows) -> list[str]:
    """The rows as lines, with their cells aligned."""
    columns = zip_longest(*(row for row in rows if not isinstance(row, str)), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    return [row if isinstance(row, str) else "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
