"""The picture: which panels there are, and that they show the figures. How it looks is for eyes."""

from __future__ import annotations

import pytest

from groupwise.usmle import picture
from groupwise.usmle.analysis import analyse
from groupwise.usmle.compare import compare
from groupwise.usmle.picture import draw_report
from tests.usmle.factories import Model, exam, given, question


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw and give the panels by their titles; they are rendered too."""
    figures = []
    save = picture.save_figure

    def keep(figure, path):
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(picture, "save_figure", keep)

    def draw(report, **options):
        draw_report(tmp_path / "report.png", report, **{"title": "A title", **options})
        assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
        return {axes.get_title(loc="left").split(",")[0].split(" (")[0]: axes for axes in figures[-1].axes}

    return draw


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def names(ticks):
    return [tick.get_text() for tick in ticks]


QUESTIONS = exam(50, ["heart", "lung"], ["Step 1"])


def test_the_least(drawn):
    """No category and no option: accuracy and letters."""
    report = analyse([question(1, "A"), question(2, "B")], [given(1, "A"), given(2, "B")])
    panels = drawn(report)
    assert list(panels) == ["Accuracy on 2 questions", "Right and answered letters"]
    assert heights(panels["Accuracy on 2 questions"]) == [100.0, 100.0]
    assert names(panels["Right and answered letters"].get_xticklabels()) == ["A", "B", "C", "D", "none"]


def test_everything(drawn):
    report = Model(1, 0.5, QUESTIONS).report(samples=8, shuffled=True, letters=True)
    panels = drawn(report)
    assert list(panels) == [
        "Accuracy on 50 questions", "By category", "Right and answered letters", "8 answers to each question",
        "Calibration", f"What went wrong in {report.errors} answers",
    ]  # fmt: skip
    bars = panels["Accuracy on 50 questions"]
    assert names(bars.get_xticklabels()) == ["strict", "lenient", "majority\nvote", "likeliest\nletter", "shuffled"]
    assert heights(bars) == pytest.approx([100 * share.value for share in report.accuracies().values()])
    assert 25.0 in [line.get_ydata()[0] for line in bars.lines]  # guessing
    numbers = [text.get_text() for text in panels["Right and answered letters"].texts]
    assert numbers == [str(count) for row in report.confusion.counts for count in row]
    curve = panels["8 answers to each question"].lines[0]
    assert list(curve.get_xdata()) == [1, 2, 4, 8]
    assert list(curve.get_ydata()) == pytest.approx([100 * entry.share.value for entry in report.sampled.pass_at])


def test_categories_the_largest_on_top(drawn):
    report = Model(1, 0.5, QUESTIONS).report()
    axes = drawn(report)["By category"]
    expected = [f"{part.name} ({part.accuracy.n})" for part in report.by_category]
    assert names(axes.get_yticklabels()) == expected[::-1]
    assert list(axes.lines[0].get_xdata()) == pytest.approx(
        [100 * part.accuracy.value for part in reversed(report.by_category)]
    )


def test_steps_where_there_is_no_category(drawn):
    assert "By exam step" in drawn(Model(1, 0.5, exam(20, (), ["1", "2"])).report())


def test_before_and_after_side_by_side(drawn):
    before, after = Model(1, 0.2, QUESTIONS).report(), Model(2, 0.8, QUESTIONS).report(samples=2)
    axes = drawn(after, comparison=compare(before, after))["Accuracy on 50 questions"]
    # Before, the majority vote was not measured.
    expected = [before.strict, before.lenient, after.strict, after.lenient, after.sampled.majority]
    assert heights(axes) == pytest.approx([100 * share.value for share in expected])
    assert names(axes.get_legend().get_texts()) == ["guessing", "before", "after"]


def test_many_categories_are_cut(drawn):
    questions = [question(number, category=f"category {number % 40}") for number in range(200)]
    axes = drawn(Model(1, 0.5, questions).report())["By category"]
    assert axes.get_title(loc="left") == "By category (16 of 40)"
    assert len(axes.get_yticklabels()) == 16


@pytest.mark.parametrize("name", ["$\\frac{", "心臓", "x" * 500, "a\nb", "100 % $ and $", "", "_"])
def test_any_name_can_be_drawn(drawn, name):
    questions = [question(number, category=name) for number in range(6)]
    drawn(analyse(questions, [given(number, "B") for number in range(6)]), title=name)


def test_nothing_right_and_nothing_said(drawn):
    report = analyse(QUESTIONS, [given(entry.number, None) for entry in QUESTIONS])
    panels = drawn(report)
    assert heights(panels["Accuracy on 50 questions"]) == [0.0, 0.0]
    assert panels["Right and answered letters"].get_title(loc="left") == "Right and answered letters"
