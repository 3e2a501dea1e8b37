"""Input that an analysis refuses, and the fingerprint of a set of questions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupwise.errors import InputError
from groupwise.usmle.analysis import analyse
from groupwise.usmle.records import LetterProbabilities
from tests.usmle.factories import answer_to, question

ASKED = [question(1, "A"), question(2, "B")]
GREEDY = [answer_to(1, "A"), answer_to(2, "A")]
SAME = {letter: letter for letter in "ABCD"}
EVEN = dict.fromkeys("ABCD", 0.25)


def letters(number, **probabilities):
    return LetterProbabilities(number, {**EVEN, **probabilities})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: analyse([], []), "there are no questions to analyse"),
        (lambda: analyse([ASKED[0], ASKED[0]], GREEDY), "two questions have the number 1"),
        (lambda: analyse([question(1, "E"), ASKED[1]], GREEDY), "got A, B, C, D and the answer 'E'"),
        (lambda: analyse([question(1, letters="A"), ASKED[1]], GREEDY), "question 1 needs at least two options"),
        (lambda: analyse(ASKED, GREEDY[:1]), "question 2 has 0 greedy answers; give 1"),
        (lambda: analyse(ASKED, [*GREEDY, answer_to(1, "B")]), "question 1 has 2 greedy answers; give 1"),
        (lambda: analyse(ASKED, [*GREEDY, answer_to(9, "B")]), "greedy answers for question 9, which was not asked"),
        (lambda: analyse(ASKED, [answer_to(1, "F"), GREEDY[1]]), "question 1 was read as 'F', which is none"),
        (lambda: analyse(ASKED, [answer_to(1, "A", "a"), GREEDY[1]]), "was read as 'a'"),
        (lambda: analyse(ASKED, GREEDY, sampled=[answer_to(1, "A")]), "question 2 has 0 sampled answers"),
        (lambda: analyse(ASKED, GREEDY, sampled=[*GREEDY, answer_to(2, "A", sample=1)]),
         "question 2 has 2 sampled answers; give 1"),
        (lambda: analyse(ASKED, GREEDY, sampled=[*GREEDY, *GREEDY]), "two sampled answers with the same number"),
        (lambda: analyse(ASKED, GREEDY, sampled=[answer_to(1, "X"), answer_to(2, "A")]), "was read as 'X'"),
        (lambda: analyse(ASKED, GREEDY, shuffled=[(SAME, answer_to(1, "A"))]), "question 2 has 0 shuffled answers"),
        (lambda: analyse(ASKED, GREEDY, shuffled=[(SAME, answer_to(1, "Z")), (SAME, answer_to(2, "A"))]),
         "was read as 'Z'"),
        (lambda: analyse(ASKED, GREEDY, shuffled=[({**SAME, "A": "B"}, answer) for answer in GREEDY]),
         "of question 1 does not map its letters"),
        (lambda: analyse(ASKED, GREEDY, shuffled=[({"A": "A"}, answer) for answer in GREEDY]), "does not map"),
        (lambda: analyse(ASKED, GREEDY, letters=[letters(1)]), "question 2 has 0 letter probabilities"),
        (lambda: analyse(ASKED, GREEDY, letters=[letters(1), letters(2, A=0.5)]), "sum to 1, got 0.5, 0.25"),
        (lambda: analyse(ASKED, GREEDY, letters=[letters(1), letters(2, A=-0.25, B=0.75)]), "between 0 and 1"),
        (lambda: analyse(ASKED, GREEDY, letters=[letters(1), letters(2, A=float("nan"))]), "got nan"),
        (lambda: analyse(ASKED, GREEDY, letters=[letters(1), letters(2, E=0.0)]), "but probabilities of A, B, C, D, E"),
        (lambda: analyse(ASKED, GREEDY, letters=[letters(1), LetterProbabilities(2, {})]), "but probabilities of none"),
        (lambda: analyse(ASKED, GREEDY, shuffled_letters=[(SAME, letters(1)), (SAME, letters(2))]),
         "shuffled_letters are compared with letters"),
        (lambda: analyse(ASKED, GREEDY, letters=[letters(1), letters(2)], shuffled_letters=[(SAME, letters(1))]),
         "question 2 has 0 shuffled letter probabilities"),
    ],
)  # fmt: skip
def test_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def fingerprint(*questions):
    return analyse(questions, [answer_to(entry.number, None) for entry in questions]).fingerprint


def test_the_fingerprint_depends_on_texts_options_and_right_letters():
    first = fingerprint(*ASKED)
    assert fingerprint(*reversed(ASKED)) == first
    assert fingerprint(replace(ASKED[0], category="heart", step="1", id="x"), ASKED[1]) == first
    others = [
        replace(ASKED[0], question="Another?"),
        replace(ASKED[0], answer="B"),
        replace(ASKED[0], options={**ASKED[0].options, "C": "another"}),
        replace(ASKED[0], options=dict(reversed(ASKED[0].options.items()))),
    ]
    assert len({first, *(fingerprint(other, ASKED[1]) for other in others)}) == 5
    assert fingerprint(ASKED[0]) != first


def test_a_lone_surrogate_has_a_fingerprint():
    assert len(fingerprint(replace(ASKED[0], question="half a pair: \ud83d"))) == 64
