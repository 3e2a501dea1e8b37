"""The samples of a run: one Parquet file per step, readable by pandas, polars and duckdb."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import CheckpointError, InputError, RunDirError
from groupwise.paths import open_file
from groupwise.rundir import write_bytes
from groupwise.text import error_reason

if TYPE_CHECKING:
    import pyarrow

ROLLOUTS = "rollouts"

# The fixed columns of a rollout file, in order, with Arrow types. These are not inferred from the values, because a
# column that is empty in one step must keep its type.
COLUMNS = {
    "step": "int64",
    "prompt_number": "int64",
    "row": "int64",
    "sample": "int64",
    "group": "int64",
    "prompt": "string",
    "completion": "string",
    "reward": "double",
    "reward/": "double",  # one per reward function
    "grade/": "bool",  # one per grade; missing if no answer was found
    "advantage": "double",
    "contributes": "bool",
    "masked_out": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "stop_reason": "string",
}
PLAIN = frozenset({bool, int, float, str, type(None)})  # types of Python, which Arrow takes
EXTRA_TYPES = ("bool", "double", "string")  # of columns that reward functions add; each can hold those before it


class RolloutWriter:
    """Writes the samples of each step, one row per sample, to a file in ``folder``; atomically.

    Columns beside `COLUMNS` may hold booleans, numbers (stored as floats) and strings; other values become text. Their
    types are remembered, so that a column keeps its type from step to step. NaN is written as a missing value.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._types: dict[str, str] | None = None  # of the extra columns

    def write(self, step: int, table: Mapping[str, Sequence[Any]]) -> None:
        import pyarrow.parquet

        if self._types is None:
            self._types = _saved_types(self.folder)
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(_arrow_table(table, self._types), buffer, compression="zstd")
        write_bytes(self.folder / file_name(step), buffer.getvalue())


def read_rollouts(folder: Path, steps: Iterable[int] | None = None) -> pyarrow.Table:
    """The rollouts of all steps, or of ``steps``, as one table. ``folder`` is a run folder or its ``rollouts``."""
    import pyarrow
    import pyarrow.parquet

    folder = Path(folder)
    folder = folder / ROLLOUTS if (folder / ROLLOUTS).is_dir() else folder
    files = step_files(folder)
    if not files:
        raise RunDirError(f"{folder} has no rollouts (step-….parquet); a run writes them if run.save_rollouts is true")
    wanted = sorted(files) if steps is None else list(dict.fromkeys(steps))
    if not wanted:
        raise InputError("read_rollouts: steps is empty; omit it to read all")
    missing = [step for step in wanted if step not in files]
    if missing:
        raise RunDirError(
            f"{folder} has no rollouts of step {', '.join(map(str, missing))}; "
            f"it has {len(files)} steps between {min(files)} and {max(files)}"
        )
    tables = []
    for step in wanted:
        try:
            tables.append(pyarrow.parquet.read_table(files[step]))
        except (pyarrow.ArrowException, OSError) as error:
            raise _damaged(files[step], error) from error
    return pyarrow.concat_tables(_same_types(tables), promote_options="default")


def file_name(step: int) -> str:
    return f"step-{step:06d}.parquet"


