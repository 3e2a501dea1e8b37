"""Draws a run's metrics into ``curves.png``."""

from __future__ import annotations

import math
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.rundir import metric_column, read_metrics
from groupwise.training.display.base import MAX_DRAWN, is_share
from groupwise.training.preference import PREFERENCE_ACCURACY
from groupwise.training.store.recorder import EVAL_PREFIX

Points = tuple[list[int], list[float]]  # steps, values

CURVES = "curves.png"
TICK_STEPS = (1, 2, 5, 10)
MAX_MARKED = 10  # points of a curve; longer curves have no markers
MAX_EVALUATIONS_MARKED = 40
LABELS = {  # of the metrics that share a panel
    "preference/chosen_reward": "better",
    "preference/rejected_reward": "worse",
    "grad_norm/grpo": "GRPO",
    "grad_norm/preference": "pairs",
}
SMOOTHING_SHARE = 0.05  # of a curve's points are averaged on each side


def draw_curves(run_folder: Path, *, metric: str | None, goal: float | None = None) -> Path | None:
    """Draw reward, ``metric`` on held-out rows, pairs, entropy and KL, lengths, diversity, and gradients of the terms.

    Metrics that were not recorded are left out. Returns the file; None if there is nothing to draw, or if
    matplotlib cannot be loaded.
    """
    from groupwise.plots import new_figure, save_figure, widen_flat_axis

    rows = read_metrics(run_folder / "metrics.jsonl")
    cells = _cells(metric)
    curves = {name: _finite(rows, name) for cell in cells for colours in cell.values() for name in colours}
    if not curves["reward"][0]:
        cells.insert(0, cells.pop(2))  # a run without rewards starts with its pairs
    cells = [{title: c for title, c in cell.items() if all(curves[name][0] for name in c)} for cell in cells]
    cells = [cell for number, cell in enumerate(cells) if cell and cell not in cells[:number]]
    if not cells:
        return None
    columns, lines = min(2, len(cells)), math.ceil(len(cells) / 2)
    try:
        figure = new_figure(5.4 * columns, 3.3 * lines)
    except ImportError:  # a broken matplotlib must not fail a run at its end
        return None
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    drawn = {step for cell in cells for colours in cell.values() for name in colours for step in curves[name][0]}
    grid = figure.add_gridspec(2 * lines, columns)  # each cell has two halves, for two small panels
    for number, cell in enumerate(cells):
        alone = number == len(cells) - 1 and number % 2 == 0
        across = slice(None) if alone else number % 2
        for position, (title, colours) in enumerate(cell.items()):
            top = number // 2 * 2 + position
            axes = figure.add_subplot(grid[top : top + 3 - len(cell), across])
            share = all(is_share(name) and max(curves[name][1]) <= 1 for name in colours)
            for name, colour in colours.items():
                if name.startswith(EVAL_PREFIX):
                    target = goal if name == f"{EVAL_PREFIX}{metric}" else None
                    _draw_held_out(axes, rows, name, colour, target, share)
                else:
                    _draw_smoothed(axes, *curves[name], colour, LABELS.get(name))
            if len(colours) > 1:
                axes.legend(frameon=False, fontsize=8)
            bounds = [value for name in colours for end in ("_low", "_high") for value in _finite(rows, name + end)[1]]
            lines_drawn = [y for line in axes.lines for y in line.get_ydata()]  # the goal too
            widen_flat_axis(axes, [*lines_drawn, *bounds], share)
            _share_steps(axes, min(drawn), max(drawn))
            _finish_axes(axes, title, share, last=position == len(cell) - 1)
    save_figure(figure, run_folder / CURVES)
    return run_folder / CURVES


