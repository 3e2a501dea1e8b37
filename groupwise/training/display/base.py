"""The base class of displays, and the formatting that they share.

A display never changes a run and never raises: metrics may be missing or no numbers, and the terminal may go away.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from groupwise.training.store.recorder import EVAL_PREFIX

Clock = Callable[[], float]
SummaryRows = Sequence[str | Sequence[str]]
"""Lines, or rows of cells that are aligned."""

RECENT = 20  # steps that the remaining time is estimated from
SMOOTHING = 0.1  # weight of the newest value in a smoothed curve
MAX_DRAWN = 1e30  # larger values are not drawn
MAX_POINTS = 4000  # kept per curve
REWARD, MARGIN = "reward", "preference/margin"  # the curve of a run, and that of a run without rewards
OCCASIONAL = ("grad_cosine/grpo_preference",)  # measured in some steps only; the last value stays visible


@dataclass(frozen=True)
class RunFacts:
    """The description of a run. ``metric`` is the evaluations' metric and ``goal`` its target."""

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
        self._lock = threading.RLock()
        self.facts = RunFacts("", "", 0, "", "", 0, None, "")
        self._began = clock()
        self._step, self._stage = 0, ""
        self._metrics: dict[str, float] = {}
        self._rewards, self._margins = SmoothedCurve(), SmoothedCurve()
        self._occasional: dict[str, float] = {}
        self._evaluations: list[EvaluationPoint] = []
        self._finished = deque([(0, self._began)], maxlen=RECENT + 1)  # step, time

    def start(self, facts: RunFacts, first_step: int = 0, past: Iterable[Mapping[str, Any]] = ()) -> None:
        """Start. A resumed run continues after ``first_step``; ``past`` are the rows of its metrics."""
        with self._lock:
            self.facts, self._step, self._began = facts, first_step, self._clock()
            self._finished = deque([(first_step, self._began)], maxlen=RECENT + 1)
            for row in past:
                self._add_points(int(row["step"]), as_numbers(row))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is finished."""
        with self._lock:
            self._step, self._stage, self._metrics = step, "", as_numbers(metrics)
            if self._metrics.get("tokens_per_second") == 0:  # nothing was sampled
                del self._metrics["tokens_per_second"]
            self._finished.append((step, self._clock()))
            self._add_points(step, self._metrics)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """An evaluation after ``step`` is finished."""
        with self._lock:
            self._stage = ""
            self._add_points(step, {EVAL_PREFIX + name: number for name, number in as_numbers(metrics).items()})

    def stage(self, text: str) -> None:
        """The current activity, such as "evaluating"."""

    def say(self, text: str) -> None:
        """A notice that must stay visible."""

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
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def seconds_left(self) -> float | None:
        """The time for the remaining steps at the pace of the last ones."""
        (first, began), (last, ended) = self._finished[0], self._finished[-1]
        return (ended - began) / (last - first) * max(0, self.facts.steps - last) if last > first else None

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
        return f"{value:{sign}.3f}"

    def _in_percent(self) -> bool:
        return is_share(self.facts.metric or "") and all(point.value <= 1 for point in self._evaluations)

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
