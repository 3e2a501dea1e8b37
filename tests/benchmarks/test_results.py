"""The file of results of a benchmark: written after each one, and what was interrupted goes on."""

from __future__ import annotations

import json

import pytest
from results import Results

WORK = {"device": "CPU", "samples": 4, "sizes": (1, 2)}


def test_results_are_written_one_by_one_and_found_again(tmp_path, capsys):
    path = tmp_path / "results.json"
    first = Results(path, WORK)
    first.add("a", {"seconds": 1.5})
    assert json.loads(path.read_text())["results"] == {"a": {"seconds": 1.5}}
    again = Results(path, WORK)
    assert "1 finished results" in capsys.readouterr().out
    assert "a" in again
    assert "b" not in again
    again.add("b", {"seconds": 2.0})
    assert Results(path, WORK).found == {"a": {"seconds": 1.5}, "b": {"seconds": 2.0}}


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Results(None, WORK).add("a", {})
    assert not list(tmp_path.iterdir())


def test_other_work_is_refused(tmp_path):
    path = tmp_path / "results.json"
    Results(path, WORK).add("a", {})
    with pytest.raises(SystemExit, match="measured with samples 4, this run has 8"):
        Results(path, {**WORK, "samples": 8})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"work": 1, "results": {}}', '{"work": {}, "results": 3}'])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match="not a file of this benchmark"):
        Results(path, WORK)
    assert path.read_text() == content


def test_a_missing_folder_is_an_error_before_work(tmp_path):
    with pytest.raises(SystemExit, match="no folder"):
        Results(tmp_path / "none" / "results.json", WORK)
