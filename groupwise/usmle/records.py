"""The input of an analysis: the questions as they were asked, and the answers. Plain records from any source."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TypeVar

from groupwise.errors import InputError

OptionOrder = Mapping[str, str]
"""How the options were shuffled: {letter in the question: letter as it was shown}."""


@dataclass(frozen=True)
class Question:
    """A held-out question; ``answer`` is the right letter."""

    number: int
    question: str
    options: Mapping[str, str]
    answer: str
    category: str | None = None
    step: str | None = None
    id: str | None = None

    def original_letters(self, order: OptionOrder) -> dict[str, str]:
        """The question's letters by the letters as they were shown."""
        if set(order) != set(self.options) or set(order.values()) != set(self.options):
            raise InputError(
                f"the order {dict(order)!r} of question {self.number} does not map its letters "
                f"({_names(self.options)}) one to one"
            )
        return {shown: letter for letter, shown in order.items()}


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

    def check(self, question: Question) -> None:
        for letter in (self.lenient, self.strict):
            if letter is not None and letter not in question.options:
                raise InputError(
                    f"an answer to question {question.number} was read as {letter!r}, which is none of its options "
                    f"({_names(question.options)}); read it as None"
                )

    def renamed(self, letters: Mapping[str, str]) -> ModelAnswer:
        lenient, strict = (letter and letters[letter] for letter in (self.lenient, self.strict))
        return replace(self, lenient=lenient, strict=strict)


@dataclass(frozen=True)
class LetterProbabilities:
    """The probability of each letter of a question, without a written answer. They sum to 1."""

    number: int
    probabilities: Mapping[str, float]

    def check(self, question: Question) -> None:
        values = self.probabilities.values()
        if set(self.probabilities) != set(question.options):
            raise InputError(
                f"question {question.number} has the options {_names(question.options)}, but probabilities of "
                f"{_names(self.probabilities)}"
            )
        if not all(0 <= value <= 1 for value in values) or not math.isclose(sum(values), 1, abs_tol=1e-3):
            raise InputError(
                f"the probabilities of question {question.number}'s letters must lie between 0 and 1 and sum to 1, got "
                f"{', '.join(f'{value:g}' for value in values)}"
            )

    def renamed(self, letters: Mapping[str, str]) -> LetterProbabilities:
        return replace(self, probabilities={letters[shown]: value for shown, value in self.probabilities.items()})


Record = TypeVar("Record", ModelAnswer, LetterProbabilities)


def sorted_questions(questions: Sequence[Question]) -> list[Question]:
    """The questions, checked, by their numbers."""
    if not questions:
        raise InputError("there are no questions to analyse; give at least one")
    for question in questions:
        if len(question.options) < 2 or question.answer not in question.options:
            raise InputError(
                f"question {question.number} needs at least two options with the right one among them, got "
                f"{_names(question.options)} and the answer {question.answer!r}"
            )
    ordered = sorted(questions, key=lambda question: question.number)
    for first, second in pairwise(ordered):
        if first.number == second.number:
            raise InputError(f"two questions have the number {first.number}; give each its own")
    return ordered


def fingerprint(questions: Sequence[Question]) -> str:
    """The SHA-256 of the questions, to check that two reports are about the same ones."""
    asked = [[question.question, list(question.options.items()), question.answer] for question in questions]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def by_question(what: str, questions: Sequence[Question], records: Iterable[Record], each: int = 1) -> list[Record]:
    """The records, checked, in the questions' order; an error unless there are ``each`` of every question."""
    groups: dict[int, list[Record]] = {question.number: [] for question in questions}
    for record in records:
        if record.number not in groups:
            raise InputError(f"there are {what} for question {record.number}, which was not asked")
        groups[record.number].append(record)
    for question in questions:
        group = groups[question.number]
        if len(group) != each:
            raise InputError(f"question {question.number} has {len(group)} {what}; give {each} for every question")
        for record in group:
            record.check(question)
    return list(chain(*groups.values()))


def by_question_unshuffled(
    what: str, questions: Sequence[Question], shuffled: Sequence[tuple[OptionOrder, Record]]
) -> list[Record]:
    """One record of each question, in the question's own letters."""
    orders = {record.number: order for order, record in shuffled}
    records = by_question(what, questions, [record for _, record in shuffled])
    return [
        record.renamed(question.original_letters(orders[question.number]))
        for question, record in zip(questions, records, strict=True)
    ]


def _names(letters: Iterable[str]) -> str:
    return ", ".join(letters) or "none"
