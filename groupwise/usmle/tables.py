"""The tables of a report on multiple choice, as plain values that can be stored as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import TypeAdapter, ValidationError

from groupwise.errors import CheckpointError
from groupwise.stats import mean_interval, paired_test
from groupwise.text import one_line

Name = TypeVar("Name", str, str | None)
Value = TypeVar("Value")
VERSION = 2
ALL_ORDERS = "likeliest, all orders"
FEW = 5  # groups of fewer questions are marked


class JsonTable:
    def to_json(self) -> dict[str, Any]:
        """The table as dictionaries, lists, strings and numbers."""
        plain: dict[str, Any] = TypeAdapter(type(self)).dump_python(self, mode="json")
        return plain


@dataclass(frozen=True)
class Proportion:
    """A share of ``n`` questions, such as an accuracy, with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Proportion:
        """The share of true outcomes, or the mean of one share per question."""
        interval = mean_interval(values)
        # Rounding can put a bound beyond the estimate: 0 of 20 with an interval from 1e-17.
        low, high = min(interval.low, interval.estimate), max(interval.high, interval.estimate)
        return cls(float(interval.estimate), float(low), float(high), len(values))


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with its 95 % interval and the p-value of the permutation test."""

    value: float
    low: float
    high: float
    p_value: float

    @classmethod
    def between(cls, after: ArrayLike, before: ArrayLike) -> Difference:
        test = paired_test(np.asarray(after, dtype=np.float64), np.asarray(before, dtype=np.float64))
        return cls(test.difference.estimate, test.difference.low, test.difference.high, test.p_value)


@dataclass(frozen=True)
class GroupAccuracy:
    """The accuracy on the questions of one category or exam step; the name is None for those without one."""

    name: str | None
    accuracy: Proportion
    few: bool


@dataclass(frozen=True)
class LetterCounts:
    """How often a letter is right and how often it is predicted. The shares are of the answered questions."""

    letter: str
    right: int
    predicted: int
    right_share: float | None
    predicted_share: float | None
    accuracy: Proportion | None  # on the questions with this right letter


@dataclass(frozen=True)
class Confusion:
    """How often each right letter (rows) was answered with each letter, or with none (columns).

    ``bias`` is the total variation distance between the predicted and the right letters of the answered questions: 0 if
    each letter is predicted as often as it is right. None if there is no answer.
    """

    letters: tuple[LetterCounts, ...]
    counts: tuple[tuple[int, ...], ...]
    bias: float | None


@dataclass(frozen=True)
class ShuffledOptions:
    accuracy: Proportion
    difference: Difference  # shuffled minus original
    consistency: Proportion  # questions with the same option chosen in both orders


@dataclass(frozen=True)
class PassAtK:
    k: int
    share: Proportion  # probability that at least one of k answers is right


@dataclass(frozen=True)
class SampledAccuracy:
    samples: int
    accuracy: Proportion
    majority: Proportion
    pass_at: tuple[PassAtK, ...]


@dataclass(frozen=True)
class CalibrationBin:
    """The questions whose likeliest letter has a probability between ``low`` and ``high``."""

    low: float
    high: float
    n: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class LetterScores:
    """The accuracy of the likeliest letter, without a written answer."""

    accuracy: Proportion
    right_probability: float
    bins: tuple[CalibrationBin, ...]
    calibration_error: float
    agreement: Proportion  # with the written answer
    order: ShuffledOptions | None  # shuffled options against the original ones


@dataclass(frozen=True)
class ErrorExample:
    number: int
    question: str
    right: str
    predicted: str | None
    ending: str


@dataclass(frozen=True)
class ErrorPattern:
    name: str
    count: int
    share: float  # of all errors
    examples: tuple[ErrorExample, ...]


@dataclass(frozen=True)
class RuleAccuracy:
    """A rule of the lenient reader: how often it was used, and how often its letter was right."""

    name: str
    accuracy: Proportion


@dataclass(frozen=True)
class QuestionOutcome:
    """The result of one question as letters; None where there is none."""

    number: int
    question: str
    category: str | None
    right: str
    lenient: str | None
    strict: str | None
    letters: str  # the likeliest letter
    averaged: str  # the likeliest over all orders of the options
    sampled: float | None  # the share of right samples


@dataclass(frozen=True)
class ExamReport(JsonTable):
    """All results. A table without a word about the reader is by the lenient one."""

    fingerprint: str
    n: int
    chance: float
    lenient: Proportion
    strict: Proportion
    unread_lenient: int
    unread_strict: int
    mean_tokens: float
    cut_off: float
    by_category: tuple[GroupAccuracy, ...]
    by_step: tuple[GroupAccuracy, ...]
    confusion: Confusion
    shuffled: ShuffledOptions
    sampled: SampledAccuracy | None
    letters: LetterScores
    shuffled_letters: LetterScores
    averaged_letters: LetterScores  # averaged over orders in which each option has each letter once
    errors: int  # answers that are wrong for at least one reader
    patterns: tuple[ErrorPattern, ...]
    rules: tuple[RuleAccuracy, ...]
    outcomes: tuple[QuestionOutcome, ...]
    version: int = VERSION

    def accuracies(self) -> dict[str, Proportion]:
        """Every measure of accuracy, by name."""
        accuracies = {"strict": self.strict, "lenient": self.lenient}
        if self.sampled:
            accuracies["majority vote"] = self.sampled.majority
        letters = {"likeliest letter": self.letters.accuracy, ALL_ORDERS: self.averaged_letters.accuracy}
        return accuracies | letters | {"shuffled": self.shuffled.accuracy}

    @classmethod
    def from_json(cls, value: Any, where: str = "the report") -> ExamReport:
        """The report from the result of `to_json`; ``where`` names it in an error."""
        if not isinstance(value, dict) or "version" not in value:
            raise CheckpointError(f"{where} is not a report of an evaluation: it has no version")
        if value["version"] != VERSION:
            versions = f"has the format {value['version']!r}, but this version of groupwise reads {VERSION}"
            raise CheckpointError(f"{where} {versions}; evaluate the model again")
        try:
            return TypeAdapter(ExamReport).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise CheckpointError(f"{where} is damaged: {reason}; evaluate the model again") from error


def largest_first(pairs: Iterable[tuple[Name, Value]]) -> list[tuple[Name, list[Value]]]:
    """The values by name, the largest group first."""
    groups: dict[Name, list[Value]] = {}
    for name, value in pairs:
        groups.setdefault(name, []).append(value)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0] or ""))


def start_of(text: str, limit: int) -> str:
    """The first characters of a text on one line, at most ``limit`` including the ellipsis."""
    line = one_line(text)
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def end_of(text: str, limit: int) -> str:
    """The last characters of a text on one line, at most ``limit`` including the ellipsis."""
    line = one_line(text)
    return line if len(line) <= limit else "…" + line[len(line) - limit + 1 :].lstrip()
