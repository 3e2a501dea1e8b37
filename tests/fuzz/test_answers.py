"""Answers of a model, to everything that reads them: rewards, grades and parsers.

A policy may write anything, and it is trained on what its reader makes of it. No text may raise an error, and the time
for a long one must grow in proportion to its length: the limit of CPU time is one that only quadratic cost can reach.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.redaction import hide_secrets
from groupwise.rewards import text_of
from groupwise.rewards.maths import (
    correct_number,
    gold_number,
    lenient_answer,
    marked_answer,
    number_format,
    parse_number,
    same_number,
    strict_answer,
)
from groupwise.rewards.text import answer_of, format_reward, prompt_text
from groupwise.rewards.verdict import parse_score, question
from groupwise.rewards.writing import distinct_n, key_words, keywords, length_band, repetition, words_of
from groupwise.tasks.gsm8k import grade as grade_number
from groupwise.tasks.quiz import grade_letter
from groupwise.text import code_span, escape_markdown, printable
from groupwise.training.rollout.advantages import repetition as repeated_triples
from groupwise.usmle.answers import extract_answer
from groupwise.usmle.medical_words import medical_terms
from groupwise.usmle.rewards import enhanced_reward, grade
from tests.fuzz import accepted, many, tried
from tests.fuzz.texts import broken_text

OPTIONS = {"A": "aspirin", "B": "beta blockers (B)", "C": "no treatment", "D": "vitamin D"}
ROW = {"options": OPTIONS, "answer": "B", "answer_idx": "B"}
LONG = 100_000  # characters
SECONDS = 60  # of CPU time for a long text, which takes a second at most where the time is linear

READERS: dict[str, Callable[[str], Any]] = {
    "parse_number": parse_number,
    "strict_answer": strict_answer,
    "lenient_answer": lenient_answer,
    "marked_answer": marked_answer,
    "correct_number": lambda text: correct_number(["p"], [text], ["#### 18"]),
    "number_format": lambda text: number_format(["p"], [text]),
    "grade_number": lambda text: grade_number({"answer": "#### 18"}, text, strict=False),
    "same_number": lambda text: same_number(text, "18"),
    "extract_answer": lambda text: extract_answer(text, OPTIONS),
    "extract_answer_strict": lambda text: extract_answer(text, OPTIONS, strict=True),
    "grade": lambda text: grade(ROW, text, strict=False),
    "grade_letter": lambda text: grade_letter(ROW, text),
    "enhanced_reward": lambda text: enhanced_reward(True, text),
    "medical_terms": lambda text: list(medical_terms(text)),
    "parse_score": lambda text: parse_score(text, 1, 10),
    "question": lambda text: question("{prompt} {answer}", text, text, 1, 10),
    "answer_of": answer_of,
    "words_of": words_of,
    "distinct_n": lambda text: distinct_n([text], 3),
    "length_band": lambda text: length_band(low=1, high=5)(["p"], [text]),
    "repetition": lambda text: repetition()(["p"], [text]),
    "keywords": lambda text: keywords()([text], [text]),
    "key_words": key_words,
    "format_reward": lambda text: format_reward(r"<think>.*</think>.*")(["p"], [text]),
    "repeated_triples": repeated_triples,
    "printable": printable,
    "escape_markdown": escape_markdown,
    "code_span": code_span,
    "hide_secrets": hide_secrets,
}

PIECES = (
    *("0", "1", "18", "000,", "1,000", ".5", "1.", "1/2", "1 1/2", "1/0", "-", "+", "−", "$", "€", "%", "°", "e999"),
    *("####", "#### ", "#", "\\boxed{", "\\frac{", "\\text{", "\\dfrac", "}", "{", "{,}", "\\,", "million ", "=", "e"),
    *("answer:", "Answer: ", "the answer is ", "not ", "because ", "if ", "would be ", "option ", "A", "B", "(C)"),
    *("**D**", "`A`", "A. ", "B, C and ", "E. coli ", "vitamin D ", "A 45-year-old ", "aspirin ", "Q: x\nA: "),
    *("✅", "❌", "<answer>", "</answer>", '"answer": "', "<think>", "</think>", "Score: ", "score", "rating is "),
    *("/10", "out of ", " or 8", '{"score": ', ". ", "; ", "? ", "\n", " ", "\t", "word ", "the ", "'", "’", "(", ")"),
    *("٣", "Ⅷ", "½", "²", "日", "\u200d", "\x00", "\ud800", "ﬃ", "İ", "ß", "\ufdfa", "://", "@", "?token=", "&"),
)

pieces = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
answers = st.one_of(pieces, broken_text(), st.tuples(pieces, broken_text(4), pieces).map("".join))


@many(15)
@given(answers)
def test_no_answer_breaks_a_reader(text):
    for read in READERS.values():
        tried("answers")
        read(text)
    score, number = parse_score(text, 1, 10), lenient_answer(text)
    assert score is None or 1 <= score <= 10
    assert number is None or math.isfinite(float(number))
    lenient, strict = extract_answer(text, OPTIONS), extract_answer(text, OPTIONS, strict=True)
    assert lenient.letter in (None, *OPTIONS)
    assert strict.letter in (None, lenient.letter)


@many(5)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), answers),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["role", "content", "text", "type", "tool_calls"]), inner, max_size=4),
        ),
        max_leaves=8,
    )
)
def test_completions_and_gold_answers_of_any_shape(value):
    accepted("answers of any shape", lambda: text_of(value))
    accepted("answers of any shape", lambda: prompt_text(value))
    accepted("answers of any shape", lambda: gold_number(value))
    assert same_number(None, "1") is False


@pytest.fixture
def cpu_limit():
    """End a reader whose time explodes: CPU time, which does not depend on how busy the machine is."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def repeated(*parts: str) -> str:
    unit = "".join(parts)
    return unit * (LONG // len(unit))


LONG_TEXTS = [
    repeated("000,") + "0000",  # numbers with separators were read in quadratic time
    repeated("1,000") + "x",
    repeated("1 1/"),
    repeated("answer: 1 ="),
    repeated("\\boxed{"),
    repeated("\\frac{1}{\\text{"),
    repeated("#### 1\n"),
    repeated("Score: 5 or\n"),
    repeated(". score: (") + "x",
    repeated(" ") + "score:",
    repeated("{") + "}",
    repeated("[") + '{"score": 1}',
    repeated("A, B and "),
    repeated("the answer is not A because "),
    repeated("aspirin "),
    repeated("日"),
    repeated("\ufdfa")[: LONG // 10],  # each is 18 letters
    repeated("a-"),
    repeated("x://a@"),
    repeated("?token=a&"),
    repeated("`"),
    repeated("\u200d\ufe0f"),
    repeated("'"),
    repeated("<think></think>"),
]


@pytest.mark.slow
@pytest.mark.parametrize("text", LONG_TEXTS, ids=range(len(LONG_TEXTS)))
@pytest.mark.usefixtures("cpu_limit")
def test_long_answers_are_read_in_linear_time(text):
    for read in READERS.values():
        tried("answers of 100,000 characters")
        read(text)
