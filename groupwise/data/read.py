"""Rows of data from wherever they are: a file, a folder of files, the hub.

What exists on this machine comes first, and what looks like a path never reaches a network. Every complaint names the
file and the line.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from groupwise.data.rows import Row, has_half_a_character, kind_of
from groupwise.errors import DataError, MissingExtraError

# How a file's name ends, and the kind of file that it is.
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
    """The rows of ``source``, the first ``limit`` of them if it is given; what comes after those is not looked at.

    source: a file (.jsonl, .json with a list of objects or with one on each line, both also with .gz; .parquet; .csv
        with a header, whose values are all texts), a folder of files of one kind, read in the order of their names, or
        ``owner/name`` on the hub.
    split, subset: the part of a data set on the hub, ``"train"`` and the only one if not given. Files have none.
    header: the columns of a .csv file that has no line with their names.
    """
    if not isinstance(source, (str, os.PathLike)) or not str(source):
        raise DataError(f"a data set is named by a text or a path, not by {source!r}")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise DataError(f"limit={limit!r} is no number of rows: give a whole number from 1, or None for all rows")
    name = str(source)
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):
        for option, value in (("split", split), ("subset", subset)):
            if value is not None:
                raise DataError(
                    f"{option}={value!r} chooses among the parts of a data set on the hub, but {path} is on this "
                    f"machine, and files have none: leave {option} out and name the file you want"
                )
        found = _files(path, header) if path.is_dir() else _file(path, header)
    elif isinstance(source, os.PathLike) or _looks_like_a_path(name):
        raise DataError(_missing(path))
    elif _HUB_ID.fullmatch(name):
        found = _hub(name, subset, split or "train")
    else:
        raise DataError(f"{_missing(path)}. A data set on the hub is written owner/name")
    rows: list[dict[str, Any]] = list(islice(found, limit))
    if not rows:
        raise DataError(f"{name} is empty: there is not a single row in it")
    return rows


def _ending(name: str) -> str | None:
    return next((ending for ending in ENDINGS if name.lower().endswith(ending)), None)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or _ending(name) is not None


def _missing(path: Path) -> str:
    """That a file is not there, where it was looked for, and what is there that has nearly its name."""
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        there = next((parent for parent in folder.parents if os.path.isdir(parent)), folder.anchor)
        return f"there is no file or folder {path}: the folder {folder} does not exist, only {there}"
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    near = difflib.get_close_matches(path.name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"there is no file or folder {path.name!r} in {folder}{hint}"


def _files(folder: Path, header: Sequence[str] | None) -> Iterator[Row]:
    """The rows of all data files of a folder. Other files, such as a README, are left alone."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {reason_of(error)}") from error
    names = [entry.name for entry in entries if _ending(entry.name) and entry.is_file()]
    if not names:
        inner = [entry.name for entry in entries if entry.is_dir()]
        hint = f"; there are folders in it ({', '.join(inner)}), give one of those" if inner else ""
        raise DataError(f"{folder} holds no data files (names that end in {', '.join(ENDINGS)}){hint}")
    by_kind = {ENDINGS[_ending(name) or ""]: name for name in reversed(names)}
    if len(by_kind) > 1:
        some = ", ".join(sorted(by_kind.values()))
        raise DataError(f"{folder} holds files of several kinds ({some}); give one file, or a folder of one kind")
    # A folder with train and test files read as one data set would train on its own test.
    by_split = {match[1].lower(): name for name in reversed(names) if (match := _SPLIT.match(name))}
    if len(by_split) > 1:
        some = ", ".join(sorted(by_split.values()))
        raise DataError(f"{folder} holds several splits ({some}); give one file, or a folder for each split")
    for name in names:
        yield from _file(folder / name, header)


def _file(path: Path, header: Sequence[str] | None) -> Iterator[Row]:
    ending = _ending(path.name)
    if ending is None:
        raise DataError(f"{path} is of no kind that can be read here; its name must end in {', '.join(ENDINGS)}")
    if ENDINGS[ending] == "parquet":
        yield from _parquet(path)
        return
    try:
        with gzip.open(path) if ending.endswith(".gz") else open(path, "rb") as file:
            read = partial(_csv, header=header) if ENDINGS[ending] == "csv" else TEXT_READERS[ENDINGS[ending]]
            yield from read(file, path.name)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged or no gzip file at all: {error or 'it ends too early'}. Get it anew"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from error


def _lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of a file, split at line feeds alone: other separators occur within texts."""
    for number, line in enumerate(file, start=1):
        try:
            yield (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}, line {number}: byte {error.start + 1} of the line is not UTF-8 ({error.reason}); save the "
                "file as UTF-8"
            ) from error


def _json_lines(file: Iterable[bytes], name: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(file, name), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            yield _object(_parse(line, name, number), where, escapes=_SURROGATE.search(line) is not None)


def _json(file: IO[bytes], name: str) -> Iterator[Row]:
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
    """Whether the whole text is one JSON value. Where each line is one, this has its answer after the first."""
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
            f'{where} is no object: expected {{"prompt": …}} with the columns of one row, got {kind_of(value)} (a file '
            "that is one list of objects is named .json, one with an object on each line .jsonl)"
        )
    # Half a character would fail much later, when it is tokenised or written; only an escape can make one.
    if escapes and has_half_a_character(json.dumps(value, ensure_ascii=False)):
        raise DataError(f"{where} holds half a character (a lone surrogate, \\ud800 to \\udfff); mend the text")
    return Row(value, where)


def _csv(file: Iterable[bytes], name: str, header: Sequence[str] | None = None) -> Iterator[Row]:
    reader = csv.reader(_lines(file, name), strict=True)
    while True:
        # A record may span lines; the reader counts those it has taken.
        where = f"{name}, line {reader.line_num + 1}"
        try:
            with _long_fields():
                fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{where}: this is not CSV: {error}") from error
        if not fields:
            continue
        if not header:
            header = fields
            if not all(header) or len(set(header)) < len(header):
                raise DataError(f"{where}: the header must name every column once, got {', '.join(map(repr, header))}")
            continue
        if len(fields) != len(header):
            raise DataError(
                f"{where} has {len(fields)} fields, but the header names {len(header)} ({', '.join(header)}); put a "
                'field that holds commas or line breaks into "…"'
            )
        yield Row(dict(zip(header, fields, strict=True)), where)


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let a field be as long as it is. The limit is the whole process's, so it is put back."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


TEXT_READERS: dict[str, Callable[[Any, str], Iterator[Row]]] = {"jsonl": _json_lines, "json": _json}


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, f"{path.name}, row {number}")
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        if getattr(error, "errno", None):  # the system's own; Arrow's errors of this class have no number
            raise DataError(f"{path} cannot be read: {reason_of(error)}") from error
        raise DataError(f"{path} is damaged or no parquet file at all: {reason_of(error)}. Get it anew") from error


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
            f"there is no file or folder {name}, and no such data set on the hub, or none that you may see: "
            f"{reason_of(error)}. Mind the spelling, and log in (hf auth login) if it is private or gated"
        ) from error
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{part}, split {split!r} cannot be had from the hub: {reason_of(error)}") from error
    except OSError as error:
        raise DataError(
            f"there is no file or folder {name}, and the hub cannot be asked for it: {reason_of(error)}. Without a way "
            f"to the hub, download it where you can (hf download {name} --repo-type dataset --local-dir FOLDER) and "
            "give its files"
        ) from error
    for number, values in enumerate(data, start=1):
        yield Row(values, f"{part} ({split}), row {number}")


def reason_of(error: BaseException) -> str:
    """Why something was refused: the system's words, or the first line of a longer message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
