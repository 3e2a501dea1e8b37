"""Two models compared question by question, by hand and against scipy."""

from __future__ import annotations

import json

import pytest

from groupwise.errors import InputError
from groupwise.stats import paired_test
from groupwise.usmle.compare import AnswerChanges, compare
from tests.usmle.factories import Model, analyse, answer_to, exam, question


def report(said, strict=None, *, categories=None, **options):
    """The report on a model that answers these letters to questions whose right letter is A."""
    asked = [question(place, "A", category=categories[place] if categories else None) for place in range(len(said))]
    read = strict or said
    return analyse(
        asked, [answer_to(place, a, b) for place, (a, b) in enumerate(zip(said, read, strict=True))], **options
    )


def test_by_hand():
    """Right before: 0, 1, 2. Right after: 2, 3, 4, 5. So one stays, two are lost, three gained, one stays wrong."""
    comparison = compare(report("AAABBBB"), report(["B", None, "A", "A", "A", "A", "C"]))
    lenient = comparison.measures[0]
    assert lenient.name == "lenient"
    assert (lenient.before, lenient.after) == (pytest.approx(3 / 7), pytest.approx(4 / 7))
    assert lenient.changes == AnswerChanges(1, 2, 3, 1, 1.0)
    expected = paired_test([0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0])
    assert lenient.difference.value == pytest.approx(1 / 7)
    assert lenient.difference.p_value == expected.p_value
    assert (lenient.difference.low, lenient.difference.high) == (expected.difference.low, expected.difference.high)
    assert not lenient.real
    assert [(moved.number, moved.right, moved.before, moved.after) for moved in comparison.lost] == [
        (0, "A", "A", "B"),
        (1, "A", "A", None),
    ]
    assert [(moved.number, moved.before, moved.after) for moved in comparison.gained] == [
        (3, "B", "A"), (4, "B", "A"), (5, "B", "A"),
    ]  # fmt: skip
    assert comparison.n == 7
    assert comparison.by_category == ()


def test_strict_and_lenient_are_separate_measures():
    """Only the form was learned: six of six gained by the strict reader, none by the lenient one."""
    comparison = compare(report("AAAAAA", [None] * 6), report("AAAAAA"))
    lenient, strict, *_ = comparison.measures
    assert (lenient.changes.wrong_right, strict.changes.wrong_right) == (0, 6)
    assert (lenient.real, strict.real) == (False, True)
    assert strict.changes.p_value == 2 / 64
    assert comparison.gained == comparison.lost == ()


@pytest.mark.parametrize(("changed", "real"), [(5, False), (6, True)])
def test_six_of_six_changes_are_significant(changed, real):
    """2 / 2⁵ is 0.0625, 2 / 2⁶ is 0.03125."""
    assert compare(report("B" * 9), report("A" * changed + "B" * (9 - changed))).measures[0].real is real
    assert compare(report("A" * changed + "B" * (9 - changed)), report("B" * 9)).measures[0].real is real


def test_letters_and_samples_if_both_reports_have_them():
    sure, unsure = {"A": 0.7, "B": 0.1, "C": 0.1, "D": 0.1}, {"A": 0.1, "B": 0.7, "C": 0.1, "D": 0.1}
    samples = [answer_to(place, letter, sample=sample) for place in (0, 1) for sample, letter in enumerate("AB")]
    right = [answer_to(place, "A", sample=sample) for place in (0, 1) for sample in (0, 1)]
    before = report("AA", letters=[unsure, sure], sampled=samples)
    after = report("AA", letters=[sure, sure], sampled=right)
    comparison = compare(before, after)
    assert [measure.name for measure in comparison.measures] == [
        "lenient",
        "strict",
        "likeliest letter",
        "likeliest, all orders",
        "mean of samples",
    ]
    assert comparison.measures[2].changes == AnswerChanges(1, 0, 1, 0, 1.0)
    last = comparison.measures[4]
    assert (last.before, last.after, last.changes, last.real) == (0.5, 1.0, None, False)
    assert last.difference.value == 0.5
    assert last.difference.p_value == 0.5  # two pairs, both up: 2 of 4 sign patterns are as extreme
    assert [measure.name for measure in compare(report("AA"), after).measures] == [
        "lenient",
        "strict",
        "likeliest letter",
        "likeliest, all orders",
    ]
    assert set(comparison.before) == {
        "strict",
        "lenient",
        "majority vote",
        "likeliest letter",
        "likeliest, all orders",
        "shuffled",
    }
    assert comparison.after["likeliest letter"].value == 1.0


def test_by_category():
    names = ["heart"] * 6 + ["lung"] * 2
    changes = compare(report("AABBBBAB", categories=names), report("BAAAABBB", categories=names)).by_category
    assert [(part.name, part.n, part.gained, part.lost, part.few) for part in changes] == [
        ("heart", 6, 3, 1, False),
        ("lung", 2, 0, 1, True),
    ]
    assert [part.difference.value for part in changes] == pytest.approx([2 / 6, -1 / 2])
    assert [(part.before.value, part.after.value) for part in changes] == [
        (pytest.approx(2 / 6), pytest.approx(4 / 6)), (0.5, 0.0),
    ]  # fmt: skip


def test_at_most_five_examples():
    assert [moved.number for moved in compare(report("B" * 9), report("A" * 9)).gained] == [0, 1, 2, 3, 4]


def test_a_large_exam_against_scipy():
    from scipy import stats as scipy_stats

    questions = exam(200, ["heart", "lung"])
    before, after = Model(1, 0.1, questions).report(), Model(2, 0.6, questions).report()
    comparison = compare(before, after)
    changes = comparison.measures[0].changes
    changed = changes.right_wrong + changes.wrong_right
    assert changes.p_value == pytest.approx(scipy_stats.binomtest(changes.wrong_right, changed).pvalue)
    assert comparison.measures[0].real
    assert sum((changes.right_right, changed, changes.wrong_wrong)) == 200
    assert (comparison.before["lenient"], comparison.after["lenient"]) == (before.lenient, after.lenient)
    assert sum(part.n for part in comparison.by_category) == 200
    assert json.loads(json.dumps(comparison.to_json()))["measures"][0]["changes"]["right_wrong"] == changes.right_wrong


def test_reports_on_other_questions_are_refused():
    with pytest.raises(InputError, match=r"not about the same questions \(2 and 3; "):
        compare(report("AA"), report("AAA"))
    other = analyse([question(0, "B"), question(1, "A")], [answer_to(0, "A"), answer_to(1, "A")])
    with pytest.raises(InputError, match="not about the same questions"):
        compare(report("AA"), other)
