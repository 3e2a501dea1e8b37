"""Text for reports, displays and messages: what may be printed, Markdown cells and tables, counts, durations.

Texts of models, data, files and other people's code go through `printable` or `one_line` before they are shown: these
show control characters and invisible ones as escapes, and hide secrets.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from groupwise.redaction import hide_secrets

Say = Callable[[str], None]
"""Takes one message for the user, such as a display's method or ``list.append``."""

# An underscore between two letters or digits is not markup; without a backslash it reads better in a terminal.
_MARKDOWN = re.compile(r"([\\`*\[\]<>|~&$#]|(?<![^\W_])_|_(?![^\W_]))")

# Characters that a terminal obeys or that nobody sees: controls (but tab and newline), the separators of lines and
# paragraphs, marks and overrides of the direction, zero-width and other format characters, tags, lone surrogates.
_NOT_SHOWN = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f"
    r"\ufeff\ufff9-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_FLAG = "\U0001f3f4\U000e0067\U000e0062(?:{})\U000e007f".format(  # England, Scotland and Wales are spelt with tags
    "|".join("".join(chr(0xE0000 + ord(letter)) for letter in name) for name in ("eng", "sct", "wls"))
)
_ESCAPED = re.compile(f"(?P<flag>{_FLAG})|[{_NOT_SHOWN}]")
_JOINERS, _FIRST_JOINED = "\u200c\u200d", "\u0590"  # Persian and the scripts of India need joiners; Latin ones do not
_IN_ASCII = str.maketrans({"·": "-", "–": "-", "−": "-", "…": "...", "→": "->", "±": "+/-", "×": "x"})  # our own signs
_VIRAMA = 9  # combining class of a sign that may end a word with a joiner


def printable(text: str) -> str:
    """The text as it may be printed: what a terminal would obey or hide is escaped, such as ``\\x1b`` or ``\\u202e``.

    Tabs and newlines are kept, and ``\\r\\n`` is a newline. Joiners stay between letters of scripts that need them and
    in emojis, a variation selector after the character that it selects. Secrets become ``***``.
    """
    text = hide_secrets(text)
    return _ESCAPED.sub(_escape, text.replace("\r\n", "\n"))


def _escape(match: re.Match[str]) -> str:
    if match["flag"] is not None or _stays(match.string, match.start()):
        return match[0]
    return match[0].encode("unicode_escape").decode()


def _stays(text: str, place: int) -> bool:
    """Whether the character at ``place`` is shown, or belongs to the one before it."""
    letter = text[place]
    if not _ESCAPED.match(letter):
        return True
    if place == 0 or not (letter in _JOINERS or _is_selector(letter)):
        return False
    before, after = text[place - 1], text[place + 1 : place + 2]
    if _is_selector(letter):
        is_base = unicodedata.category(before)[0] in "LMNPS" and not _is_selector(before)
    else:
        is_base = _is_joined(before) and (_is_joined(after) or unicodedata.combining(before) == _VIRAMA)
    return is_base and _stays(text, place - 1)


def _is_joined(letter: str) -> bool:
    """Whether a joiner may stand beside a character: a letter, a mark or a symbol, not of a European script."""
    return letter >= _FIRST_JOINED and unicodedata.category(letter)[0] in "LMS"


def _is_selector(letter: str) -> bool:
    return "\ufe00" <= letter <= "\ufe0f" or "\u180b" <= letter <= "\u180d" or "\U000e0100" <= letter <= "\U000e01ef"


def one_line(text: str) -> str:
    """The text, `printable` and on one line: runs of white space become one space."""
    return " ".join(printable(text).split())


def encodable(text: str, encoding: str) -> str:
    """The text with escapes for what ``encoding`` lacks, so that it can be written to any stream."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_IN_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def excerpt(value: Any, length: int = 60) -> str:
    """The repr of a value, cut to about ``length`` characters for an error message."""
    text = hide_secrets(value if isinstance(value, str) else shown(value))
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


def code_span(text: str) -> str:
    """The text on one line as code in Markdown, in which nothing is markup."""
    line = one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line or not line else f"{fence}{line}{fence}"


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
        blocking = next((place for place in (path, *path.parents) if os.path.isfile(place)), path)
        return f"{blocking} is a file, not a folder"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (hide_secrets(str(error)).strip() or type(error).__name__).splitlines()[0].rstrip(".")
