"""The kinds of errors in a model's answers. Each error has exactly one kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from groupwise.text import one_line
from groupwise.usmle import answers as reader
from groupwise.usmle import tables
from groupwise.usmle.records import ModelAnswer, Question
from groupwise.usmle.tables import Proportion, end_of, largest_first, start_of

EXAMPLES = 3
EXCERPT, ENDING = 120, 200  # characters of a question and of an answer's end

# The kind of an error by the rule of the lenient reader, where that found no letter for another reason than "nothing".
BY_RULE = {
    reader.SEVERAL: "two answers",
    reader.DECLINED: "no answer: declined",
    reader.BEYOND: "no answer: beyond the options",
}


def find_patterns(questions: Sequence[Question], answers: Sequence[ModelAnswer]) -> tuple[tables.ErrorPattern, ...]:
    """The kinds of errors, the most frequent first. An error is an answer that is wrong for at least one reader."""
    favourite = favourite_letter(questions, answers)
    errors = [
        (_kind(question, answer, favourite), _example(question, answer))
        for question, answer in zip(questions, answers, strict=True)
        if not answer.lenient == answer.strict == question.answer
    ]
    return tuple(
        tables.ErrorPattern(name, len(examples), len(examples) / len(errors), tuple(examples[:EXAMPLES]))
        for name, examples in largest_first(errors)
    )


def favourite_letter(questions: Sequence[Question], answers: Sequence[ModelAnswer]) -> str | None:
    """The letter of more than half of the wrong answers; None if there is none, or if too few answers are wrong."""
    wrong = [a.lenient for q, a in zip(questions, answers, strict=True) if a.lenient != q.answer]
    letters = Counter(letter for letter in wrong if letter is not None)
    if len(wrong) < tables.FEW or not letters:
        return None
    letter, count = letters.most_common(1)[0]
    return letter if 2 * count > len(wrong) else None


def find_rules(questions: Sequence[Question], answers: Sequence[ModelAnswer]) -> tuple[tables.RuleAccuracy, ...]:
    """How often the lenient reader used each rule, and how often it was right; the most frequent first."""
    by_rule = largest_first((one_line(a.rule), a.lenient == q.answer) for q, a in zip(questions, answers, strict=True))
    return tuple(tables.RuleAccuracy(name, Proportion.of(outcomes)) for name, outcomes in by_rule)


def _kind(question: Question, answer: ModelAnswer, favourite: str | None) -> str:
    if answer.lenient == question.answer:
        return "right in lenient, not in strict form"
    if answer.lenient is None:
        nothing = "no answer: cut off" if answer.stop_reason == "length" else "no answer: nothing found"
        return BY_RULE.get(answer.rule, nothing)
    if answer.rule.endswith(reader.DISAGREES):
        return "letter and text disagree"
    return f"the favourite letter: {favourite}" if answer.lenient == favourite else "wrong option"


def _example(question: Question, answer: ModelAnswer) -> tables.ErrorExample:
    def option(letter: str) -> str:
        return start_of(f"{letter}. {question.options[letter]}", EXCERPT)

    return tables.ErrorExample(
        question.number,
        start_of(question.question, EXCERPT),
        option(question.answer),
        None if answer.lenient is None else option(answer.lenient),
        end_of(answer.text, ENDING),
    )
