"""The rows of text files: JSON, JSON on lines, CSV. An error names the file and the line of what is wrong."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import Any, BinaryIO

from groupwise.data.rows import Row, describe_type, has_lone_surrogate, list_columns
from groupwise.errors import DataError
from groupwise.paths import MEGABYTE
from groupwise.text import error_reason, excerpt

# A file of zeros, or one that expands without end, is refused before it fills the memory.
LONGEST_LINE = 256 * MEGABYTE
LARGEST_JSON = 1024 * MEGABYTE  # a list is read at once; lines together have no limit
DEEPEST = 100  # levels of lists and objects in a row

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _lines(file: BinaryIO, name: str) -> Iterator[str]:
    """The lines of a file, split only at line feeds: other line separators occur within texts."""
    for number in count(1):
        line = file.readline(LONGEST_LINE + 1)
        if not line:
            return
        if len(line) > LONGEST_LINE:
            raise DataError(f"{name}, line {number} has more than {LONGEST_LINE // MEGABYTE} MB; a row is one line")
        try:
            yield (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).decode()
        except UnicodeDecodeError as error:
            place = f"{name}, line {number}: byte {error.start + 1} of the line"
            raise DataError(f"{place} is not UTF-8 ({error.reason}); save the file as UTF-8") from error


def read_json_lines(file: BinaryIO, name: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(file, name), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            value, _ = _parse(line.rstrip("\r\n"), name, number, only=True)
            yield _object(value, where, escapes=_SURROGATE.search(line) is not None)


def read_json(file: BinaryIO, name: str) -> Iterator[Row]:
    """The rows of a list, or of objects on lines."""
    data = file.read(LARGEST_JSON + 1)
    if len(data) > LARGEST_JSON:
        limit = f"{LARGEST_JSON // MEGABYTE} MB"
        raise DataError(f"{name} has more than {limit}; write a .jsonl file, one object per line, which has no limit")
    text = "".join(_lines(io.BytesIO(data), name))
    start = _skip_space(text, 0)
    if text.startswith("[", start):
        escapes = _SURROGATE.search(text) is not None
        for number, value in enumerate(_entries(text, name, start + 1), start=1):
            yield _object(value, f"{name}, entry {number}", escapes)
        return
    second = text[start:].partition("\n")[2].strip()
    if second and not second.startswith("{"):
        _parse(text, name, 1, start)  # an error in a later line of an object is reported there
        raise DataError(f"{name} is one object over several lines; give a list of objects, or one object on each line")
    yield from read_json_lines(io.BytesIO(data), name)


def _entries(text: str, name: str, place: int) -> Iterator[Any]:
    """The values of a list, from the ``place`` after its bracket; an error has the line of its own value."""
    place = _skip_space(text, place)
    while not text.startswith("]", place):
        value, place = _parse(text, name, 1, place)
        yield value
        place = _skip_space(text, place)
        is_last = not text.startswith(",", place)
        if not is_last:
            place = _skip_space(text, place + 1)
        if text.startswith("]", place) != is_last:
            expected = "expected a comma or the end of the list" if is_last else "there is no value after the comma"
            raise DataError(f"{_place(text, place, name, 1)}: this is not JSON: {expected}")
    place = _skip_space(text, place + 1)
    if place < len(text):
        raise DataError(f"{_place(text, place, name, 1)}: this is not JSON: there is more after the end of the list")


def _skip_space(text: str, place: int) -> int:
    space = _SPACE.match(text, place)
    return space.end() if space else place


def _place(text: str, place: int, name: str, first_line: int) -> str:
    column = place - text.rfind("\n", 0, place)
    return f"{name}, line {first_line + text.count(chr(10), 0, place)}, column {column}"


def _parse(text: str, name: str, first_line: int, start: int = 0, *, only: bool = False) -> tuple[Any, int]:
    """The JSON value at ``start`` and the place after it; ``only`` if nothing may follow."""
    start = _skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise DataError(f"{_place(text, error.pos, name, first_line)}: this is not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error_reason(error)
        line = first_line + text.count("\n", 0, start)
        raise DataError(f"{name}, line {line}: this cannot be read as JSON: {reason}") from error
    if only and (rest := _skip_space(text, end)) < len(text):
        raise DataError(f"{_place(text, rest, name, first_line)}: this is not JSON: there is more after the object")
    if text.count("[", start, end) + text.count("{", start, end) > DEEPEST and _depth(value) > DEEPEST:
        line = first_line + text.count("\n", 0, start)
        raise DataError(f"{name}, line {line}: the lists and objects are nested more than {DEEPEST} deep")
    return value, end


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {excerpt(repeated)} is there twice")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repetition)


def _depth(value: Any) -> int:
    """The levels of lists and objects."""
    level, depth = [value], 0
    while level := [inner for inner in level if isinstance(inner, (dict, list))]:
        depth += 1
        level = list(chain.from_iterable(inner.values() if isinstance(inner, dict) else inner for inner in level))
    return depth


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


def read_csv(file: BinaryIO, name: str, header: Sequence[str] | None = None) -> Iterator[Row]:
    reader = csv.reader(_lines(file, name), strict=True)
    while True:
        # A record may span several lines.
        where = f"{name}, line {reader.line_num + 1}"
        field_limit = csv.field_size_limit(LONGEST_LINE)  # global, so it is restored
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
                raise DataError(f"{where}: the header must name every column once, got {list_columns(header)}")
            continue
        if len(fields) != len(header):
            counts = f"{len(fields)} fields, but the header names {len(header)} ({', '.join(header)})"
            raise DataError(f'{where} has {counts}; put a field that holds commas or line breaks into "…"')
        yield Row(dict(zip(header, fields, strict=True)), where)
