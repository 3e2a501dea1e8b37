"""The list of runs; of a run its summary, its settings, its findings, and its state, which a page asks for often."""

from __future__ import annotations

import math
from typing import Any

from groupwise.analysis.findings import diagnose
from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.settings import run_settings
from groupwise.viewer.api import Query, route, run_route
from groupwise.viewer.runs import ServedRun, ServedRuns


@route("runs")
def runs(served: ServedRuns, query: Query) -> dict[str, Any]:
    """All runs, newest first, and folders that look like one and cannot be read."""
    rows = []
    for run in served.scan():
        with run.lock:
            run.refresh()
            rows.append(_listed(run) | state(run, query))
    return {"runs": rows, "unreadable": served.unreadable, "folders": [str(root) for root in served.roots]}


def _listed(run: ServedRun) -> dict[str, Any]:
    def numbers() -> dict[str, Any]:
        reader = run.reader
        return {
            "held_out": _from_to(reader, f"eval/{reader.metric}") if reader.metric else None,
            "reward": _from_to(reader, "reward"),
            "tokens": max(reader.column("num_tokens")[1], default=None),
            "seconds": math.fsum(value for value in reader.column("step_time")[1] if math.isfinite(value)),
        }

    return _identity(run) | run.cached("listed", numbers)


def _from_to(reader: RunReader, name: str) -> dict[str, Any] | None:
    """The first, the best (largest) and the last value of a metric."""
    values = [value for value in reader.column(name)[1] if math.isfinite(value)]
    return {"first": values[0], "best": max(values), "last": values[-1]} if values else None


@run_route("state")
def state(run: ServedRun, query: Query) -> dict[str, Any]:
    """What tells a page whether anything has changed."""
    reader = run.reader
    return {
        "version": run.version,
        "status": reader.status,
        "step": reader.step,
        "total_steps": reader.total_steps,
        "problem_count": len(reader.problems),
    }


def _identity(run: ServedRun) -> dict[str, Any]:
    reader, settings = run.reader, run.reader.settings
    return {
        "id": run.id,
        "name": reader.name,
        "path": str(reader.path),
        "task": settings.get("task"),
        "model": settings.get("model.source"),
        "algorithm": settings.get("algorithm"),
        "metric": reader.metric,
        "created": reader.created,
        "problems": reader.problems,
    }


@run_route("")
def summary(run: ServedRun, query: Query) -> dict[str, Any]:
    """What every view needs to know of a run."""
    reader = run.reader
    return (
        state(run, query)
        | _identity(run)
        | {
            "settings": reader.settings,
            "phases": [{"name": phase.name, "first": phase.first, "last": phase.last} for phase in reader.phases],
            "changes": reader.changes,
            "evaluated_steps": [row["step"] for row in reader.evaluations],
            "rollout_steps": reader.rollout_steps,
            "token_steps": reader.token_steps,
            "evaluation_steps": reader.evaluation_steps,
            "checkpoints": sorted(reader.checkpoints),
        }
    )


@run_route("settings")
def settings(run: ServedRun, query: Query) -> dict[str, Any]:
    """Every setting with its default, what was changed on the way, and what the run was made of."""
    reader = run.reader
    return {
        "settings": [setting._asdict() for setting in run_settings(reader)],
        "changes": reader.changes,
        "inputs": reader.inputs,
        "versions": reader.versions,
    }


@run_route("findings")
def findings(run: ServedRun, query: Query) -> dict[str, Any]:
    """What is wrong with the run."""
    return run.cached("findings", lambda: {"findings": [finding.as_dict() for finding in diagnose(run.reader)]})
