"""Curves of a run, and of several in one plot."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from groupwise.analysis.curves import POINTS, ChartSection, RunAxes, chart_sections, curve
from groupwise.analysis.settings import side_by_side
from groupwise.analysis.step_times import step_times
from groupwise.errors import InputError
from groupwise.viewer.api import Query, route, run_route
from groupwise.viewer.routes.runs import summary
from groupwise.viewer.runs import ServedRun, ServedRuns

MOST_COMPARED = 16


@run_route("curves")
def curves(run: ServedRun, query: Query) -> dict[str, Any]:
    """Which charts there are; their points come from ``metrics``."""
    return run.cached("curves", lambda: {"sections": _sections(chart_sections([run.reader]))})


@run_route("metrics")
def metrics(run: ServedRun, query: Query) -> dict[str, Any]:
    """The points of the metrics in ``names`` (default: all), at most ``points`` of each."""
    names = query.names("names") or run.reader.metric_names
    points = query.integer("points", POINTS, least=10)
    axes = run.cached("axes", lambda: RunAxes(run.reader))
    known = set(run.reader.metric_names)
    return {"columns": {name: curve(run.reader, axes, name, points) for name in names if name in known}}


@run_route("time")
def time(run: ServedRun, query: Query) -> dict[str, Any]:
    return run.cached("time", lambda: step_times(run.reader))


@route("compare")
def compare(served: ServedRuns, query: Query) -> dict[str, Any]:
    """Several runs: their charts, and settings, versions and inputs side by side."""
    identifiers = list(dict.fromkeys(query.names("runs")))
    if not 1 <= len(identifiers) <= MOST_COMPARED:
        raise InputError(f"runs must name 1 to {MOST_COMPARED} runs, separated by commas, got {len(identifiers)}")
    chosen = [served.get(identifier) for identifier in identifiers]
    with ExitStack() as locks:
        for run in chosen:
            locks.enter_context(run.lock)
            run.refresh()
        readers = [run.reader for run in chosen]
        tables = {
            "settings": [reader.settings for reader in readers],
            "inputs": [_flat_inputs(reader.inputs) for reader in readers],
            "versions": [reader.versions for reader in readers],
        }
        return {
            "runs": [summary(run, query) for run in chosen],
            "sections": _sections(chart_sections(readers)),
            "tables": {name: [row._asdict() for row in side_by_side(rows)] for name, rows in tables.items()},
        }


def _sections(sections: Iterable[ChartSection]) -> list[dict[str, Any]]:
    return [asdict(section) for section in sections]


def _flat_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, with the hash of each source file on a line of its own."""
    flat = {name: value for name, value in inputs.items() if name != "sources"}
    sources = inputs.get("sources")
    for role, files in sources.items() if isinstance(sources, dict) else ():
        for file, digest in files.items() if isinstance(files, dict) else ():
            flat[f"{file}, source of {role}"] = digest
    return flat
