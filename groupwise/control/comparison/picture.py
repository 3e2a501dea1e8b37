"""An environment's learning curves as one picture. Needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.control.comparison.curves import Curves, MeanCurve
from groupwise.control.comparison.runs import AXES, MEASURES
from groupwise.control.comparison.text import counted, number, short
from groupwise.plots import COLOURS, DASHES, new_figure, save_figure

MANY_FOLD = 4  # CPU seconds that differ so much would squeeze the quick algorithms into the left end of a linear axis
WIDTH, HEIGHT, LEGEND_LINE = 11.0, 6.1, 0.24  # inches; a line of the legend makes the picture so much higher
LABEL_WIDTH, LEGEND_WIDTH = 60, 140  # characters in a line of a label, and beside each other in the legend
NO_BREAK = "\N{NO-BREAK SPACE}"

Style = dict[str, Any]


def styles_of(algorithms: Sequence[str]) -> dict[str, Style]:
    """Each algorithm looks the same in all pictures."""
    return {
        algorithm: {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place // len(COLOURS) % len(DASHES)]}
        for place, algorithm in enumerate(algorithms)
    }


def draw(
    path: Path, curves: Mapping[str, Curves], styles: Mapping[str, Style], *, title: str, threshold: float | None
) -> None:
    """Greedy and sampled return, one above the other, against environment steps and against CPU seconds."""
    figure = new_figure(WIDTH, HEIGHT)
    figure.suptitle(_plain(title), fontsize=13, x=0.01, ha="left")
    panels = figure.subplots(len(MEASURES), len(AXES), sharex="col", sharey=True)
    for measure, row in zip(MEASURES, panels, strict=True):
        row[0].set_ylabel(f"mean {MEASURES[measure]}")
        for axis, axes in zip(AXES, row, strict=True):
            drawn = {label: cell[axis, measure] for label, cell in curves.items()}
            _panel(axes, drawn, styles, threshold)
            if axis == "cpu_seconds" and _differ_many_fold(drawn.values()):
                axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: short(value))
    for axis, axes in zip(AXES, panels[-1], strict=True):
        axes.set_xlabel(AXES[axis])
    _legend(figure, panels[0][0])
    with warnings.catch_warnings():
        # A label may hold letters that the font has not; they are drawn as boxes, which is no news to a user.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        save_figure(figure, path)


def _panel(axes: Any, curves: Mapping[str, MeanCurve], styles: Mapping[str, Style], threshold: float | None) -> None:
    """A mean and its band are steps: between evaluations nothing is known to change. A single run has no band."""
    for label, curve in curves.items():
        style = styles[label]
        axes.plot(
            curve.x, curve.mean.estimate, **style, linewidth=1.8, drawstyle="steps-post", label=_named(label, curve)
        )
        if curve.runs > 1:
            band = {"color": style["color"], "alpha": 0.18, "linewidth": 0, "step": "post"}
            axes.fill_between(curve.x, curve.mean.low, curve.mean.high, **band)
    if threshold is not None:
        axes.axhline(threshold, color="0.4", linewidth=1, linestyle=(0, (4, 3)), label=f" solved: {number(threshold)}")


def _differ_many_fold(curves: Iterable[MeanCurve]) -> bool:
    ends = [curve.x[-1] for curve in curves]
    return bool(max(ends) > MANY_FOLD * min(ends) > 0)


def _named(label: str, curve: MeanCurve) -> str:
    """The label with its number of runs; a long one is broken into lines, after a comma if there is one.

    The blank in front is for matplotlib, which leaves a name out of the legend if it starts with an underscore.
    """
    runs = counted(curve.runs, "run").replace(" ", NO_BREAK)
    name = f"{_plain(label).replace(',', ', ')} ({runs})"
    return textwrap.fill(name, LABEL_WIDTH, initial_indent=" ", subsequent_indent=" ")


def _plain(text: str) -> str:
    """A text without formulas: matplotlib would set what stands between two dollar signs as one."""
    return text.replace("$", r"\$")


def _legend(figure: Any, axes: Any) -> None:
    """Below the panels, with as many names in a line as fit."""
    handles, labels = axes.get_legend_handles_labels()
    lines = [line for label in labels for line in label.splitlines()]
    columns = max(1, min(len(labels), LEGEND_WIDTH // (max(map(len, lines)) + 6)))
    figure.set_figheight(HEIGHT + LEGEND_LINE * math.ceil(len(lines) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
