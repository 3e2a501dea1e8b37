"""The tables of a report on multiple choice: plain values all of them, so that a file can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import TypeAdapter, ValidationError

from groupwise.errors import CheckpointError
from groupwise.stats import Interval, mean_interval, paired_test, proportion_interval

VERSION = 1
FEW = 5  # fewer questions than this say next to nothing, and are marked


@dataclass(frozen=True)
class Share:
    """A share of ``n`` questions, such as an accuracy, with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, outcomes: Sequence[bool]) -> Share:
        """The share of the true ones, with Wilson's interval."""
        return cls._from(proportion_interval(sum(outcomes), len(outcomes)), len(outcomes))

    @classmethod
    def mean(cls, values: Sequence[float]) -> Share:
        """The mean of one share per question."""
        return cls._from(mean_interval(values), len(values))

    @classmethod
    def _from(cls, interval: Interval, number: int) -> Share:
        # Rounding can put a bound a hair beyond the estimate: 0 of 20 with an interval from 1e-17.
        low, high = min(interval.low, interval.estimate), max(interval.high, interval.estimate)
        return cls(float(interval.estimate), float(low), float(high), number)


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with its 95 % interval and the p-value of the permutation test."""

    value: float
    low: float
    high: float
    p_value: float

    @classmethod
    def between(cls, after: ArrayLike, before: ArrayLike) -> Difference:
        found = paired_test(np.asarray(after, dtype=np.float64), np.asarray(before, dtype=np.float64))
        return cls(found.difference.estimate, found.difference.low, found.difference.high, found.p_value)


@dataclass(frozen=True)
class Slice:
    """The accuracy on the questions of one category or exam step; None for those that name none."""

    name: str | None
    accuracy: Share
    few: bool


@dataclass(frozen=True)
class Letter:
    """A letter as the right one and as the predicted one; the shares are of the questions that have an answer."""

    letter: str
    right: int
    predicted: int
    right_share: float | None
    predicted_share: float | None
    accuracy: Share | None  # on the questions whose right letter it is


@dataclass(frozen=True)
class Confusion:
    """How often each right letter (rows) was answered by each letter, or by none (columns).

    ``bias`` is the total variation distance between the predicted and the right letters of the questions that have an
    answer: 0 if each letter is predicted as often as it is right, 1 if never. None without any answer.
    """

    letters: tuple[Letter, ...]
    counts: tuple[tuple[int, ...], ...]
    bias: float | None


@dataclass(frozen=True)
class Shuffled:
    """The same questions with their options in another order: a model that knows the answer does not mind."""

    accuracy: Share
    difference: Difference  # shuffled minus plain
    consistency: Share  # the questions for which both orders led to the same option


@dataclass(frozen=True)
class PassAt:
    """How likely at least one of ``k`` answers is right."""

    k: int
    share: Share


@dataclass(frozen=True)
class SampledAccuracy:
    """Several answers to each question."""

    samples: int
    accuracy: Share
    majority: Share
    pass_at: tuple[PassAt, ...]


@dataclass(frozen=True)
class Bin:
    """The questions whose likeliest letter has a probability between ``low`` and ``high``."""

    low: float
    high: float
    n: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Scored:
    """The likeliest letter as the answer, which needs no form and no reader."""

    accuracy: Share
    right_probability: float
    bins: tuple[Bin, ...]
    calibration_error: float
    agreement: Share | None  # with the answer that was written to the same form of the question
    order: Shuffled | None  # for the shuffled form: against the plain one


@dataclass(frozen=True)
class Example:
    number: int
    question: str
    right: str
    predicted: str | None
    ending: str


@dataclass(frozen=True)
class Pattern:
    """One way to be wrong: how often it happened, its share of all errors, and some examples."""

    name: str
    count: int
    share: float
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Rule:
    """A rule of the lenient reader: how often it fired, and how often its letter was right."""

    name: str
    accuracy: Share


@dataclass(frozen=True)
class Outcome:
    """What became of one question: letters, None where there is none."""

    number: int
    question: str
    category: str | None
    right: str
    lenient: str | None
    strict: str | None
    letters: str | None  # the likeliest letter
    sampled: float | None  # the share of its samples that are right


@dataclass(frozen=True)
class ExamReport:
    """All that was found. Where a table has no word about the reader, the lenient one read the answers."""

    fingerprint: str
    n: int
    chance: float
    lenient: Share
    strict: Share
    unread_lenient: int
    unread_strict: int
    mean_tokens: float
    cut_off: float
    by_category: tuple[Slice, ...]
    by_step: tuple[Slice, ...]
    confusion: Confusion
    shuffled: Shuffled | None
    sampled: SampledAccuracy | None
    letters: Scored | None
    shuffled_letters: Scored | None
    errors: int  # answers that are wrong by one reader or by both
    patterns: tuple[Pattern, ...]
    rules: tuple[Rule, ...]
    outcomes: tuple[Outcome, ...]
    version: int = VERSION

    def accuracies(self) -> dict[str, Share]:
        """Every way in which the model was measured, by its name."""
        found = {"strict": self.strict, "lenient": self.lenient}
        if self.sampled:
            found["majority vote"] = self.sampled.majority
        if self.letters:
            found["likeliest letter"] = self.letters.accuracy
        if self.shuffled:
            found["shuffled"] = self.shuffled.accuracy
        return found

    def to_json(self) -> dict[str, Any]:
        return to_plain(self)

    @classmethod
    def from_json(cls, value: Any, where: str = "the report") -> ExamReport:
        """The report that `to_json` gave; ``where`` names it in an error."""
        if not isinstance(value, dict) or "version" not in value:
            raise CheckpointError(f"{where} is no report of an evaluation: it has no version")
        if value["version"] != VERSION:
            raise CheckpointError(
                f"{where} has version {value['version']!r}; this groupwise reads {VERSION}. Evaluate the model again"
            )
        try:
            report = TypeAdapter(ExamReport).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{where} is damaged: {place}: {first['msg']}. Evaluate the model again") from error
        if len(report.outcomes) != report.n:
            raise CheckpointError(
                f"{where} is damaged: it is about {report.n} questions but lists {len(report.outcomes)}. Evaluate the "
                "model again"
            )
        return report


def to_plain(table: Any) -> dict[str, Any]:
    """A table as dictionaries, lists, text and numbers."""
    plain: dict[str, Any] = TypeAdapter(type(table)).dump_python(table, mode="json")
    return plain
