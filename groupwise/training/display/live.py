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
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from groupwise.text import format_duration, one_line
from groupwise.training.display.base import MARGIN, REWARD, Clock, Display, RunFacts, drawable, format_count
from groupwise.training.display.chart import Chart, empty_chart
from groupwise.training.preference import PREFERENCE_ACCURACY

REFRESHES = 4  # per second
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TWO_CHARTS = 70  # columns inside the panel that are needed for two charts side by side
TILE = 13  # columns


class LiveDisplay(Display):
    """The panel. A run without rewards shows the margin of its pairs instead."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self.console = console
        self._live: Live | None = None
        self._closed = False
        self._notices: deque[str] = deque(maxlen=2)

    def start(self, facts: RunFacts, first_step: int = 0, past: Iterable[Mapping[str, Any]] = ()) -> None:
        super().start(facts, first_step, past)
        self._closed = False
        self._show()

    def stage(self, text: str) -> None:
        self._stage = text
        self._show()

    def say(self, text: str) -> None:
        with self._lock:
            self._notices.append(f"step {self._step}: {one_line(text)}")
        # Outside the lock: printing renders the panel, which takes the lock in the rendering thread.
        with suppress(OSError, ValueError):
            self.console.print(Text(text, style="yellow"))

    def _print(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        live, self._live, self._stage, self._closed = self._live, None, "", True
        atexit.unregister(self.close)
        if live is not None:
            with suppress(OSError, ValueError):
                live.stop()

    def _show(self) -> None:
        """Start redrawing. Before `start` only the current stage is shown."""
        if self._live is None and not self._closed:
            atexit.register(self.close)  # restores the cursor if close is never called
            self._live = Live(console=self.console, get_renderable=lambda: self, refresh_per_second=REFRESHES)
            with suppress(OSError, ValueError):
                self._live.start(refresh=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            content = self._panel(options.max_width, options.size.height) if self.facts.steps else self._activity()
        yield content

    def _panel(self, width: int, height: int) -> Panel:
        facts, inside = self.facts, max(20, width - 4)
        title = [facts.name, f"{facts.model} ({format_count(facts.parameters)})", facts.algorithm]
        tiles = self._tiles(inside)
        foot = [Text(notice, style="yellow", no_wrap=True, overflow="ellipsis") for notice in self._notices]
        if self._live is not None:
            foot.insert(0, self._activity())
        rows = min(8, max(3, height - 9 - tiles.row_count - len(foot)))
        return Panel(
            Group(self._progress(), Text(), self._charts(inside, rows), Text(), tiles, *foot),
            title=Text(" · ".join(filter(None, title)), style="bold"),
            title_align="left",
            subtitle=Text(f"{facts.device} · {facts.folder}", style="dim"),
            subtitle_align="right",
            border_style="cyan",
            width=width,
        )

    def _activity(self) -> Text:
        spin = SPINNER[int(self._clock() * 8) % len(SPINNER)]
        text = f"{spin} {self._stage or 'training'}" if self._live is not None else ""
        return Text(text, style="dim", no_wrap=True, overflow="ellipsis")

    def _progress(self) -> RenderableType:
        total = max(self.facts.steps, self._step, 1)
        left = self.seconds_left()
        times = format_duration(self._clock() - self._began)
        if left is not None and self._step < total:
            times += f" · left {format_duration(left)}"
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        bar = ProgressBar(total=total, completed=self._step, complete_style="cyan", finished_style="green")
        grid.add_row(Text.assemble("step ", (f"{self._step:,}", "bold"), f" of {total:,}"), bar, Text(times))
        return grid

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
            return empty_chart(head, width, rows, "waiting for the first step")
        steps, raw, smooth = map(np.array, zip(*points, strict=True))
        # Outliers may be outside the chart, so that they do not flatten the curve.
        span = [smooth.min(), smooth.max(), *np.percentile(raw, (2, 98))]
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


TILES: dict[str, tuple[str, Callable[[float], str]]] = {
    "entropy": ("entropy", lambda value: _format_number(value)),
    "kl": ("KL", lambda value: _format_number(value)),
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
