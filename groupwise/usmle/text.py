"""Excerpts of questions and answers for the lines of a report."""

from __future__ import annotations

from groupwise.text import one_line


def start_of(text: str, limit: int) -> str:
    """The first characters of a text on one line, at most ``limit`` including the ellipsis."""
    line = one_line(text)
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def end_of(text: str, limit: int) -> str:
    """The last characters of a text on one line, at most ``limit`` including the ellipsis."""
    line = one_line(text)
    return line if len(line) <= limit else "…" + line[len(line) - limit + 1 :].lstrip()
