"""The input of an analysis: the questions as they were asked, and the answers. Plain records from any source."""

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


@dataclass(frozen=True)
class LetterProbabilities:
    """The probability of each letter of a question, without a written answer. They sum to 1."""

    number: int
    probabilities: Mapping[str, float]


def sorted_questions(questions: Sequence[Question]) -> list[Question]:
    """The questions, checked, by their numbers."""
    if not questions:
        raise InputError("there are no questions to analyse; give at least one")
    repeated = _repeated(question.number for question in questions)
    if repeated is not None:
        raise InputError(f"two questions have the number {repeated}; give each its own")
    for question in questions:
        if len(question.options) < 2 or question.answer not in question.options:
            raise InputError(
                f"question {question.number} needs at least two options with the right one among them, got "
                f"{_names(question.options)} and the answer {question.answer!r}"
            )
    return sorted(questions, key=lambda question: question.number)


def fingerprint(questions: Sequence[Question]) -> str:
    """The SHA-256 of the questions, to check that two reports are about the same ones."""
    asked = [[question.question, list(question.options.items()), question.answer] for question in questions]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def one_per_question(
    what: str, questions: Sequence[Question], items: Sequence[Item], number: Callable[[Item], int]
) -> list[Item]:
    """One item per question, in the questions' order."""
    by_number: dict[int, Item] = {}
    for item in items:
        if number(item) in by_number:
            raise InputError(f"there are two {what} for question {number(item)}; give one for each question")
        by_number[number(item)] = item
    _check_numbers(what, questions, by_number)
    return [by_number[question.number] for question in questions]


def group_samples(what: str, questions: Sequence[Question], answers: Sequence[ModelAnswer]) -> list[list[ModelAnswer]]:
    """The samples of each question, equally many, in the order in which they were drawn."""
    groups: dict[int, list[ModelAnswer]] = {}
    for answer in answers:
        groups.setdefault(answer.number, []).append(answer)
    _check_numbers(what, questions, groups)
    number = len(groups[questions[0].number])
    for question in questions:
        samples = groups[question.number]
        if len(samples) != number:
            raise InputError(
                f"every question needs equally many {what}, but question {questions[0].number} has {number} and "
                f"question {question.number} has {len(samples)}"
            )
        repeated = _repeated(answer.sample for answer in samples)
        if repeated is not None:
            raise InputError(f"question {question.number} has two {what} with the number {repeated}")
        samples.sort(key=lambda answer: answer.sample)
    return [groups[question.number] for question in questions]


def check_answer(question: Question, answer: ModelAnswer) -> None:
    for letter in (answer.lenient, answer.strict):
        if letter is not None and letter not in question.options:
            raise InputError(
                f"an answer to question {question.number} was read as {letter!r}, which is none of its options "
                f"({_names(question.options)}); read it as None"
            )


def check_probabilities(question: Question, letters: LetterProbabilities) -> None:
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


def answer_in_original_letters(question: Question, order: OptionOrder, answer: ModelAnswer) -> ModelAnswer:
    """An answer to the shuffled question, in the letters of the original."""
    original = _original_letters(question, order)
    check_answer(question, answer)
    return replace(
        answer,
        lenient=None if answer.lenient is None else original[answer.lenient],
        strict=None if answer.strict is None else original[answer.strict],
    )


def probabilities_in_original_letters(
    question: Question, order: OptionOrder, letters: LetterProbabilities
) -> LetterProbabilities:
    """The probabilities of the shuffled question's letters, by the letters of the original."""
    original = _original_letters(question, order)
    check_probabilities(question, letters)
    return replace(letters, probabilities={original[shown]: value for shown, value in letters.probabilities.items()})


def _original_letters(question: Question, order: OptionOrder) -> dict[str, str]:
    if set(order) != set(question.options) or set(order.values()) != set(question.options):
        raise InputError(
            f"the order {dict(order)!r} of question {question.number} does not map its letters "
            f"({_names(question.options)}) one to one"
        )
    return {shown: letter for letter, shown in order.items()}


def _check_numbers(what: str, questions: Sequence[Question], numbers: Iterable[int]) -> None:
    asked, answered = {question.number for question in questions}, set(numbers)
    if missing := asked - answered:
        raise InputError(
            f"{len(missing)} of {len(asked)} questions have no {what}, the first is question {min(missing)}"
        )
    if extra := answered - asked:
        raise InputError(f"there are {what} for question {min(extra)}, which was not asked")


def _repeated(numbers: Iterable[int]) -> int | None:
    return next((number for number, count in Counter(numbers).items() if count > 1), None)


def _names(letters: Iterable[str]) -> str:
    return ", ".join(letters) or "none"
