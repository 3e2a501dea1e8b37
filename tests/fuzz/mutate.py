"""Valid files with something wrong in them: JSON with other values, bytes that are cut off or flipped."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

JUNK = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 3, 2**31, 2**40, 2**63, 10**18, -(2**63), 0.5, 1e308, float("nan"), float("inf")]
    ),
    st.sampled_from(["", "x", "\x00", "\x1b[31mred", "\u202e", "\ud800", "../../x", "a" * 5000, "{{ x }}", "(a+)+$"]),
    st.sampled_from([[], {}, [[]], [1], ["x"], [None], {"a": 1}, {"": None}, [[[[[1]]]]], list(range(500))]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
).map(copy.deepcopy)  # a list of these may be changed further


@st.composite
def mutated(draw: st.DrawFn, value: Any, most: int = 3) -> Any:
    """A JSON value with up to ``most`` changes: an entry is replaced, dropped, added or nested deeper."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        place, key = _place(draw, value)
        if place is None:
            return draw(JUNK)
        change = draw(st.sampled_from(["replace", "replace", "replace", "drop", "add", "nest"]))
        if change == "drop":
            del place[key]
        elif change == "add" and isinstance(place, dict):
            place[draw(st.text(max_size=6))] = draw(JUNK)
        elif change == "add":
            place.append(draw(JUNK))
        elif change == "nest":
            for _ in range(draw(st.sampled_from([1, 5, 50]))):
                place[key] = [place[key]]
        else:
            place[key] = draw(JUNK)
    return value


def _place(draw: st.DrawFn, value: Any) -> tuple[Any, Any]:
    """A list or dict somewhere in a value, and the key of one of its entries; None if there is none."""
    place, key = None, None
    while isinstance(value, (dict, list)) and value:
        place, key = value, draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        value = value[key]
        if draw(st.booleans()):
            break
    return place, key


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


@st.composite
def damaged(draw: st.DrawFn, data: bytes, head: int | None = None) -> bytes:
    """Bytes that are cut off, or of which some are changed, inserted or repeated; mostly in the first ``head``."""
    head = len(data) if head is None else min(head, len(data))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, min(head, len(data)) - 1)))
        change = draw(st.sampled_from(["cut", "flip", "number", "insert", "repeat", "remove"]))
        if change == "cut":
            data = data[:at]
        elif change == "flip":
            data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :] if data else b""
        elif change == "number":
            number = draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
            data = data[:at] + number.to_bytes(8, "little") + data[at + 8 :]
        elif change == "insert":
            data = data[:at] + draw(st.binary(min_size=1, max_size=9)) + data[at:]
        elif change == "repeat":
            data = data[:at] + data[at : at + draw(st.integers(1, 40))] * 2 + data[at:]
        else:
            data = data[:at] + data[at + draw(st.integers(1, 40)) :]
    return data
