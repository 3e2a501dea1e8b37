"""A panel on a terminal, redrawn in place: progress, curves, numbers and the last notices."""

from __future__ import annotations

import atexit
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from groupwise.text import one_line, printable
from groupwise.training.display.base import (
    MARGIN,
    REWARD,
    Clock,
    Display,
    RunFacts,
    SampleCompletion,
    drawable,
    format_count,
    format_times,
    shorten_start,
)
from groupwise.training.display.chart import Chart, empty_chart
from groupwise.training.preference import PREFERENCE_ACCURACY

REFRESHES = 4  # per second
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TWO_CHARTS = 70  # columns inside the panel that are needed for two charts side by side
TILE = 13  # columns
ONE_LINE = 60  # columns that are needed for a progress bar beside its times
CHART_ROWS, TALL_CHART_ROWS, ROWS_WITH_SAMPLES = 8, 12, 6  # the usual and the largest; the smallest that samples leave
TALL = 34  # rows of a terminal from which on the charts are taller
MIN_BAR = 6  # columns of the bar of an activity
NOTICES = 2  # in the panel
SHORT = 24  # rows of a terminal below which a notice has one line
BAR_SECONDS = 1.0  # a shorter activity gets no bar, which would flicker


class ResizableLive(Live):
    """rich's live display, which redraws the screen when its size changes: lines that were wrapped stay otherwise."""

    _drawn_at: ConsoleDimensions | None = None

    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        before, self._drawn_at = self._drawn_at, self.console.size
        if before is not None and before != self._drawn_at:
            renderables = [Control.clear(), Control.home(), *renderables]
        return super().process_renderables(renderables)


