"""Every sampled answer of a run: one Parquet file per step, which pandas, polars and duckdb read."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import CheckpointError, InputError, RunDirError
from groupwise.rundir import write_bytes

if TYPE_CHECKING:
    import pyarrow

ROLLOUTS = "rollouts"

# The columns of a rollout file that groupwise fills, in their order, with Arrow's names of their types. They are told
# to Arrow, not guessed from the values: a column that is empty in one step must not change its type there.
COLUMNS = {
    "step": "int64",
    "prompt_number": "int64",
    "row": "int64",
    "sample": "int64",
    "group": "int64",
    "prompt": "string",
    "completion": "string",
    "reward": "double",
    "reward/": "double",  # one for each reward function
    "advantage": "double",
    "contributes": "bool",
    "masked_out": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "stop_reason": "string",
}
WIDENING = ("bool", "double", "string")  # of a column that a reward function adds: each can hold the ones before it


def write_rollouts(folder: Path, step: int, table: Mapping[str, Sequence[Any]], kinds: dict[str, str]) -> None:
    """Write one row per sample, whole or not at all. See COLUMNS; other columns are kept as they are given.

    In those, numbers, booleans and strings stay what they are, anything else becomes its text; numbers are all floats,
    so that a column does not change its type from one step to the next: ``kinds`` remembers them. NaN is written as a
    missing value.
    """
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(_arrow_table(table, kinds), buffer, compression="zstd")
    write_bytes(_rollout_path(folder, step), buffer.getvalue())


def read_rollouts(folder: Path, steps: Iterable[int] | None = None) -> pyarrow.Table:
    """The rollouts of all steps, or of the given ones, as one table. ``folder`` is the run's or its rollouts'."""
    import pyarrow
    import pyarrow.parquet

    folder = Path(folder)
    folder = folder / ROLLOUTS if (folder / ROLLOUTS).is_dir() else folder
    files = rollout_files(folder)
    if not files:
        raise RunDirError(f"{folder} holds no rollouts (step-….parquet); was the run told to keep them?")
    wanted = sorted(files) if steps is None else list(dict.fromkeys(steps))
    missing = [step for step in wanted if step not in files]
    if missing:
        raise RunDirError(
            f"{folder} has no rollouts of step {', '.join(map(str, missing))}; "
            f"it has {len(files)} steps between {min(files)} and {max(files)}"
        )
    if not wanted:
        raise InputError("read_rollouts was asked for no step at all; leave out steps to read every one")
    tables = []
    for step in wanted:
        try:
            tables.append(pyarrow.parquet.read_table(files[step]))
        except (pyarrow.ArrowException, OSError) as error:
            raise CheckpointError(f"{files[step]} is damaged: {error}. Remove it, or restore it from a copy") from error
    return pyarrow.concat_tables(_same_types(tables), promote_options="default")


def rollout_files(folder: Path) -> dict[int, Path]:
    """The files by their steps."""
    found = ((re.fullmatch(r"step-(\d+)\.parquet", path.name), path) for path in folder.glob("step-*.parquet"))
    return {int(match[1]): path for match, path in found if match}


def kinds_so_far(folder: Path) -> dict[str, str]:
    """The types of the added columns when a run is resumed. Text tells nothing: an empty column is text as well."""
    import pyarrow.parquet

    files = rollout_files(folder)
    try:
        newest = pyarrow.parquet.read_schema(files[max(files)]) if files else []
    except (pyarrow.ArrowException, OSError):
        return {}  # whoever reads the rollouts hears of the damage; writing can go on
    kinds = {field.name: str(field.type) for field in newest if _own(field.name) not in COLUMNS}
    return {name: kind for name, kind in kinds.items() if kind in WIDENING and kind != "string"}


def _rollout_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.parquet"


def _arrow_table(table: Mapping[str, Sequence[Any]], kinds: dict[str, str]) -> pyarrow.Table:
    """The columns in their order, with types. ``kinds`` remembers the types of those that are not groupwise's own."""
    import pyarrow

    columns = {name: _plain(values) for name, values in table.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"the columns of the rollouts must be equally long, got {lengths}")
    order = list(COLUMNS)
    known = [name for name in columns if _own(name) in COLUMNS]
    arrays = {}
    for name in sorted(known, key=lambda name: order.index(_own(name))) + [n for n in columns if n not in known]:
        kind = COLUMNS.get(_own(name)) or _kind(columns[name], kinds.get(name))
        if name not in known and any(value is not None for value in columns[name]):
            kinds[name] = kind
        try:
            arrays[name] = pyarrow.array(_as(kind, columns[name]), pyarrow.type_for_alias(kind))
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"the rollouts' column {name!r} must hold {kind} values: {error}") from error
    return pyarrow.table(arrays)


def _own(name: str) -> str:
    return "reward/" if name.startswith("reward/") else name


def _plain(values: Any) -> list[Any]:
    """A list of Python's own values, from a list, an array or a tensor."""
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    return [value.item() if getattr(value, "shape", None) == () else value for value in values]


def _kind(values: list[Any], before: str | None) -> str:
    """The type of a column that a reward function added; never narrower than it was ``before``."""
    present = [value for value in values if value is not None]
    if not present:
        return before or "string"
    if all(isinstance(value, bool) for value in present):
        kind = "bool"
    else:
        kind = "double" if all(isinstance(value, (int, float)) for value in present) else "string"
    return max(kind, before or kind, key=WIDENING.index)


def _as(kind: str, values: list[Any]) -> list[Any]:
    if kind == "double":
        return [None if value is None or math.isnan(value) else float(value) for value in values]
    if kind == "string":  # a lone surrogate, which no file can hold, becomes a question mark
        return [None if value is None else str(value).encode("utf-8", "replace").decode() for value in values]
    broken = [value for value in values if isinstance(value, float) and not value.is_integer()]
    if broken:
        raise ValueError(f"{broken[0]} is no whole number")  # Arrow would cut it off without a word
    return values


def _same_types(tables: list[pyarrow.Table]) -> list[pyarrow.Table]:
    """The tables with one type per column: the widest that one of them has."""
    import pyarrow

    widest: dict[str, str] = {}
    for table in tables:
        for name, column in zip(table.column_names, table.columns, strict=True):
            kind = str(column.type)
            if kind in WIDENING and not (kind == "string" and column.null_count == len(column)):
                widest[name] = max(kind, widest.get(name, kind), key=WIDENING.index)
    for number, table in enumerate(tables):
        for position, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
            if str(column.type) != widest.get(name, str(column.type)):
                column = column.cast(pyarrow.type_for_alias(widest[name]))
                tables[number] = tables[number].set_column(position, name, column)
    return tables
