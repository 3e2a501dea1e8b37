"""Metrics as JSON lines, one object per row, each written at once.

A killed process loses no recorded row; an unfinished last line is dropped on the next start. JSON has no NaN, so NaN
and infinities are written as the strings "NaN", "Infinity" and "-Infinity" and are read back as floats. A resumed run
does not depend on its metrics: damaged lines are set aside, and it goes on with the others.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from groupwise.errors import InputError, RunDirError
from groupwise.paths import MEGABYTE, kind_of, open_file, read_file
from groupwise.rundir.files import NOT_FINITE, NOT_IN_PLACE, as_json, is_still, json_bytes, set_aside, write_bytes
from groupwise.text import error_reason, excerpt, one_line, plural

LARGEST = 4096 * MEGABYTE


class MetricsRecorder:
    """Appends rows to a metrics file. Steps may repeat (training and evaluation of one step) but not decrease.

    Damaged lines are an error, unless ``resume`` says that `rewind` will be called, which sets them aside.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        lines = _read_lines(self.path) if self.path.exists() else []
        if not resume:
            _check(self.path, lines)
        self.last_step: int | None = max((line.row["step"] for line in lines if line.row), default=None)
        self._open()
        self._file.truncate(sum(len(line.text) for line in lines))

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise RunDirError(f"{self.path} cannot be opened: {error_reason(error)}") from error

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one row. Values are numbers (or tensors and arrays of one number), booleans, strings or None."""
        if self.last_step is not None and step < self.last_step:
            raise InputError(f"step {step} comes after step {self.last_step} in {self.path}; rewind it first")
        if "step" in values:
            raise InputError("'step' is reserved for the step number; give the metric another name")
        row = {"step": int(step), **{name: _plain(name, value) for name, value in values.items()}}
        self._append(json_bytes(row) + b"\n")
        self.last_step = int(step)

    def _append(self, line: bytes) -> None:
        if not is_still(self._file.fileno(), self.path):  # what is written to a deleted file is lost silently
            raise RunDirError(f"{self.path} {NOT_IN_PLACE}")
        length = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
            reason = "the disk is full" if written != len(line) else ""
        except OSError as error:
            reason = error_reason(error)
        if reason:
            self._file.truncate(length)
            raise RunDirError(f"{self.path} could not be written: {reason}. Earlier rows are untouched; make room")

    def rewind(self, step: int, *, drop: Callable[[Mapping[str, Any]], bool] = lambda row: False) -> str | None:
        """Delete the rows after ``step``, to resume from there, and those to ``drop``.

        Rows are sorted by step, and repeated ones are deleted. If lines are damaged, the file is kept under another
        name; the result is a sentence about that.
        """
        lines = _read_lines(self.path)
        rows: dict[bytes, dict[str, Any]] = {line.text: line.row for line in lines if line.row is not None}
        kept = [text for text, row in rows.items() if row["step"] <= step and not drop(row)]
        kept.sort(key=lambda text: int(rows[text]["step"]))
        self._file.close()
        damaged = [line for line in lines if line.problem]
        note = None
        if damaged:
            note = (
                f"{self.path.name} has {plural(len(damaged), 'damaged line')} (the first is line {damaged[0].number}): "
                f"it was renamed to {set_aside(self.path).name}, and the run goes on with the other rows"
            )
        write_bytes(self.path, b"".join(kept))
        self._open()
        self.last_step = max((row["step"] for row in rows.values() if row["step"] <= step), default=None)
        return note

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file. An unfinished last line is ignored; other damage is an error."""
    if kind_of(path, RunDirError) is None:
        raise RunDirError(f"{path} does not exist")
    lines = _read_lines(Path(path))
    _check(path, lines)
    return [line.row for line in lines if line.row is not None]


class MetricsFollower:
    """The rows of a metrics file that another process may still write; `read` takes in what was appended.

    Damaged lines are left out and named in ``problems``. A file that was rewound, replaced or deleted is read again
    from its start.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self._start_again()

    def _start_again(self) -> None:
        self._read: list[_Line] = []
        self._state: os.stat_result | None = None
        self._offset, self._last = 0, b""

    def read(self) -> bool:
        """Whether ``rows`` or ``problems`` have changed. Both are then new lists."""
        before, problems = self._read, []
        try:
            if kind_of(self.path, RunDirError) is None:
                self._start_again()
            else:
                with open_file(self.path, RunDirError) as file:
                    self._take(file)
        except (OSError, RunDirError) as error:
            problems = [str(error) if isinstance(error, RunDirError) else f"{self.path}: {error_reason(error)}"]
        problems += [
            f"{self.path.name}, line {row.number} is damaged: {row.problem}" for row in self._read if row.problem
        ]
        if self._read is before and problems == self.problems:
            return False
        self.rows, self.problems = [line.row for line in self._read if line.row is not None], problems
        return True

    def _take(self, file: BinaryIO) -> None:
        state = os.fstat(file.fileno())
        is_same = self._state is not None and os.path.samestat(self._state, state)
        if is_same:  # the number of a deleted file may be given to the next one, so the last line is compared
            file.seek(self._offset - len(self._last))
            is_same = file.read(len(self._last)) == self._last
        if not is_same:
            self._start_again()
            file.seek(0)
        self._state = state
        texts = [text for text in file if text.endswith(b"\n")]
        if texts:
            new = [_parse(number, text) for number, text in enumerate(texts, start=len(self._read) + 1)]
            self._read = [*self._read, *new]
            self._offset, self._last = self._offset + sum(map(len, texts)), texts[-1]


def metric_column(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[Any]]:
    """The steps at which a metric was recorded, and its values."""
    rows = [row for row in rows if name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]


class _Line(NamedTuple):
    """A complete line of the file: its row, or what is wrong with it; a blank line has neither."""

    number: int
    text: bytes
    row: dict[str, Any] | None
    problem: str = ""


def _read_lines(path: Path) -> list[_Line]:
    """The complete lines of the file. They are split at line feeds, as an editor counts them."""
    content = io.BytesIO(read_file(path, RunDirError, limit=LARGEST))
    lines = (_parse(number, text) for number, text in enumerate(content, start=1) if text.endswith(b"\n"))
    return list(lines)


def _check(path: str | Path, lines: Iterable[_Line]) -> None:
    for line in lines:
        if line.problem:
            raise RunDirError(f"{path}, line {line.number} is damaged: {line.problem}. Repair or remove that line")


def _parse(number: int, text: bytes) -> _Line:
    if not text.strip():
        return _Line(number, text, None)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _Line(number, text, None, f"it is not JSON ({one_line(str(error))})")
    if not isinstance(row, dict):
        return _Line(number, text, None, "it is not an object")
    if type(row.get("step")) is not int or row["step"] < 0:
        return _Line(number, text, None, "'step' is missing or not a number of steps")
    if name := next((name for name, value in row.items() if isinstance(value, (dict, list))), None):
        return _Line(number, text, None, f"{name!r} is neither a number nor a text")
    return _Line(number, text, {name: NOT_FINITE.get(x, x) if isinstance(x, str) else x for name, x in row.items()})


def _plain(name: str, value: Any) -> Any:
    try:
        plain = as_json(value)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"the metric {name!r} must be one number, got {excerpt(value)}") from error
    if plain is None or isinstance(plain, (bool, int, float, str)):
        return plain
    raise InputError(f"the metric {name!r} must be a number, a string or None, got {type(value).__name__}")
