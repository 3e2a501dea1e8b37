"""What went wrong: each error in the right class, in exactly one, with examples."""

from __future__ import annotations

import pytest

from groupwise.stats import proportion_interval
from groupwise.usmle.analysis import analyse
from groupwise.usmle.tables import Share
from tests.usmle.factories import given, question


def patterns(questions, answers):
    return {entry.name: entry for entry in analyse(questions, answers).patterns}


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (given(1, None, rule="nothing", stop_reason="length"), "no answer: cut off"),
        (given(1, None, rule="nothing", stop_reason="eos"), "no answer: nothing found"),
        (given(1, None, rule="declined", stop_reason="length"), "no answer: declined"),
        (given(1, None, rule="beyond the options"), "no answer: beyond the options"),
        (given(1, None, rule="several", stop_reason="length"), "two answers"),
        (given(1, "B", rule="stated, text disagrees"), "letter and text disagree"),
        (given(1, "B", stop_reason="length"), "wrong option"),
        (given(1, "A", None), "right in lenient, not in strict form"),
        (given(1, "A", "B"), "right in lenient, not in strict form"),
        (given(1, "B", "A"), "wrong option"),
    ],
)
def test_the_kind_of_an_error(answer, name):
    report = analyse([question(1, "A")], [answer])
    assert [(entry.name, entry.count, entry.share) for entry in report.patterns] == [(name, 1, 1.0)]
    assert report.errors == 1


def test_what_is_right_in_both_forms_is_no_error():
    report = analyse([question(1, "A")], [given(1, "A", rule="stated, text disagrees")])
    assert report.patterns == ()
    assert report.errors == 0


def test_a_favourite_letter():
    """Three of five wrong answers say C: more than half."""
    asked = [question(number, "A") for number in range(6)]
    said = "CCCBDA"
    found = patterns(asked, [given(number, letter) for number, letter in enumerate(said)])
    assert {name: entry.count for name, entry in found.items()} == {"the favourite letter: C": 3, "wrong option": 2}


@pytest.mark.parametrize("said", [["C", "C", "C", "B", "D", "B"], ["C", "C", "C", None, None, None], "CCCC"])
def test_half_of_the_errors_is_not_more_than_half_and_four_are_too_few(said):
    asked = [question(number, "A") for number in range(len(said))]
    found = patterns(asked, [given(number, letter) for number, letter in enumerate(said)])
    assert "the favourite letter: C" not in found
    assert found["wrong option"].count == sum(letter is not None for letter in said)


def test_shares_and_the_most_frequent_first():
    asked = [question(number, "A") for number in range(5)]
    answers = [given(0, None), given(1, "B"), given(2, "C"), given(3, "A", None), given(4, "A")]
    assert [(entry.name, entry.count, entry.share) for entry in analyse(asked, answers).patterns] == [
        ("wrong option", 2, 0.5),
        ("no answer: nothing found", 1, 0.25),
        ("right in lenient, not in strict form", 1, 0.25),
    ]


def test_examples():
    """Three at most, the first ones; the question's start and the answer's end."""
    asked = [
        question(number, "A", text=f"{number} " + "q" * 200, options={"A": "aspirin", "B": "beta\nblocker"})
        for number in range(1, 6)
    ]
    answers = [given(number, "B", text="x" * 300 + f" so B, number {number}") for number in range(1, 6)]
    found = patterns(asked, answers)["the favourite letter: B"]
    assert found.count == 5
    assert [example.number for example in found.examples] == [1, 2, 3]
    first = found.examples[0]
    assert first.question == "1 " + "q" * 117 + "…"
    assert (first.right, first.predicted) == ("A. aspirin", "B. beta blocker")
    assert len(first.ending) == 200
    assert first.ending.startswith("…xxx")
    assert first.ending.endswith(" so B, number 1")


def test_an_example_without_an_answer():
    example = analyse([question(1, "A")], [given(1, None)]).patterns[0].examples[0]
    assert example.predicted is None


def test_rules():
    asked = [question(number, "A") for number in range(4)]
    answers = [given(0, "A"), given(1, "B"), given(2, "A", rule="alone"), given(3, None, rule="declined")]
    half = proportion_interval(1, 2)
    rules = analyse(asked, answers).rules
    assert [(rule.name, rule.accuracy.n, rule.accuracy.value) for rule in rules] == [
        ("stated", 2, 0.5),
        ("alone", 1, 1.0),
        ("declined", 1, 0.0),
    ]
    assert rules[0].accuracy == Share(0.5, half.low, half.high, 2)
