"""Random questions and answers, as many and as varied as those of a real evaluation."""

from __future__ import annotations

import random

from groupwise.usmle import analysis
from groupwise.usmle.records import ModelAnswer, Question

LETTERS = "ABCDE"


def question(number, answer="A", *, letters="ABCD", category=None, step=None, text=None, options=None):
    return Question(
        number,
        text or f"Question {number}?",
        options or {letter: f"option {letter} of {number}" for letter in letters},
        answer,
        category,
        step,
    )


def answer_to(number, lenient, strict="same", *, sample=0, text="", rule=None, tokens=10, stop_reason="eos"):
    """An answer; by default both readers find the same letter."""
    return ModelAnswer(
        number,
        sample,
        text or f"The answer is {lenient}.",
        lenient,
        lenient if strict == "same" else strict,
        rule or ("nothing" if lenient is None else "stated"),
        tokens,
        stop_reason,
    )


def analyse(
    questions, greedy, *, sampled=(), shuffled=None, letters=None, shuffled_letters=None, averaged_letters=None
):
    """A report. By default the options are not shuffled, the answers are those to the original order, and all letters
    are equally likely; shuffled answers and letters are given with their order."""
    orders = [{letter: letter for letter in entry.options} for entry in questions]
    even = [dict.fromkeys(entry.options, 1 / len(entry.options)) for entry in questions]
    shuffled = shuffled or list(zip(orders, greedy, strict=True))
    orders = [order for order, _ in shuffled]
    return analysis.analyse(
        questions,
        greedy,
        sampled=sampled,
        orders=orders,
        shuffled=[answer for _, answer in shuffled],
        letters=letters or even,
        shuffled_letters=shuffled_letters or letters or even,
        averaged_letters=averaged_letters or letters or even,
    )


class Model:
    """Knows a share of the answers, otherwise prefers some letters, and sometimes gives no answer."""

    def __init__(self, seed, skill, questions):
        self.random, self.skill, self.questions = random.Random(seed), skill, questions

    def letter(self, question):
        if self.random.random() < 0.04:
            return None
        if self.random.random() < self.skill:
            return question.answer
        return self.random.choices(list(question.options), weights=[4, 2, 1, 1, 1][: len(question.options)])[0]

    def answer(self, question, sample=0, shown=None):
        letter = self.letter(question)
        letter = shown[letter] if shown and letter else letter
        rule, reason = "stated", "eos"
        if letter is None:
            rule = self.random.choice(["nothing", "several", "declined", "beyond the options"])
            reason = self.random.choice(["length", "eos"])
        elif self.random.random() < 0.1:
            rule = self.random.choice(["alone", "option text", "alone, text disagrees"])
        strict = letter if rule == "stated" else None
        text = f"The patient has many findings. Therefore the answer is {letter}."
        return ModelAnswer(question.number, sample, text, letter, strict, rule, self.random.randrange(50, 400), reason)

    def letters(self, question, shown=None):
        sure = self.letter(question) or question.answer
        raw = {
            letter: self.random.random() + 2 * self.random.random() * (letter == sure) for letter in question.options
        }
        total = sum(raw.values())
        return {(shown or {}).get(letter, letter): value / total for letter, value in raw.items()}

    def order(self, question):
        shown = list(question.options)
        self.random.shuffle(shown)
        return dict(zip(question.options, shown, strict=True))

    def report(self, *, samples=0):
        orders = [self.order(question) for question in self.questions]
        pairs = list(zip(self.questions, orders, strict=True))
        return analyse(
            self.questions,
            [self.answer(question) for question in self.questions],
            sampled=[self.answer(question, sample) for question in self.questions for sample in range(samples)],
            shuffled=[(order, self.answer(question, shown=order)) for question, order in pairs],
            letters=[self.letters(question) for question in self.questions],
            shuffled_letters=[self.letters(question, order) for question, order in pairs],
            averaged_letters=[self.letters(question) for question in self.questions],
        )


def exam(number, categories=(), steps=(), *, seed=0, options=4):
    """Questions of an exam; the first categories are the largest."""
    generator = random.Random(seed)
    weights = [1 / (place + 1) for place in range(len(categories))]
    return [
        question(
            place,
            generator.choice(LETTERS[:options]),
            letters=LETTERS[:options],
            category=generator.choices(categories, weights=weights)[0] if categories else None,
            step=generator.choice(steps) if steps else None,
            text=f"A {generator.randrange(20, 90)}-year-old patient comes to the physician with pain, number {place}.",
        )
        for place in range(number)
    ]
