"""Text that came from elsewhere, made fit for a line of a report."""

from __future__ import annotations

import re

MARKDOWN = re.compile(r"([\\`*_\[\]<>|~&$#])")


def clean(text: str) -> str:
    """One line: white space of any kind becomes one blank, and what cannot be printed is left out."""
    return " ".join("".join(letter for letter in text if letter.isprintable() or letter.isspace()).split())


def start_of(text: str, limit: int) -> str:
    """A text's first characters, at most ``limit`` with the dots."""
    line = clean(text)
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def end_of(text: str, limit: int) -> str:
    """A text's last characters, at most ``limit`` with the dots."""
    line = clean(text)
    return line if len(line) <= limit else "…" + line[len(line) - limit + 1 :].lstrip()


def escape(text: str) -> str:
    """A text as a cell of a Markdown table shows it: nothing in it is markup, nothing ends the cell."""
    return MARKDOWN.sub(r"\\\1", clean(text))
