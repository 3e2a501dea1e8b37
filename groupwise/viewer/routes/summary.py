"""The run on one page."""

from __future__ import annotations

from typing import Any

from groupwise.analysis.summary import summarize
from groupwise.viewer.api import Query, run_route
from groupwise.viewer.runs import ServedRun


@run_route("summary")
def summary(run: ServedRun, query: Query) -> dict[str, Any]:
    return run.cached("summary", lambda: summarize(run.reader).as_dict())
