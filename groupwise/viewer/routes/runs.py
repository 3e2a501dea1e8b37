"""The list of runs, a run's summary, and its state, which a page asks for every two seconds."""

from __future__ import annotations

from typing import Any

from groupwise.viewer.api import Query, route, run_route
from groupwise.viewer.runs import ServedRun, ServedRuns


@route("runs")
def runs(served: ServedRuns, query: Query) -> dict[str, Any]:
    """All runs, newest first, and folders that look like one and cannot be read."""
    rows = []
    for run in served.scan():
        with run.lock:
            run.refresh()
            rows.append(state(run, query) | {"id": run.id, "name": run.reader.name})
    return {"runs": rows, "unreadable": served.unreadable, "folders": [str(root) for root in served.roots]}


@run_route("state")
def state(run: ServedRun, query: Query) -> dict[str, Any]:
    """What tells a page whether anything has changed."""
    reader = run.reader
    return {
        "version": run.version,
        "status": reader.status,
        "step": reader.step,
        "total_steps": reader.total_steps,
        "problems": len(reader.problems),
    }


@run_route("")
def summary(run: ServedRun, query: Query) -> dict[str, Any]:
    """What every view needs to know of a run."""
    reader = run.reader
    return state(run, query) | {
        "id": run.id,
        "name": reader.name,
        "path": str(reader.path),
        "task": reader.settings.get("task"),
        "model": reader.settings.get("model.source"),
        "algorithm": reader.settings.get("algorithm"),
        "metric": reader.metric,
        "settings": reader.settings,
        "phases": [{"name": phase.name, "first": phase.first, "last": phase.last} for phase in reader.phases],
        "changes": reader.changes,
        "problems": reader.problems,
        "rollout_steps": reader.rollout_steps,
        "token_steps": reader.token_steps,
        "evaluation_steps": reader.evaluation_steps,
        "checkpoints": sorted(reader.checkpoints),
    }
