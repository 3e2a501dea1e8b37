"""A JSON file of results that is written after each of them, so that an interrupted benchmark goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from groupwise.errors import GroupwiseError
from groupwise.rundir import write_json


class Results:
    """Results by name, of ``work`` that must be the same in all of them; kept in a file if there is a ``path``."""

    def __init__(self, path: Path | None, work: dict[str, Any]) -> None:
        self.path, self.work = path, json.loads(json.dumps(work))
        self.found: dict[str, Any] = {}
        if path is None:
            return
        if not path.absolute().parent.is_dir():
            raise SystemExit(f"{path}: there is no folder {path.absolute().parent}; create it or name another file")
        if path.exists():
            self.found = self._read(path)
            print(f"{path} has {len(self.found)} finished results, which are not measured again", flush=True)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            work, found = dict(content["work"]), dict(content["results"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path} is not a file of this benchmark ({error!r}); delete it or name another") from None
        for name in dict.fromkeys([*self.work, *work]):
            if self.work.get(name) != work.get(name):
                raise SystemExit(
                    f"{path} was measured with {name} {work.get(name)!r}, this run has {self.work.get(name)!r}; name "
                    "another file, or delete this one to measure all again"
                )
        return found

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def add(self, name: str, result: dict[str, Any]) -> None:
        self.found[name] = result
        if self.path is None:
            return
        try:
            write_json(self.path, {"work": self.work, "results": self.found})
        except (OSError, GroupwiseError) as error:
            raise SystemExit(f"{self.path} cannot be written: {error}") from None