class LiveDisplay(Display):
    """The panel. A run without rewards shows the margin of its pairs instead."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self.console = console
        self._live: Live | None = None
        self._closed = False
        self._notices: deque[str] = deque()  # those that are shown in the panel and not printed yet
        self._interruption = ""

    def start(self, facts: RunFacts, first_step: int = 0, past: Iterable[Mapping[str, Any]] = ()) -> None:
        super().start(facts, first_step, past)
        self._closed = False
        self._show()

    def stage(self, text: str) -> None:
        self._begin(text)
        self._show()

    def progress(
        self, text: str, done: float, total: int, unit: str = "", *, estimated: bool = True, detail: str = ""
    ) -> None:
        self._begin(text, done, total, unit, estimated, detail)
        self._show()

    def interrupted(self, text: str) -> None:
        self._interruption = one_line(text)  # printing in a signal handler could draw into a half-drawn panel

    def say(self, text: str) -> None:
        """A notice is in the panel until others take its place or the panel is closed; then it is printed above."""
        with self._lock:
            is_placed = text.startswith("step ") or not self._current
            self._notices.append(text if is_placed else f"step {self._current}: {text}")
        self._print_notices(NOTICES if self._live is not None else 0)

    def _print_notices(self, keep: int) -> None:
        """Print all notices but the last ``keep`` above the panel."""
        with self._lock:
            notices = [self._notices.popleft() for _ in range(len(self._notices) - keep)]
        # Outside the lock: printing renders the panel, which takes the lock in the rendering thread.
        for notice in notices:
            with suppress(OSError, ValueError):
                self.console.print(Text(printable(notice), style="yellow"))

    def _print(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self.console.print(Text(printable(text)), soft_wrap=True)

    def close(self) -> None:
        live, self._live, self._closed = self._live, None, True
        atexit.unregister(self.close)
        self._print_notices(0)
        if live is not None:
            live.transient = not (self._metrics or self._evaluations)  # there is nothing to keep
            with suppress(OSError, ValueError):
                live.stop()

    def _show(self) -> None:
        """Start redrawing. Before `start` only the current activity is shown."""
        if self._live is None and not self._closed:
            atexit.register(self.close)  # restores the cursor if close is never called
            self._live = ResizableLive(console=self.console, get_renderable=lambda: self, refresh_per_second=REFRESHES)
            with suppress(OSError, ValueError):
                self._live.start(refresh=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            width, height = options.max_width, options.size.height
            lines = [*self._status(width), *self._foot(width, height)]
            content = self._panel(width, height) if self.facts.steps else Group(*lines)
        yield content
        if self._live is not None:
            # The cursor waits on an empty line: a terminal echoes ^C there, and the next drawing erases it. At the end
            # of a full line the echo would go to the next one, and the first line would be drawn twice.
            yield Text()

    def _panel(self, width: int, height: int) -> Panel:
        facts, inside = self.facts, max(20, width - 4)
        title = [facts.name, f"{facts.model} ({format_count(facts.parameters)})", facts.algorithm]
        progress, tiles, status = self._progress(inside), self._tiles(inside), self._status(inside)
        foot = self._foot(inside, height)
        rows = height - 8 - len(progress) - tiles.row_count - len(status) - len(foot)
        samples = self._sample_lines(inside)
        if samples and rows - len(samples) >= ROWS_WITH_SAMPLES:
            rows -= len(samples)
        else:
            samples = []
        rows = max(3, min(rows, CHART_ROWS if height < TALL else TALL_CHART_ROWS))
        charts = self._charts(inside, rows)
        return Panel(
            Group(*progress, Text(), charts, Text(), tiles, *samples, *status, *foot),
            title=Text(" · ".join(filter(None, title)), style="bold"),
            title_align="left",
            subtitle=Text(f"{facts.device} · {facts.folder}", style="dim"),
            subtitle_align="right",
            border_style="cyan",
            width=width,
        )

    def _status(self, width: int) -> list[RenderableType]:
        """What the run is doing, and whether it was asked to stop; empty at the end."""
        if self._live is None:
            return []
        now, activity = self._clock(), self._activity
        head = f"{SPINNER[int(now * 8) % len(SPINNER)]} {activity.text or 'training'}"
        lines: list[RenderableType] = []
        room = width - cell_len(head) - MIN_BAR - 2
        ends = [
            " · ".join(filter(None, (count, activity.times(now)))) for count in (activity.full_count, activity.count)
        ]
        end = next((end for end in ends if cell_len(end) <= room), None)
        if activity.total and end is not None and now - activity.began >= BAR_SECONDS:
            bar = ProgressBar(total=activity.total, completed=activity.done, complete_style="cyan")
            lines.append(_bar_row(Text(head, style="dim"), bar, Text(end, style="dim")))
        else:
            lines.append(_cut(" · ".join(filter(None, (head, ends[-1]))), "dim"))
        if self._interruption:
            lines.append(_cut(self._interruption, "bold yellow"))
        return lines

    def _foot(self, width: int, height: int) -> list[RenderableType]:
        """The last notices, of one or two lines each."""
        if self._live is None:
            return []
        lines: list[RenderableType] = []
        for notice in list(self._notices)[-NOTICES:]:
            wrapped = Text(one_line(notice), style="yellow").wrap(self.console, max(1, width))
            if len(wrapped) > 1 and height >= SHORT:
                rest = Text(" ", style="yellow").join(wrapped[1:])
                rest.truncate(width, overflow="ellipsis")
                lines += [wrapped[0], rest]
            else:
                lines.append(_cut(one_line(notice), "yellow"))
        return lines

    def _progress(self, width: int) -> list[RenderableType]:
        total = max(self.facts.steps, self._step, 1)
        is_over = self._live is None or (self._step >= total and not self._evaluations_left())
        left = None if is_over else self.seconds_left()
        times = format_times("run", self._clock() - self._began, left)
        bar = ProgressBar(total=total, completed=self._step, complete_style="cyan", finished_style="green")
        head = Text(self._position(self._current))
        head.highlight_regex("[0-9]+(?=/)", "bold")
        if width >= ONE_LINE:
            return [_bar_row(head, bar, Text(times))]
        return [_bar_row(head, bar), _cut(times if len(times) <= width else times.removeprefix("run: "))]

    def _sample_lines(self, width: int) -> list[RenderableType]:
        """Completions of the last step below their heading and an empty line."""
        if not self._samples:
            return []
        head = Text.assemble(
            ("completions ", "bold magenta"), (f" step {self._step:,}, best and worst of a group", "dim")
        )
        if len(self._samples) != 2:
            head = Text.assemble(("completions ", "bold magenta"), (f" step {self._step:,}", "dim"))
        rewards = [_format_number(sample.reward) for sample in self._samples]
        margin = max(map(len, rewards))
        lines = [
            self._sample_line(sample, reward.rjust(margin), width)
            for sample, reward in zip(self._samples, rewards, strict=True)
        ]
        return [Text(), head, *lines]

    def _sample_line(self, sample: SampleCompletion, reward: str, width: int) -> Text:
        completion = one_line(sample.completion)
        room = width - len(reward) - len("   → ")
        prompt = shorten_start(one_line(sample.prompt), max(8, room * 2 // 5, room - max(7, cell_len(completion))))
        parts = (
            (reward, "bold"),
            f"  {prompt}",
            (" → ", "bold magenta"),
            (completion or "(empty)", "" if completion else "dim"),
        )
        line = Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
        line.truncate(width, overflow="ellipsis")
        return line

    def _charts(self, width: int, rows: int) -> RenderableType:
        grid = Table.grid(padding=(0, 3, 0, 0))
        if self.facts.metric is None or width < TWO_CHARTS:
            grid.add_row(self._training_chart(width, rows))
        else:
            left = (width - 3) // 2
            grid.add_row(self._training_chart(left, rows), self._held_out_chart(width - 3 - left, rows))
        return grid

    @property
    def _curve(self) -> str:
        return MARGIN if self._margins and not self._rewards else REWARD

    def _training_chart(self, width: int, rows: int) -> Text:
        name, values = self._curve, self._metrics
        head, points = Text(), self._rewards if name == REWARD else self._margins
        if points or name in values:
            head.append("reward " if name == REWARD else "margin of pairs ", "bold cyan")
        if name in values:
            head.append(f" {_format_number(values[name])}", "bold")
        if name == REWARD and "reward_std" in values:
            head.append(f" ±{_format_number(values['reward_std'])}", "dim")
        if not points:
            text = "waiting for the first step" if self._live is not None else "no step was finished"
            return empty_chart(head, width, rows, text)
        steps, raw, smooth = map(np.array, zip(*points, strict=True))
        # Outliers may be outside the chart, so that they do not flatten the curve.
        span = [smooth.min(), smooth.max(), *np.percentile(raw, (2, 98)), raw[-1]]
        chart = Chart(width, rows, steps, span, share=False)
        chart.dots(steps, raw, "bright_black")
        chart.line(steps, smooth, "cyan")
        return chart.text(head)

    def _held_out_chart(self, width: int, rows: int) -> Text:
        metric = "preferred" if self.facts.metric == PREFERENCE_ACCURACY else self.facts.metric
        head = Text.assemble((f"{metric}, held out ", "bold green"))
        if not self._evaluations:
            return empty_chart(head, width, rows, "waiting for the first evaluation")
        goal, change = drawable(self.facts.goal), self._change()
        head.append(f" {self._format_metric(self._evaluations[-1].value)}", "bold")
        if change is not None:
            head.append(f" {self._format_metric(change, signed=True)}", "green" if change >= 0 else "red")
        steps, values = (np.array(column) for column in list(zip(*self._evaluations, strict=True))[:2])
        bounds = [(e.step, e.low, e.high) for e in self._evaluations if e.low is not None and e.high is not None]
        span = [*values, *(end for _, *ends in bounds for end in ends), *([] if goal is None else [goal])]
        chart = Chart(width, rows, steps, span, share=self._in_percent())
        if goal is not None:
            chart.level(goal, "yellow")
        if bounds:
            at, low, high = map(np.array, zip(*bounds, strict=True))
            chart.intervals(at, low, high, "bright_black")
        chart.line(steps, values, "green")
        chart.marks(steps, values, "bold green")
        return chart.text(head)

    def _tiles(self, width: int) -> Table:
        """Numbers under their names, as many side by side as fit."""
        memory = [value for name, value in self._metrics.items() if name.startswith("memory/")]
        values = {**self._occasional, **self._metrics, **({"memory": max(memory)} if memory else {})}
        shown = [name for name in TILES if name in values and name != self._curve]
        tiles = [(TILES[name][0], TILES[name][1](values[name])) for name in shown]
        if self._evaluations and width < TWO_CHARTS:  # its chart does not fit
            label = "held out" if self.facts.metric == PREFERENCE_ACCURACY else self.facts.metric or ""
            tiles.insert(0, (label, self._format_metric(self._evaluations[-1].value)))
        lines = math.ceil(len(tiles) / max(1, width // TILE))
        beside = math.ceil(len(tiles) / lines) if lines else 1
        table = Table.grid(expand=True)
        for _ in range(beside):
            table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for at in range(0, len(tiles), beside):
            line = tiles[at : at + beside]
            table.add_row(*(Text(label, style="dim") for label, _ in line))
            table.add_row(*(Text(value, style="bold") for _, value in line))
        return table


def _bar_row(*cells: RenderableType) -> Table:
    """A label, a bar that fills the rest, and its times."""
    grid = Table.grid(padding=(0, 1), expand=True)
    for number in range(len(cells)):
        grid.add_column(ratio=1 if number == 1 else None, no_wrap=True)
    grid.add_row(*cells)
    return grid


def _cut(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


TILES: dict[str, tuple[str, Callable[[float], str]]] = {
    "entropy": ("entropy", lambda value: _format_number(value)),
    "kl": ("KL", lambda value: _format_number(value)),
    "distillation/kl": ("teacher KL", lambda value: _format_number(value)),
    "clip_ratio/region_mean": ("clipped", lambda value: f"{100 * value:.1f} %"),
    "preference/pairs": ("pairs", lambda value: f"{value:,.0f}"),
    MARGIN: ("margin", lambda value: _format_number(value)),
    "preference/accuracy": ("preferred", lambda value: f"{100 * value:.0f} %"),
    "grad_cosine/grpo_preference": ("grad cosine", lambda value: f"{value:+.2f}"),
    "frac_reward_zero_std": ("equal groups", lambda value: f"{100 * value:.0f} %"),
    "similarity_groups/avg_groups_per_prompt": ("clusters", lambda value: f"{value:.1f}"),
    "diversity/mean_distance": ("distance", lambda value: f"{value:.2f}"),
    "completions/mean_length": ("mean length", lambda value: f"{value:,.1f}"),
    "completions/clipped_ratio": ("cut off", lambda value: f"{100 * value:.1f} %"),
    "tokens_per_second": ("tokens/s", lambda value: f"{value:,.0f}"),
    "memory": ("peak memory", lambda value: f"{value:.1f} GiB"),
    "grad_norm": ("grad norm", lambda value: _format_number(value)),
    "learning_rate": ("learning rate", lambda value: f"{value:.1e}"),
}


def _format_number(value: float) -> str:
    return f"{value:.3f}" if not 0 < abs(value) < 0.001 and abs(value) < 1e4 else f"{value:.2g}"
