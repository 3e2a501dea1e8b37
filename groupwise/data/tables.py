"""Rows that a program already holds: a list of dicts, a DataFrame, a `datasets.Dataset`, an Arrow table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from groupwise.data.rows import Row, describe_type
from groupwise.errors import DataError

ACCEPTED = "a path, a list of dicts, a DataFrame or a datasets.Dataset"


def as_rows(table: Any, limit: int | None = None) -> list[Row]:
    """The rows of a table, or the first ``limit``.

    ``table`` is an iterable of dicts (a list, a `datasets.Dataset`), a pandas or Polars DataFrame, or an Arrow table.
    Missing values of a DataFrame become None.
    """
    rows: list[Row] = []
    for number, values in enumerate(islice(_records(table), limit), start=1):
        if not isinstance(values, Mapping):
            hint = '; write {"prompt": …}' if isinstance(values, str) else ""
            raise DataError(f"row {number} is {describe_type(values)}; a row is a dict with a prompt{hint}")
        if wrong := [name for name in values if not isinstance(name, str)]:
            raise DataError(f"row {number} has a column named {wrong[0]!r}; column names must be strings")
        rows.append(Row({name: _plain(value) for name, value in values.items()}, f"row {number}"))
    if not rows:
        raise DataError("there are no rows: the table is empty")
    return rows


def _records(table: Any) -> Iterable[Any]:
    if hasattr(table, "notna") and hasattr(table, "columns"):  # pandas
        if not table.columns.is_unique:
            twice = table.columns[table.columns.duplicated()][0]
            raise DataError(f"the DataFrame has two columns named {twice!r}; rename one")
        known = table.astype(object).where(table.notna(), None)
        return known.to_dict("records")  # type: ignore[no-any-return]
    for method in ("to_dicts", "to_pylist"):  # Polars, Arrow
        if hasattr(table, method):
            return getattr(table, method)()  # type: ignore[no-any-return]
    if isinstance(table, Mapping):
        hint = "give a list with one dict per row"
        if any(hasattr(part, "column_names") for part in table.values()):  # a datasets.DatasetDict
            hint = f"choose one of its splits ({', '.join(map(str, table))})"
        raise DataError(f"the rows are a {type(table).__name__}; {hint}")
    if isinstance(table, (str, bytes)) or not isinstance(table, Iterable):
        raise DataError(f"rows cannot be read from an object {describe_type(table)}; give {ACCEPTED}")
    return table


def _plain(value: Any) -> Any:
    """NumPy's arrays and numbers as Python's: Parquet files read by pandas have lists of messages as arrays."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "dtype") else value
