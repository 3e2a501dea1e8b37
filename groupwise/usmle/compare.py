"""Two models on the same questions, compared question by question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from groupwise.errors import InputError
from groupwise.stats import mcnemar
from groupwise.usmle.tables import (
    ALL_ORDERS,
    FEW,
    Difference,
    ExamReport,
    JsonTable,
    Proportion,
    QuestionOutcome,
    largest_first,
)

LEVEL = 0.05  # a difference with a smaller p-value is significant
EXAMPLES = 5

OutcomePairs = Sequence[tuple[QuestionOutcome, QuestionOutcome]]
"""The outcomes of each question before and after."""


@dataclass(frozen=True)
class AnswerChanges:
    """How many questions were right or wrong before and after; ``p_value`` is that of the exact McNemar test."""

    right_right: int
    right_wrong: int
    wrong_right: int
    wrong_wrong: int
    p_value: float


@dataclass(frozen=True)
class MeasureChange:
    """One measure before and after. The mean over several samples has no ``changes`` from right to wrong."""

    name: str
    before: float
    after: float
    difference: Difference
    changes: AnswerChanges | None
    real: bool

    @property
    def p_value(self) -> float:
        """McNemar's for answers that are right or wrong, else that of a permutation test."""
        return self.difference.p_value if self.changes is None else self.changes.p_value


@dataclass(frozen=True)
class CategoryChange:
    name: str | None
    n: int
    before: Proportion
    after: Proportion
    difference: Difference
    gained: int
    lost: int
    few: bool


@dataclass(frozen=True)
class ChangedAnswer:
    """A question that only one of the two models answered right."""

    number: int
    question: str
    right: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class ExamComparison(JsonTable):
    """The changes from one report to another, by the lenient reader unless the name says otherwise."""

    fingerprint: str
    n: int
    measures: tuple[MeasureChange, ...]
    before: dict[str, Proportion]
    after: dict[str, Proportion]
    by_category: tuple[CategoryChange, ...]
    gained: tuple[ChangedAnswer, ...]
    lost: tuple[ChangedAnswer, ...]


def check_same(before: ExamReport, other: str, number: int) -> None:
    """Raise an error unless a report is about the questions with this fingerprint, of which there are ``number``."""
    if before.fingerprint != other:
        raise InputError(
            f"the two reports are not about the same questions ({before.n} and {number}; the texts, the options or "
            "the right letters differ); evaluate both models on the same held-out rows"
        )


def compare(before: ExamReport, after: ExamReport) -> ExamComparison:
    """How ``after`` differs from ``before``; both must be about the same questions."""
    check_same(before, after.fingerprint, after.n)
    pairs = list(zip(before.outcomes, after.outcomes, strict=True))
    measures = [
        _measure("lenient", pairs, _right),
        _measure("strict", pairs, lambda outcome: outcome.strict == outcome.right),
        _measure("likeliest letter", pairs, lambda outcome: outcome.letters == outcome.right),
        _measure(ALL_ORDERS, pairs, lambda outcome: outcome.averaged == outcome.right),
    ]
    if before.sampled and after.sampled:
        measures.append(_measure("mean of samples", pairs, lambda outcome: outcome.sampled or 0.0))
    return ExamComparison(
        fingerprint=after.fingerprint,
        n=after.n,
        measures=tuple(measures),
        before=before.accuracies(),
        after=after.accuracies(),
        by_category=_categories(pairs),
        gained=_changed(pairs, gained=True),
        lost=_changed(pairs, gained=False),
    )


def _right(outcome: QuestionOutcome) -> bool:
    return outcome.lenient == outcome.right


def _measure(name: str, pairs: OutcomePairs, value: Callable[[QuestionOutcome], float]) -> MeasureChange:
    first, second = ([value(outcome) for outcome in outcomes] for outcomes in zip(*pairs, strict=True))
    difference = Difference.between(second, first)
    changes = None
    if isinstance(first[0], bool):
        counts = Counter(zip(first, second, strict=True))
        lost, gained = counts[True, False], counts[False, True]
        p_value = mcnemar(gained, lost)
        changes = AnswerChanges(counts[True, True], lost, gained, counts[False, False], p_value)
    else:
        p_value = difference.p_value
    before, after = sum(first) / len(first), sum(second) / len(second)
    return MeasureChange(name, before, after, difference, changes, real=p_value < LEVEL)


def _categories(pairs: OutcomePairs) -> tuple[CategoryChange, ...]:
    """The change by category, the largest first; empty if no question has one."""
    if all(after.category is None for _, after in pairs):
        return ()
    changes = []
    by_name = largest_first((after.category, (_right(before), _right(after))) for before, after in pairs)
    for name, outcomes in by_name:
        first, second = zip(*outcomes, strict=True)
        changes.append(
            CategoryChange(
                name,
                n=len(outcomes),
                before=Proportion.of(first),
                after=Proportion.of(second),
                difference=Difference.between(second, first),
                gained=outcomes.count((False, True)),
                lost=outcomes.count((True, False)),
                few=len(outcomes) < FEW,
            )
        )
    return tuple(changes)


def _changed(pairs: OutcomePairs, *, gained: bool) -> tuple[ChangedAnswer, ...]:
    examples = [
        ChangedAnswer(after.number, after.question, after.right, before.lenient, after.lenient)
        for before, after in pairs
        if _right(after) == gained and _right(before) != gained
    ]
    return tuple(examples[:EXAMPLES])
