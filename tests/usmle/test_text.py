"""Text of others in a line of a report: cut where it should be, and never taken for markup."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from groupwise.usmle.text import clean, end_of, escape, start_of

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def cells(page):
    """The text in each cell of a page's tables, as a reader of Markdown sees it; anything but text fails."""
    found = []
    inside = False
    for token in READER.parse(page):
        inside = token.type in ("td_open", "th_open") or (inside and token.type == "inline")
        if token.type == "inline" and inside:
            assert all(child.type in ("text", "text_special") for child in token.children), token.children
            found.append("".join(child.content for child in token.children))
    return found


HOSTILE = [
    "a | b",
    "a\n| c | d |\n\nnew paragraph",
    "<script>alert(1)</script>",
    "`code` and **bold** and _emphasis_ and ~~struck~~",
    "[link](http://example.org) ![picture](x.png) <http://example.org>",
    "back\\slash, \\| and \\\\|",
    "&lt; &amp; &#124;",
    "$x$ # heading",
    "separators \u2028 \u2029 \x0b \x85 and \x00\x1b[31m",
    "half a pair \ud83d",
    "\u202eright to left",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_only_text(text):
    assert cells(f"| {escape(text)} | last |\n| --- | --- |") == [clean(text), "last"]


@given(text=st.text(max_size=60))
def test_any_text_is_only_text(text):
    assert cells(f"| x{escape(text)}x | last |\n| --- | --- |") == [f"x{clean(text)}x", "last"]


@given(text=st.text())
def test_a_clean_text_is_one_printable_line(text):
    line = clean(text)
    assert line.isprintable()
    line.encode()
    assert clean(line) == line


def test_starts_and_ends():
    assert start_of("short", 5) == end_of("short", 5) == "short"
    assert start_of("longer text", 8) == "longer…"  # no blank before the dots
    assert end_of("longer text", 6) == "…text"
    assert start_of("a\n\n  b", 10) == "a b"


@given(text=st.text(max_size=40), limit=st.integers(1, 30))
def test_an_excerpt_is_never_too_long(text, limit):
    assert len(start_of(text, limit)) <= limit
    assert len(end_of(text, limit)) <= limit
