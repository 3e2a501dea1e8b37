"""Numbers and names as a page or a picture shows them."""

from __future__ import annotations

import re

MARKUP = re.compile(r"([\\`*\[\]<>|~&$#])")  # an underscore within a word is none


def escape(text: str) -> str:
    """A text in one line, in which nothing is markup and nothing ends a table's cell."""
    return MARKUP.sub(r"\\\1", " ".join(text.split()))


def short(value: float) -> str:
    """Three digits, thousands as k and millions as M: ``26.6k``."""
    rounded = float(f"{value:.3g}")
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(rounded) >= size:
            return f"{rounded / size:.6g}{letter}"
    return f"{rounded:g}"


def number(value: float) -> str:
    """As many digits as a table bears: ``1,234``, ``475.3``, ``−86.4``, ``0.00123``; a whole number without zeros."""
    value = 0.0 if abs(value) < 1e-9 else value  # what is left of a difference of equals
    size = abs(value)
    if value == round(value) or size >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.1f}" if size >= 10 else f"{value:.3g}"
    return text.replace("-", "−")


def signed(value: float) -> str:
    text = number(value)
    return f"+{text}" if value > 0 and text != "0" else text


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def counted(count: int, noun: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
