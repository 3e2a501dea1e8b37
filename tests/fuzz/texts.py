"""Texts that break things: pieces that are joined at random, and any Unicode."""

from __future__ import annotations

from hypothesis import strategies as st

PIECES = (
    *("\x00", "\x07", "\x08", "\x1b", "\x1b[31m", "\x1b]0;title\x07", "\x1b]8;;http://evil\x1b\\", "\x9b2J", "\x85"),
    *("\r", "\n", "\r\n", "\t", "\u2028", "\u2029", "\u202e", "\u2066", "\u200e", "\u061c", "\u200b", "\u2060"),
    *("\ufeff", "\u200c", "\u200d", "\ufe0f", "\ufe01", "\U000e0067", "\U000e0062", "\U000e007f", "\U000e0100"),
    *("\ud800", "\udc80", "\xad", "\u034f", "👩", "❤", "🏴", "م", "क", "्", "日", "ß", "e\u0301", "\ufdfa", "ŉ"),
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "](javascript:alert(1))", "[a](b)", "![x](y)"),
    *(
        "`",
        "``",
        "```",
        "|",
        "\\|",
        "\\",
        "*",
        "**",
        "_",
        "__",
        "~",
        "~~",
        "#",
        "# ",
        "- ",
        "---",
        "\n---\n",
        ": ",
        "&",
    ),
    *("&lt;", "<!--", "-->", "<a@b.c>", "<http://x>", "$x_$", "$", "{", "}", "[", "]", "(", ")", "'", '"', "''", "='"),
    *("=1+1", "+1", "-1", "@SUM(A1)", ",", ";", "1", "-1.5", "1e5", "[bold]", "[/]", ":smile:", " ", "a", "word"),
)


def broken_text(max_pieces: int = 12) -> st.SearchStrategy[str]:
    pieces = st.lists(st.sampled_from(PIECES), max_size=max_pieces).map("".join)
    unicode = st.text(st.characters(), max_size=20)
    return st.one_of(pieces, unicode, st.tuples(pieces, unicode).map("".join))
