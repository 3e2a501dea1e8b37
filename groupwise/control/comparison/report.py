"""What `groupwise report` shows of a comparison: its page with notes and settings, and its curves as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupwise.control.comparison.formatting import percent
from groupwise.control.comparison.page import Block, comparison_blocks
from groupwise.control.comparison.pairwise_tests import MIN_SEEDS
from groupwise.control.comparison.plot import needs_log_scale
from groupwise.control.comparison.read import Comparison
from groupwise.control.comparison.runs import (
    AXES,
    MEASURES,
    ComparedRun,
    RunsByEnvironment,
    any_run,
    list_algorithms,
    mean_curves,
)
from groupwise.control.comparison.write import plot_file_name
from groupwise.control.settings import Config
from groupwise.errors import ControlError
from groupwise.paths import is_file
from groupwise.text import plural

MANY_ZERO_SPREAD = 0.5
FAR_BELOW_BEST = 0.25  # of the distance between the lowest and the highest return of a run


def report_blocks(comparison: Comparison) -> list[Block]:
    """The page of the comparison, with notes before it and the settings of the algorithms after it."""
    groups = comparison.groups
    notes = [*comparison.notes, *_observations(groups)]
    listed: list[Block] = [{"heading": "Notes"}, {"list": notes}] if notes else []
    page = comparison_blocks(groups, comparison.configs[0].starts)
    return [*page[:1], *listed, *page[1:], {"heading": "Settings"}, _settings_table(comparison.configs)]


def report_curves(groups: RunsByEnvironment) -> dict[str, list[dict[str, Any]]]:
    """The charts of each environment: mean returns with intervals, along each axis."""
    charts: dict[str, list[dict[str, Any]]] = {}
    for environment, by_algorithm in groups.items():
        curves = {algorithm: mean_curves(runs) for algorithm, runs in by_algorithm.items()}
        charts[environment] = [
            {
                "x_label": axis_label,
                "y_label": measure_label,
                "log": axis == "cpu_seconds" and needs_log_scale([one[axis, measure] for one in curves.values()]),
                "threshold": any_run(by_algorithm).threshold,
                "series": [
                    {
                        "name": f"{algorithm} ({plural(curve.runs, 'run')})",
                        "x": curve.x.tolist(),
                        "mean": curve.mean.estimate.tolist(),
                        "low": curve.mean.low.tolist() if curve.runs > 1 else None,
                        "high": curve.mean.high.tolist() if curve.runs > 1 else None,
                    }
                    for algorithm, one in curves.items()
                    for curve in [one[axis, measure]]
                ],
            }
            for measure, measure_label in MEASURES.items()
            for axis, axis_label in AXES.items()
        ]
    return charts


def saved_plots(folder: Path, groups: RunsByEnvironment) -> dict[str, Path]:
    """The plots that `groupwise control compare` has drawn, by environment."""
    paths = {environment: folder / plot_file_name(environment) for environment in groups}
    return {environment: path for environment, path in paths.items() if is_file(path, ControlError)}


def _observations(groups: RunsByEnvironment) -> list[str]:
    """What a reader of the tables should know: few seeds, groups without a signal, runs that lost what they had."""
    notes = []
    seeds = min(len(runs) for by_algorithm in groups.values() for runs in by_algorithm.values())
    if len(list_algorithms(groups)) > 1 and seeds < MIN_SEEDS:
        few = f"There are only {plural(seeds, 'seed')} per algorithm"
        notes.append(f"{few}: a verdict needs {MIN_SEEDS}, and fewer cannot give p below 0.05.")
    for environment, by_algorithm in groups.items():
        for algorithm, runs in by_algorithm.items():
            name = f"{algorithm} on {environment}"
            spreads = [row["zero_spread_groups"] for run in runs for row in run.rows if "zero_spread_groups" in row]
            if spreads and sum(spreads) / len(spreads) > MANY_ZERO_SPREAD:
                share = sum(spreads) / len(spreads)
                notes.append(
                    f"{name}: in {percent(share)} of the groups all returns are equal: no learning signal. "
                    "Use a larger group_size."
                )
            fallen = [run for run in runs if _has_fallen(run)]
            if fallen:
                shown = ", ".join(str(run.seed) for run in fallen)
                notes.append(
                    f"{name}: {len(fallen)} of {plural(len(runs), 'run')} ended far below the best return "
                    f"(seed {shown}). The best model is kept; a smaller lr makes such falls rarer."
                )
    return notes


def _has_fallen(run: ComparedRun) -> bool:
    returns = run.column("greedy_return")
    span = returns.max() - returns.min()
    return bool(span > 0 and returns.max() - returns[-1] > FAR_BELOW_BEST * span)


def _settings_table(configs: Sequence[Config]) -> Block:
    """A row for each setting, a column for each algorithm; the settings of the runs come first."""
    by_algorithm = {config.algorithm: config for config in reversed(configs)}
    algorithms = list(dict.fromkeys(config.algorithm for config in configs))
    shared = {"steps": "environment steps", "evaluate_every": "steps between evaluations", "starts": "held-out starts"}
    dumped = {name: by_algorithm[name].settings.model_dump(mode="json") for name in algorithms}
    names = dict.fromkeys(key for settings in dumped.values() for key in settings)
    rows = [
        [title, *(_shown(getattr(by_algorithm[name], key)) for name in algorithms)] for key, title in shared.items()
    ]
    rows += [[key, *(_shown(dumped[name].get(key)) for name in algorithms)] for key in names]
    return {"table": {"header": ["setting", *algorithms], "rows": rows, "left": [0]}}


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "x".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
