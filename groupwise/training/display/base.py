"""What a run shows while it goes on: a panel that renews itself on a terminal, plain lines anywhere else.

A display only looks on. Metrics may be missing or no numbers, the terminal may change its size or go away: nothing here
raises, and nothing here changes a run.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from groupwise.training.store.recorder import EVALUATION, PREFERRED, is_share

StepTimer = Callable[[], float]
Rows = Sequence[str | Sequence[str]]

RECENT = 20  # steps from which the time that is left is told
NEW_SHARE = 0.1  # of the newest value in a point of a smoothed curve
HUGE = 1e30  # what is larger is not drawn
MOST_POINTS = 4000  # of a curve that are kept; more than any terminal has dots
LINE_SECONDS = 1.0
STAGE_SECONDS = 20.0
REWARD, MARGIN = "reward", "preference/margin"  # the curves: the second for a run that has no rewards
SELDOM = ("grad_cosine/grpo_preference",)  # measured in some steps only: the last value is shown until the next


@dataclass(frozen=True)
class RunFacts:
    """What a run is. ``metric`` is what its evaluations measure, ``goal`` where that should get."""

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


@dataclass(frozen=True)
class Evaluation:
    step: int
    value: float
    low: float | None
    high: float | None


class Smoothed(list[tuple[int, float, float]]):
    """The points of a curve: step, value, and its mean with those before, of which the newest have most weight."""

    def __init__(self) -> None:
        super().__init__()
        self._count, self._mean = 0, 0.0

    def take(self, step: int, value: float) -> None:
        self._count += 1
        self._mean += (value - self._mean) * max(NEW_SHARE, 1 / self._count)
        self.append((step, value, self._mean))
        if len(self) > MOST_POINTS:
            del self[1::2]


def make_display(stream: TextIO | None = None) -> Display:
    """The display that fits a stream, the standard output without one."""
    from rich.console import Console

    from groupwise.training.display.live import LiveDisplay

    stream = sys.stdout if stream is None else stream
    console = Console(file=stream, highlight=False)
    # FORCE_COLOR makes rich call a pipe a terminal; a log file full of redrawn panels helps nobody.
    if stream.isatty() and console.is_terminal and console.is_interactive and not console.options.ascii_only:
        return LiveDisplay(console)
    return LineDisplay(stream)


class Display:
    """Keeps what is shown. Metrics have TRL's names; ``memory/…`` is in GiB, ``step_time`` in seconds."""

    def __init__(self, timer: StepTimer = time.monotonic) -> None:
        self._clock = timer
        self._lock = threading.RLock()
        self.facts = RunFacts("", "", 0, "", "", 0, None, "")
        self._began = timer()
        self._now = 0
        self._metrics: dict[str, float] = {}
        self._rewards, self._margins = Smoothed(), Smoothed()
        self._seldom: dict[str, float] = {}
        self._evaluations: list[Evaluation] = []
        self._marks: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)  # step, when it was done

    def start(self, facts: RunFacts, first_step: int = 0, past: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin. A resumed run goes on after ``first_step``; ``past`` are the rows of its metrics until then."""
        with self._lock:
            self.facts, self._now, self._began = facts, first_step, self._clock()
            self._marks.append((first_step, self._began))
            for row in past:
                self._remember(int(row["step"]), _numbers(row))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done."""
        with self._lock:
            self._now, self._metrics = step, _numbers(metrics)
            if self._metrics.get("tokens_per_second") == 0:  # nothing was sampled, at no speed
                del self._metrics["tokens_per_second"]
            self._marks.append((step, self._clock()))
            self._remember(step, self._metrics)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """An evaluation after ``step`` is done; names with or without ``eval/``."""
        numbers = {name.removeprefix(EVALUATION): value for name, value in _numbers(metrics).items()}
        with self._lock:
            self._remember(step, {EVALUATION + name: value for name, value in numbers.items()})

    def stage(self, text: str) -> None:
        """What goes on right now, such as "evaluating"."""

    def say(self, text: str) -> None:
        """A notice that must stay visible."""

    def finish(self, lines: Rows) -> None:
        """The end of the run: lines, or rows of cells, that sum it up."""
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _remember(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the points of the curves that are in a row of metrics, and what is not in every row."""
        for name, curve in ((REWARD, self._rewards), (MARGIN, self._margins)):
            point = drawable(numbers.get(name))
            if point is not None:
                curve.take(step, point)
        self._seldom |= {name: numbers[name] for name in SELDOM if name in numbers}
        metric = f"{EVALUATION}{self.facts.metric}"
        value, low, high = (drawable(numbers.get(metric + end)) for end in ("", "_low", "_high"))
        if value is not None:
            self._evaluations.append(Evaluation(step, value, low, high))

    def seconds_left(self) -> float | None:
        """How long the remaining steps take if they take as long as the last ones."""
        (first, began), (last, done) = (self._marks[0], self._marks[-1]) if self._marks else ((0, 0.0), (0, 0.0))
        return (done - began) / (last - first) * max(0, self.facts.steps - last) if last > first else None

    def _held_out(self, value: float, signed: bool = False) -> str:
        """The evaluations' metric as it is written: in percent where it is a share."""
        sign = "+" if signed else ""
        if self._in_percent():
            return f"{100 * value:{sign}.1f}" + ("" if signed else " %")
        return f"{value:{sign}.3f}"

    def _in_percent(self) -> bool:
        return is_share(self.facts.metric or "") and all(evaluation.value <= 1 for evaluation in self._evaluations)

    def _change(self) -> float | None:
        return self._evaluations[-1].value - self._evaluations[0].value if len(self._evaluations) > 1 else None


class LineDisplay(Display):
    """A line for a step; with quick steps about one a second, and always for evaluations and for the last step.

    With ``log_every`` of the facts, for each so many steps; where those take long, also in between.
    """

    def __init__(self, stream: TextIO | None = None, timer: StepTimer = time.monotonic) -> None:
        super().__init__(timer)
        self._stream = sys.stdout if stream is None else stream
        self._written = self._step_written = -math.inf
        self._pending = False

    def start(self, facts: RunFacts, first_step: int = 0, past: Iterable[Mapping[str, Any]] = ()) -> None:
        super().start(facts, first_step, past)
        model = f"{facts.model} ({count_of(facts.parameters)} weights) on {facts.device}"
        self._write(" · ".join([facts.name, model, facts.algorithm, f"{facts.steps:,} steps", facts.folder]))
        if first_step:
            self._write(f"going on after step {first_step}")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().step(step, metrics)
        self._pending = True
        waited, every = self._clock() - self._step_written, self.facts.log_every
        due = waited >= (LINE_SECONDS if every == 1 else STAGE_SECONDS) or (every > 1 and step % every == 0)
        if due or step >= self.facts.steps:
            self._write_step()

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        count = len(self._evaluations)
        super().evaluation(step, metrics)
        if len(self._evaluations) > count:
            self._write(f"{self._place(step)} · held out: {self._evaluated()}{self._beside(metrics)}")
            return
        numbers = [f"{name.removeprefix(EVALUATION)} {value:.4g}" for name, value in _numbers(metrics).items()]
        self._write(f"{self._place(step)} · held out: {', '.join(numbers[:6]) or 'nothing measured'}")

    def stage(self, text: str) -> None:
        if self._clock() - self._written >= STAGE_SECONDS:
            self._write(f"{self._place(self._now)} · {text}" if self.facts.steps else text)

    def say(self, text: str) -> None:
        self._write(text)

    def finish(self, lines: Rows) -> None:
        self.close()
        for line in aligned(lines):
            self._write(line)

    def close(self) -> None:
        if self._pending:
            self._write_step()

    def _evaluated(self) -> str:
        last, change = self._evaluations[-1], self._change()
        text = f"{self.facts.metric} {self._held_out(last.value)}"
        if last.low is not None and last.high is not None:
            text += f" ({self._held_out(last.low)} to {self._held_out(last.high)})"
        if change is not None:
            points = " points" if self._in_percent() else ""
            text += f", {self._held_out(change, signed=True)}{points} since the first"
        return text

    def _beside(self, metrics: Mapping[str, Any]) -> str:
        """What an evaluation says of pairs, where that is not its metric."""
        numbers = _numbers(metrics)
        share = numbers.get(PREFERRED, numbers.get(EVALUATION + PREFERRED))
        return f"; preferred {100 * share:.1f} %" if share is not None and self.facts.metric != PREFERRED else ""

    def _place(self, step: int) -> str:
        total = str(self.facts.steps)
        return f"step {step:>{len(total)}}/{total}"

    def _write_step(self) -> None:
        self._pending, self._step_written = False, self._clock()
        values, components = self._metrics, [self._place(self._now)]
        spread = f" ±{values['reward_std']:.2f}" if "reward_std" in values else ""
        if "reward" in values:
            components.append(f"reward {values['reward']:6.3f}{spread}")
        if self._evaluations:
            last = self._evaluations[-1]
            components.append(f"{self.facts.metric} {self._held_out(last.value):>6} (held out, step {last.step})")
        for name, form in LINE_PARTS.items():
            if name in values:
                components.append(form(values[name]))
        seconds = self._last_seconds()
        components += [f"{seconds:5.1f} s"] if seconds is not None else []
        left = self.seconds_left()
        components += [f"left {duration(left)}"] if left and self._now < self.facts.steps else []
        self._write(" · ".join(components))

    def _last_seconds(self) -> float | None:
        if "step_time" in self._metrics:
            return self._metrics["step_time"]
        return self._marks[-1][1] - self._marks[-2][1] if len(self._marks) > 1 else None

    def _write(self, text: str) -> None:
        self._written = self._clock()
        with suppress(OSError, ValueError):  # a closed pipe or file is no reason to stop training
            try:
                self._stream.write(text + "\n")
            except UnicodeEncodeError:
                encoding = getattr(self._stream, "encoding", None) or "ascii"
                self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()


LINE_PARTS: dict[str, Callable[[float], str]] = {
    "frac_reward_zero_std": lambda value: f"equal groups {100 * value:3.0f} %",
    "similarity_groups/avg_groups_per_prompt": lambda value: f"clusters {value:4.1f}",
    "diversity/mean_distance": lambda value: f"distance {value:.2f}",
    "completions/mean_length": lambda value: f"length {value:6.1f}",
    "preference/pairs": lambda value: f"pairs {value:3,.0f}",
    MARGIN: lambda value: f"margin {value:6.3f}",
    "preference/accuracy": lambda value: f"preferred {100 * value:3.0f} %",
    "tokens_per_second": lambda value: f"{value:7,.0f} tokens/s",
}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            numbers[name] = float(value)
    return numbers


def drawable(value: float | None) -> float | None:
    return value if value is not None and abs(value) <= HUGE else None


def count_of(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{0 if number >= 100 * size else 1}f} {letter}"
    return str(number)


def duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), round(seconds / 60) // 60
    if seconds < 99.5:
        return f"{max(0, seconds):.0f} s"
    return f"{minutes} min" if hours < 2 else f"{hours} h {minutes % 60:02d} min"


def aligned(rows: Rows) -> list[str]:
    """Rows of cells under each other; a line stays as it is."""
    cells = [[row] if isinstance(row, str) else [str(cell) for cell in row] for row in rows]
    columns = max((len(row) for row in cells), default=0)
    tables = [row for row in cells if len(row) > 1]
    widths = [max((len(row[at]) for row in tables if at < len(row)), default=0) for at in range(columns)]
    return [
        row[0] if len(row) == 1 else "  ".join(f"{cell:<{widths[at]}}" for at, cell in enumerate(row)).rstrip()
        for row in cells
    ]
