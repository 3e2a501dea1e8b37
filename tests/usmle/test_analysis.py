"""The tables of a report, computed by hand for a few questions, and properties of any answers."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.stats import bootstrap_interval, paired_test, proportion_interval
from groupwise.usmle.analysis import majority
from groupwise.usmle.tables import CalibrationBin, Difference, ExamReport, Proportion
from tests.usmle.factories import Model, analyse, answer_to, exam, question

FOUR = [question(1, "A"), question(2, "B"), question(3, "C"), question(4, "D")]
FOUR_ANSWERS = [
    answer_to(1, "A", tokens=10),
    answer_to(2, "A", tokens=20),
    answer_to(3, "C", None, tokens=30, rule="alone"),
    answer_to(4, None, tokens=40, stop_reason="length"),
]


def wilson(successes, number):
    interval = proportion_interval(successes, number)
    return Proportion(interval.estimate, interval.low, interval.high, number)


def same(share, expected):
    """Equal up to rounding, since the estimate is kept within its interval."""
    return share.n == expected.n and (share.value, share.low, share.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )


def test_the_headline():
    report = analyse(FOUR, FOUR_ANSWERS)
    assert report.n == 4
    assert same(report.lenient, wilson(2, 4))
    assert same(report.strict, wilson(1, 4))
    assert (report.unread_lenient, report.unread_strict) == (1, 2)
    assert report.mean_tokens == 25.0
    assert report.cut_off == 0.25
    assert report.chance == 0.25
    assert report.errors == 3
    assert report.sampled is None
    assert list(report.accuracies()) == ["strict", "lenient", "likeliest letter", "likeliest, all orders", "shuffled"]


def test_guessing_depends_on_the_number_of_options():
    report = analyse([question(1), question(2, letters="ABCDE"), question(3, letters="AB")],
                     [answer_to(number, "A") for number in (1, 2, 3)])  # fmt: skip
    assert report.chance == pytest.approx((1 / 4 + 1 / 5 + 1 / 2) / 3)


def test_by_category_and_step():
    """The largest first; small groups are marked; questions without a name have their own row."""
    named = ["heart"] * 5 + ["lung"] * 2 + [None] * 6
    questions = [question(place, category=name, step="1" if place < 12 else "2") for place, name in enumerate(named)]
    report = analyse(questions, [answer_to(place, "A" if place in (0, 1, 5) else "B") for place in range(13)])
    assert [(part.name, part.accuracy.n, part.few) for part in report.by_category] == [
        (None, 6, False), ("heart", 5, False), ("lung", 2, True),
    ]  # fmt: skip
    assert [part.accuracy.value for part in report.by_category] == [0.0, 0.4, 0.5]
    assert same(report.by_category[1].accuracy, wilson(2, 5))
    assert [(part.name, part.accuracy.n) for part in report.by_step] == [("1", 12), ("2", 1)]


def test_without_categories_there_is_no_table():
    report = analyse(FOUR, FOUR_ANSWERS)
    assert report.by_category == report.by_step == ()


def test_the_confusion_of_letters():
    """Three have an answer: right A, B, C, predicted A, A, C, so a third of the predictions is wrong."""
    confusion = analyse(FOUR, FOUR_ANSWERS).confusion
    assert confusion.counts == ((1, 0, 0, 0, 0), (1, 0, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 0, 1))
    assert [(letter.letter, letter.right, letter.predicted) for letter in confusion.letters] == [
        ("A", 1, 2), ("B", 1, 0), ("C", 1, 1), ("D", 1, 0),
    ]  # fmt: skip
    assert [letter.right_share for letter in confusion.letters] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert [letter.predicted_share for letter in confusion.letters] == pytest.approx([2 / 3, 0, 1 / 3, 0])
    assert [letter.accuracy.value for letter in confusion.letters] == [1.0, 0.0, 1.0, 0.0]
    assert confusion.bias == pytest.approx(1 / 3)


def test_letters_without_questions_and_questions_without_answers():
    report = analyse([question(1, "A")], [answer_to(1, None)])
    assert report.confusion.bias is None
    assert [letter.predicted_share for letter in report.confusion.letters] == [None] * 4
    assert [letter.accuracy is None for letter in report.confusion.letters] == [False, True, True, True]


def test_bias_is_one_if_no_predicted_letter_is_ever_right():
    report = analyse([question(1, "A"), question(2, "B")], [answer_to(1, "C"), answer_to(2, "D")])
    assert report.confusion.bias == 1.0


# --- shuffled options ------------------------------------------------------------------------------------------------


def test_shuffled_answers_are_mapped_back():
    """Right originally: 1 and 2. Shuffled: 1 answers D, which shows A (right); 2 answers B, which shows C (wrong)."""
    turn = {"A": "D", "B": "C", "C": "B", "D": "A"}
    shuffled = [
        (turn, answer_to(1, "D")),
        (turn, answer_to(2, "B")),
        (turn, answer_to(3, "B")),
        (turn, answer_to(4, None)),
    ]
    plain = [answer_to(1, "A"), answer_to(2, "B"), answer_to(3, "A"), answer_to(4, None)]
    result = analyse(FOUR, plain, shuffled=shuffled).shuffled
    assert same(result.accuracy, wilson(2, 4))  # questions 1 and 3
    test = paired_test([1, 0, 1, 0], [1, 1, 0, 0])
    assert result.difference == Difference(0.0, test.difference.low, test.difference.high, test.p_value)
    assert same(result.consistency, wilson(1, 4))  # question 1; two missing answers do not agree


def test_an_order_is_inverted_in_the_right_direction():
    """A is shown as B, B as C, C as A: the answer B means A."""
    turn = {"A": "B", "B": "C", "C": "A"}
    asked = [question(1, "A", letters="ABC")]
    assert analyse(asked, [answer_to(1, "A")], shuffled=[(turn, answer_to(1, "B"))]).shuffled.accuracy.value == 1.0
    assert analyse(asked, [answer_to(1, "A")], shuffled=[(turn, answer_to(1, "C"))]).shuffled.accuracy.value == 0.0


def test_the_same_text_under_two_letters_is_the_same_option():
    asked = [question(1, "A", options={"A": "yes", "B": "no", "C": "no"})]
    order = {"A": "A", "B": "B", "C": "C"}
    assert analyse(asked, [answer_to(1, "B")], shuffled=[(order, answer_to(1, "C"))]).shuffled.consistency.value == 1.0


# --- sampled answers -------------------------------------------------------------------------------------------------


def sampled(number, letters):
    return [answer_to(number, letter, sample=place) for place, letter in enumerate(letters)]


def test_sampled_answers():
    """Question 1 is right in 3 of 4, question 2 in 1 of 4; pass@2 is 1 − 0/6 and 1 − 3/6."""
    answers = sampled(1, "AABA") + sampled(2, ["B", "C", "C", None])
    report = analyse(FOUR[:2], [answer_to(1, "A"), answer_to(2, "B")], sampled=answers)
    result = report.sampled
    assert result.samples == 4
    interval = bootstrap_interval([0.75, 0.25])
    assert same(result.accuracy, Proportion(0.5, interval.low, interval.high, 2))
    assert same(result.majority, wilson(1, 2))
    assert [entry.k for entry in result.pass_at] == [1, 2, 4]
    assert [entry.share.value for entry in result.pass_at] == pytest.approx([0.5, 0.75, 1.0])
    # Both questions have a right answer among the four: Wilson's interval of 2 of 2.
    assert (result.pass_at[2].share.low, result.pass_at[2].share.high) == pytest.approx((0.3424, 1.0), abs=1e-4)
    assert [outcome.sampled for outcome in report.outcomes] == [0.75, 0.25]


@pytest.mark.parametrize(("samples", "powers"), [(1, [1]), (2, [1, 2]), (7, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_pass_at_the_powers_of_two_up_to_the_number_of_samples(samples, powers):
    result = analyse([question(1)], [answer_to(1, "A")], sampled=sampled(1, "A" * samples)).sampled
    assert [entry.k for entry in result.pass_at] == powers


@pytest.mark.parametrize(
    ("letters", "winner"),
    [
        ("ABB", "B"),
        ("BAAB", "B"),  # tied: the first one
        ("ABBA", "A"),
        ([None, None, None, "C"], "C"),  # None never wins
        ([None, None], None),
        ("", None),
    ],
)
def test_majority(letters, winner):
    assert majority(letters) == winner


# --- probabilities of the letters ------------------------------------------------------------------------------------


def test_letters():
    """Bins 0.6 to 0.7 (0.6 wrong, 0.65 right) and 0.9 to 1 (1.0 right): errors |0.5 − 0.625| · 2/3 and 0 · 1/3."""
    asked = [question(number, "A", letters="AB") for number in (1, 2, 3)]
    letters = [
        {"A": 0.4, "B": 0.6},
        {"A": 0.65, "B": 0.35},
        {"A": 1.0, "B": 0.0},
    ]
    report = analyse(asked, [answer_to(1, "B"), answer_to(2, "B"), answer_to(3, None)], letters=letters)
    result = report.letters
    assert same(result.accuracy, wilson(2, 3))
    assert result.right_probability == pytest.approx((0.4 + 0.65 + 1) / 3)
    assert same(result.agreement, wilson(1, 3))
    assert len(result.bins) == 10
    assert result.bins[6] == CalibrationBin(0.6, 0.7, 2, pytest.approx(0.625), 0.5)
    assert result.bins[9] == CalibrationBin(0.9, 1.0, 1, 1.0, 1.0)
    assert [entry.n for entry in result.bins] == [0, 0, 0, 0, 0, 0, 2, 0, 0, 1]
    assert (result.bins[0].confidence, result.bins[0].accuracy) == (None, None)
    assert result.calibration_error == pytest.approx(0.125 * 2 / 3)
    assert result.order is None
    assert [outcome.letters for outcome in report.outcomes] == ["B", "A", "A"]


def test_the_first_of_equally_likely_letters_is_taken():
    report = analyse([question(1, "B", letters="BA")], [answer_to(1, "A")], letters=[{"A": 0.5, "B": 0.5}])
    assert report.outcomes[0].letters == "B"


def test_shuffled_letters_are_mapped_back():
    turn = {"A": "B", "B": "C", "C": "A"}
    asked = [question(1, "A", letters="ABC"), question(2, "B", letters="ABC")]
    report = analyse(
        asked,
        [answer_to(1, "A"), answer_to(2, "A")],
        shuffled=[(turn, answer_to(1, "B")), (turn, answer_to(2, "A"))],
        letters=[
            {"A": 0.5, "B": 0.3, "C": 0.2},
            {"A": 0.5, "B": 0.3, "C": 0.2},
        ],
        shuffled_letters=[
            {"A": 0.1, "B": 0.7, "C": 0.2},
            {"A": 0.1, "B": 0.2, "C": 0.7},
        ],
    )
    result = report.shuffled_letters
    assert result.accuracy.value == 1.0  # B stands for A, C for B
    assert result.right_probability == pytest.approx(0.7)
    assert result.agreement.value == 0.5  # written: A and C, likeliest: A and B
    assert result.order.difference.value == 0.5
    assert result.order.consistency.value == 0.5
    assert report.letters.accuracy.value == 0.5


def test_letters_averaged_over_orders():
    asked = [question(1, "A", letters="AB"), question(2, "B", letters="AB")]
    report = analyse(
        asked,
        [answer_to(1, "B"), answer_to(2, "B")],
        letters=[{"A": 0.4, "B": 0.6}] * 2,
        averaged_letters=[{"A": 0.7, "B": 0.3}, {"A": 0.1, "B": 0.9}],
    )
    assert [outcome.averaged for outcome in report.outcomes] == ["A", "B"]
    assert report.averaged_letters.accuracy.value == 1.0
    assert report.averaged_letters.right_probability == pytest.approx(0.8)
    assert report.accuracies()["likeliest, all orders"].value == 1.0
    assert report.letters.accuracy.value == 0.5


def test_outcome_of_a_question():
    long = question(7, "B", text="word " * 100, category="heart\nand vessels")
    outcome = analyse([long], [answer_to(7, "B", None)]).outcomes[0]
    assert (outcome.number, outcome.right, outcome.lenient, outcome.strict) == (7, "B", "B", None)
    assert len(outcome.question) <= 120
    assert outcome.question.endswith("word…")
    assert outcome.category == "heart and vessels"
    assert outcome.sampled is None


# --- properties of any answers ---------------------------------------------------------------------------------------


def shares(value):
    """Every proportion and difference in a report, at any depth."""
    if isinstance(value, (Proportion, Difference)):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from shares(getattr(value, field.name))
    elif isinstance(value, tuple):
        for entry in value:
            yield from shares(entry)


@given(
    seed=st.integers(0, 10**6),
    number=st.integers(1, 40),
    skill=st.floats(0, 1),
    options=st.integers(2, 5),
    samples=st.integers(0, 5),
)
def test_any_report_is_consistent(seed, number, skill, options, samples):
    questions = exam(number, ["heart", "lung", "mind"], ["1", "2"], seed=seed, options=options)
    report = Model(seed, skill, questions).report(samples=samples)
    for share in shares(report):
        assert share.low <= share.value <= share.high
        assert isinstance(share, Difference) or 0 <= share.low <= share.high <= 1
    counts = report.confusion.counts
    assert sum(map(sum, counts)) == number
    assert sum(counts[place][place] for place in range(options)) == round(report.lenient.value * number)
    assert sum(row[-1] for row in counts) == report.unread_lenient
    assert sum(pattern.count for pattern in report.patterns) == report.errors <= number
    assert sum(pattern.share for pattern in report.patterns) == pytest.approx(1.0 if report.errors else 0.0)
    for table in (report.by_category, report.by_step, report.rules):
        assert sum(row.accuracy.n for row in table) == number
    assert (report.sampled is None) == (samples == 0)
    if report.sampled:
        rising = [entry.share.value for entry in report.sampled.pass_at]
        assert rising == sorted(rising)
        assert rising[0] == pytest.approx(report.sampled.accuracy.value)
    assert ExamReport.from_json(report.to_json()) == report
