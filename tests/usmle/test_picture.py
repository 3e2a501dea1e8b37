"""The figure of a report: its panels, and the numbers that they show."""

from __future__ import annotations

import pytest

from groupwise.usmle import picture
from groupwise.usmle.compare import compare
from groupwise.usmle.picture import draw_report
from tests.usmle.factories import Model, analyse, answer_to, exam, question


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw a report, and render it only if asked; the panels by their titles."""
    figures = []
    save = picture.save_figure

    def draw(report, *, render=False, **options):
        def keep(figure, path):
            figures.append(figure)
            if render:
                save(figure, path)

        monkeypatch.setattr(picture, "save_figure", keep)
        draw_report(tmp_path / "report.png", report, **{"title": "A title", **options})
        assert not render or (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
        return {axes.get_title(loc="left").split(",")[0].split(" (")[0]: axes for axes in figures[-1].axes}

    return draw


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def names(ticks):
    return [tick.get_text() for tick in ticks]


QUESTIONS = exam(50, ["heart", "lung"], ["Step 1"])


def test_a_minimal_report(drawn):
    """Without categories and samples: accuracy, letters and calibration."""
    report = analyse([question(1, "A"), question(2, "B")], [answer_to(1, "A"), answer_to(2, "B")])
    panels = drawn(report)
    assert list(panels) == ["Accuracy on 2 questions", "Right and answered letters", "Calibration"]
    assert heights(panels["Accuracy on 2 questions"]) == [100.0, 100.0, 50.0, 50.0, 100.0]
    assert names(panels["Right and answered letters"].get_xticklabels()) == ["A", "B", "C", "D", "none"]


def test_a_complete_report(drawn):
    report = Model(1, 0.5, QUESTIONS).report(samples=8)
    panels = drawn(report)
    assert list(panels) == [
        "Accuracy on 50 questions", "By category", "Right and answered letters", "8 answers to each question",
        "Calibration", f"Kinds of the {report.errors} errors",
    ]  # fmt: skip
    bars = panels["Accuracy on 50 questions"]
    assert names(bars.get_xticklabels()) == [
        "strict",
        "lenient",
        "majority\nvote",
        "likeliest\nletter",
        "likeliest,\nall\norders",
        "shuffled",
    ]
    assert heights(bars) == pytest.approx([100 * share.value for share in report.accuracies().values()])
    assert 25.0 in [line.get_ydata()[0] for line in bars.lines]  # guessing
    numbers = [text.get_text() for text in panels["Right and answered letters"].texts]
    assert numbers == [str(count) for row in report.confusion.counts for count in row]
    curve = panels["8 answers to each question"].lines[0]
    assert list(curve.get_xdata()) == [1, 2, 4, 8]
    assert list(curve.get_ydata()) == pytest.approx([100 * entry.share.value for entry in report.sampled.pass_at])


@pytest.mark.slow
def test_the_largest_category_is_on_top(drawn):
    report = Model(1, 0.5, QUESTIONS).report()
    axes = drawn(report)["By category"]
    expected = [f"{part.name} ({part.accuracy.n})" for part in report.by_category]
    assert names(axes.get_yticklabels()) == expected[::-1]
    assert list(axes.lines[0].get_xdata()) == pytest.approx(
        [100 * part.accuracy.value for part in reversed(report.by_category)]
    )


def test_exam_steps_without_categories(drawn):
    assert "By exam step" in drawn(Model(1, 0.5, exam(20, (), ["1", "2"])).report())


def test_before_and_after_side_by_side(drawn):
    before, after = Model(1, 0.2, QUESTIONS).report(), Model(2, 0.8, QUESTIONS).report(samples=2)
    axes = drawn(after, comparison=compare(before, after))["Accuracy on 50 questions"]
    # The earlier report has no majority vote.
    expected = [*before.accuracies().values(), *after.accuracies().values()]
    assert heights(axes) == pytest.approx([100 * share.value for share in expected])
    assert names(axes.get_legend().get_texts()) == ["guessing", "before", "after"]


def test_at_most_sixteen_categories(drawn):
    questions = [question(number, category=f"category {number % 40}") for number in range(200)]
    axes = drawn(Model(1, 0.5, questions).report())["By category"]
    assert axes.get_title(loc="left") == "By category (16 of 40)"
    assert len(axes.get_yticklabels()) == 16


@pytest.mark.slow
def test_any_name_can_be_drawn(drawn):
    names = ["$\\frac{", "心臓", "x" * 500, "a\nb", "100 % $ and $", "", "_"]
    questions = [question(number, category=name) for number, name in enumerate(names)]
    report = analyse(questions, [answer_to(number, "B") for number in range(len(names))])
    drawn(report, title=" ".join(names), render=True)


def test_no_answers_at_all(drawn):
    report = analyse(QUESTIONS, [answer_to(entry.number, None) for entry in QUESTIONS])
    panels = drawn(report)
    assert heights(panels["Accuracy on 50 questions"])[:2] == [0.0, 0.0]
    assert panels["Right and answered letters"].get_title(loc="left") == "Right and answered letters"
