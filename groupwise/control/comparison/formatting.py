"""Numbers as a page or a plot shows them."""

from __future__ import annotations


def short(value: float) -> str:
    """Three digits, thousands as k and millions as M: ``26.6k``."""
    rounded = float(f"{value:.3g}")
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(rounded) >= size:
            return f"{rounded / size:.6g}{letter}"
    return f"{rounded:g}"


def number(value: float) -> str:
    """A number for a table: ``1,234``, ``475.3``, ``−86.4``, ``0.00123``, and integers without decimals."""
    value = 0.0 if abs(value) < 1e-9 else value  # rounding errors of a difference of equal numbers
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
