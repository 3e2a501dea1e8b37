"""The files of a comparison: two tables for other programs, a page and pictures for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from groupwise.control.comparison.curves import Curves, curves_of
from groupwise.control.comparison.page import page
from groupwise.control.comparison.picture import draw, styles_of
from groupwise.control.comparison.runs import Run, algorithms_of, any_run, cells_of, check_runs
from groupwise.rundir import write_bytes, write_csv


def write_comparison(folder: str | Path, runs: Sequence[Run], *, starts: int | None = None) -> str:
    """Write ``runs.csv``, ``curves.csv``, ``comparison.md`` and a picture of each environment; the Markdown text.

    starts: on how many held-out starts a return was measured; the text then says so.

    The pictures need matplotlib and come last, so that without it the rest is there all the same.
    """
    check_runs(runs)
    folder, cells = Path(folder), cells_of(runs)
    curves = {name: {label: curves_of(cell) for label, cell in row.items()} for name, row in cells.items()}
    pictures = file_names(cells)
    text = page(cells, pictures, starts)
    write_csv(folder / "runs.csv", map(_rounded, map(_run_line, runs)))
    write_csv(folder / "curves.csv", map(_rounded, _curve_lines(curves)))
    write_bytes(folder / "comparison.md", text.encode())
    styles = styles_of(algorithms_of(cells))
    for name, row in cells.items():
        draw(folder / pictures[name], curves[name], styles, title=name, threshold=any_run(row).threshold)
    return text


def file_names(environments: Iterable[str]) -> dict[str, str]:
    """The name of each environment's picture, of letters that every system bears: ALE/Pong-v5 has a slash."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for environment in environments:
        name = plain = re.sub(r"[^A-Za-z0-9._-]+", "-", environment).strip("-.") or "environment"
        number = 1
        while name.lower() in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name.lower())
        names[environment] = f"{name}.png"
    return names


def _rounded(line: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers have up to ten digits."""
    return {name: f"{cell:.10g}" if isinstance(cell, Real) else cell for name, cell in line.items()}


def _run_line(run: Run) -> dict[str, Any]:
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


def _curve_lines(curves: Mapping[str, Mapping[str, Curves]]) -> Iterator[dict[str, Any]]:
    """A single run has no interval."""
    for environment, row in curves.items():
        for algorithm, cell in row.items():
            names = {"environment": environment, "algorithm": algorithm}
            for (axis, measure), curve in cell.items():
                band = (curve.mean.low, curve.mean.high) if curve.runs > 1 else [[None] * len(curve.x)] * 2
                for x, mean, low, high in zip(curve.x, curve.mean.estimate, *band, strict=True):
                    yield names | {"axis": axis, "x": x, "measure": measure, "mean": mean, "low": low, "high": high}
