"""Metrics as JSON lines, one object per row, each written at once.

A killed process loses no recorded row; an unfinished last line is dropped on the next start. JSON has no NaN, so NaN
and infinities are written as the strings "NaN", "Infinity" and "-Infinity" and are read back as floats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import InputError, RunDirError
from groupwise.paths import MEGABYTE, kind_of, read_file
from groupwise.rundir.files import write_bytes
from groupwise.text import error_reason

LARGEST = 4096 * MEGABYTE
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsRecorder:
    """Appends rows to a metrics file. Steps may repeat (training and evaluation of one step) but not decrease."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        lines = _parse(self.path)
        self.last_step: int | None = lines[-1][1]["step"] if lines else None
        self._open()
        self._file.truncate(sum(len(line) for line, _ in lines))

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
        self._append((json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode())
        self.last_step = int(step)

    def _append(self, line: bytes) -> None:
        length = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
            reason = "the disk is full" if written != len(line) else ""
        except OSError as error:
            reason = error_reason(error)
        if reason:
            self._file.truncate(length)
            raise RunDirError(f"{self.path} could not be written: {reason}. Earlier rows are untouched; make room")

    def rewind(self, step: int, *, drop: Callable[[Mapping[str, Any]], bool] = lambda row: False) -> None:
        """Delete the rows after ``step``, to resume from there, and those to ``drop``."""
        lines = _parse(self.path)
        kept = [line for line, row in lines if row["step"] <= step and not drop(row)]
        self._file.close()
        write_bytes(self.path, b"".join(kept))
        self._open()
        self.last_step = max((row["step"] for _, row in lines if row["step"] <= step), default=None)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file. An unfinished last line is ignored; other damage is an error."""
    if kind_of(path, RunDirError) is None:
        raise RunDirError(f"{path} does not exist")
    return [row for _, row in _parse(Path(path))]


def metric_column(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[Any]]:
    """The steps at which a metric was recorded, and its values."""
    rows = [row for row in rows if name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]


def _parse(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """The complete lines of the file, each with its row."""
    if kind_of(path, RunDirError) is None:
        return []
    lines = read_file(path, RunDirError, limit=LARGEST).splitlines(keepends=True)
    parsed = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise RunDirError(f"{path}, line {number} is damaged: {error}. Repair or remove that line") from error
        finite = {key: NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in row.items()}
        parsed.append((line, finite))
    return parsed


def _plain(name: str, value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise InputError(f"the metric {name!r} must be one number, got {value!r}") from error
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(f"the metric {name!r} must be a number, a string or None, got {type(value).__name__}")
