"""What is compared of an answer: its result, not the thoughts before it."""

from __future__ import annotations


def result_text(text: str, after: str | None = "</think>") -> str:
    """What follows the last ``after`` in a text, without white space around it.

    The whole text where the mark is absent, as in an answer that was cut short while thinking, and where ``after`` is
    None or empty. A text that ends with the mark has an empty result.
    """
    return text.rpartition(after)[2].strip() if after else text.strip()
