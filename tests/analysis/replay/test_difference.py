"""Two runs, to their first difference."""

from __future__ import annotations

import json
import math
import shutil

import pyarrow
import pyarrow.parquet
import pytest

from groupwise.analysis.replay import find_difference
from groupwise.analysis.replay.difference import first_character, same_value
from groupwise.analysis.replay.pages import as_json, as_markdown, difference_page
from groupwise.errors import RunDirError
from tests.training.runs import run_steps, small_trainer

BASE = {"train": {"steps": 3}, "evaluate": {"every": 2}, "run": {"checkpoint_every": 0}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run twice, the second one step shorter; and one with another KL weight from step 2 on."""
    folder = tmp_path_factory.mktemp("runs")
    kl = {"loss": {"kl_coef": 0.05}}
    phases = {"phases": [{"name": "first", "steps": 1, "kl_coef": 0.05}, {"name": "second", "kl_coef": 0.5}]}
    run_steps(small_trainer(folder / "a", BASE, kl), 3)
    run_steps(small_trainer(folder / "b", BASE, kl), 2)
    run_steps(small_trainer(folder / "c", BASE, kl, phases), 3)
    return folder


def rewrite(path, column, change):
    table = pyarrow.parquet.read_table(path)
    values = change(table.column(column).to_pylist())
    place = table.column_names.index(column)
    pyarrow.parquet.write_table(table.set_column(place, column, pyarrow.array(values)), path)


def test_equal_runs(runs):
    result = find_difference(runs / "a", runs / "b")
    assert result.equal
    assert (result.settings, result.inputs, result.versions, result.step) == ([], [], [], None)
    assert (result.steps, result.last) == (2, (3, 2))
    assert "equal in all 2 steps" in as_markdown(difference_page(result))
    assert as_json(result)["equal"] is True


def test_a_setting_that_changes_on_the_way(runs):
    """Step 2 samples the same and updates otherwise; so its metrics differ, and its completions do not."""
    result = find_difference(runs / "a", runs / "c")
    assert [name for name, *_ in result.settings] == ["phases"]
    assert (result.step, result.is_evaluation, result.sample) == (2, False, None)
    names = [metric.name for metric in result.metrics]
    assert "kl_coef" in names
    assert "reward" not in names
    assert [step for step, _ in result.around] == [1, 2, 3]
    assert all(one == other for one, other in result.around[0][1].values())
    assert "in its update" in as_markdown(difference_page(result))
    json.dumps(as_json(result), allow_nan=False)


def test_a_setting_is_a_difference_where_it_has_an_effect(runs, tmp_path):
    """In the first step policy and reference are the same, so that the weight of the KL has none."""
    run_steps(small_trainer(tmp_path / "d", BASE, {"loss": {"kl_coef": 0.5}}), 3)
    result = find_difference(runs / "a", tmp_path / "d")
    assert [name for name, *_ in result.settings] == ["loss.kl_coef"]
    assert result.step == 2
    assert {"kl_coef", "loss/kl"} <= {metric.name for metric in result.metrics}


def test_a_text_that_differs(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "d")

    def change(texts):
        texts[7] = texts[7][:2] + "§" + texts[7][3:]
        return texts

    rewrite(tmp_path / "d" / "rollouts" / "step-000003.parquet", "completion", change)
    result = find_difference(runs / "a", tmp_path / "d")
    sample = result.sample
    assert result.step == 3
    assert result.metrics == []
    assert sample is not None
    assert (sample.prompt_number, sample.sample, sample.column, sample.character) == (1, 3, "completion", 2)
    assert (sample.samples, sample.of) == (1, 12)
    page = as_markdown(difference_page(result))
    assert "prompt 1, sample 3: completion differs, from character 2 on" in page
    assert "§" in page


def test_tolerance(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "d")
    rewrite(tmp_path / "d" / "rollouts" / "step-000001.parquet", "advantage", lambda values: [v + 1e-6 for v in values])
    result = find_difference(runs / "a", tmp_path / "d")
    assert result.step == 1
    assert result.sample is not None
    assert result.sample.column == "advantage"
    assert find_difference(runs / "a", tmp_path / "d", tolerance=1e-5).equal
    assert find_difference(runs / "a", tmp_path / "d", first=2).equal


def test_damaged_and_missing_files(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "d")
    (tmp_path / "d" / "rollouts" / "step-000001.parquet").write_bytes(b"no parquet")
    (tmp_path / "d" / "rollouts" / "step-000002.parquet").unlink()
    result = find_difference(runs / "a", tmp_path / "d")
    assert result.equal
    assert any("step 1" in note for note in result.notes)
    with pytest.raises(RunDirError, match="holds no run"):
        find_difference(runs / "a", tmp_path)


def test_values():
    assert same_value(math.nan, math.nan)
    assert not same_value(math.nan, 1.0)
    assert not same_value(1.0, 1.0 + 1e-9)
    assert same_value(1.0, 1.0 + 1e-9, 1e-8)
    assert same_value(1e6, 1e6 + 1, 1e-6)
    assert not same_value(None, 0.0)
    assert same_value(math.inf, math.inf)
    assert (first_character("abc", "abd"), first_character("ab", "abd"), first_character("", "")) == (2, 2, 0)
