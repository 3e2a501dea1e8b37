"""Reads finished runs and comparisons back from their folders, for a report. Nothing is trained and nothing written."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.control.comparison.runs import ComparedRun, RunsByEnvironment, group_runs
from groupwise.control.main import CONFIG_FILE, PROGRESS_FILE, RESULT_FILE, read_progress
from groupwise.control.settings import Config, config_of
from groupwise.errors import CheckpointError, ControlError, GroupwiseError
from groupwise.paths import is_file
from groupwise.rundir.files import read_object

RUNS_FILE = "runs.csv"


@dataclass
class Comparison:
    """The runs of a folder, their configurations, and sentences about what is not in it."""

    runs: list[ComparedRun] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def groups(self) -> RunsByEnvironment:
        return group_runs(self.runs)


def is_control_run(folder: Path) -> bool:
    """Whether `groupwise control train` has written this folder."""
    return is_file(folder / CONFIG_FILE, ControlError) and is_file(folder / PROGRESS_FILE, ControlError)


def is_comparison(folder: Path) -> bool:
    """Whether runs of `groupwise control compare` are below this folder."""
    return any(is_control_run(path.parent) for path in folder.glob(f"*/*/seed-*/{CONFIG_FILE}"))


def read_run(config: Config, folder: Path) -> ComparedRun:
    """A finished run."""
    result = read_object(folder / RESULT_FILE)
    if not {"threshold", "solved_at"} <= result.keys():
        raise CheckpointError(f"{folder / RESULT_FILE} is damaged; delete it, and the run is finished again")
    return _compared_run(config, folder, result)


def read_comparison(folder: Path) -> Comparison:
    """All runs of a comparison, or the one of `groupwise control train`; a run that cannot be compared is a note.

    An unfinished run is left out of a comparison, as in comparison.md; one on its own is shown as far as it came.
    """
    comparison = Comparison()
    paths = [folder] if is_control_run(folder) else _in_order(folder)
    for path in paths:
        try:
            config = config_of(**read_object(path / CONFIG_FILE))
            if is_file(path / RESULT_FILE, ControlError):
                run = read_run(config, path)
            elif path == folder:
                run = _compared_run(config, path, {"threshold": None, "solved_at": None})
                comparison.notes.append("The run is not finished: it shows what was recorded so far.")
            else:
                comparison.notes.append(f"{path.relative_to(folder)} is not finished and is left out.")
                continue
        except GroupwiseError as error:
            if path == folder:
                raise
            comparison.notes.append(f"{path.relative_to(folder)} cannot be read and is left out: {error}")
            continue
        comparison.runs.append(run)
        comparison.configs.append(config)
    if not comparison.runs:
        reasons = f" ({comparison.notes[0]})" if comparison.notes else ""
        raise ControlError(f"{folder} has no finished run to report{reasons}; continue it with the same command")
    return comparison


def _compared_run(config: Config, folder: Path, result: Mapping[str, Any]) -> ComparedRun:
    rows = read_progress(folder / PROGRESS_FILE)
    if not rows:
        raise CheckpointError(f"{folder / PROGRESS_FILE} has no rows; train this run again")
    return ComparedRun(
        config.environment,
        config.algorithm,
        config.seed,
        rows=rows,
        budget=config.steps,
        threshold=result["threshold"],
        solved_at=result["solved_at"] and tuple(result["solved_at"]),
    )


def _in_order(folder: Path) -> list[Path]:
    """The folders of the runs: in the order of runs.csv, then those that it does not have."""
    order: dict[tuple[str, str, str], int] = {}
    try:
        with open(folder / RUNS_FILE, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                order.setdefault((row["environment"], row["algorithm"], row["seed"]), len(order))
    except (OSError, KeyError, ValueError, csv.Error):
        order = {}  # the runs have everything

    def place(path: Path) -> tuple[int, str, str, int]:
        try:
            values = read_object(path / CONFIG_FILE)
            name = (str(values.get("environment")), str(values.get("algorithm")), str(values.get("seed")))
        except CheckpointError:
            name = (path.parts[-3], path.parts[-2], "0")
        seed = int(name[2]) if name[2].isdigit() else 0
        return order.get(name, len(order)), name[0], name[1], seed

    return sorted((path.parent for path in folder.glob(f"*/*/seed-*/{CONFIG_FILE}")), key=place)
