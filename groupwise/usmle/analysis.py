"""From the questions and a model's answers to the tables of a report. An answer without a letter counts as wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from groupwise.errors import InputError
from groupwise.stats import pass_at_k
from groupwise.text import one_line
from groupwise.usmle import tables
from groupwise.usmle.patterns import EXCERPT, find_patterns, find_rules
from groupwise.usmle.records import (
    LetterProbabilities,
    ModelAnswer,
    OptionOrder,
    Question,
    by_question,
    by_question_unshuffled,
    fingerprint,
    sorted_questions,
)
from groupwise.usmle.tables import Difference, ExamReport, Proportion, start_of

BINS = 10

Questions = Sequence[Question]
AnsweredLetters = Sequence[str | None]
"""One letter per question, or None."""
Scored = Sequence[LetterProbabilities]
Samples = Sequence[Sequence[ModelAnswer]]
"""The samples of each question, equally many, in the order in which they were drawn."""


def analyse(
    questions: Sequence[Question],
    greedy: Sequence[ModelAnswer],
    *,
    sampled: Sequence[ModelAnswer] = (),
    shuffled: Sequence[tuple[OptionOrder, ModelAnswer]] = (),
    letters: Sequence[LetterProbabilities] = (),
    shuffled_letters: Sequence[tuple[OptionOrder, LetterProbabilities]] = (),
) -> ExamReport:
    """The report on one model. An optional argument is empty or covers every question.

    ``greedy`` holds one answer per question, ``sampled`` equally many per question, ``shuffled`` one per question with
    shuffled options, in the letters as they were shown. ``letters`` and ``shuffled_letters`` hold the probabilities.
    """
    questions = sorted_questions(questions)
    if shuffled_letters and not letters:
        raise InputError("shuffled_letters are compared with letters; give those too")
    if len({(answer.number, answer.sample) for answer in sampled}) < len(sampled):
        raise InputError("a question has two sampled answers with the same number; number its samples")
    answers = by_question("greedy answers", questions, greedy)
    lenient = [answer.lenient for answer in answers]
    right = _right(questions, lenient)
    samples = _samples(questions, sampled) if sampled else None
    moved = by_question_unshuffled("shuffled answers", questions, shuffled) if shuffled else ()
    moved_lenient = [answer.lenient for answer in moved] or None
    probabilities = by_question("letter probabilities", questions, letters) if letters else None
    patterns = find_patterns(questions, answers)
    return ExamReport(
        fingerprint=fingerprint(questions),
        n=len(questions),
        chance=sum(1 / len(question.options) for question in questions) / len(questions),
        lenient=Proportion.of(right),
        strict=Proportion.of(_right(questions, [answer.strict for answer in answers])),
        unread_lenient=lenient.count(None),
        unread_strict=sum(answer.strict is None for answer in answers),
        mean_tokens=sum(answer.tokens for answer in answers) / len(answers),
        cut_off=sum(answer.stop_reason == "length" for answer in answers) / len(answers),
        by_category=_by_group([question.category for question in questions], right),
        by_step=_by_group([question.step for question in questions], right),
        confusion=_confusion(questions, lenient),
        shuffled=None if moved_lenient is None else _shuffled(questions, lenient, moved_lenient),
        sampled=None if samples is None else _sampled(questions, samples),
        letters=None if probabilities is None else _letter_scores(questions, probabilities, lenient),
        shuffled_letters=_shuffled_letter_scores(questions, shuffled_letters, moved_lenient, probabilities)
        if probabilities and shuffled_letters
        else None,
        errors=sum(pattern.count for pattern in patterns),
        patterns=patterns,
        rules=find_rules(questions, answers),
        outcomes=_outcomes(questions, answers, probabilities, samples),
    )


def majority(letters: AnsweredLetters) -> str | None:
    """The most frequent letter, of equally frequent ones the first; None if there is no letter at all."""
    votes = Counter(letter for letter in letters if letter is not None)
    return votes.most_common(1)[0][0] if votes else None


def _right(questions: Sequence[Question], letters: AnsweredLetters) -> list[bool]:
    return [letter == question.answer for question, letter in zip(questions, letters, strict=True)]


def _samples(questions: Questions, sampled: Sequence[ModelAnswer]) -> Samples:
    number = max(1, len(sampled) // len(questions))
    in_order = sorted(sampled, key=lambda answer: answer.sample)
    answers = by_question("sampled answers", questions, in_order, number)
    return [answers[start : start + number] for start in range(0, len(answers), number)]


def _by_group(names: Sequence[str | None], right: Sequence[bool]) -> tuple[tables.GroupAccuracy, ...]:
    """The accuracy by name, the largest group first; empty if no question has a name."""
    if all(name is None for name in names):
        return ()
    plain = [None if name is None else one_line(name) for name in names]
    return tuple(
        tables.GroupAccuracy(name, Proportion.of(members), len(members) < tables.FEW)
        for name, members in tables.largest_first(zip(plain, right, strict=True))
    )


def _confusion(questions: Sequence[Question], letters: AnsweredLetters) -> tables.Confusion:
    pairs = Counter((question.answer, letter) for question, letter in zip(questions, letters, strict=True))
    names = sorted({letter for question in questions for letter in question.options})
    answered = {letter: sum(pairs[letter, predicted] for predicted in names) for letter in names}
    predicted = {letter: sum(pairs[right, letter] for right in names) for letter in names}
    total = sum(answered.values())
    rows = []
    for name in names:
        outcomes = [letter == name for q, letter in zip(questions, letters, strict=True) if q.answer == name]
        rows.append(
            tables.LetterCounts(
                name,
                right=len(outcomes),
                predicted=predicted[name],
                right_share=answered[name] / total if total else None,
                predicted_share=predicted[name] / total if total else None,
                accuracy=Proportion.of(outcomes) if outcomes else None,
            )
        )
    bias = sum(abs(answered[name] - predicted[name]) for name in names) / (2 * total) if total else None
    counts = tuple(tuple(pairs[right, letter] for letter in (*names, None)) for right in names)
    return tables.Confusion(tuple(rows), counts, bias)


def _shuffled(questions: Questions, original: AnsweredLetters, moved: AnsweredLetters) -> tables.ShuffledOptions:
    after = _right(questions, moved)
    same = [
        first is not None and second is not None and question.options[first] == question.options[second]
        for question, first, second in zip(questions, original, moved, strict=True)
    ]
    difference = Difference.between(after, _right(questions, original))
    return tables.ShuffledOptions(Proportion.of(after), difference, Proportion.of(same))


def _shares_right(questions: Questions, groups: Samples) -> list[float]:
    return [
        sum(answer.lenient == question.answer for answer in group) / len(group)
        for question, group in zip(questions, groups, strict=True)
    ]


def _sampled(questions: Questions, groups: Samples) -> tables.SampledAccuracy:
    number = len(groups[0])
    shares = _shares_right(questions, groups)
    votes = [majority([answer.lenient for answer in group]) for group in groups]
    pass_at = []
    for k in (2**power for power in range(number.bit_length())):
        chances = [pass_at_k(number, round(share * number), k) for share in shares]
        pass_at.append(tables.PassAtK(k, Proportion.of(chances)))
    return tables.SampledAccuracy(
        number, Proportion.of(shares), Proportion.of(_right(questions, votes)), tuple(pass_at)
    )


def _likeliest(questions: Questions, letters: Scored) -> list[str]:
    """The letters with the highest probability; of equally likely ones the first."""
    return [
        max(question.options, key=lambda letter: entry.probabilities[letter])
        for question, entry in zip(questions, letters, strict=True)
    ]


def _letter_scores(
    questions: Questions, letters: Scored, written: AnsweredLetters | None, order: tables.ShuffledOptions | None = None
) -> tables.LetterScores:
    chosen = _likeliest(questions, letters)
    right = _right(questions, chosen)
    bins = _bins([entry.probabilities[letter] for entry, letter in zip(letters, chosen, strict=True)], right)
    gaps = [
        abs(entry.accuracy - entry.confidence) * entry.n
        for entry in bins
        if entry.accuracy is not None and entry.confidence is not None
    ]
    of_right = [entry.probabilities[question.answer] for question, entry in zip(questions, letters, strict=True)]
    return tables.LetterScores(
        accuracy=Proportion.of(right),
        right_probability=sum(of_right) / len(of_right),
        bins=bins,
        calibration_error=sum(gaps) / len(questions),
        agreement=None if written is None else Proportion.of([a == b for a, b in zip(chosen, written, strict=True)]),
        order=order,
    )


def _shuffled_letter_scores(
    questions: Questions,
    shuffled: Sequence[tuple[OptionOrder, LetterProbabilities]],
    written: AnsweredLetters | None,
    original: Scored,
) -> tables.LetterScores:
    moved = by_question_unshuffled("shuffled letter probabilities", questions, shuffled)
    changes = _shuffled(questions, _likeliest(questions, original), _likeliest(questions, moved))
    return _letter_scores(questions, moved, written, changes)


def _bins(confidence: Sequence[float], right: Sequence[bool]) -> tuple[tables.CalibrationBin, ...]:
    members: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for value, is_right in zip(confidence, right, strict=True):
        members[min(int(value * BINS), BINS - 1)].append((value, is_right))
    return tuple(
        tables.CalibrationBin(
            low=number / BINS,
            high=(number + 1) / BINS,
            n=len(inside),
            confidence=sum(value for value, _ in inside) / len(inside) if inside else None,
            accuracy=sum(is_right for _, is_right in inside) / len(inside) if inside else None,
        )
        for number, inside in enumerate(members)
    )


def _outcomes(
    questions: Questions, answers: Sequence[ModelAnswer], letters: Scored | None, groups: Samples | None
) -> tuple[tables.QuestionOutcome, ...]:
    none = [None] * len(questions)
    likeliest = _likeliest(questions, letters) if letters else none
    sampled = _shares_right(questions, groups) if groups else none
    return tuple(
        tables.QuestionOutcome(
            number=question.number,
            question=start_of(question.question, EXCERPT),
            category=None if question.category is None else one_line(question.category),
            right=question.answer,
            lenient=answer.lenient,
            strict=answer.strict,
            letters=letter,
            sampled=share,
        )
        for question, answer, letter, share in zip(questions, answers, likeliest, sampled, strict=True)
    )
