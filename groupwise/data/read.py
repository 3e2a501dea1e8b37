"""Rows from a file, a folder of files, or the hub.

Local files come first, and a name that looks like a path is never looked up on the hub. Errors name the file and line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from groupwise.data.rows import Row, describe_type, has_lone_surrogate
from groupwise.errors import DataError, MissingExtraError, nearest_file
from groupwise.text import error_reason

# File name endings and their formats.
ENDINGS = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".json": "json",
    ".json.gz": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
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
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):
        for option, value in (("split", split), ("subset", subset)):
            if value is not None:
                raise DataError(f"{option}={value!r} is for hub datasets, but {path} is local; leave {option} out")
        iterator = _files(path, header) if path.is_dir() else _file(path, header)
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
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):
        return
    if isinstance(source, os.PathLike) or _looks_like_path(name):
        raise DataError(_missing(path))
    if not is_hub_id(name):
        raise DataError(f"{_missing(path)}. A hub dataset is written owner/name")


def is_hub_id(name: str) -> bool:
    """Whether a name is looked up on the hub: no local file has it, and it does not look like a path."""
    is_path = _looks_like_path(name) or os.path.exists(os.path.expanduser(name))
    return not is_path and _HUB_ID.fullmatch(name) is not None


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or _ending(name) is not None


def _ending(name: str) -> str | None:
    return next((ending for ending in ENDINGS if name.lower().endswith(ending)), None)


def _missing(path: Path) -> str:
    """The message for a missing file, with the nearest name in its folder."""
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        existing = next((parent for parent in folder.parents if os.path.isdir(parent)), folder.anchor)
        return f"there is no file or folder {path}: the folder {folder} does not exist, only {existing}"
    names = os.listdir(folder) if os.access(folder, os.R_OK) else []
    near = nearest_file(path.name, names)
    return f"there is no file or folder {path.name!r} in {folder}{f'; did you mean {near!r}?' if near else ''}"


def _files(folder: Path, header: Sequence[str] | None) -> Iterator[Row]:
    """The rows of all data files in a folder. Other files, such as a README, are ignored."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error_reason(error)}") from error
    names = [entry.name for entry in entries if _ending(entry.name) and entry.is_file()]
    if not names:
        inner = [entry.name for entry in entries if entry.is_dir()]
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
    if ENDINGS[ending] == "parquet":
        yield from _parquet(path)
        return
    try:
        with gzip.open(path) if ending.endswith(".gz") else open(path, "rb") as file:
            if ENDINGS[ending] == "csv":
                yield from _csv(file, path.name, header)
            else:
                yield from _json(file, path.name) if ENDINGS[ending] == "json" else _json_lines(file, path.name)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        reason = str(error) or "it ends too early"
        raise DataError(f"{path} is damaged or not a gzip file: {reason}; download it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error_reason(error)}") from error


def _lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of a file, split only at line feeds: other line separators occur within texts."""
    for number, line in enumerate(file, start=1):
        try:
            yield (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).decode()
        except UnicodeDecodeError as error:
            place = f"{name}, line {number}: byte {error.start + 1} of the line"
            raise DataError(f"{place} is not UTF-8 ({error.reason}); save the file as UTF-8") from error


def _json_lines(file: Iterable[bytes], name: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(file, name), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            yield _object(_parse(line.rstrip("\r\n"), name, number), where, escapes=_SURROGATE.search(line) is not None)


def _json(file: Any, name: str) -> Iterator[Row]:
    data = file.read()
    text = "".join(_lines(io.BytesIO(data), name))
    if text.lstrip().startswith("["):
        escapes = _SURROGATE.search(text) is not None
        for number, value in enumerate(_parse(text, name, 1), start=1):
            yield _object(value, f"{name}, entry {number}", escapes)
        return
    if _is_one_value(text) and "\n" in text.strip():
        raise DataError(f"{name} is one object over several lines; give a list of objects, or one object on each line")
    yield from _json_lines(io.BytesIO(data), name)


def _is_one_value(text: str) -> bool:
    """Whether the text is one JSON value; fast if it is one value per line."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _parse(text: str, name: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{name}, line {first_line + error.lineno - 1}, column {error.colno}"
        raise DataError(f"{place}: this is not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}, line {first_line}: this cannot be read as JSON: {error}") from error


def _object(value: Any, where: str, escapes: bool) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f'{where} is not an object: expected {{"prompt": …}} with the columns of a row, got {describe_type(value)} '
            "(a .json file is a list of objects, a .jsonl file has one object per line)"
        )
    # A lone surrogate, which only an escape can produce, would fail later in the tokenizer.
    if escapes and has_lone_surrogate(json.dumps(value, ensure_ascii=False)):
        raise DataError(f"{where} contains a lone surrogate (\\ud800 to \\udfff); fix the text")
    return Row(value, where)


def _csv(file: Iterable[bytes], name: str, header: Sequence[str] | None = None) -> Iterator[Row]:
    reader = csv.reader(_lines(file, name), strict=True)
    while True:
        # A record may span several lines.
        where = f"{name}, line {reader.line_num + 1}"
        field_limit = csv.field_size_limit(2**31 - 1)  # global, so it is restored
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{where}: this is not CSV: {error}") from error
        finally:
            csv.field_size_limit(field_limit)
        if not fields:
            continue
        if not header:
            header = fields
            if not all(header) or len(set(header)) < len(header):
                raise DataError(f"{where}: the header must name every column once, got {', '.join(map(repr, header))}")
            continue
        if len(fields) != len(header):
            counts = f"{len(fields)} fields, but the header names {len(header)} ({', '.join(header)})"
            raise DataError(f'{where} has {counts}; put a field that holds commas or line breaks into "…"')
        yield Row(dict(zip(header, fields, strict=True)), where)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
            for number, values in enumerate(chain.from_iterable(batches), start=1):
                yield Row(values, f"{path.name}, row {number}")
    except (pyarrow.ArrowException, ValueError, OSError) as error:
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