def _cells(metric: str | None) -> list[dict[str, dict[str, str]]]:
    """Title, metrics and colours of all panels; two in one cell share its height. The third cell shows the pairs."""
    from groupwise.plots import COLOURS

    blue, orange, green, pink = COLOURS[:4]
    pair_rewards = {"preference/chosen_reward": blue, "preference/rejected_reward": orange}
    gradients = {"grad_norm/grpo": blue, "grad_norm/preference": orange}
    return [
        {"reward while training": {"reward": blue}},
        {_held_out_title(metric or ""): {f"{EVAL_PREFIX}{metric}": green}},
        {
            "DPO's reward of the two answers of a pair": pair_rewards,
            "better answer preferred, while training": {"preference/accuracy": blue},
        },
        {_held_out_title(PREFERENCE_ACCURACY): {f"{EVAL_PREFIX}{PREFERENCE_ACCURACY}": green}},
        {"entropy": {"entropy": orange}, "KL to the reference": {"kl": pink}},
        {
            "tokens in an answer": {"completions/mean_length": blue},
            "answers cut off": {"completions/clipped_ratio": orange},
        },
        {
            "distance of two answers to a prompt": {"diversity/mean_distance": green},
            "clusters per prompt": {"similarity_groups/avg_groups_per_prompt": pink},
        },
        {
            "cosine of the gradients of pairs and of GRPO": {"grad_cosine/grpo_preference": pink},
            "norm of their gradients": gradients,
        },
    ]


def _finite(rows: list[dict[str, Any]], name: str) -> Points:
    steps, values = metric_column(rows, name)
    kept = [isinstance(value, (int, float)) and abs(value) <= MAX_DRAWN for value in values]
    return list(compress(steps, kept)), [float(value) for value in compress(values, kept)]


def _held_out_title(metric: str) -> str:
    if metric == PREFERENCE_ACCURACY:
        return "better answer preferred, held-out pairs"
    return "right on held-out questions" if "accuracy" in metric else f"{metric.replace('_', ' ')}, held out"


def _draw_smoothed(axes: Any, steps: list[int], values: list[float], colour: str, label: str | None) -> None:
    reach = int(len(values) * SMOOTHING_SHARE)
    if reach:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
    sums, at = np.concatenate([[0.0], np.cumsum(values)]), np.arange(len(values))
    first, end = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(values))
    smooth = (sums[end] - sums[first]) / (end - first)
    marker = "o" if len(steps) <= MAX_MARKED else None
    axes.plot(steps, smooth, color=colour, linewidth=2, marker=marker, markersize=4, label=label)


def _draw_held_out(
    axes: Any, rows: list[dict[str, Any]], name: str, colour: str, goal: float | None, share: bool
) -> None:
    steps, values = _finite(rows, name)
    low, high = (dict(zip(*_finite(rows, name + end), strict=True)) for end in ("_low", "_high"))
    band = [step for step in steps if step in low and step in high]
    axes.fill_between(band, [low[s] for s in band], [high[s] for s in band], color=colour, alpha=0.16, linewidth=0)
    marker = "o" if len(steps) <= MAX_EVALUATIONS_MARKED else None
    axes.plot(steps, values, color=colour, linewidth=2, marker=marker, markersize=4.5)
    if goal is not None:
        axes.axhline(goal, color="0.4", linewidth=1, linestyle=(0, (4, 3)))
        text = f"goal {_percent(goal)}" if share else f"goal {goal:g}"
        where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(text, (0, goal), (4, 3), fontsize=8, color="0.4", **where)


def _share_steps(axes: Any, first: int, last: int) -> None:
    """All panels have the same steps."""
    edge = 0.01 * (last - first) if last > first else 1.0
    axes.set_xlim(first - edge, last + edge)


def _percent(value: float) -> str:
    return f"{round(100 * value, 6):g} %"


def _finish_axes(axes: Any, title: str, share: bool, last: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from groupwise.plots import plain_label

    axes.set_title(plain_label(title), loc="left", fontsize=10)
    axes.tick_params(labelsize=8, labelbottom=last, color="0.6")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=TICK_STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=TICK_STEPS))
    if share:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
    if last:
        axes.set_xlabel("step", fontsize=9)
