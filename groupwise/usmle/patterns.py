"""What went wrong, by kinds: each error falls into exactly one, so that the counts add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from groupwise.usmle import answers as choice
from groupwise.usmle.records import ModelAnswer, Question
from groupwise.usmle.tables import FEW, Example, Pattern, Rule, Share
from groupwise.usmle.text import clean, end_of, start_of

EXAMPLES = 3
EXCERPT, ENDING = 120, 200  # characters of a question and of an answer's end

CUT_OFF = "no answer: cut off"
DECLINED = "no answer: declined"
BEYOND = "no answer: beyond the options"
NOTHING = "no answer: nothing found"
TWO = "two answers"
DISAGREE = "letter and text disagree"
SAME = "the favourite letter"
WRONG = "wrong option"
FORM = "right in lenient, not in strict form"

# Why the lenient reader found no letter, where that alone says what happened.
OF_RULE = {choice.SEVERAL: TWO, choice.DECLINED: DECLINED, choice.BEYOND: BEYOND}


def right_in_both(question: Question, answer: ModelAnswer) -> bool:
    return answer.lenient == answer.strict == question.answer


def find_patterns(questions: Sequence[Question], answers: Sequence[ModelAnswer]) -> tuple[Pattern, ...]:
    """The kinds of errors, the most frequent first. An error is an answer that is wrong by one reader at least."""
    favourite = favourite_letter(questions, answers)
    found: dict[str, list[Example]] = {}
    for question, answer in zip(questions, answers, strict=True):
        if not right_in_both(question, answer):
            found.setdefault(_kind(question, answer, favourite), []).append(_example(question, answer))
    errors = sum(map(len, found.values()))
    patterns = [Pattern(name, len(all_), len(all_) / errors, tuple(all_[:EXAMPLES])) for name, all_ in found.items()]
    return tuple(sorted(patterns, key=lambda pattern: (-pattern.count, pattern.name)))


def favourite_letter(questions: Sequence[Question], answers: Sequence[ModelAnswer]) -> str | None:
    """The letter that makes more than half of the wrong answers, if there is one and they are not few."""
    wrong = [a.lenient for q, a in zip(questions, answers, strict=True) if a.lenient != q.answer]
    letters = Counter(letter for letter in wrong if letter is not None)
    if len(wrong) < FEW or not letters:
        return None
    letter, count = letters.most_common(1)[0]
    return letter if 2 * count > len(wrong) else None


def find_rules(questions: Sequence[Question], answers: Sequence[ModelAnswer]) -> tuple[Rule, ...]:
    """How often each of the lenient reader's rules fired, and how often it was right; the most frequent first."""
    found: dict[str, list[bool]] = {}
    for question, answer in zip(questions, answers, strict=True):
        found.setdefault(clean(answer.rule), []).append(answer.lenient == question.answer)
    rules = [Rule(name, Share.of(outcomes)) for name, outcomes in found.items()]
    return tuple(sorted(rules, key=lambda rule: (-rule.accuracy.n, rule.name)))


def _kind(question: Question, answer: ModelAnswer, favourite: str | None) -> str:
    if answer.lenient == question.answer:
        return FORM
    if answer.lenient is None:
        return OF_RULE.get(answer.rule) or (CUT_OFF if answer.stop_reason == "length" else NOTHING)
    if answer.rule.endswith(choice.DISAGREES):
        return DISAGREE
    return f"{SAME}: {favourite}" if answer.lenient == favourite else WRONG


def _example(question: Question, answer: ModelAnswer) -> Example:
    return Example(
        question.number,
        start_of(question.question, EXCERPT),
        _option(question, question.answer),
        None if answer.lenient is None else _option(question, answer.lenient),
        end_of(answer.text, ENDING),
    )


def _option(question: Question, letter: str) -> str:
    return start_of(f"{letter}. {question.options[letter]}", EXCERPT)
