"""The text of messages that come from tools and environments: whatever they return becomes harmless, limited text.

Special tokens of a chat template, such as ``<|im_start|>``, are left as they are: here they are plain characters, and
the tokenizer must encode them as such.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Set
from typing import Any

from groupwise.text import shown

NO_RESULT = "(no result)"
_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def message_text(value: Any, limit: int) -> str:
    """Any value as the text of a message: cleaned, and of at most ``limit`` characters.

    Texts stay texts, and containers and numbers become JSON. Bytes become text if they are UTF-8, and a note otherwise.
    """
    return limited_text(value if isinstance(value, str) else _as_text(value), limit)


def limited_text(text: str, limit: int) -> str:
    """The text, cleaned, and without its middle if it is longer than ``limit`` characters."""
    return cut_text(clean_text(cut_text(text, limit)), limit)


def clean_text(text: str) -> str:
    """The text without what no tokenizer or file can hold: control characters become escapes such as ``\\x00``, lone
    surrogates ``\\ufffd``. Tabs and newlines are kept; ``\\r\\n`` and ``\\r`` become a newline."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _NOT_TEXT.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return "\ufffd" if match[0] >= "\ud800" else f"\\x{ord(match[0]):02x}"


def cut_text(text: str, limit: int) -> str:
    """The text, or its beginning and its end with a note between them, of at most ``limit`` characters together."""
    if len(text) <= limit:
        return text
    note = f"\n[… {len(text):,} characters, the middle is left out …]\n"
    room = limit - len(note)
    if room <= 0:
        return text[:limit]
    end = room // 3
    return text[: room - end] + note + (text[-end:] if end else "")


def _as_text(value: Any) -> str:
    if value is None:
        return NO_RESULT
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _bytes_text(bytes(value))
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except Exception:  # keys that are no texts, a cycle, a huge integer; or a method of someone else's object
        return shown(value)


def _bytes_text(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\x00"
    return f"({len(value):,} bytes of binary data)" if _NOT_TEXT.search(text) else text


def _plain(value: Any) -> Any:
    """What JSON shows of a value that it does not have."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _bytes_text(bytes(value))
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return sorted(value, key=shown)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    for name in ("model_dump", "tolist"):  # of pydantic; of NumPy and torch
        method = getattr(value, name, None)
        if callable(method):
            return method()
    return str(value)
