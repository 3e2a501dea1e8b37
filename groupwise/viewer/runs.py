"""The runs that a page shows: found below some folders, each with an id that a URL can hold."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from groupwise.analysis.run_reader import RunReader, find_runs
from groupwise.errors import GroupwiseError, RunDirError
from groupwise.text import excerpt

Result = TypeVar("Result")
REFRESH = 0.5  # seconds for which files are not looked at again


class NotServedError(GroupwiseError, LookupError):
    """There is no such path, run, step or sample."""


class ServedRun:
    """A run with its reader. Who uses the reader holds ``lock``.

    ``version`` counts the changes that were seen, so that a page knows whether to ask again.
    """

    def __init__(self, identifier: str, reader: RunReader) -> None:
        self.id, self.reader = identifier, reader
        self.version = 1
        self.lock = threading.RLock()
        self._refreshed = time.monotonic()
        self._cache: dict[Any, Any] = {}

    def refresh(self) -> None:
        """Read what was added to the run's files."""
        if time.monotonic() - self._refreshed < REFRESH:
            return
        if self.reader.refresh():
            self.version += 1
            self._cache.clear()
        self._refreshed = time.monotonic()

    def cached(self, key: Any, compute: Callable[[], Result]) -> Result:
        """The result of ``compute``, kept under ``key`` until the run changes."""
        if key not in self._cache:
            self._cache[key] = compute()
        result: Result = self._cache[key]
        return result


class ServedRuns:
    """All runs below ``roots``, which are run folders or folders with runs. New ones are found by `scan`.

    A root that does not exist, or in which there is no run, is an error at the start; later it just has none.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = list(roots)
        find_runs(self.roots)
        self._runs: dict[str, ServedRun] = {}
        self._ids: dict[Path, str] = {}
        self._lock = threading.Lock()
        self.unreadable: dict[str, str] = {}  # the reason, by name of the folder
        self.scan()

    def scan(self) -> list[ServedRun]:
        """Look for runs again; newest first."""
        with self._lock:
            found = self._find()
            self.unreadable = {}
            for path in found:
                if path not in self._ids or self._ids[path] not in self._runs:
                    self._open(path)
            present = {self._ids[path] for path in found if path in self._ids}
            for identifier in set(self._runs) - present:
                del self._runs[identifier]
            return [self._runs[self._ids[path]] for path in found if self._ids.get(path) in self._runs]

    def get(self, identifier: str) -> ServedRun:
        run = self._runs.get(identifier)
        if run is None or not run.reader.path.is_dir():  # a new one, or one that was deleted
            run = next((run for run in self.scan() if run.id == identifier), None)
        if run is None:
            raise NotServedError(f"there is no run {excerpt(identifier)} here; it may have been moved or deleted")
        return run

    def _find(self) -> list[Path]:
        try:
            return find_runs(self.roots)
        except RunDirError:  # of one of them
            found = []
            for root in self.roots:
                with suppress(RunDirError):
                    found += find_runs([root])
            return list(dict.fromkeys(found))

    def _open(self, path: Path) -> None:
        try:
            reader = RunReader(path)
        except GroupwiseError as error:
            self.unreadable[path.name] = str(error)
            return
        identifier = self._ids.setdefault(path, self._new_id(path))
        self._runs[identifier] = ServedRun(identifier, reader)

    def _new_id(self, path: Path) -> str:
        """The folder's name, with a hash of its path if the name is taken or would have to be escaped in a URL."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name)
        if name == path.name and name.strip(".") and name not in self._ids.values():
            return name
        return f"{name}-{hashlib.sha256(str(path.absolute()).encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"
