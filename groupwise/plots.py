"""Learning curves with intervals, as image files. Needs no display."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from groupwise.errors import InputError
from groupwise.rundir.files import write_bytes
from groupwise.stats import bootstrap_interval
from groupwise.text import one_line

# Okabe and Ito's colour-blind safe palette, without its yellow, which is too faint for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", "-.", ":")


def plot_curves(
    path: str | Path,
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    title: str = "",
    y_label: str = "",
    goal: float | None = None,
) -> None:
    """Draw each curve's mean over its runs, with a band for its bootstrap interval.

    A curve is x (points,) and values (runs, points); a single run is drawn without a band. ``goal`` draws a horizontal
    line. The suffix of ``path`` sets the format: png, svg or pdf.
    """
    path = Path(path)
    if not curves:
        raise InputError("there is no curve to draw")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"a plot's name must end in .png, .svg or .pdf, got {path.name!r}")
    figure = new_figure()
    axes, bands = figure.add_subplot(), False
    for number, (name, (x, runs_values)) in enumerate(curves.items()):
        values = np.atleast_2d(np.asarray(runs_values, dtype=np.float64))
        if values.shape[1:] != np.shape(x):
            raise InputError(
                f"curve {name!r} needs x (points,) and values (runs, points), got {np.shape(x)} and {values.shape}"
            )
        band = bootstrap_interval(values)
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        runs = f" ({len(values)} runs)" if len(values) > 1 else ""
        axes.plot(x, band.estimate, dash, color=colour, linewidth=2, label=plain_label(f"{name}{runs}"))
        if len(values) > 1:
            bands = True
            axes.fill_between(x, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
    if goal is not None:
        axes.axhline(goal, color="0.4", linewidth=1, linestyle=(0, (4, 3)), label=f"goal: {goal:g}")
    if not bands:
        widen_flat_axis(axes, [y for line in axes.lines for y in line.get_ydata()])
    axes.set(xlabel="step", ylabel=plain_label(y_label))
    axes.set_title(plain_label(title), loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def plain_label(text: str) -> str:
    """A text that matplotlib draws as it is: dollar signs are no mathematics, and a leading ``_`` hides no label."""
    label = one_line(text).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def axis_range(low: float, high: float, share: bool = False) -> tuple[float, float]:
    """The range of an axis for values from ``low`` to ``high``: widened if they are equal but for rounding.

    A ``share`` is between 0 and 1, and so is its axis.
    """
    size = max(abs(low), abs(high))
    if high - low > max(1e-6 * size, 1e-9):
        return low, high
    middle, reach = (low + high) / 2, 0.2 * size if size > 1e-9 else 1.0
    if share and 0 <= middle <= 1:
        return max(middle - reach, 0.0), min(middle + reach, 1.0)
    return middle - reach, middle + reach


def widen_flat_axis(axes: Any, values: ArrayLike, share: bool = False) -> None:
    """Give a readable y axis to ``values`` that are all equal; other axes stay as they are."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return
    low, high = axis_range(finite.min(), finite.max(), share)
    if (low, high) != (finite.min(), finite.max()):
        edge = 0.04 * (high - low)  # a line at 0 % is not hidden by the axis
        axes.set_ylim(low - edge, high + edge)


def new_figure(width: float = 7.0, height: float = 4.2) -> Any:
    """An empty figure, independent of pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def save_figure(figure: Any, path: str | Path) -> None:
    """Style a figure and write it, atomically."""
    path = Path(path)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # such letters are drawn as boxes
        figure.savefig(buffer, format=path.suffix[1:], facecolor="white")
    write_bytes(path, buffer.getvalue())
