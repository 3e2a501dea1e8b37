"""The questions of an exam as they were asked, and a model's answers to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A held-out question; ``answer`` is the right letter."""

    number: int
    question: str
    options: Mapping[str, str]
    answer: str
    category: str | None = None
    step: str | None = None


@dataclass(frozen=True)
class ModelAnswer:
    """One answer to a question, and the letters that the two readers found in it.

    ``rule`` is the rule by which the lenient reader found its letter, or why it found none.
    """

    number: int
    sample: int
    text: str
    lenient: str | None
    strict: str | None
    rule: str
    tokens: int
    stop_reason: str


def fingerprint(questions: Sequence[Question]) -> str:
    """The SHA-256 of the questions, to check that two reports are about the same ones."""
    asked = [[question.question, list(question.options.items()), question.answer] for question in questions]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()
