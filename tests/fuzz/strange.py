"""Strange values, and valid inputs that are changed in a place or two."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

TEXTS = (
    "", " ", "\n", "\0", "a\0b", "\x1b[31mred\x1b[0m", "\x85", "\u2028", "\u202eabc", "\u200b", "\ufeff", "\ud800",
    "\udcff", "é", "٣", "²", "𝔸", "none", "null", "true", "NaN", "inf", "-1", "1e999", "0x10", "{answer}", "..", ".",
    "/", "~", "~nouser", "/dev/null", "/dev/zero", "x" * 300, "d/" * 3000, "%s%n", "{0}", "$(id)", "'; --",
    "__class__", "a.b.c", "-", "--", "=",
)  # fmt: skip
"""Texts that some code cannot print, encode, parse or use as a name."""


def nest(depth: int) -> Any:
    """Lists in lists."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


JUNK = (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n\n", b'"', b"[" * 5000, b"{", b"9" * 5000)
NUMBERS = (0, 1, -1, True, False, 2**31, 2**63, -(2**63) - 1, 10**400, 0.0, -0.0, 1e-320, 1e308, 5e-324)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))

texts = st.sampled_from(TEXTS) | st.text(max_size=8)
json_values = st.one_of(
    texts,
    st.sampled_from([*NUMBERS, *NOT_FINITE]),
    st.integers(-3, 300),
    st.none(),
    # Copied, because `changed` may change what it has drawn, and the strategy must draw the same again.
    st.sampled_from([[], {}, [[]], [{}], {"": 0}, [None], ["a", 1], {"role": "user"}, {"type": "text"}]).map(
        copy.deepcopy
    ),
    st.builds(nest, st.sampled_from([3, 120, 500])),
)
python_values = json_values | st.sampled_from(
    [datetime.date(2026, 1, 1), datetime.datetime(1, 1, 1), datetime.time(1), b"\xff", (1, 2), {1, 2}, object(), 1 + 2j]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a value, itself first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, entry in inner for place in places(entry, (*path, key)))]


@st.composite
def changed(draw: Callable[..., Any], original: Any, values: Any = json_values, most: int = 2) -> Any:
    """A copy of a JSON-like value in which one or two things are replaced, removed, renamed, repeated or wrapped."""
    value = json.loads(json.dumps(original))
    for _ in range(draw(st.integers(1, most))):
        path = draw(st.sampled_from(places(value)))
        change = draw(st.sampled_from(["replace", "replace", "remove", "rename", "wrap", "add"]))
        if not path:
            value = draw(values) if change == "replace" and draw(st.integers(0, 9)) == 0 else value
            continue
        *parents, key = path
        holder = value
        for part in parents:
            holder = holder[part]
        if change == "replace":
            holder[key] = draw(values)
        elif change == "wrap":
            holder[key] = draw(st.sampled_from([[holder[key]], {"x": holder[key]}, [holder[key]] * 3]))
        elif isinstance(holder, list):
            holder[key : key + 1] = [] if change == "remove" else [holder[key], holder[key]]
        elif change == "add":
            holder[draw(texts)] = draw(values)
        else:
            entry = holder.pop(key)
            if change == "rename":
                holder[draw(texts)] = entry
        if not isinstance(value, (dict, list)):
            break
    return value


@st.composite
def damaged(draw: Callable[..., Any], original: bytes) -> bytes:
    """Bytes in which some are cut off, inserted, replaced or repeated."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(["cut", "insert", "flip", "remove", "repeat"]))
        if change == "cut":
            data = data[:place]
        elif change == "insert":
            junk = st.sampled_from(
                [b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n\n", b'"', b"[" * 5000, b"{", b"9" * 5000]
            )
            data[place:place] = draw(junk | st.binary(max_size=4))
        elif change == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif change == "remove":
            del data[place : place + draw(st.integers(1, 20))]
        elif change == "repeat":
            data[place:place] = data[place : place + 40]
    return bytes(data)
