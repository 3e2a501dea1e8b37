"""Text for reports and messages."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from groupwise.text import (
    code_span,
    encodable,
    error_reason,
    escape_markdown,
    format_duration,
    markdown_table,
    one_line,
    plural,
    printable,
)


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


LANGUAGES = [
    "Grüße, naïve café e\u0301a\u0308, ¿Qué? Ελληνικά, Русский, Tiếng Việt",
    "العربية السلام عليكم، שלום עולם",
    "می\u200cخواهم، نمی\u200cدانم",  # Persian needs the non-joiner
    "हिन्दी क्\u200dष, ශ්\u200dරී, ന്\u200d മലയാളം, বাংলা",  # and these the joiner
    "ภาษาไทย ខ្មែរ မြန်မာ 한국어 日本語 中文 葛\U000e0100城",
    "👨\u200d👩\u200d👧\u200d👦 ❤\ufe0f\u200d🔥 1\ufe0f\u20e3 👍🏽 🇩🇪 "
    "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f ☺\ufe0e",
    "f(x) = ∫ x² dx ≤ ½ · 10⁻³ → ∞\n\tindented\tby tabs\n",
]


@pytest.mark.parametrize("text", LANGUAGES, ids=range(len(LANGUAGES)))
def test_ordinary_text_is_printed_as_it_is(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]8;;http://evil\x1b\\link\x07", "\\x1b]8;;http://evil\\x1b\\link\\x07"),
        ("\x9b31m\x85\x7f\x00", r"\x9b31m\x85\x7f\x00"),
        ("50 %\r100 %\r\nnext", "50 %\\r100 %\nnext"),
        ("a\x08b\x0b\x0c", r"a\x08b\x0b\x0c"),
        ("\u202egnp.exe\u202c \u2066\u2067\u2068\u2069\u200e\u200f\u061c", None),
        ("pay\u200bpal pay\u200dpal pay\u200cpal \u2060\ufeff\u180e\xad", None),
        ("\u200d👩", "\\u200d👩"),
        ("é\u200dé", "é\\u200dé"),
        ("line\u2028paragraph\u2029", r"line\u2028paragraph\u2029"),
        ("\U000e0048\U000e0069 🏴\U000e0067\U000e007f", "\\U000e0048\\U000e0069 🏴\\U000e0067\\U000e007f"),
        ("x\ufe0f\ufe01\ufe02", "x\ufe0f\\ufe01\\ufe02"),
        ("x\ufe0f\ufe01\u200d🔥", "x\ufe0f\\ufe01\\u200d🔥"),
        ("\udc80\ud83d", r"\udc80\ud83d"),
        ("\ufff9a\ufffab\ufffb\U0001d173", r"\ufff9a\ufffab\ufffb\U0001d173"),
    ],
)
def test_what_a_terminal_obeys_or_hides_is_escaped(text, shown):
    escaped = printable(text)
    assert escaped == shown if shown is not None else escaped.isascii() and escaped.isprintable()
    assert printable(escaped) == escaped
    assert one_line(text).isprintable() or "\ufe0f" in text


def test_encodable():
    assert encodable("a ·…→ é 日", "utf-8") == "a ·…→ é 日"
    assert encodable("a ·…→ é 日", "ascii") == r"a -...-> \xe9 \u65e5"
    assert encodable("é 日", "latin-1") == r"é \u65e5"


@pytest.mark.parametrize("text", ["a", "", "`", "a`b``c", "``", "a|b", "<b>", " x ", "`x`"])
def test_code_spans(text):
    span = code_span(text)
    tokens = MarkdownIt().parseInline(span)[0].children
    assert [token.type for token in tokens] == ["code_inline"] if text.strip() else True
    assert not text.strip() or tokens[0].content.strip() == text.strip()
