"""The kinds of errors: each error has exactly one, with examples."""

from __future__ import annotations

import pytest

from groupwise.stats import proportion_interval
from groupwise.usmle.tables import Proportion
from tests.usmle.factories import analyse, answer_to, question


def patterns(questions, answers):
    return {entry.name: entry for entry in analyse(questions, answers).patterns}


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (answer_to(1, None, rule="nothing", stop_reason="length"), "no answer: cut off"),
        (answer_to(1, None, rule="nothing", stop_reason="eos"), "no answer: nothing found"),
        (answer_to(1, None, rule="declined", stop_reason="length"), "no answer: declined"),
        (answer_to(1, None, rule="beyond the options"), "no answer: beyond the options"),
        (answer_to(1, None, rule="several", stop_reason="length"), "two answers"),
        (answer_to(1, "B", rule="stated, text disagrees"), "letter and text disagree"),
        (answer_to(1, "B", stop_reason="length"), "wrong option"),
        (answer_to(1, "A", None), "right in lenient, not in strict form"),
        (answer_to(1, "A", "B"), "right in lenient, not in strict form"),
        (answer_to(1, "B", "A"), "wrong option"),
    ],
)
def test_the_kind_of_an_error(answer, name):
    report = analyse([question(1, "A")], [answer])
    assert [(entry.name, entry.count, entry.share) for entry in report.patterns] == [(name, 1, 1.0)]
    assert report.errors == 1


def test_an_answer_that_is_right_for_both_readers_is_no_error():
    report = analyse([question(1, "A")], [answer_to(1, "A", rule="stated, text disagrees")])
    assert report.patterns == ()
    assert report.errors == 0


def test_a_favourite_letter():
    """Three of five wrong answers are C: more than half."""
    asked = [question(number, "A") for number in range(6)]
    said = "CCCBDA"
    by_name = patterns(asked, [answer_to(number, letter) for number, letter in enumerate(said)])
    assert {name: entry.count for name, entry in by_name.items()} == {"the favourite letter: C": 3, "wrong option": 2}


@pytest.mark.parametrize("said", [["C", "C", "C", "B", "D", "B"], ["C", "C", "C", None, None, None], "CCCC"])
def test_no_favourite_letter_with_half_of_the_errors_or_with_four_errors(said):
    asked = [question(number, "A") for number in range(len(said))]
    by_name = patterns(asked, [answer_to(number, letter) for number, letter in enumerate(said)])
    assert "the favourite letter: C" not in by_name
    assert by_name["wrong option"].count == sum(letter is not None for letter in said)


def test_the_most_frequent_kind_is_first():
    asked = [question(number, "A") for number in range(5)]
    answers = [answer_to(0, None), answer_to(1, "B"), answer_to(2, "C"), answer_to(3, "A", None), answer_to(4, "A")]
    assert [(entry.name, entry.count, entry.share) for entry in analyse(asked, answers).patterns] == [
        ("wrong option", 2, 0.5),
        ("no answer: nothing found", 1, 0.25),
        ("right in lenient, not in strict form", 1, 0.25),
    ]


def test_examples():
    """The first three, with the start of the question and the end of the answer."""
    asked = [
        question(number, "A", text=f"{number} " + "q" * 200, options={"A": "aspirin", "B": "beta\nblocker"})
        for number in range(1, 6)
    ]
    answers = [answer_to(number, "B", text="x" * 300 + f" so B, number {number}") for number in range(1, 6)]
    pattern = patterns(asked, answers)["the favourite letter: B"]
    assert pattern.count == 5
    assert [example.number for example in pattern.examples] == [1, 2, 3]
    first = pattern.examples[0]
    assert first.question == "1 " + "q" * 117 + "…"
    assert (first.right, first.predicted) == ("A. aspirin", "B. beta blocker")
    assert len(first.ending) == 200
    assert first.ending.startswith("…xxx")
    assert first.ending.endswith(" so B, number 1")


def test_an_example_without_an_answer():
    example = analyse([question(1, "A")], [answer_to(1, None)]).patterns[0].examples[0]
    assert example.predicted is None


def test_rules():
    asked = [question(number, "A") for number in range(4)]
    answers = [
        answer_to(0, "A"),
        answer_to(1, "B"),
        answer_to(2, "A", rule="alone"),
        answer_to(3, None, rule="declined"),
    ]
    half = proportion_interval(1, 2)
    rules = analyse(asked, answers).rules
    assert [(rule.name, rule.accuracy.n, rule.accuracy.value) for rule in rules] == [
        ("stated", 2, 0.5),
        ("alone", 1, 1.0),
        ("declined", 1, 0.0),
    ]
    assert rules[0].accuracy == Proportion(0.5, half.low, half.high, 2)
