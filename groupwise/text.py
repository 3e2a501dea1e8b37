"""Text for reports, displays and messages: Markdown cells and tables, counts, durations, the reason of an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Say = Callable[[str], None]
"""Takes one message for the user, such as a display's method or ``list.append``."""

# An underscore between two letters or digits is not markup; without a backslash it reads better in a terminal.
_MARKDOWN = re.compile(r"([\\`*\[\]<>|~&$#]|(?<![^\W_])_|_(?![^\W_]))")


def one_line(text: str) -> str:
    """The text on one line: runs of white space become one space, and non-printable characters are removed."""
    return " ".join("".join(letter for letter in text if letter.isprintable() or letter.isspace()).split())


def excerpt(value: Any, length: int = 60) -> str:
    """The repr of a value, cut to about ``length`` characters for an error message."""
    text = value if isinstance(value, str) else shown(value)
    text = text if len(text) <= length else text[: length - 1] + "…"
    return repr(text) if isinstance(value, str) else text


def shown(value: Any) -> str:
    """The repr of a value. Someone else's object may refuse one, as Python does for an integer of 5,000 digits."""
    try:
        return repr(value)
    except Exception as error:
        return f"a value of type {type(value).__name__} that cannot be shown ({type(error).__name__})"


def fixed(value: float, spec: str = ".3f") -> str:
    """A number in the format ``spec``, or, where that would be hundreds of digits, as ``1.7e+308``."""
    return format(value, spec) if not abs(value) >= 1e6 else f"{value:.3g}"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """A count with its noun: ``1 step``, ``1,200 steps``; ``nouns`` is the plural if it is not noun + s."""
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def escape_markdown(text: str) -> str:
    """The text on one line with its Markdown escaped, so that it can stand in a cell of a table."""
    return _MARKDOWN.sub(r"\\\1", one_line(text))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Iterable[int] = (0,)) -> str:
    """A Markdown table. The columns ``left`` are aligned to the left, the others to the right."""
    left = set(left)
    rule = [":--" if column in left else "--:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def format_duration(seconds: float) -> str:
    """``42 s``, ``1 min 17 s``, from 10 minutes on ``17 min``, or ``3 h 05 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def error_reason(error: BaseException) -> str:
    """A short reason for a message: the operating system's words, or the first line of the error's own message."""
    if isinstance(error, (FileExistsError, NotADirectoryError)) and error.filename is not None:
        path = Path(error.filename)
        blocking = next((place for place in (path, *path.parents) if place.is_file()), path)
        return f"{blocking} is a file, not a folder"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
