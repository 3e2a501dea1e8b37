"""A run's metrics as curves: which charts to draw, in which sections, and their points by step, tokens or time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from groupwise.analysis.run_reader import RunReader
from groupwise.training.monitor.descriptions import SECTIONS, aliases, describe_metric, matches

MAIN = "Main"  # the section of what to look at first
OTHER = "Others"  # metrics of a user's own rewards and callbacks
MOST_MAIN = 9
POINTS = 2000  # of a curve; a screen has no more pixels
CONSTANT = 3  # points from which on a curve that never changes is not drawn
HELD_OUT = "eval/"


@dataclass(frozen=True)
class MetricChart:
    """One or several metrics in one picture. ``bands`` are the metrics of an interval around a line: (low, high)."""

    title: str
    about: str
    lines: list[str]
    bands: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class ChartSection:
    """Charts under one heading. ``constant`` has the metrics that never change, with their value and their meaning."""

    title: str
    charts: list[MetricChart]
    constant: list[tuple[str, float, str]]


def chart_sections(readers: Sequence[RunReader]) -> list[ChartSection]:
    """All metrics of one or several runs: the main ones first, then by the sections of docs/metrics.md."""
    names = list(dict.fromkeys(name for reader in readers for name in reader.metric_names))
    grades = _grades(names)
    constants = _constants(readers, names)
    about = {name: describe_metric(name, grades) or "" for name in names}
    ends = {f"{name}{end}" for name in names if f"{name}_low" in names for end in ("_low", "_high")}
    drawn = [name for name in names if name not in constants and name not in ends]

    def chart(name: str) -> MetricChart:
        band = {name: (f"{name}_low", f"{name}_high")} if f"{name}_low" in names else {}
        return MetricChart(name, about[name], [name], band)

    sections = [ChartSection(MAIN, _main_charts(readers, set(drawn), chart), [])]
    placed: dict[str, list[str]] = {}
    for name in names:
        if name not in ends:
            placed.setdefault(_section_of(name, grades), []).append(name)
    for title in [*SECTIONS, OTHER]:
        inside = placed.get(title, [])
        shown = [chart(name) for name in inside if name in drawn]
        kept = [(name, constants[name], about[name]) for name in inside if name in constants]
        if shown or kept:
            sections.append(ChartSection(title, shown, kept))
    return [section for section in sections if section.charts or section.constant]


def _main_charts(readers: Sequence[RunReader], drawn: set[str], chart: Any) -> list[MetricChart]:
    charts = []
    for metric in dict.fromkeys(reader.metric for reader in readers if reader.metric is not None):
        held_out = chart(f"{HELD_OUT}{metric}") if f"{HELD_OUT}{metric}" in drawn else None
        if held_out is not None and metric in drawn and len(readers) == 1:
            both = "in training (line) and on the held-out rows (points, with their 95 % interval)"
            held_out = MetricChart(metric, f"{chart(metric).about}; {both}", [metric, *held_out.lines], held_out.bands)
        if held_out is not None:
            charts.append(held_out)
    names = ["reward", "preference/accuracy", "kl", "entropy", "completions/mean_length", "completions/clipped_ratio"]
    names += ["frac_reward_zero_std", "grad_norm", "loss"]
    return [*charts, *(chart(name) for name in names if name in drawn and name not in {c.title for c in charts})][
        :MOST_MAIN
    ]


def _grades(names: Iterable[str]) -> list[str]:
    """The names of the task's grades, of which a run logs the share without an answer."""
    ends = [name.removesuffix("_no_answer") for name in names if name.endswith("_no_answer")]
    return [name.removeprefix(HELD_OUT) for name in dict.fromkeys(ends)]


def _constants(readers: Sequence[RunReader], names: Iterable[str]) -> dict[str, float]:
    """The metrics with one value at all steps of all runs."""
    constants = {}
    for name in names:
        values = [value for reader in readers for value in reader.column(name)[1]]
        if len(values) >= CONSTANT and all(value == values[0] for value in values):
            constants[name] = values[0]
    return constants


def _section_of(name: str, grades: Sequence[str]) -> str:
    name = next(iter(aliases().get(name, {}).values()), name)
    for title, patterns in SECTIONS.items():
        if any(matches(pattern, name, grades) for pattern in patterns):
            return title
    return OTHER


class RunAxes:
    """Where each step is on the axes of tokens and of seconds.

    Tokens are the sampled ones; seconds are those of the training steps, without evaluations and pauses. An evaluation
    is where the last training step before it ended.
    """

    def __init__(self, reader: RunReader) -> None:
        rows = reader.training_rows
        self._steps = [row["step"] for row in rows]
        self._seconds = list(accumulate(_number(row.get("step_time")) for row in rows))
        tokens = (int(_number(row.get("num_tokens"))) for row in rows)
        self._tokens = list(accumulate(tokens, max))  # a step without completions logs none

    def at(self, step: int) -> tuple[int, float]:
        """The tokens and the seconds up to the end of a step."""
        place = bisect_right(self._steps, step) - 1
        return (self._tokens[place], self._seconds[place]) if place >= 0 else (0, 0.0)


def curve(reader: RunReader, axes: RunAxes, name: str, points: int = POINTS) -> dict[str, list[Any]]:
    """A metric's points: ``steps``, ``tokens``, ``seconds`` and ``values``, in which NaN and infinities are None."""
    steps, values = reader.column(name)
    kept = thin(values, points)
    places = [axes.at(steps[index]) for index in kept]
    return {
        "steps": [steps[index] for index in kept],
        "tokens": [tokens for tokens, _ in places],
        "seconds": [round(seconds, 3) for _, seconds in places],
        "values": [values[index] if math.isfinite(values[index]) else None for index in kept],
    }


def thin(values: Sequence[float], points: int) -> list[int]:
    """The places of at most ``points`` values: the first, the last, and the smallest and largest of each stretch, so
    that no extreme is lost."""
    if len(values) <= points:
        return list(range(len(values)))
    stretches = max(1, (points - 2) // 2)
    kept = {0, len(values) - 1}
    for number in range(stretches):
        stretch = range(number * len(values) // stretches, (number + 1) * len(values) // stretches)
        finite = [index for index in stretch if math.isfinite(values[index])] or stretch[:1]
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(kept)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
