"""What a row is, and what its prompt must be.

A row is a dict that remembers where it came from, so that whoever finds fault with it later can name the line. Rows
that a program has made are plain dicts; they are counted instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import DataError, check_choice

ROLES = ("system", "user", "assistant", "tool")


class Row(dict[str, Any]):
    """One row: a plain dict, and ``where`` it was found, for messages (``"questions.jsonl, line 12"``)."""

    __slots__ = ("where",)

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        super().__init__(values)
        self.where = where


def check_prompts(rows: Sequence[Mapping[str, Any]], column: str = "prompt") -> None:
    """Raise a DataError that names the first row whose prompt cannot be used.

    A prompt is a text that is not blank, or a list of chat messages of which the last is not the assistant's: there
    must be something to answer. All rows hold texts or all hold messages, for rewards are given the one or the other.
    """
    if not rows:
        raise DataError("there are no rows, so there is nothing to ask")
    for number, row in enumerate(rows):
        where = where_of(row, number)
        check_column(row, column, where)
        value = row[column]
        check_prompt(value, where, column)
        if isinstance(value, str) != isinstance(rows[0][column], str):
            here, there = ("a text", "messages") if isinstance(value, str) else ("a list of messages", "a text")
            raise DataError(
                f"{where}: the {column} is {here}, but {where_of(rows[0], 0)} has {there}; all rows of a data set must "
                "have the same kind"
            )


def check_column(row: Mapping[str, Any], column: str, where: str) -> None:
    """Raise a DataError unless the row has the column; it names the nearest one."""
    if column not in row:
        has = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where} has no column {column!r}{nearest(column, row)} (it has: {has})")


def nearest(column: str, row: Mapping[str, Any]) -> str:
    """The column of a row that is spelt most like this one, for messages; nothing if none is."""
    near = difflib.get_close_matches(column, map(str, row), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_prompt(value: Any, where: str, column: str = "prompt") -> None:
    """Raise a DataError that names the place unless this can be a prompt, as `check_prompts` has it."""
    if isinstance(value, str):
        check_text(value, f"{where}: the {column}")
    elif isinstance(value, (list, tuple)):
        _check_messages(value, where, column)
    else:
        raise DataError(
            f"{where}: the {column} is {kind_of(value)}; it must be a text or a list of messages such as "
            '[{"role": "user", "content": "…"}]'
        )


def columns_of(rows: Sequence[Mapping[str, Any]], *, without: str | None = None) -> dict[str, list[Any]]:
    """The rows as columns: every key of any row, with None where a row lacks it; all but the column ``without``."""
    names = {name: None for row in rows for name in row if name != without}
    return {name: [row.get(name) for row in rows] for name in names}


def where_of(row: Mapping[str, Any], number: int) -> str:
    """Where a row came from; its place among its fellows, counted from 1, if it was made by a program."""
    return getattr(row, "where", None) or f"row {number + 1}"


def check_text(text: str, what: str, may_be_empty: bool = False) -> None:
    """Raise a DataError that names ``what`` if the text is blank, or holds half a character."""
    if not may_be_empty and not text.strip():
        raise DataError(f"{what} is empty; give it something to answer, or remove the row")
    if has_half_a_character(text):
        raise DataError(f"{what} holds half a character (a lone surrogate), which no tokenizer reads; mend the text")


def _check_messages(messages: Sequence[Any], where: str, column: str) -> None:
    if not messages:
        raise DataError(f"{where}: the {column} is an empty list; it needs at least one message")
    for number, message in enumerate(messages, start=1):
        what = f"{where}: message {number} of the {column}"
        text = check_message(message, what)
        last = number == len(messages)
        if last and message["role"] == "assistant":
            raise DataError(
                f"{where}: the {column} ends with a message of the assistant, which leaves nothing to answer; end with "
                "what the model is to reply to"
            )
        check_text(text, what, may_be_empty=not last or message["role"] == "tool")


def check_message(message: Any, what: str) -> str:
    """The text of a message. Raise a DataError that names ``what`` unless it has a known role and a content of text."""
    if not isinstance(message, Mapping):
        raise DataError(f'{what} is {kind_of(message)}; a message is an object {{"role": …, "content": …}}')
    for key in ("role", "content"):
        if key not in message:
            raise DataError(f"{what} has no {key!r} (it has: {', '.join(map(repr, message)) or 'none'})")
    try:
        check_choice("role", message["role"], ROLES, DataError)
    except DataError as error:
        raise DataError(f"{what}: {error}") from None
    text = text_of(message["content"])
    if text is None:
        raise DataError(
            f"{what}: its content is {kind_of(message['content'])}; it must be a text or a list of text parts "
            '{"type": "text", "text": …}'
        )
    return text


def text_of(content: Any) -> str | None:
    """The content of a message as one text: its own, or its text parts joined. None if it is neither."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)) or not content:
        return None
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    known = [text for text in texts if isinstance(text, str)]
    return "".join(known) if len(known) == len(texts) else None


def has_half_a_character(text: str) -> bool:
    """Whether a text holds a lone surrogate: Python bears it, but neither a tokenizer nor a file does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def kind_of(value: Any) -> str:
    """What a value is, for messages."""
    return "missing (null)" if value is None else f"of type {type(value).__name__}"
