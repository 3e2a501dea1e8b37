"""From the questions and a model's answers to the tables of a report. An answer without a letter counts as wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from groupwise.stats import pass_at_k
from groupwise.text import one_line
from groupwise.usmle import tables
from groupwise.usmle.patterns import EXCERPT, find_patterns, find_rules
from groupwise.usmle.records import ModelAnswer, Question, fingerprint
from groupwise.usmle.tables import Difference, ExamReport, Proportion, start_of

BINS = 10

Questions = Sequence[Question]
AnsweredLetters = Sequence[str | None]
"""One letter per question, or None."""
Samples = Sequence[Sequence[ModelAnswer]]
"""The sampled answers of each question, equally many."""
LetterProbabilities = Mapping[str, float]
"""The probability of each letter of a question, without a written answer."""


def analyse(
    questions: Questions,
    greedy: Sequence[ModelAnswer],
    *,
    sampled: Sequence[ModelAnswer] = (),
    orders: Sequence[Mapping[str, str]],
    shuffled: Sequence[ModelAnswer],
    letters: Sequence[LetterProbabilities],
    shuffled_letters: Sequence[LetterProbabilities],
    averaged_letters: Sequence[LetterProbabilities],
) -> ExamReport:
    """The report on one model, from answers and letter probabilities in the order of the questions.

    ``sampled`` holds equally many answers per question, one question after another. ``orders`` says how the options
    were shuffled, {letter in the question: letter as it was shown}; ``shuffled`` and ``shuffled_letters`` are in the
    letters as they were shown. ``averaged_letters`` are means over several orders, in the letters of the question.
    """
    lenient = [answer.lenient for answer in greedy]
    right = _right(questions, lenient)
    number = len(sampled) // len(questions)
    samples = [sampled[start : start + number] for start in range(0, len(sampled), number)] if sampled else None
    original: list[dict[str | None, str]] = [{shown: letter for letter, shown in order.items()} for order in orders]
    moved = [by_shown.get(answer.lenient) for by_shown, answer in zip(original, shuffled, strict=True)]
    moved_letters = [
        {letter: scores[shown] for letter, shown in order.items()}
        for order, scores in zip(orders, shuffled_letters, strict=True)
    ]
    likeliest, moved_likeliest = _likeliest(questions, letters), _likeliest(questions, moved_letters)
    averaged = _likeliest(questions, averaged_letters)
    patterns = find_patterns(questions, greedy)
    return ExamReport(
        fingerprint=fingerprint(questions),
        n=len(questions),
        chance=sum(1 / len(question.options) for question in questions) / len(questions),
        lenient=Proportion.of(right),
        strict=Proportion.of(_right(questions, [answer.strict for answer in greedy])),
        unread_lenient=lenient.count(None),
        unread_strict=sum(answer.strict is None for answer in greedy),
        mean_tokens=sum(answer.tokens for answer in greedy) / len(greedy),
        cut_off=sum(answer.stop_reason == "length" for answer in greedy) / len(greedy),
        by_category=_by_group([question.category for question in questions], right),
        by_step=_by_group([question.step for question in questions], right),
        confusion=_confusion(questions, lenient),
        shuffled=_shuffled(questions, lenient, moved),
        sampled=_sampled(questions, samples) if samples else None,
        letters=_letter_scores(questions, letters, likeliest, lenient),
        shuffled_letters=_letter_scores(
            questions, moved_letters, moved_likeliest, moved, _shuffled(questions, likeliest, moved_likeliest)
        ),
        averaged_letters=_letter_scores(questions, averaged_letters, averaged, lenient),
        errors=sum(pattern.count for pattern in patterns),
        patterns=patterns,
        rules=find_rules(questions, greedy),
        outcomes=_outcomes(questions, greedy, likeliest, averaged, samples),
    )


def majority(letters: AnsweredLetters) -> str | None:
    """The most frequent letter, of equally frequent ones the first; None if there is no letter at all."""
    votes = Counter(letter for letter in letters if letter is not None)
    return votes.most_common(1)[0][0] if votes else None


def _right(questions: Questions, letters: AnsweredLetters) -> list[bool]:
    return [letter == question.answer for question, letter in zip(questions, letters, strict=True)]


def _by_group(names: Sequence[str | None], right: Sequence[bool]) -> tuple[tables.GroupAccuracy, ...]:
    """The accuracy by name, the largest group first; empty if no question has a name."""
    if all(name is None for name in names):
        return ()
    plain = [None if name is None else one_line(name) for name in names]
    return tuple(
        tables.GroupAccuracy(name, Proportion.of(members), len(members) < tables.FEW)
        for name, members in tables.largest_first(zip(plain, right, strict=True))
    )


def _confusion(questions: Questions, letters: AnsweredLetters) -> tables.Confusion:
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


def _likeliest(questions: Questions, letters: Sequence[LetterProbabilities]) -> list[str]:
    """The letters with the highest probability; of equally likely ones the first."""
    return [max(question.options, key=scores.__getitem__) for question, scores in zip(questions, letters, strict=True)]


def _letter_scores(
    questions: Questions,
    letters: Sequence[LetterProbabilities],
    likeliest: Sequence[str],
    written: AnsweredLetters,
    order: tables.ShuffledOptions | None = None,
) -> tables.LetterScores:
    right = _right(questions, likeliest)
    bins = _bins([scores[letter] for scores, letter in zip(letters, likeliest, strict=True)], right)
    gaps = [
        abs(entry.accuracy - entry.confidence) * entry.n
        for entry in bins
        if entry.accuracy is not None and entry.confidence is not None
    ]
    of_right = [scores[question.answer] for question, scores in zip(questions, letters, strict=True)]
    return tables.LetterScores(
        accuracy=Proportion.of(right),
        right_probability=sum(of_right) / len(of_right),
        bins=bins,
        calibration_error=sum(gaps) / len(questions),
        agreement=Proportion.of([first == second for first, second in zip(likeliest, written, strict=True)]),
        order=order,
    )


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
    questions: Questions,
    answers: Sequence[ModelAnswer],
    likeliest: Sequence[str],
    averaged: Sequence[str],
    samples: Samples | None,
) -> tuple[tables.QuestionOutcome, ...]:
    sampled = _shares_right(questions, samples) if samples else [None] * len(questions)
    return tuple(
        tables.QuestionOutcome(
            number=question.number,
            question=start_of(question.question, EXCERPT),
            category=None if question.category is None else one_line(question.category),
            right=question.answer,
            lenient=answer.lenient,
            strict=answer.strict,
            letters=letter,
            averaged=average,
            sampled=share,
        )
        for question, answer, letter, average, share in zip(
            questions, answers, likeliest, averaged, sampled, strict=True
        )
    )
