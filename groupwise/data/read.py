"""Rows from a file, a folder of files, or the hub.

Local files come first, and a name that looks like a path is never looked up on the hub. Errors name the file and line.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from groupwise.data.rows import Row
from groupwise.data.text_files import read_csv, read_json, read_json_lines
from groupwise.errors import DataError, MissingExtraError, nearest_file
from groupwise.paths import FILE, FOLDER, is_folder, kind_of, open_file, show_path, user_path
from groupwise.text import error_reason, excerpt

# File name endings and their formats.
ENDINGS = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".json": "json",
    ".json.gz": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)


def read_rows(
    source: str | Path,
    *,
    split: str | None = None,
    subset: str | None = None,
    limit: int | None = None,
    header: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """The rows of ``source``, or the first ``limit``; rows after those are not read.

    source: a file (.jsonl; .json with a list of objects or one object per line; both also with .gz; .parquet; .csv with
        a header), a folder of files of one format, read in the order of their names, or a hub dataset ``owner/name``.
    split, subset: of a hub dataset; default: ``"train"`` and its only subset. Files have none.
    header: the column names of a .csv file without a header line.
    """
    check_source(source)
    name = str(source)
    path = user_path(name)
    if (kind := kind_of(path, DataError)) is not None:
        for option, value in (("split", split), ("subset", subset)):
            if value is not None:
                raise DataError(f"{option}={value!r} is for hub datasets, but {path} is local; leave {option} out")
        iterator = _files(path, header) if kind == FOLDER else _file(path, header)
    else:
        iterator = _hub(name, subset, split or "train")
    rows: list[dict[str, Any]] = list(islice(iterator, limit))
    if not rows:
        raise DataError(f"{name} is empty: it has no rows")
    return rows


def check_source(source: str | Path) -> None:
    """Raise an error for what is neither an existing file or folder nor a name on the hub. Nothing is read."""
    if not isinstance(source, (str, os.PathLike)) or not str(source):
        raise DataError(f"a dataset is named by a text or a path, not by {source!r}")
    name = str(source)
    path = user_path(name)
    if kind_of(path, DataError) is not None:
        return
    if isinstance(source, os.PathLike) or _looks_like_path(name):
        raise DataError(_missing(path))
    if not is_hub_id(name):
        raise DataError(f"{_missing(path)}. A hub dataset is written owner/name")


def is_hub_id(name: str) -> bool:
    """Whether a name is looked up on the hub: no local file has it, and it does not look like a path."""
    return not _looks_like_path(name) and _HUB_ID.fullmatch(name) is not None and not is_local(name)


def is_local(name: str) -> bool:
    """Whether there is a file or folder of this name."""
    return kind_of(user_path(name), DataError) is not None


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or _ending(name) is not None


def _ending(name: str) -> str | None:
    return next((ending for ending in ENDINGS if name.lower().endswith(ending)), None)


def _missing(path: Path) -> str:
    """The message for a missing file, with the nearest name in its folder."""
    folder = path.absolute().parent
    if os.path.islink(path):
        return f"{path} is a link to {show_path(os.readlink(path))}, which does not exist"
    if not is_folder(folder, DataError):
        existing = next((parent for parent in folder.parents if os.path.isdir(parent)), folder.anchor)
        missing = "is a file" if os.path.exists(folder) else f"does not exist, only {existing}"
        return f"there is no file or folder {path}: the folder {folder} {missing}"
    names = os.listdir(folder) if os.access(folder, os.R_OK) else []
    near = nearest_file(path.name, names)
    return f"there is no file or folder {path.name!r} in {folder}{f'; did you mean {near!r}?' if near else ''}"


def _files(folder: Path, header: Sequence[str] | None) -> Iterator[Row]:
    """The rows of all data files in a folder. Other files, such as a README, are ignored."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error_reason(error)}") from error
    names = [entry.name for entry in entries if _ending(entry.name) and kind_of(entry, DataError) == FILE]
    if not names:
        inner = [entry.name for entry in entries if os.path.isdir(entry)]
        hint = f"; it contains folders ({', '.join(inner)}), name one of them" if inner else ""
        raise DataError(f"{folder} has no data files (names that end in {', '.join(ENDINGS)}){hint}")
    by_kind = {ENDINGS[_ending(name) or ""]: name for name in reversed(names)}
    if len(by_kind) > 1:
        some = ", ".join(sorted(by_kind.values()))
        raise DataError(f"{folder} has files of several formats ({some}); name one file, or a folder of one format")
    # Do not mix the train and test files of a folder.
    by_split = {match[1].lower(): name for name in reversed(names) if (match := _SPLIT.match(name))}
    if len(by_split) > 1:
        some = ", ".join(sorted(by_split.values()))
        raise DataError(f"{folder} has several splits ({some}); name one file, or use a folder per split")
    for name in names:
        yield from _file(folder / name, header)


def _file(path: Path, header: Sequence[str] | None) -> Iterator[Row]:
    ending = _ending(path.name)
    if ending is None:
        raise DataError(f"{path} has an unknown format; its name must end in {', '.join(ENDINGS)}")
    name = show_path(path.name)
    try:
        with open_file(path, DataError) as opened:
            if ENDINGS[ending] == "parquet":
                yield from _parquet(opened, path)
                return
            file: Any = gzip.open(opened) if ending.endswith(".gz") else opened  # noqa: SIM115 - `opened` is closed
            if ENDINGS[ending] == "csv":
                yield from read_csv(file, name, header)
            else:
                yield from read_json(file, name) if ENDINGS[ending] == "json" else read_json_lines(file, name)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        reason = str(error) or "it ends too early"
        raise DataError(f"{path} is damaged or not a gzip file: {reason}; download it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error_reason(error)}") from error


def _parquet(opened: BinaryIO, path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(opened) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                repeated = next(name for name in names if names.count(name) > 1)
                raise DataError(f"{path} has two columns named {excerpt(repeated)}; rename one")
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
            for number, values in enumerate(chain.from_iterable(batches), start=1):
                yield Row(values, f"{show_path(path.name)}, row {number}")
    except DataError:
        raise
    except (pyarrow.ArrowException, ValueError, OSError, ArithmeticError, RecursionError) as error:
        if getattr(error, "errno", None):  # from the system: Arrow's own errors have no errno
            raise DataError(f"{path} cannot be read: {error_reason(error)}") from error
        raise DataError(f"{path} is damaged or not a parquet file: {error_reason(error)}; download it again") from error


def _hub(name: str, subset: str | None, split: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        feature = f"there is no file or folder {name}; reading it from the hub"
        raise MissingExtraError(feature, "datasets", "hub") from error
    part = f"{name}, subset {subset}" if subset else name
    try:
        data = datasets.load_dataset(name, subset, split=split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"there is no file or folder {name}, and no accessible dataset of that name on the hub: "
            f"{error_reason(error)}. Check the spelling, and log in (hf auth login) if it is private or gated"
        ) from error
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{part}, split {split!r} cannot be loaded from the hub: {error_reason(error)}") from error
    except OSError as error:
        raise DataError(
            f"there is no file or folder {name}, and the hub cannot be reached: {error_reason(error)}; download it on "
            f"another machine (hf download {name} --repo-type dataset --local-dir FOLDER) and name its files"
        ) from error
    for number, values in enumerate(data, start=1):
        yield Row(values, f"{part} ({split}), row {number}")
