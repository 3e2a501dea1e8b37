"""Two models on the same questions, compared question by question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise.errors import InputError
from groupwise.stats import mcnemar
from groupwise.usmle.tables import FEW, Difference, ExamReport, Proportion, QuestionOutcome, to_plain

LEVEL = 0.05  # a difference with a smaller p-value is significant
EXAMPLES = 5

Reading = Callable[[QuestionOutcome], str | None]
"""One of the letters of an outcome: by the lenient reader, by the strict one, or the likeliest."""


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
class ExamComparison:
    """The changes from one report to another, by the lenient reader unless the name says otherwise."""

    fingerprint: str
    n: int
    measures: tuple[MeasureChange, ...]
    before: dict[str, Proportion]
    after: dict[str, Proportion]
    by_category: tuple[CategoryChange, ...]
    gained: tuple[ChangedAnswer, ...]
    lost: tuple[ChangedAnswer, ...]

    def to_json(self) -> dict[str, Any]:
        return to_plain(self)


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
        _of_letters("lenient", pairs, lambda outcome: outcome.lenient),
        _of_letters("strict", pairs, lambda outcome: outcome.strict),
    ]
    if before.letters and after.letters:
        measures.append(_of_letters("likeliest letter", pairs, lambda outcome: outcome.letters))
    if before.sampled and after.sampled:
        measures.append(_of_samples(pairs))
    return ExamComparison(
        fingerprint=after.fingerprint,
        n=after.n,
        measures=tuple(measures),
        before=before.accuracies(),
        after=after.accuracies(),
        by_category=_categories(pairs),
        gained=_moved(pairs, gained=True),
        lost=_moved(pairs, gained=False),
    )


OutcomePairs = Sequence[tuple[QuestionOutcome, QuestionOutcome]]


def _right(outcome: QuestionOutcome, reading: Reading = lambda outcome: outcome.lenient) -> bool:
    return reading(outcome) == outcome.right


def _of_letters(name: str, pairs: OutcomePairs, reading: Reading) -> MeasureChange:
    first = [_right(before, reading) for before, _ in pairs]
    second = [_right(after, reading) for _, after in pairs]
    return _measure(name, first, second, _changes(first, second))


def _of_samples(pairs: OutcomePairs) -> MeasureChange:
    first = [before.sampled or 0.0 for before, _ in pairs]
    second = [after.sampled or 0.0 for _, after in pairs]
    return _measure("mean of samples", first, second, None)


def _measure(
    name: str, before: Sequence[float], after: Sequence[float], changes: AnswerChanges | None
) -> MeasureChange:
    change = MeasureChange(
        name,
        before=sum(before) / len(before),
        after=sum(after) / len(after),
        difference=Difference.between(after, before),
        changes=changes,
        real=False,
    )
    return replace(change, real=change.p_value < LEVEL)


def _changes(before: Sequence[bool], after: Sequence[bool]) -> AnswerChanges:
    pairs = list(zip(before, after, strict=True))
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    return AnswerChanges(
        right_right=pairs.count((True, True)),
        right_wrong=lost,
        wrong_right=gained,
        wrong_wrong=pairs.count((False, False)),
        p_value=mcnemar(gained, lost),
    )


def _categories(pairs: OutcomePairs) -> tuple[CategoryChange, ...]:
    """The change by category, the largest first; empty if no question has one."""
    by_name: dict[str | None, list[tuple[bool, bool]]] = {}
    for before, after in pairs:
        by_name.setdefault(after.category, []).append((_right(before), _right(after)))
    if set(by_name) == {None}:
        return ()
    changes = []
    for name, outcomes in by_name.items():
        first, second = [before for before, _ in outcomes], [after for _, after in outcomes]
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
    return tuple(sorted(changes, key=lambda change: (-change.n, change.name or "")))


def _moved(pairs: OutcomePairs, *, gained: bool) -> tuple[ChangedAnswer, ...]:
    examples = [
        ChangedAnswer(after.number, after.question, after.right, before.lenient, after.lenient)
        for before, after in pairs
        if _right(after) == gained and _right(before) != gained
    ]
    return tuple(examples[:EXAMPLES])
