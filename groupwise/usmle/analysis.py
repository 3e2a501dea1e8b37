"""The analysis of a multiple-choice evaluation: from questions and answers to the tables of a report.

No model is needed here, only what it said. An answer in which no letter is found counts as wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from groupwise.errors import InputError
from groupwise.stats import pass_at_k
from groupwise.usmle.patterns import EXCERPT, find_patterns, find_rules
from groupwise.usmle.records import (
    Letters,
    ModelAnswer,
    Order,
    Question,
    check_given,
    check_letters,
    equally_many,
    fingerprint,
    in_order,
    in_plain_letters,
    one_each,
    probabilities_in_plain_letters,
)
from groupwise.usmle.tables import (
    FEW,
    Bin,
    Confusion,
    Difference,
    ExamReport,
    Letter,
    Outcome,
    PassAt,
    SampledAccuracy,
    Scored,
    Share,
    Shuffled,
    Slice,
)
from groupwise.usmle.text import clean, start_of

__all__ = ["ExamReport", "Letters", "ModelAnswer", "Order", "Question", "analyse"]

BINS = 10

Answered = Sequence[str | None]
"""For each question a letter, or None."""


def analyse(
    questions: Sequence[Question],
    greedy: Sequence[ModelAnswer],
    *,
    sampled: Sequence[ModelAnswer] = (),
    shuffled: Sequence[tuple[Order, ModelAnswer]] = (),
    letters: Sequence[Letters] = (),
    shuffled_letters: Sequence[tuple[Order, Letters]] = (),
) -> ExamReport:
    """The report on one model. What is optional is left out or covers every question.

    greedy: one answer to each question. sampled: equally many to each. shuffled: an answer to each with its options in
    another order, in the letters as they were shown. letters, shuffled_letters: the letters' probabilities.
    """
    asked = in_order(questions)
    if shuffled_letters and not letters:
        raise InputError("shuffled_letters are compared with letters; give those too")
    answers = one_each("greedy answers", asked, greedy, lambda answer: answer.number)
    for question, answer in zip(asked, answers, strict=True):
        check_given(question, answer)
    lenient = [answer.lenient for answer in answers]
    groups = _groups(asked, sampled) if sampled else None
    moved = _plain_answers(asked, shuffled) if shuffled else None
    likely = _plain_letters(asked, letters) if letters else None
    patterns = find_patterns(asked, answers)
    return ExamReport(
        fingerprint=fingerprint(asked),
        n=len(asked),
        chance=sum(1 / len(question.options) for question in asked) / len(asked),
        lenient=Share.of(_right(asked, lenient)),
        strict=Share.of(_right(asked, [answer.strict for answer in answers])),
        unread_lenient=sum(answer.lenient is None for answer in answers),
        unread_strict=sum(answer.strict is None for answer in answers),
        mean_tokens=sum(answer.tokens for answer in answers) / len(answers),
        cut_off=sum(answer.stop_reason == "length" for answer in answers) / len(answers),
        by_category=_slices([question.category for question in asked], _right(asked, lenient)),
        by_step=_slices([question.step for question in asked], _right(asked, lenient)),
        confusion=_confusion(asked, lenient),
        shuffled=None if moved is None else _shuffled(asked, lenient, moved),
        sampled=None if groups is None else _sampled(asked, groups),
        letters=None if likely is None else _scored(asked, likely, lenient),
        shuffled_letters=_scored_shuffled(asked, shuffled_letters, moved, likely) if likely else None,
        errors=sum(pattern.count for pattern in patterns),
        patterns=patterns,
        rules=find_rules(asked, answers),
        outcomes=_outcomes(asked, answers, likely, groups),
    )


def likeliest(question: Question, letters: Letters) -> str:
    """The letter with the highest probability; among equals the one that stands first in the question."""
    return max(question.options, key=lambda letter: letters.probabilities[letter])


def majority(letters: Answered) -> str | None:
    """The letter given most often, of equally frequent ones the one that came first; None only if there is no other."""
    votes = Counter(letter for letter in letters if letter is not None)
    return votes.most_common(1)[0][0] if votes else None


def _right(questions: Sequence[Question], letters: Answered) -> list[bool]:
    return [letter == question.answer for question, letter in zip(questions, letters, strict=True)]


def _groups(questions: Sequence[Question], sampled: Sequence[ModelAnswer]) -> list[list[ModelAnswer]]:
    groups = equally_many("sampled answers", questions, sampled)
    for question, group in zip(questions, groups, strict=True):
        for answer in group:
            check_given(question, answer)
    return groups


def _plain_answers(questions: Sequence[Question], shuffled: Sequence[tuple[Order, ModelAnswer]]) -> list[str | None]:
    pairs = one_each("shuffled answers", questions, shuffled, lambda pair: pair[1].number)
    return [in_plain_letters(question, *pair).lenient for question, pair in zip(questions, pairs, strict=True)]


def _plain_letters(questions: Sequence[Question], letters: Sequence[Letters]) -> list[Letters]:
    found = one_each("letters' probabilities", questions, letters, lambda entry: entry.number)
    for question, entry in zip(questions, found, strict=True):
        check_letters(question, entry)
    return found


def _slices(names: Sequence[str | None], right: Sequence[bool]) -> tuple[Slice, ...]:
    """The accuracy by name, the largest slice first; nothing if no question has a name."""
    found: dict[str | None, list[bool]] = {}
    for name, outcome in zip(names, right, strict=True):
        found.setdefault(None if name is None else clean(name), []).append(outcome)
    if set(found) == {None}:
        return ()
    slices = [Slice(name, Share.of(outcomes), len(outcomes) < FEW) for name, outcomes in found.items()]
    return tuple(sorted(slices, key=lambda part: (-part.accuracy.n, part.name or "")))


def _confusion(questions: Sequence[Question], letters: Answered) -> Confusion:
    pairs = Counter((question.answer, letter) for question, letter in zip(questions, letters, strict=True))
    names = sorted({letter for question in questions for letter in question.options})
    answered = {letter: sum(pairs[letter, given] for given in names) for letter in names}
    predicted = {letter: sum(pairs[right, letter] for right in names) for letter in names}
    total = sum(answered.values())
    rows = []
    for name in names:
        of_it = [letter == name for q, letter in zip(questions, letters, strict=True) if q.answer == name]
        rows.append(
            Letter(
                name,
                right=len(of_it),
                predicted=predicted[name],
                right_share=answered[name] / total if total else None,
                predicted_share=predicted[name] / total if total else None,
                accuracy=Share.of(of_it) if of_it else None,
            )
        )
    bias = sum(abs(answered[name] - predicted[name]) for name in names) / (2 * total) if total else None
    counts = tuple(tuple(pairs[right, given] for given in (*names, None)) for right in names)
    return Confusion(tuple(rows), counts, bias)


def _shuffled(questions: Sequence[Question], plain: Answered, moved: Answered) -> Shuffled:
    after = _right(questions, moved)
    same = [
        first is not None and second is not None and question.options[first] == question.options[second]
        for question, first, second in zip(questions, plain, moved, strict=True)
    ]
    return Shuffled(Share.of(after), Difference.between(after, _right(questions, plain)), Share.of(same))


def _sampled(questions: Sequence[Question], groups: Sequence[Sequence[ModelAnswer]]) -> SampledAccuracy:
    number = len(groups[0])
    right = [sum(answer.lenient == q.answer for answer in group) for q, group in zip(questions, groups, strict=True)]
    votes = [majority([answer.lenient for answer in group]) for group in groups]
    powers = [2**power for power in range(number.bit_length())]
    return SampledAccuracy(
        samples=number,
        accuracy=Share.mean([count / number for count in right]),
        majority=Share.of(_right(questions, votes)),
        pass_at=tuple(PassAt(k, Share.mean([pass_at_k(number, count, k) for count in right])) for k in powers),
    )


def _scored(
    questions: Sequence[Question],
    letters: Sequence[Letters],
    written: Answered | None,
    order: Shuffled | None = None,
) -> Scored:
    chosen = [likeliest(question, entry) for question, entry in zip(questions, letters, strict=True)]
    right = _right(questions, chosen)
    confidence = [entry.probabilities[letter] for entry, letter in zip(letters, chosen, strict=True)]
    bins = _bins(confidence, right)
    gaps = [
        abs(part.accuracy - part.confidence) * part.n
        for part in bins
        if part.accuracy is not None and part.confidence is not None
    ]
    of_right = [entry.probabilities[question.answer] for question, entry in zip(questions, letters, strict=True)]
    return Scored(
        accuracy=Share.of(right),
        right_probability=sum(of_right) / len(of_right),
        bins=bins,
        calibration_error=sum(gaps) / len(questions),
        agreement=None if written is None else Share.of([a == b for a, b in zip(chosen, written, strict=True)]),
        order=order,
    )


def _scored_shuffled(
    questions: Sequence[Question],
    shuffled: Sequence[tuple[Order, Letters]],
    written: Answered | None,
    plain: Sequence[Letters],
) -> Scored | None:
    if not shuffled:
        return None
    pairs = one_each("shuffled letters' probabilities", questions, shuffled, lambda pair: pair[1].number)
    moved = [probabilities_in_plain_letters(q, *pair) for q, pair in zip(questions, pairs, strict=True)]
    before = [likeliest(question, entry) for question, entry in zip(questions, plain, strict=True)]
    after = [likeliest(question, entry) for question, entry in zip(questions, moved, strict=True)]
    return _scored(questions, moved, written, _shuffled(questions, before, after))


def _bins(confidence: Sequence[float], right: Sequence[bool]) -> tuple[Bin, ...]:
    inside: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for value, outcome in zip(confidence, right, strict=True):
        inside[min(int(value * BINS), BINS - 1)].append((value, outcome))
    return tuple(
        Bin(
            low=number / BINS,
            high=(number + 1) / BINS,
            n=len(part),
            confidence=sum(value for value, _ in part) / len(part) if part else None,
            accuracy=sum(outcome for _, outcome in part) / len(part) if part else None,
        )
        for number, part in enumerate(inside)
    )


def _outcomes(
    questions: Sequence[Question],
    answers: Sequence[ModelAnswer],
    letters: Sequence[Letters] | None,
    groups: Sequence[Sequence[ModelAnswer]] | None,
) -> tuple[Outcome, ...]:
    found = []
    for place, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        samples = groups[place] if groups else ()
        found.append(
            Outcome(
                number=question.number,
                question=start_of(question.question, EXCERPT),
                category=None if question.category is None else clean(question.category),
                right=question.answer,
                lenient=answer.lenient,
                strict=answer.strict,
                letters=likeliest(question, letters[place]) if letters else None,
                sampled=sum(a.lenient == question.answer for a in samples) / len(samples) if samples else None,
            )
        )
    return tuple(found)
