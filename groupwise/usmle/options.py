"""The ``[task_options]`` of the task ``usmle``."""

from __future__ import annotations

from typing import Literal

from groupwise.config.sections import Count, CountOrNone, NotNegative, Section


class UsmleOptions(Section):
    prompt: Literal["chat", "direct", "completion"] = "chat"
    """the prompt asks for reasoning and a last line "Answer: X"; for that line alone; or ends before a bare letter"""
    reading: Literal["strict", "lenient"] = "strict"
    """what the reward takes as an answer: the required form only, or any form that is clear to a careful reader"""
    reward: Literal["binary", "enhanced", "enhanced_when_right"] = "binary"
    """1 for the right letter; that with a bonus and a penalty; or with the bonus for right answers only"""
    term_bonus: NotNegative = 0.05
    """enhanced: bonus for medical terminology"""
    short_penalty: NotNegative = 0.1
    """enhanced: penalty for a very short answer"""
    short_length: CountOrNone = 50
    """enhanced: an answer of fewer characters is very short"""
    vocabulary: str | None = None
    """enhanced: a file of medical words, one per line, instead of the packaged list"""
    copies: Count = 1
    """copies of each training question; all but the first have their options in another order"""
    bad_rows: Literal["error", "skip"] = "error"
    """a row that is not a valid question: stop with an error, or skip it and count it"""