def step_files(folder: Path) -> dict[int, Path]:
    """The files ``step-000012.parquet`` of a folder, by step; none without the folder."""
    try:
        with os.scandir(folder) as entries:
            matches = [re.fullmatch(r"step-(\d+)\.parquet", entry.name) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise RunDirError(f"{folder} cannot be read: {error_reason(error)}") from error
    return {int(match[1]): folder / match[0] for match in matches if match}


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of one file, with those of ``columns`` that it has; a CheckpointError if it is damaged or deleted."""
    rows: list[dict[str, Any]] = _read(path, columns, lambda table: table.to_pylist())
    return rows


def read_columns(path: Path, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Those of ``columns`` that a file has; errors as in `read_rows`."""
    values: dict[str, list[Any]] = _read(path, columns, lambda table: table.to_pydict())
    return values


def _read(path: Path, columns: Sequence[str] | None, convert: Callable[[Any], Any]) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        with open_file(path, CheckpointError) as file, pyarrow.parquet.ParquetFile(file) as parquet:
            return convert(parquet.read(None if columns is None else list(columns), use_threads=False))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {error_reason(error)}. Remove it, or restore it from a copy")


def _saved_types(folder: Path) -> dict[str, str]:
    """The types of the extra columns in the newest file, except strings: an empty column is stored as strings too."""
    import pyarrow.parquet

    files = step_files(folder)
    try:
        newest = pyarrow.parquet.read_schema(files[max(files)]) if files else []
    except (pyarrow.ArrowException, OSError):
        return {}  # read_rollouts reports the damage; writing can continue
    types = {field.name: str(field.type) for field in newest if _column_key(field.name) not in COLUMNS}
    return {name: kind for name, kind in types.items() if kind in EXTRA_TYPES and kind != "string"}


def _arrow_table(table: Mapping[str, Sequence[Any]], extra_types: dict[str, str]) -> pyarrow.Table:
    """The table with its columns in order; ``extra_types`` is updated."""
    import pyarrow

    order = list(COLUMNS)
    fixed = sorted((name for name in table if _column_key(name) in COLUMNS), key=lambda n: order.index(_column_key(n)))
    arrays = {}
    for name in [*fixed, *(name for name in table if name not in fixed)]:
        values: Sequence[Any] = table[name]
        if not PLAIN.issuperset(map(type, values)):  # rewards may log lists of numbers of torch or NumPy
            values = [value.item() if getattr(value, "shape", None) == () else value for value in values]
        kind = COLUMNS.get(_column_key(name)) or _infer_type(values, extra_types.get(name))
        if name not in fixed and any(value is not None for value in values):
            extra_types[name] = kind
        arrays[name] = pyarrow.array(_convert(values, kind), pyarrow.type_for_alias(kind))
    return pyarrow.table(arrays)


def _column_key(name: str) -> str:
    """The column's key in `COLUMNS`."""
    return next((prefix for prefix in ("reward/", "grade/") if name.startswith(prefix)), name)


def _infer_type(values: Sequence[Any], before: str | None) -> str:
    """The type of an extra column, at least as wide as ``before``."""
    present = [value for value in values if value is not None]
    if not present:
        return before or "string"
    if all(isinstance(value, bool) for value in present):
        kind = "bool"
    else:
        kind = "double" if all(isinstance(value, (int, float)) for value in present) else "string"
    return max(kind, before or kind, key=EXTRA_TYPES.index)


def _convert(values: Sequence[Any], kind: str) -> Sequence[Any]:
    if kind == "double":
        return [None if value is None or math.isnan(value) else float(value) for value in values]
    if kind == "string":  # lone surrogates cannot be encoded and become question marks
        texts = [None if value is None else str(value) for value in values]
        written = {text: None if text is None else text.encode("utf-8", "replace").decode() for text in set(texts)}
        return [written[text] for text in texts]
    return [None if value is None else bool(value) for value in values] if kind == "bool" else values


def _same_types(tables: list[pyarrow.Table]) -> list[pyarrow.Table]:
    """The tables with each column cast to the widest of its types."""
    import pyarrow

    widest: dict[str, str] = {}
    for table in tables:
        for name, column in zip(table.column_names, table.columns, strict=True):
            kind = str(column.type)
            if kind in EXTRA_TYPES and not (kind == "string" and column.null_count == len(column)):
                widest[name] = max(kind, widest.get(name, kind), key=EXTRA_TYPES.index)

    def schema_of(table: pyarrow.Table) -> pyarrow.Schema:
        return pyarrow.schema([(field.name, widest.get(field.name) or field.type) for field in table.schema])

    return [table.cast(schema_of(table)) for table in tables]
