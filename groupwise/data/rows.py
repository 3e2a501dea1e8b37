"""Rows and the checks of their prompts.

A row from a file knows its file and line, so that later errors can name them. Rows made by a program are plain dicts;
errors name their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from groupwise.errors import DataError, check_choice, did_you_mean

ROLES = ("system", "user", "assistant", "tool")


class Row(dict[str, Any]):
    """A dict with its origin ``where`` (``"questions.jsonl, line 12"``), for error messages."""

    __slots__ = ("where",)

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        super().__init__(values)
        self.where = where


def check_prompts(
    rows: Sequence[Mapping[str, Any]],
    column: str = "prompt",
    *,
    assistant_last: bool = False,
    may_be_empty: bool = False,
) -> None:
    """Raise a DataError for the first row with an invalid prompt.

    A prompt is a text that is not blank, or a list of chat messages that does not end with the assistant's, unless
    ``assistant_last``. With ``may_be_empty`` the last message may be blank. All rows must have the same kind, because
    rewards get completions of that kind.
    """
    if not rows:
        raise DataError("there are no rows")
    if len(rows) > 1 and not any(column in row for row in rows):
        columns = list(dict.fromkeys(str(name) for row in rows for name in row))
        shown = list_columns(columns)
        near = did_you_mean(column, columns)
        problem = f"no row{_file_of(rows)} has a column {column!r}{near} (columns: {shown})"
        raise DataError(f"{problem}; set data.prompt to the column of the prompt")
    for number, row in enumerate(rows):
        where = where_of(row, number)
        check_column(row, column, where, "; data.prompt names the column of the prompt")
        value = row[column]
        check_prompt(value, where, column, assistant_last=assistant_last, may_be_empty=may_be_empty)
        if isinstance(value, str) != isinstance(rows[0][column], str):
            here, there = ("a text", "messages") if isinstance(value, str) else ("a list of messages", "a text")
            kinds = f"{here}, but {where_of(rows[0], 0)} has {there}"
            raise DataError(f"{where}: the {column} is {kinds}; all rows must have the same kind")


def check_column(row: Mapping[str, Any], column: str, where: str, remedy: str = "") -> None:
    if column not in row:
        near = did_you_mean(column, map(str, row))
        raise DataError(f"{where} has no column {column!r}{near} (it has: {list_columns(row)}){remedy}")


def list_columns(names: Iterable[object]) -> str:
    """Names for a message, the first of them if there are many or very long ones."""
    shown = ", ".join(map(repr, names)) or "none"
    return shown if len(shown) <= 300 else f"{shown[:299]}…"


def check_prompt(
    value: Any, where: str, column: str = "prompt", *, assistant_last: bool = False, may_be_empty: bool = False
) -> None:
    """Raise a DataError unless the value is a valid prompt (see `check_prompts`)."""
    if isinstance(value, str):
        check_text(value, f"{where}: the {column}")
    elif isinstance(value, (list, tuple)):
        _check_messages(value, where, column, assistant_last, may_be_empty)
    else:
        expected = 'a text or a list of messages such as [{"role": "user", "content": "…"}]'
        raise DataError(f"{where}: the {column} is {describe_type(value)}; it must be {expected}")


def columns_of(rows: Sequence[Mapping[str, Any]], *, without: str | None = None) -> dict[str, list[Any]]:
    """The rows as columns: every key of any row but ``without``; None if a row does not have it."""
    names = {name: None for row in rows for name in row if name != without}
    return {name: [row.get(name) for row in rows] for name in names}


def where_of(row: Mapping[str, Any], number: int) -> str:
    """The origin of a row; its number, from 1, if it was made by a program."""
    return getattr(row, "where", None) or f"row {number + 1}"


def name_completion(where: str, number: int, samples: int) -> str:
    """``rows.jsonl, line 3, completion 2``; without the number, which starts at 0, if there is one sample per row."""
    return f"{where}, completion {number + 1}" if samples > 1 else where


def _file_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """``" of facts.jsonl"`` if all rows come from this file, else nothing."""
    files = {getattr(row, "where", "").rpartition(", ")[0] for row in rows}
    return f" of {files.pop()}" if len(files) == 1 and all(files) else ""


def check_text(text: str, what: str, may_be_empty: bool = False) -> None:
    """Raise a DataError about ``what`` if the text is blank or contains a lone surrogate."""
    if not may_be_empty and not text.strip():
        raise DataError(f"{what} is empty; fill it in or remove the row")
    if has_lone_surrogate(text):
        raise DataError(f"{what} contains a lone surrogate, which no tokenizer accepts; fix the text")


def _check_messages(messages: Sequence[Any], where: str, column: str, assistant_last: bool, may_be_empty: bool) -> None:
    if not messages:
        raise DataError(f"{where}: the {column} is an empty list; it needs at least one message")
    for number, message in enumerate(messages, start=1):
        what = f"{where}: message {number} of the {column}"
        text = check_message(message, what)
        last = number == len(messages)
        if last and message["role"] == "assistant" and not assistant_last:
            raise DataError(f"{where}: the {column} ends with a message of the assistant; end it with the user's")
        check_text(text, what, may_be_empty=may_be_empty or not last or message["role"] == "tool")


def check_message(message: Any, what: str) -> str:
    """The text of a message; a DataError about ``what`` unless it has a valid role and text content."""
    if not isinstance(message, Mapping):
        raise DataError(f'{what} is {describe_type(message)}; a message is an object {{"role": …, "content": …}}')
    for key in ("role", "content"):
        if key not in message:
            raise DataError(f"{what} has no {key!r} (it has: {list_columns(message)})")
    try:
        check_choice("role", message["role"], ROLES, DataError)
    except DataError as error:
        raise DataError(f"{what}: {error}") from None
    text = content_text(message["content"])
    if text is None:
        kind = describe_type(message["content"])
        raise DataError(f"{what}: its content is {kind}; it must be a text or a list of text parts")
    return text


def content_text(content: Any) -> str | None:
    """The content of a message as one text, with text parts joined; None if it is not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)) or not content:
        return None
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    strings = [text for text in texts if isinstance(text, str)]
    return "".join(strings) if len(strings) == len(texts) else None


def has_lone_surrogate(text: str) -> bool:
    """Whether a text contains a lone surrogate, which Python allows but UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def describe_type(value: Any) -> str:
    """The type of a value, for error messages."""
    return "missing (null)" if value is None else f"of type {type(value).__name__}"
