"""What an analysis of multiple choice is given: the questions as they were asked, and the answers to them.

Plain records, so that anything can make them: an engine of one's own, a served model, a file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from groupwise.errors import InputError

Item = TypeVar("Item")
Order = Mapping[str, str]
"""How the options were shuffled: {letter in the question: letter as it was shown}."""


@dataclass(frozen=True)
class Question:
    """A held-out question as it was asked; ``answer`` is the right letter."""

    number: int
    question: str
    options: Mapping[str, str]
    answer: str
    category: str | None = None
    step: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class ModelAnswer:
    """One answer to a question, and the letters that were read in it.

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


@dataclass(frozen=True)
class Letters:
    """How likely the model holds each of a question's letters, without writing an answer; the sum is 1."""

    number: int
    probabilities: Mapping[str, float]


def in_order(questions: Sequence[Question]) -> list[Question]:
    """The questions by their numbers, once they are known to make sense."""
    if not questions:
        raise InputError("there are no questions to analyse; give at least one")
    twice = _twice(question.number for question in questions)
    if twice is not None:
        raise InputError(f"two questions have the number {twice}; number them one by one")
    for question in questions:
        if len(question.options) < 2 or question.answer not in question.options:
            raise InputError(
                f"question {question.number} needs at least two options with the right one among them, got "
                f"{_names(question.options)} and the answer {question.answer!r}"
            )
    return sorted(questions, key=lambda question: question.number)


def fingerprint(questions: Sequence[Question]) -> str:
    """The SHA-256 of what was asked: the same for two models only if both answered the same questions."""
    asked = [[question.question, list(question.options.items()), question.answer] for question in questions]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def one_each(
    what: str, questions: Sequence[Question], items: Sequence[Item], number: Callable[[Item], int]
) -> list[Item]:
    """One item for every question, in the questions' order."""
    found: dict[int, Item] = {}
    for item in items:
        if number(item) in found:
            raise InputError(f"there are two {what} for question {number(item)}; give one for each question")
        found[number(item)] = item
    _check_numbers(what, questions, found)
    return [found[question.number] for question in questions]


def equally_many(what: str, questions: Sequence[Question], answers: Sequence[ModelAnswer]) -> list[list[ModelAnswer]]:
    """The samples of every question, in the order in which they were drawn."""
    found: dict[int, list[ModelAnswer]] = {}
    for answer in answers:
        found.setdefault(answer.number, []).append(answer)
    _check_numbers(what, questions, found)
    number = len(found[questions[0].number])
    for question in questions:
        samples = found[question.number]
        if len(samples) != number:
            raise InputError(
                f"every question needs equally many {what}, but question {questions[0].number} has {number} and "
                f"question {question.number} has {len(samples)}"
            )
        twice = _twice(answer.sample for answer in samples)
        if twice is not None:
            raise InputError(f"question {question.number} has two {what} with the number {twice}")
        samples.sort(key=lambda answer: answer.sample)
    return [found[question.number] for question in questions]


def check_given(question: Question, answer: ModelAnswer) -> None:
    for letter in (answer.lenient, answer.strict):
        if letter is not None and letter not in question.options:
            raise InputError(
                f"an answer to question {question.number} was read as {letter!r}, which is none of its options "
                f"({_names(question.options)}); read it as None"
            )


def check_letters(question: Question, letters: Letters) -> None:
    values = letters.probabilities.values()
    if set(letters.probabilities) != set(question.options):
        raise InputError(
            f"question {question.number} has the options {_names(question.options)}, but probabilities of "
            f"{_names(letters.probabilities)}"
        )
    if not all(0 <= value <= 1 for value in values) or not math.isclose(sum(values), 1, abs_tol=1e-3):
        raise InputError(
            f"the probabilities of question {question.number}'s letters must lie between 0 and 1 and sum to 1, got "
            f"{', '.join(f'{value:g}' for value in values)}"
        )


def in_plain_letters(question: Question, order: Order, answer: ModelAnswer) -> ModelAnswer:
    """An answer to the shuffled form, in the letters of the plain one."""
    back = _back(question, order)
    check_given(question, answer)
    return replace(
        answer,
        lenient=None if answer.lenient is None else back[answer.lenient],
        strict=None if answer.strict is None else back[answer.strict],
    )


def probabilities_in_plain_letters(question: Question, order: Order, letters: Letters) -> Letters:
    """The probabilities of a shuffled form's letters, as those of the plain one's."""
    back = _back(question, order)
    check_letters(question, letters)
    return replace(letters, probabilities={back[shown]: value for shown, value in letters.probabilities.items()})


def _back(question: Question, order: Order) -> dict[str, str]:
    if set(order) != set(question.options) or set(order.values()) != set(question.options):
        raise InputError(
            f"question {question.number} was shuffled as {dict(order)!r}, which does not give each of its letters "
            f"({_names(question.options)}) another or the same one"
        )
    return {shown: letter for letter, shown in order.items()}


def _check_numbers(what: str, questions: Sequence[Question], found: Iterable[int]) -> None:
    asked, given = {question.number for question in questions}, set(found)
    if asked - given:
        raise InputError(
            f"{len(asked - given)} of {len(asked)} questions have no {what}, the first is question {min(asked - given)}"
        )
    if given - asked:
        raise InputError(f"there are {what} for question {min(given - asked)}, which was not asked")


def _twice(numbers: Iterable[int]) -> int | None:
    return next((number for number, count in Counter(numbers).items() if count > 1), None)


def _names(letters: Iterable[str]) -> str:
    return ", ".join(letters) or "none"
