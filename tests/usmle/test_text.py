"""Excerpts for a report, and text of any kind in the cells of its tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from groupwise.text import escape_markdown, one_line
from groupwise.usmle.tables import end_of, start_of

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def cells(page):
    """The text of each cell of a page's tables, parsed as Markdown; anything but plain text fails."""
    texts = []
    inside = False
    for token in READER.parse(page):
        inside = token.type in ("td_open", "th_open") or (inside and token.type == "inline")
        if token.type == "inline" and inside:
            assert all(child.type in ("text", "text_special") for child in token.children), token.children
            texts.append("".join(child.content for child in token.children))
    return texts


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
def test_hostile_text_stays_text(text):
    assert cells(f"| {escape_markdown(text)} | last |\n| --- | --- |") == [one_line(text), "last"]


def test_excerpts():
    assert start_of("short", 5) == end_of("short", 5) == "short"
    assert start_of("longer text", 8) == "longer…"  # no space before the ellipsis
    assert end_of("longer text", 6) == "…text"
    assert start_of("a\n\n  b", 10) == "a b"


@given(text=st.text(max_size=40), limit=st.integers(1, 30))
def test_an_excerpt_is_never_too_long(text, limit):
    assert len(start_of(text, limit)) <= limit
    assert len(end_of(text, limit)) <= limit
