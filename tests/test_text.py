"""Text for reports and messages."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.text import error_reason, escape_markdown, format_duration, markdown_table, one_line, plural


def test_one_line():
    assert one_line(" a\n\tb\u2028c\x00 ") == r"a b\u2028c\x00"


def test_plural():
    assert [plural(count, "step") for count in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]
    assert [plural(count, "entry", "entries") for count in (1, 2)] == ["1 entry", "2 entries"]


@given(text=st.text(st.sampled_from("ab|\\`*_[]<>&$#~ \n\t\u2028")))
def test_escaped_text_is_one_cell_and_reads_the_same(text):
    escaped = escape_markdown(text)
    assert not re.search(r"(?<!\\)(?:\\\\)*\|", escaped)  # a bar after an even number of backslashes ends a cell
    assert re.sub(r"\\(.)", r"\1", escaped) == one_line(text)


def test_only_underscores_within_a_word_stay():
    assert escape_markdown("same_start=false") == "same_start=false"
    assert escape_markdown("_a_ b_ _c a__b") == r"\_a\_ b\_ \_c a\_\_b"


def test_markdown_table():
    table = markdown_table(["name", "n", "note"], [["a", "1", "x"]], left=(0, 2))
    assert table == "| name | n | note |\n| :-- | --: | :-- |\n| a | 1 | x |"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (77, "1 min 17 s"),
        (599.4, "9 min 59 s"),
        (599.6, "10 min"),
        (3540, "59 min"),
        (3599, "1 h 00 min"),
        (11_100, "3 h 05 min"),
    ],
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


def test_error_reason(tmp_path):
    (tmp_path / "file").write_text("")
    for failing in (lambda: (tmp_path / "file").mkdir(), lambda: (tmp_path / "file/below").mkdir(parents=True)):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - two kinds of it
            failing()
        assert error_reason(caught.value) == f"{tmp_path / 'file'} is a file, not a folder"
    assert error_reason(FileNotFoundError(2, "No such file or directory", "x")) == "No such file or directory"
    assert error_reason(ValueError("first line.\nsecond")) == "first line"
    assert error_reason(KeyboardInterrupt()) == "KeyboardInterrupt"
