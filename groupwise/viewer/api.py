"""What the page can ask for: each path has one function, and an answer is a dict that JSON can hold. No HTTP here.

The functions are in `routes/`. To add a path, write a function there::

    @run_route("groups")  # GET run/ID/groups?step=3
    def groups(run: ServedRun, query: Query) -> dict[str, Any]:
        return {"groups": …}

`groupwise view` answers requests with it, and `groupwise report` puts the answers into a file.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from groupwise.errors import InputError, check_choice
from groupwise.rundir import as_json
from groupwise.text import excerpt
from groupwise.viewer.runs import NotServedError, ServedRun, ServedRuns

RunHandler = Callable[[ServedRun, "Query"], dict[str, Any]]
RunsHandler = Callable[[ServedRuns, "Query"], dict[str, Any]]

RUN_ROUTES: dict[str, RunHandler] = {}
"""The functions of paths below ``run/ID``, by the rest of the path; the run itself is ``""``."""
ROUTES: dict[str, RunsHandler] = {}
"""The functions of all other paths."""


class Query(dict[str, str]):
    """The query of a request. A value of the wrong kind is an `InputError`."""

    def text(self, name: str, default: str = "") -> str:
        return self.get(name, default)

    def integer(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None or not (value.isascii() and value.isdigit()) or len(value) > 15 or int(value) < least:
            given = "it is missing" if value is None else f"got {excerpt(value)}"
            raise InputError(f"{name} must be an integer of at least {least}; {given}")
        return int(value)

    def choice(self, name: str, allowed: Iterable[str], default: str) -> str:
        value = self.get(name) or default
        check_choice(name, value, allowed)
        return value

    def names(self, name: str) -> list[str]:
        """A list of names, separated by commas."""
        return [part for part in self.get(name, "").split(",") if part]


def run_route(path: str) -> Callable[[RunHandler], RunHandler]:
    """Let a function answer ``run/ID/path``."""

    def register(function: RunHandler) -> RunHandler:
        RUN_ROUTES[path] = function
        return function

    return register


def route(path: str) -> Callable[[RunsHandler], RunsHandler]:
    """Let a function of all runs answer ``path``."""

    def register(function: RunsHandler) -> RunsHandler:
        ROUTES[path] = function
        return function

    return register


class Api:
    """Answers paths about the runs of some folders."""

    def __init__(self, runs: ServedRuns) -> None:
        self.runs = runs
        self._listing = threading.Lock()
        from groupwise.viewer import routes

        for module in pkgutil.iter_modules(routes.__path__):
            importlib.import_module(f"{routes.__name__}.{module.name}")

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The answer to a path such as ``run/ID/metrics``. Requests may come from several threads."""
        parameters = Query(query or {})
        if path in ROUTES:
            with self._listing:
                return _checked(ROUTES[path](self.runs, parameters))
        kind, _, rest = path.partition("/")
        identifier, _, name = rest.partition("/")
        if kind != "run" or name not in RUN_ROUTES:
            raise NotServedError(f"there is nothing at {excerpt(path)}")
        run = self.runs.get(identifier)
        with run.lock:
            run.refresh()
            return _checked(RUN_ROUTES[name](run, parameters))


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = as_json(answer)
    return checked


def answer_key(path: str, query: Mapping[str, str] | None = None) -> str:
    """The name of an answer in a report's file; `gw.source` in app.js makes the same one."""
    pairs = sorted((query or {}).items())
    encoded = "&".join(f"{quote(name, safe=KEPT)}={quote(value, safe=KEPT)}" for name, value in pairs if value != "")
    return f"{path}?{encoded}" if encoded else path


KEPT = "!~*'()"  # what JavaScript's encodeURIComponent leaves as it is, and urllib would escape
