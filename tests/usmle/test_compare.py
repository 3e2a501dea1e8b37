"""Two models question by question, by hand and against scipy."""

from __future__ import annotations

import json

import pytest
from scipy import stats as scipy_stats

from groupwise.errors import InputError
from groupwise.stats import paired_test
from groupwise.usmle.analysis import Letters, analyse
from groupwise.usmle.compare import Changes, compare
from tests.usmle.factories import Model, exam, given, question


def report(said, strict=None, *, categories=None, **options):
    """A model that says these letters to questions whose right letter is A."""
    asked = [question(place, "A", category=categories[place] if categories else None) for place in range(len(said))]
    read = strict or said
    return analyse(asked, [given(place, a, b) for place, (a, b) in enumerate(zip(said, read, strict=True))], **options)


def test_by_hand():
    """Right before: 0, 1, 2. Right after: 2, 3, 4, 5. So one stays, two are lost, three gained, one stays wrong."""
    found = compare(report("AAABBBB"), report(["B", None, "A", "A", "A", "A", "C"]))
    lenient = found.measures[0]
    assert lenient.name == "lenient"
    assert (lenient.before, lenient.after) == (pytest.approx(3 / 7), pytest.approx(4 / 7))
    assert lenient.changes == Changes(1, 2, 3, 1, scipy_stats.binomtest(2, 5).pvalue)
    expected = paired_test([0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0])
    assert lenient.difference.value == pytest.approx(1 / 7)
    assert lenient.difference.p_value == expected.p_value
    assert (lenient.difference.low, lenient.difference.high) == (expected.difference.low, expected.difference.high)
    assert not lenient.real
    assert [(moved.number, moved.right, moved.before, moved.after) for moved in found.lost] == [
        (0, "A", "A", "B"),
        (1, "A", "A", None),
    ]
    assert [(moved.number, moved.before, moved.after) for moved in found.gained] == [
        (3, "B", "A"), (4, "B", "A"), (5, "B", "A"),
    ]  # fmt: skip
    assert found.n == 7
    assert found.by_category == ()


def test_strict_and_lenient_are_told_apart():
    """The form was learned, nothing else: six of six gained by the strict reader, none by the lenient one."""
    found = compare(report("AAAAAA", [None] * 6), report("AAAAAA"))
    lenient, strict = found.measures
    assert (lenient.changes.wrong_right, strict.changes.wrong_right) == (0, 6)
    assert (lenient.real, strict.real) == (False, True)
    assert strict.changes.p_value == 2 / 64
    assert found.gained == found.lost == ()


@pytest.mark.parametrize(("changed", "real"), [(5, False), (6, True)])
def test_real_from_six_of_six(changed, real):
    """2 / 2⁵ is 0.0625, 2 / 2⁶ is 0.03125."""
    assert compare(report("B" * 9), report("A" * changed + "B" * (9 - changed))).measures[0].real is real
    assert compare(report("A" * changed + "B" * (9 - changed)), report("B" * 9)).measures[0].real is real


def test_letters_and_samples_where_both_have_them():
    sure, unsure = {"A": 0.7, "B": 0.1, "C": 0.1, "D": 0.1}, {"A": 0.1, "B": 0.7, "C": 0.1, "D": 0.1}
    samples = [given(place, letter, sample=sample) for place in (0, 1) for sample, letter in enumerate("AB")]
    right = [given(place, "A", sample=sample) for place in (0, 1) for sample in (0, 1)]
    before = report("AA", letters=[Letters(0, unsure), Letters(1, sure)], sampled=samples)
    after = report("AA", letters=[Letters(0, sure), Letters(1, sure)], sampled=right)
    found = compare(before, after)
    assert [measure.name for measure in found.measures] == ["lenient", "strict", "likeliest letter", "mean of samples"]
    assert found.measures[2].changes == Changes(1, 0, 1, 0, 1.0)
    last = found.measures[3]
    assert (last.before, last.after, last.changes, last.real) == (0.5, 1.0, None, False)
    assert last.difference.value == 0.5
    assert last.difference.p_value == 0.5  # two pairs, both up: 2 of 4 sign patterns are as extreme
    assert [measure.name for measure in compare(report("AA"), after).measures] == ["lenient", "strict"]
    assert set(found.before) == {"strict", "lenient", "majority vote", "likeliest letter"}
    assert found.after["likeliest letter"].value == 1.0


def test_by_category():
    names = ["heart"] * 6 + ["lung"] * 2
    found = compare(report("AABBBBAB", categories=names), report("BAAAABBB", categories=names)).by_category
    assert [(part.name, part.n, part.gained, part.lost, part.few) for part in found] == [
        ("heart", 6, 3, 1, False),
        ("lung", 2, 0, 1, True),
    ]
    assert [part.difference.value for part in found] == pytest.approx([2 / 6, -1 / 2])
    assert [(part.before.value, part.after.value) for part in found] == [
        (pytest.approx(2 / 6), pytest.approx(4 / 6)), (0.5, 0.0),
    ]  # fmt: skip


def test_examples_are_few():
    assert [moved.number for moved in compare(report("B" * 9), report("A" * 9)).gained] == [0, 1, 2, 3, 4]


def test_a_whole_exam():
    questions = exam(1273, ["heart", "lung"])
    before, after = Model(1, 0.2, questions).report(), Model(2, 0.4, questions).report()
    found = compare(before, after)
    changes = found.measures[0].changes
    changed = changes.right_wrong + changes.wrong_right
    assert changes.p_value == pytest.approx(scipy_stats.binomtest(changes.wrong_right, changed).pvalue)
    assert found.measures[0].real
    assert sum((changes.right_right, changed, changes.wrong_wrong)) == 1273
    assert (found.before["lenient"], found.after["lenient"]) == (before.lenient, after.lenient)
    assert sum(part.n for part in found.by_category) == 1273
    assert json.loads(json.dumps(found.to_json()))["measures"][0]["changes"]["right_wrong"] == changes.right_wrong


def test_other_questions_are_refused():
    with pytest.raises(InputError, match=r"not about the same questions \(2 and 3; .* on the same held-out rows"):
        compare(report("AA"), report("AAA"))
    other = analyse([question(0, "B"), question(1, "A")], [given(0, "A"), given(1, "A")])
    with pytest.raises(InputError, match="not about the same questions"):
        compare(report("AA"), other)
