"""The files of a comparison: CSV tables, a Markdown page and plots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from groupwise.control.comparison.page import comparison_page
from groupwise.control.comparison.plot import make_styles, plot_environment
from groupwise.control.comparison.runs import (
    ComparedRun,
    MeanCurves,
    any_run,
    group_runs,
    list_algorithms,
    mean_curves,
)
from groupwise.rundir import write_bytes, write_csv


def write_comparison(folder: Path, runs: Sequence[ComparedRun], *, starts: int) -> str:
    """Write ``runs.csv``, ``curves.csv``, ``comparison.md`` and a plot of each environment; return the Markdown.

    ``starts`` is the number of held-out starts of an evaluation, for the text. The plots need matplotlib and come last,
    so that the other files are written without it.
    """
    groups = group_runs(runs)
    curves = {
        environment: {algorithm: mean_curves(group) for algorithm, group in by_algorithm.items()}
        for environment, by_algorithm in groups.items()
    }
    plots = {environment: plot_file_name(environment) for environment in groups}
    text = comparison_page(groups, plots, starts)
    write_csv(folder / "runs.csv", map(_format_numbers, map(_run_row, runs)))
    write_csv(folder / "curves.csv", map(_format_numbers, _curve_rows(curves)))
    write_bytes(folder / "comparison.md", text.encode())
    styles = make_styles(list_algorithms(groups))
    for environment, by_algorithm in groups.items():
        path, threshold = folder / plots[environment], any_run(by_algorithm).threshold
        plot_environment(path, curves[environment], styles, title=environment, threshold=threshold)
    return text


def plot_file_name(environment: str) -> str:
    """A portable file name; ids such as ALE/Pong-v5 contain a slash."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', environment).strip('-.')}.png"


def _format_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers with up to ten digits."""
    return {name: f"{cell:.10g}" if isinstance(cell, Real) else cell for name, cell in row.items()}


def _run_row(run: ComparedRun) -> dict[str, Any]:
    steps, seconds = run.solved_at or (None, None)
    return {
        "environment": run.environment,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "final_greedy_return": run.last("greedy_return"),
        "final_sampled_return": run.last("sampled_return"),
        "best_greedy_return": run.column("greedy_return").max(),
        "solved": None if run.threshold is None else "yes" if run.solved_at else "no",
        "steps_to_solve": steps,
        "cpu_seconds_to_solve": seconds,
        "env_steps": run.last("env_steps"),
        "cpu_seconds": run.last("cpu_seconds"),
    }


def _curve_rows(curves: Mapping[str, Mapping[str, MeanCurves]]) -> Iterator[dict[str, Any]]:
    """One row per point of each curve; a single run has no interval."""
    for environment, by_algorithm in curves.items():
        for algorithm, algorithm_curves in by_algorithm.items():
            names = {"environment": environment, "algorithm": algorithm}
            for (axis, measure), curve in algorithm_curves.items():
                band = (curve.mean.low, curve.mean.high) if curve.runs > 1 else [[None] * len(curve.x)] * 2
                for x, mean, low, high in zip(curve.x, curve.mean.estimate, *band, strict=True):
                    yield names | {"axis": axis, "x": x, "measure": measure, "mean": mean, "low": low, "high": high}
