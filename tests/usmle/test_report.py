"""A report as files: writing, reading back, and the Markdown page."""

from __future__ import annotations

import json
import sys

import pytest

from groupwise.errors import CheckpointError, InputError
from groupwise.usmle import report as report_module
from groupwise.usmle.compare import compare
from groupwise.usmle.report import read_report, write_report
from tests.usmle.factories import Model, analyse, answer_to, exam, question
from tests.usmle.test_text import HOSTILE, cells

FACTS = {"model": "a model"}


@pytest.fixture(scope="module")
def reports():
    """Before and after, with every optional part."""
    questions = exam(60, ["heart", "lung", "mind"], ["Step 1", "Step 2"])
    return Model(1, 0.2, questions).report(samples=4), Model(2, 0.8, questions).report(samples=4)


@pytest.fixture(scope="module")
def small():
    return analyse([question(1, "A"), question(2, "B")], [answer_to(1, "A"), answer_to(2, None)])


@pytest.fixture
def no_drawing(monkeypatch):
    """Replace the picture by an empty file."""
    monkeypatch.setattr(report_module, "draw_report", lambda path, *_, **__: path.write_bytes(b""))


def page_of(folder, report, **options):
    write_report(folder, report, **{"title": "A title", "facts": FACTS, **options})
    return (folder / "report.md").read_text()


def test_the_files(tmp_path, reports):
    before, after = reports
    written = write_report(tmp_path, after, title="A title", facts=FACTS, comparison=compare(before, after))
    assert sorted(path.name for path in written) == ["comparison.json", "report.json", "report.md", "report.png"]
    assert set(tmp_path.iterdir()) == set(written)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "comparison.json").read_bytes()) == compare(before, after).to_json()
    named = json.loads((tmp_path / "report.json").read_bytes())
    assert (named["title"], named["facts"]) == ("A title", FACTS)


@pytest.mark.usefixtures("no_drawing")
def test_a_report_is_read_as_it_was_written(tmp_path, reports, small):
    for report in (*reports, small):
        write_report(tmp_path, report, title="A title", facts={})
        assert read_report(tmp_path) == report
        assert read_report(str(tmp_path / "report.json")) == report


@pytest.mark.usefixtures("no_drawing")
def test_a_new_folder_without_a_comparison(tmp_path, small):
    written = write_report(tmp_path / "new" / "folder", small, title="A title", facts=FACTS)
    assert sorted(path.name for path in written) == ["report.json", "report.md", "report.png"]


@pytest.mark.usefixtures("no_drawing")
def test_files_of_an_earlier_report_are_removed(tmp_path, reports, small, monkeypatch):
    write_report(tmp_path, reports[1], title="", facts={}, comparison=compare(*reports))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_report(tmp_path, small, title="", facts={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]


def test_without_matplotlib_there_is_no_picture(tmp_path, reports, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    written = write_report(tmp_path, reports[0], title="A title", facts=FACTS)
    assert [path.name for path in written] == ["report.json", "report.md"]
    assert "report.png" not in (tmp_path / "report.md").read_text()


def test_a_comparison_of_other_questions_is_refused(tmp_path, reports, small):
    with pytest.raises(InputError, match="about other questions than the report"):
        write_report(tmp_path, small, title="", facts={}, comparison=compare(*reports))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_drawing")
def test_a_folder_that_cannot_be_written(tmp_path, small):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be written: .*file is a file, not a folder"):
        write_report(tmp_path / "file", small, title="", facts={})
    (tmp_path / "comparison.json").mkdir()
    with pytest.raises(CheckpointError, match=r"comparison.json of an earlier report cannot be removed"):
        write_report(tmp_path, small, title="", facts={})


def changed(report, **values):
    return json.dumps({**report.to_json(), **values})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda report: "{", "is damaged, it holds no valid JSON"),
        (lambda report: "[1]", "is not a report of an evaluation"),
        (lambda report: '{"a": 1}', "is not a report of an evaluation"),
        (lambda report: changed(report, version=1), "has the format 1, .* reads 2; evaluate the model again"),
        (lambda report: changed(report, lenient=None), "is damaged: lenient: "),
        (lambda report: changed(report, outcomes=[{"number": 1}]), r"is damaged: outcomes.0.\w+: Field required"),
    ],
)
def test_a_file_that_is_not_a_report(tmp_path, small, content, message):
    path = tmp_path / "report.json"
    path.write_text(content(small))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_report(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["", "nothing", "nothing.json"])
