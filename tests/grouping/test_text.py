"""The part of an answer that is compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.grouping.text import result_text


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        ("<think>Hm.</think>\n\nParis \n", "</think>", "Paris"),
        ("<think>a</think> b </think> c", "</think>", "c"),
        ("<think>Hm.</think>", "</think>", ""),
        ("<think>Hm.</think> \n\t", "</think>", ""),
        ("<think>cut short ", "</think>", "<think>cut short"),
        ("  plain\nlines  ", "</think>", "plain\nlines"),
        ("a </THINK> b", "</think>", "a </THINK> b"),
        ("", "</think>", ""),
        ("\u3000\u00a0", "</think>", ""),
        ("#### 4\n#### 5", "####", "5"),
        ("aaa", "aa", ""),
        ("a</think>b", "####", "a</think>b"),
        (" a</think>b ", None, "a</think>b"),
        (" a b ", "", "a b"),
    ],
)
def test_the_result_follows_the_last_mark(text, after, expected):
    assert result_text(text, after) == expected


def test_default_mark():
    assert result_text("thoughts</think> result") == "result"


@given(before=st.text(), result=st.text(alphabet="ab c<>\n", max_size=20))
def test_text_before_the_mark_is_ignored(before, result):
    assert result_text(f"{before}</think>{result}") == result.strip()
