"""From the questions and a model's answers to the tables of a report. An answer without a letter counts as wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from groupwise.errors import InputError
from groupwise.stats import pass_at_k
from groupwise.text import one_line
from groupwise.usmle.patterns import EXCERPT, find_patterns, find_rules
from groupwise.usmle.records import (
    LetterProbabilities,
    ModelAnswer,
    OptionOrder,
    Question,
    answer_in_original_letters,
    check_answer,
    check_probabilities,
    fingerprint,
    group_samples,
    one_per_question,
    probabilities_in_original_letters,
    sorted_questions,
)
from groupwise.usmle.tables import (
    FEW,
    CalibrationBin,
    Confusion,
    Difference,
    ExamReport,
    GroupAccuracy,
    LetterCounts,
    LetterScores,
    PassAtK,
    Proportion,
    QuestionOutcome,
    SampledAccuracy,
    ShuffledOptions,
)
from groupwise.usmle.text import start_of

__all__ = ["ExamReport", "LetterProbabilities", "ModelAnswer", "OptionOrder", "Question", "analyse"]

BINS = 10

AnsweredLetters = Sequence[str | None]
"""One letter per question, or None."""


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
    answers = one_per_question("greedy answers", questions, greedy, lambda answer: answer.number)
    for question, answer in zip(questions, answers, strict=True):
        check_answer(question, answer)
    lenient = [answer.lenient for answer in answers]
    samples = _samples(questions, sampled) if sampled else None
    moved = _moved_answers(questions, shuffled) if shuffled else None
    probabilities = _probabilities(questions, letters) if letters else None
    patterns = find_patterns(questions, answers)
    return ExamReport(
        fingerprint=fingerprint(questions),
        n=len(questions),
        chance=sum(1 / len(question.options) for question in questions) / len(questions),
        lenient=Proportion.of(_right(questions, lenient)),
        strict=Proportion.of(_right(questions, [answer.strict for answer in answers])),
        unread_lenient=sum(answer.lenient is None for answer in answers),
        unread_strict=sum(answer.strict is None for answer in answers),
        mean_tokens=sum(answer.tokens for answer in answers) / len(answers),
        cut_off=sum(answer.stop_reason == "length" for answer in answers) / len(answers),
        by_category=_by_group([question.category for question in questions], _right(questions, lenient)),
        by_step=_by_group([question.step for question in questions], _right(questions, lenient)),
        confusion=_confusion(questions, lenient),
        shuffled=None if moved is None else _shuffled(questions, lenient, moved),
        sampled=None if samples is None else _sampled(questions, samples),
        letters=None if probabilities is None else _letter_scores(questions, probabilities, lenient),
        shuffled_letters=_shuffled_letter_scores(questions, shuffled_letters, moved, probabilities)
        if probabilities and shuffled_letters
        else None,
        errors=sum(pattern.count for pattern in patterns),
        patterns=patterns,
        rules=find_rules(questions, answers),
        outcomes=_outcomes(questions, answers, probabilities, samples),
    )


def likeliest(question: Question, letters: LetterProbabilities) -> str:
    """The letter with the highest probability; of equally likely ones the first."""
    return max(question.options, key=lambda letter: letters.probabilities[letter])


def majority(letters: AnsweredLetters) -> str | None:
    """The most frequent letter, of equally frequent ones the first; None if there is no letter at all."""
    votes = Counter(letter for letter in letters if letter is not None)
    return votes.most_common(1)[0][0] if votes else None


def _right(questions: Sequence[Question], letters: AnsweredLetters) -> list[bool]:
    return [letter == question.answer for question, letter in zip(questions, letters, strict=True)]


def _samples(questions: Sequence[Question], sampled: Sequence[ModelAnswer]) -> list[list[ModelAnswer]]:
    groups = group_samples("sampled answers", questions, sampled)
    for question, group in zip(questions, groups, strict=True):
        for answer in group:
            check_answer(question, answer)
    return groups


def _moved_answers(
    questions: Sequence[Question], shuffled: Sequence[tuple[OptionOrder, ModelAnswer]]
) -> list[str | None]:
    pairs = one_per_question("shuffled answers", questions, shuffled, lambda pair: pair[1].number)
    return [answer_in_original_letters(q, *pair).lenient for q, pair in zip(questions, pairs, strict=True)]


def _probabilities(questions: Sequence[Question], letters: Sequence[LetterProbabilities]) -> list[LetterProbabilities]:
    entries = one_per_question("letter probabilities", questions, letters, lambda entry: entry.number)
    for question, entry in zip(questions, entries, strict=True):
        check_probabilities(question, entry)
    return entries


def _by_group(names: Sequence[str | None], right: Sequence[bool]) -> tuple[GroupAccuracy, ...]:
    """The accuracy by name, the largest group first; empty if no question has a name."""
    groups: dict[str | None, list[bool]] = {}
    for name, is_right in zip(names, right, strict=True):
        groups.setdefault(None if name is None else one_line(name), []).append(is_right)
    if set(groups) == {None}:
        return ()
    rows = [GroupAccuracy(name, Proportion.of(members), len(members) < FEW) for name, members in groups.items()]
    return tuple(sorted(rows, key=lambda row: (-row.accuracy.n, row.name or "")))


def _confusion(questions: Sequence[Question], letters: AnsweredLetters) -> Confusion:
    pairs = Counter((question.answer, letter) for question, letter in zip(questions, letters, strict=True))
    names = sorted({letter for question in questions for letter in question.options})
    answered = {letter: sum(pairs[letter, predicted] for predicted in names) for letter in names}
    predicted = {letter: sum(pairs[right, letter] for right in names) for letter in names}
    total = sum(answered.values())
    rows = []
    for name in names:
        outcomes = [letter == name for q, letter in zip(questions, letters, strict=True) if q.answer == name]
        rows.append(
            LetterCounts(
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
    return Confusion(tuple(rows), counts, bias)


def _shuffled(questions: Sequence[Question], original: AnsweredLetters, moved: AnsweredLetters) -> ShuffledOptions:
    after = _right(questions, moved)
    same = [
        first is not None and second is not None and question.options[first] == question.options[second]
        for question, first, second in zip(questions, original, moved, strict=True)
    ]
    difference = Difference.between(after, _right(questions, original))
    return ShuffledOptions(Proportion.of(after), difference, Proportion.of(same))


def _sampled(questions: Sequence[Question], groups: Sequence[Sequence[ModelAnswer]]) -> SampledAccuracy:
    number = len(groups[0])
    right = [sum(answer.lenient == q.answer for answer in group) for q, group in zip(questions, groups, strict=True)]
    votes = [majority([answer.lenient for answer in group]) for group in groups]
    powers = [2**power for power in range(number.bit_length())]
    return SampledAccuracy(
        samples=number,
        accuracy=Proportion.mean([count / number for count in right]),
        majority=Proportion.of(_right(questions, votes)),
        pass_at=tuple(PassAtK(k, Proportion.mean([pass_at_k(number, count, k) for count in right])) for k in powers),
    )


def _letter_scores(
    questions: Sequence[Question],
    letters: Sequence[LetterProbabilities],
    written: AnsweredLetters | None,
    order: ShuffledOptions | None = None,
) -> LetterScores:
    chosen = [likeliest(question, entry) for question, entry in zip(questions, letters, strict=True)]
    right = _right(questions, chosen)
    confidence = [entry.probabilities[letter] for entry, letter in zip(letters, chosen, strict=True)]
    bins = _bins(confidence, right)
    gaps = [
        abs(entry.accuracy - entry.confidence) * entry.n
        for entry in bins
        if entry.accuracy is not None and entry.confidence is not None
    ]
    of_right = [entry.probabilities[question.answer] for question, entry in zip(questions, letters, strict=True)]
    return LetterScores(
        accuracy=Proportion.of(right),
        right_probability=sum(of_right) / len(of_right),
        bins=bins,
        calibration_error=sum(gaps) / len(questions),
        agreement=None if written is None else Proportion.of([a == b for a, b in zip(chosen, written, strict=True)]),
        order=order,
    )


def _shuffled_letter_scores(
    questions: Sequence[Question],
    shuffled: Sequence[tuple[OptionOrder, LetterProbabilities]],
    written: AnsweredLetters | None,
    original: Sequence[LetterProbabilities],
) -> LetterScores:
    pairs = one_per_question("shuffled letter probabilities", questions, shuffled, lambda pair: pair[1].number)
    moved = [probabilities_in_original_letters(q, *pair) for q, pair in zip(questions, pairs, strict=True)]
    before = [likeliest(question, entry) for question, entry in zip(questions, original, strict=True)]
    after = [likeliest(question, entry) for question, entry in zip(questions, moved, strict=True)]
    return _letter_scores(questions, moved, written, _shuffled(questions, before, after))


def _bins(confidence: Sequence[float], right: Sequence[bool]) -> tuple[CalibrationBin, ...]:
    members: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for value, is_right in zip(confidence, right, strict=True):
        members[min(int(value * BINS), BINS - 1)].append((value, is_right))
    return tuple(
        CalibrationBin(
            low=number / BINS,
            high=(number + 1) / BINS,
            n=len(inside),
            confidence=sum(value for value, _ in inside) / len(inside) if inside else None,
            accuracy=sum(is_right for _, is_right in inside) / len(inside) if inside else None,
        )
        for number, inside in enumerate(members)
    )


def _outcomes(
    questions: Sequence[Question],
    answers: Sequence[ModelAnswer],
    letters: Sequence[LetterProbabilities] | None,
    groups: Sequence[Sequence[ModelAnswer]] | None,
) -> tuple[QuestionOutcome, ...]:
    outcomes = []
    for place, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        samples = groups[place] if groups else ()
        outcomes.append(
            QuestionOutcome(
                number=question.number,
                question=start_of(question.question, EXCERPT),
                category=None if question.category is None else one_line(question.category),
                right=question.answer,
                lenient=answer.lenient,
                strict=answer.strict,
                letters=likeliest(question, letters[place]) if letters else None,
                sampled=sum(a.lenient == question.answer for a in samples) / len(samples) if samples else None,
            )
        )
    return tuple(outcomes)
