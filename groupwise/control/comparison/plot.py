"""The learning curves of an environment as one plot."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.control.comparison.formatting import counted, number, short
from groupwise.control.comparison.runs import AXES, MEASURES, MeanCurve, MeanCurves
from groupwise.plots import COLOURS, DASHES, new_figure, plain_label, save_figure

LOG_SCALE_RATIO = 4  # CPU seconds that differ by more are drawn on a logarithmic axis
WIDTH, HEIGHT, LEGEND_LINE = 11.0, 6.1, 0.24  # inches; each line of the legend adds to the height
LABEL_WIDTH, LEGEND_WIDTH = 60, 140  # characters

Style = dict[str, Any]


def make_styles(algorithms: Sequence[str]) -> dict[str, Style]:
    """A colour and a line style for each algorithm, the same in all plots."""
    return {
        algorithm: {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place // len(COLOURS) % len(DASHES)]}
        for place, algorithm in enumerate(algorithms)
    }


def plot_environment(
    path: Path, curves: Mapping[str, MeanCurves], styles: Mapping[str, Style], *, title: str, threshold: float | None
) -> None:
    """Greedy return above sampled return, against environment steps and against CPU seconds."""
    figure = new_figure(WIDTH, HEIGHT)
    figure.suptitle(plain_label(title), fontsize=13, x=0.01, ha="left")
    panels = figure.subplots(len(MEASURES), len(AXES), sharex="col", sharey=True)
    for measure, row in zip(MEASURES, panels, strict=True):
        row[0].set_ylabel(f"mean {MEASURES[measure]}")
        for axis, axes in zip(AXES, row, strict=True):
            drawn = {label: algorithm_curves[axis, measure] for label, algorithm_curves in curves.items()}
            _panel(axes, drawn, styles, threshold)
            if axis == "cpu_seconds" and needs_log_scale(drawn.values()):
                axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: short(value))
    for axis, axes in zip(AXES, panels[-1], strict=True):
        axes.set_xlabel(AXES[axis])
    _legend(figure, panels[0][0])
    save_figure(figure, path)


def _panel(axes: Any, curves: Mapping[str, MeanCurve], styles: Mapping[str, Style], threshold: float | None) -> None:
    """Curves and bands are step functions, as a run keeps its value between evaluations. A single run has no band."""
    for label, curve in curves.items():
        style = styles[label]
        name = textwrap.fill(plain_label(f"{label} ({counted(curve.runs, 'run')})"), LABEL_WIDTH)
        axes.plot(curve.x, curve.mean.estimate, **style, linewidth=1.8, drawstyle="steps-post", label=name)
        if curve.runs > 1:
            band = {"color": style["color"], "alpha": 0.18, "linewidth": 0, "step": "post"}
            axes.fill_between(curve.x, curve.mean.low, curve.mean.high, **band)
    if threshold is not None:
        axes.axhline(threshold, color="0.4", linewidth=1, linestyle=(0, (4, 3)), label=f"solved: {number(threshold)}")


def needs_log_scale(curves: Iterable[MeanCurve]) -> bool:
    ends = [curve.x[-1] for curve in curves]
    return bool(max(ends) > LOG_SCALE_RATIO * min(ends) > 0)


def _legend(figure: Any, axes: Any) -> None:
    """Below the panels, with as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    lines = [line for label in labels for line in label.splitlines()]
    columns = max(1, min(len(labels), LEGEND_WIDTH // (max(map(len, lines)) + 6)))
    figure.set_figheight(HEIGHT + LEGEND_LINE * math.ceil(len(lines) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