def test_a_missing_report(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"there is no report at "):
        read_report(tmp_path / name)


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_drawing")
def test_the_page_by_hand(tmp_path, small):
    """One of two by both readers; Wilson's interval of 1 of 2 is 9.5 to 90.5 %."""
    page = page_of(tmp_path, small)
    assert page.startswith("# A title\n")
    assert "| model | a model |" in page
    assert "Guessing gives 25.0 %." in page
    assert "| lenient: any form that is clear to a careful reader | 50.0 % [9.5, 90.5] | 1 (50.0 %) |" in page
    assert "| strict: the requested form | 50.0 % [9.5, 90.5] | 1 (50.0 %) |" in page
    assert "| A | **1** | 0 | 0 | 0 | 0 |" in page
    assert "| B | 0 | **0** | 0 | 0 | 1 |" in page
    assert "Bias: 0.0 % of the predictions" in page
    assert "| no answer: nothing found | 1 | 100.0 % |" in page
    assert "| 2 | Question 2? | B. option B of 2 | – | The answer is None. |" in page
    assert "| stated | 1 | 100.0 % [20.7, 100.0] |" in page
    assert "![accuracy, letters and calibration](report.png)" in page
    for absent in ("By category", "By exam step", "Sampled", "Before and"):
        assert absent not in page


@pytest.mark.usefixtures("no_drawing")
def test_every_part_has_its_section(tmp_path, reports):
    page = page_of(tmp_path, reports[1], comparison=compare(*reports))
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == [
        "## Before and after",
        "## By category",
        "## By exam step",
        "## Letters",
        "## Shuffled options",
        "## Sampled answers",
        "## The letters' probabilities",
        "## The letters' probabilities, shuffled options",
        "## The letters' probabilities, averaged over all orders",
        "## Errors",
        "## Reading rules",
    ]
    assert "| pass@4 |" in page
    assert "### Gained" in page
    assert "nan" not in page
    assert "None" not in "".join(line for line in page.splitlines() if "Therefore the answer is" not in line)


@pytest.mark.usefixtures("no_drawing")
def test_differences_are_signed_points(tmp_path):
    """Seven of seven gained: p is 2 / 2⁷."""
    asked = [question(number, "A") for number in range(8)]

    def says(letters):
        return analyse(asked, [answer_to(number, letter) for number, letter in enumerate(letters)])

    before, after = says("BBBBBBBB"), says("AAAAAAAB")
    page = page_of(tmp_path, after, comparison=compare(before, after))
    assert "| lenient | 0.0 % | 87.5 % | +87.5 [+62.5, +100.0] | p = 0.016 | significant |" in page
    assert "| lenient | 0 | 7 | 0 | 1 |" in page
    page = page_of(tmp_path, before, comparison=compare(after, before))
    assert "| lenient | 87.5 % | 0.0 % | −87.5 [−100.0, −62.5] | p = 0.016 | significant |" in page
    page = page_of(tmp_path, after, comparison=compare(after, after))
    assert "| lenient | 87.5 % | 87.5 % | 0.0 [0.0, 0.0] | p = 1.000 | not significant |" in page


@pytest.mark.usefixtures("no_drawing")
def test_small_groups_are_marked(tmp_path):
    asked = [question(number, category="heart" if number else None) for number in range(6)]
    page = page_of(tmp_path, analyse(asked, [answer_to(number, "A") for number in range(6)]))
    assert "| heart | 5 | 100.0 % [56.6, 100.0] |" in page
    assert "| not given † | 1 | 100.0 % [20.7, 100.0] |" in page
    assert "†: fewer than 5 questions" in page
    assert "There are none." in page  # errors
    assert "†" not in page_of(tmp_path, analyse(asked[1:], [answer_to(number, "A") for number in range(1, 6)]))


@pytest.mark.usefixtures("no_drawing")
def test_hostile_text_stays_in_its_cell(tmp_path):
    """Every table keeps its shape, whatever a question, an option, a category, an answer or a fact contains."""
    asked = [
        question(number, "A", text=text, category=text, step=text, options={"A": text, "B": f"{text}!"})
        for number, text in enumerate(HOSTILE)
    ]
    before = analyse(asked, [answer_to(entry.number, "A", None, text=entry.question) for entry in asked])
    after = analyse(asked, [answer_to(entry.number, "B", text=entry.question, rule=entry.question) for entry in asked])
    facts = {text: text for text in HOSTILE}
    page = page_of(tmp_path, after, comparison=compare(before, after), title=HOSTILE[0], facts=facts)
    assert page.startswith("# a \\| b\n")
    tables = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    assert len(tables) == 16
    for lines in tables:
        columns = lines[1].count("--")
        assert len(cells("\n".join(lines).replace("**", ""))) == columns * (len(lines) - 1)
    assert read_report(tmp_path) == after
