"""Calls in JSON, as models write it.

What has one meaning only is read although it is no JSON: line breaks in strings, a comma after the last entry, texts in
single quotes, Python's True, False and None. Everything else is a problem, told in a sentence.
"""

from __future__ import annotations

import json
import re
from typing import Any

from groupwise.conversations.tool_calls import CallError
from groupwise.environments import ToolCall
from groupwise.errors import did_you_mean
from groupwise.text import excerpt

MAX_CHARACTERS = 200_000  # of one call
_QUOTED = re.compile(r"""("[^"\\]*(?:\\.[^"\\]*)*")|'([^'\\]*(?:\\.[^'\\]*)*)'""", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]\w*")
_END_FOLLOWS = re.compile(r"\s*[}\]]")
WORDS = {"True": "true", "False": "false", "None": "null"}
CALL_KEYS = ("name", "arguments", "parameters", "id", "type", "function")


def read_json(text: str) -> Any:
    """The value of a text; a CallError if it has none, or more than one."""
    value, end = read_json_at(text, 0)
    if text[end:].strip():
        raise CallError(f"after the JSON comes {excerpt(text[end:].strip(), 30)}, where nothing may follow")
    return value


def read_json_at(text: str, start: int, *, repair: bool = True) -> tuple[Any, int]:
    """The first value from ``start`` on, and where it ends. Without ``repair`` it must be JSON."""
    start += len(text[start:]) - len(text[start:].lstrip())
    if len(text) - start > MAX_CHARACTERS:
        raise CallError(f"the call has more than {MAX_CHARACTERS:,} characters")
    try:
        return _decode(text, start)
    except CallError:
        raise
    except (ValueError, RecursionError) as error:
        reason = _reason(error)
    if not repair:
        raise CallError(f"the JSON is not valid ({reason})")
    try:
        repaired, places = _repair(text[start:])
        value, end = _decode(repaired, 0)
    except (ValueError, RecursionError):
        raise CallError(f"the JSON is not valid ({reason})") from None
    return value, start + places[end]


def call_of(value: Any, call_id: str) -> ToolCall:
    """The call that a JSON object describes; ``call_id`` is used if it has none of its own."""
    if not isinstance(value, dict):
        raise CallError(f"a call is a JSON object, not {_kind(value)}")
    if isinstance(value.get("function"), dict) and "name" not in value:
        inner = value["function"]
        value = {**{key: entry for key, entry in value.items() if key != "function"}, **inner}
    for key in value:
        if key not in CALL_KEYS:
            raise CallError(f"a call has no key {excerpt(key, 30)}{did_you_mean(key, CALL_KEYS[:2])}".rstrip("?"))
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name.strip():
        raise CallError('the call has no "name" of a tool')
    if "arguments" in value and "parameters" in value:
        raise CallError('the call has both "arguments" and "parameters"')
    own_id = value.get("id")
    arguments = arguments_of(value.get("arguments", value.get("parameters", {})))
    return ToolCall(name.strip(), arguments, own_id if isinstance(own_id, str) and own_id else call_id)


def arguments_of(value: Any) -> dict[str, Any]:
    """The arguments of a call, which may also be a text of JSON, as in OpenAI's format."""
    if isinstance(value, str):
        value = read_json(value) if value.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CallError(f"the arguments are a JSON object, not {_kind(value)}")
    return value


def _decode(text: str, start: int) -> tuple[Any, int]:
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=_object, parse_constant=_no_constant)
    return decoder.raw_decode(text, start)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        twice = next(key for key in entries if sum(key == other for other, _ in pairs) > 1)
        raise CallError(f"the key {excerpt(twice, 30)} is there twice")
    return entries


def _no_constant(word: str) -> Any:
    raise CallError(f"{word} is not JSON; write a number, or null")


def _repair(text: str) -> tuple[str, list[int]]:
    """JSON for what has one meaning only, and the place in ``text`` of each of its characters, and of its end."""
    pieces: list[str] = []
    places: list[int] = []

    def put(piece: str, place: int) -> None:
        pieces.append(piece)
        places.extend([place] * len(piece))

    at, last = 0, ""
    while at < len(text):
        character = text[at]
        if character in "\"'":
            string = _QUOTED.match(text, at)
            if string is None:
                raise ValueError("a text does not end")
            put(string[1] or _double_quoted(string[2]), at)
            at = string.end()
        elif character == "," and last not in "[{," and _END_FOLLOWS.match(text, at + 1):
            at += 1
        elif word := _WORD.match(text, at):
            put(WORDS.get(word[0], word[0]), at)
            at = word.end()
        else:
            put(character, at)
            at += 1
        last = last if character.isspace() else character
    return "".join(pieces), [*places, len(text)]


def _double_quoted(inside: str) -> str:
    def changed(match: re.Match[str]) -> str:
        return {'"': '\\"', "\\'": "'"}.get(match[0], match[0])

    return '"' + re.sub(r"\\.|\"", changed, inside, flags=re.DOTALL) + '"'


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "a number is too long"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
