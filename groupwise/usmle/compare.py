"""Two models on the same questions, question by question: what was gained, what was lost, is it more than chance?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise.errors import InputError
from groupwise.stats import mcnemar
from groupwise.usmle.tables import FEW, Difference, ExamReport, Outcome, Share, to_plain

LEVEL = 0.05  # a difference with a smaller p-value is called real
EXAMPLES = 5

Reading = Callable[[Outcome], str | None]


@dataclass(frozen=True)
class Changes:
    """How many questions were right or wrong before, and are now; ``p_value`` is McNemar's, exact."""

    right_right: int
    right_wrong: int
    wrong_right: int
    wrong_wrong: int
    p_value: float


@dataclass(frozen=True)
class Measure:
    """One way to measure, before and after. Shares of several samples have no ``changes`` from right to wrong."""

    name: str
    before: float
    after: float
    difference: Difference
    changes: Changes | None
    real: bool

    @property
    def p_value(self) -> float:
        """McNemar's where answers are right or wrong, else that of a permutation test."""
        return self.difference.p_value if self.changes is None else self.changes.p_value


@dataclass(frozen=True)
class CategoryChange:
    name: str | None
    n: int
    before: Share
    after: Share
    difference: Difference
    gained: int
    lost: int
    few: bool


@dataclass(frozen=True)
class Moved:
    """A question that was answered rightly by one of the two only."""

    number: int
    question: str
    right: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Comparison:
    """What changed from one report to another; by the lenient reader where nothing else is said."""

    fingerprint: str
    n: int
    measures: tuple[Measure, ...]
    before: dict[str, Share]
    after: dict[str, Share]
    by_category: tuple[CategoryChange, ...]
    gained: tuple[Moved, ...]
    lost: tuple[Moved, ...]

    def to_json(self) -> dict[str, Any]:
        return to_plain(self)


def check_same(before: ExamReport, asked: str, number: int) -> None:
    """Raise unless a report is about these questions: their fingerprint, and how many there are."""
    if before.fingerprint != asked:
        raise InputError(
            f"the two reports are not about the same questions ({before.n} and {number}; the texts, the options or "
            "the right letters differ); evaluate both models on the same held-out rows"
        )


def compare(before: ExamReport, after: ExamReport) -> Comparison:
    """How ``after`` differs from ``before``; both must have been asked the same questions."""
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
    return Comparison(
        fingerprint=after.fingerprint,
        n=after.n,
        measures=tuple(measures),
        before=before.accuracies(),
        after=after.accuracies(),
        by_category=_categories(pairs),
        gained=_moved(pairs, gained=True),
        lost=_moved(pairs, gained=False),
    )


Pairs = Sequence[tuple[Outcome, Outcome]]


def _right(outcome: Outcome, reading: Reading = lambda outcome: outcome.lenient) -> bool:
    return reading(outcome) == outcome.right


def _of_letters(name: str, pairs: Pairs, reading: Reading) -> Measure:
    first = [_right(before, reading) for before, _ in pairs]
    second = [_right(after, reading) for _, after in pairs]
    return _measure(name, first, second, _changes(first, second))


def _of_samples(pairs: Pairs) -> Measure:
    first = [before.sampled or 0.0 for before, _ in pairs]
    second = [after.sampled or 0.0 for _, after in pairs]
    return _measure("mean of samples", first, second, None)


def _measure(name: str, before: Sequence[float], after: Sequence[float], changes: Changes | None) -> Measure:
    found = Measure(
        name,
        before=sum(before) / len(before),
        after=sum(after) / len(after),
        difference=Difference.between(after, before),
        changes=changes,
        real=False,
    )
    return replace(found, real=found.p_value < LEVEL)


def _changes(before: Sequence[bool], after: Sequence[bool]) -> Changes:
    pairs = list(zip(before, after, strict=True))
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    return Changes(
        right_right=pairs.count((True, True)),
        right_wrong=lost,
        wrong_right=gained,
        wrong_wrong=pairs.count((False, False)),
        p_value=mcnemar(gained, lost),
    )


def _categories(pairs: Pairs) -> tuple[CategoryChange, ...]:
    """The change by category, the largest first; nothing if no question has one."""
    found: dict[str | None, list[tuple[bool, bool]]] = {}
    for before, after in pairs:
        found.setdefault(after.category, []).append((_right(before), _right(after)))
    if set(found) == {None}:
        return ()
    changes = []
    for name, outcomes in found.items():
        first, second = [before for before, _ in outcomes], [after for _, after in outcomes]
        changes.append(
            CategoryChange(
                name,
                n=len(outcomes),
                before=Share.of(first),
                after=Share.of(second),
                difference=Difference.between(second, first),
                gained=outcomes.count((False, True)),
                lost=outcomes.count((True, False)),
                few=len(outcomes) < FEW,
            )
        )
    return tuple(sorted(changes, key=lambda change: (-change.n, change.name or "")))


def _moved(pairs: Pairs, *, gained: bool) -> tuple[Moved, ...]:
    found = [
        Moved(after.number, after.question, after.right, before.lenient, after.lenient)
        for before, after in pairs
        if _right(after) == gained and _right(before) != gained
    ]
    return tuple(found[:EXAMPLES])
