"""The part of an answer that is compared: its result, without the reasoning before it."""

from __future__ import annotations


def result_text(text: str, after: str | None = "</think>") -> str:
    """The text after the last ``after``, stripped.

    The complete text if the mark is absent (such as an answer truncated while reasoning), or ``after`` is None or
    empty. A text that ends with the mark has an empty result.
    """
    return text.rpartition(after)[2].strip() if after else text.strip()
