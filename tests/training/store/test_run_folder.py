"""The folder of a run: created, resumed or overwritten; the recipe and versions that are kept in it."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

import groupwise
from groupwise.config import make_recipe
from groupwise.errors import InputError, RunDirError
from groupwise.rundir import RunDir, read_json
from groupwise.training.store import run_folder
from groupwise.training.store.run_folder import differences, open_run, versions
from tests.training.runs import go, metrics_of, small_trainer

QUICK = {"train": {"steps": 2, "batch_size": 2}, "sampling": {"max_new_tokens": 4}, "evaluate": {"max_new_tokens": 2}}


def test_an_existing_run_is_not_written_over(tmp_path):
    folder = tmp_path / "run"
    go(small_trainer(folder, QUICK), 1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunDirError, match=r"run already holds a run: .*\(--resume\)"):
        small_trainer(folder, QUICK)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    go(small_trainer(folder, QUICK, {"evaluate": {"before_training": False}}, overwrite=True), 1)
    assert [row["step"] for row in metrics_of(folder)] == [1]


def test_overwriting_begins_anew(tmp_path):
    with open_run(make_recipe(), tmp_path / "run", name="rows", resume=False, overwrite=False) as run:
        run.metrics.record(5, {"x": 1})
        (run.path / "checkpoint-5").mkdir()
    with open_run(make_recipe(), tmp_path / "run", name="rows", resume=False, overwrite=True) as run:
        assert run.metrics.last_step is None
        assert not (run.path / "checkpoint-5").exists()


def test_only_a_run_is_ever_deleted(tmp_path):
    place = tmp_path / "thesis"
    place.mkdir()
    (place / "chapter.tex").write_text("years of work")
    for overwrite in (True, False):
        with pytest.raises(RunDirError, match="thesis is not empty and holds no run; choose a new folder"):
            open_run(make_recipe(), place, name="rows", resume=False, overwrite=overwrite)
    assert (place / "chapter.tex").read_text() == "years of work"
    with pytest.raises(RunDirError, match=r"chapter\.tex is a file, not a folder"):
        open_run(make_recipe(), place / "chapter.tex", name="rows", resume=False, overwrite=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    open_run(make_recipe(), empty, name="rows", resume=False, overwrite=True).close()


def test_nothing_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirError, match=r"nowhere holds no run \(there is no run\.json in it\): nothing to resume"):
        open_run(make_recipe(), "nowhere", name="rows", resume=True, overwrite=False)
    sentence = r"there is no run called 'quiz' below runs/ to resume; name its folder with --run\.folder"
    with pytest.raises(RunDirError, match=sentence):
        open_run(make_recipe(), None, name="quiz", resume=True, overwrite=False)
    assert not list(tmp_path.iterdir())


def test_in_use(tmp_path):
    with RunDir.create(tmp_path / "run"):
        for options in ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}):
            with pytest.raises(RunDirError, match=r"run is in use by process .*: wait for it, stop it, or choose"):
                open_run(make_recipe(), tmp_path / "run", name="rows", **options)
    assert (tmp_path / "run" / "run.json").exists()


def test_a_name_of_its_own(tmp_path, monkeypatch):
    """Without a folder each run gets a new one below runs/, and the newest of that name is resumed."""
    monkeypatch.chdir(tmp_path)
    paths = []
    for _ in range(3):
        with open_run(make_recipe(), None, name="quiz", resume=False, overwrite=False) as run:
            paths.append(run.path)
    assert len(set(paths)) == 3
    assert all(re.fullmatch(r"runs/\d{8}-\d{6}-quiz(-\d)?", str(path)) for path in paths)
    with open_run(make_recipe(), None, name="run", resume=False, overwrite=False) as run:
        assert run.path.name.endswith("-run")
    with open_run(make_recipe({"run": {"name": "first"}}), None, name="quiz", resume=False, overwrite=False) as run:
        assert run.path.name.endswith("-first")
    with open_run(make_recipe(), None, name="quiz", resume=True, overwrite=False) as run:
        assert run.path == sorted(paths)[-1]
    with pytest.raises(InputError, match=r"a run's name may hold letters, digits, '\.', '_' and '-', got 'a/b'"):
        open_run(make_recipe({"run": {"name": "a/b"}}), None, name="rows", resume=False, overwrite=False)


def test_a_run_on_pairs_alone_is_called_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        offline = make_recipe({"algorithm": "dpo", "preference": {"train": "p.jsonl"}})
        with open_run(offline, None, name="rows", resume=False, overwrite=False) as run:
            assert re.search(r"-pairs(-\d)?$", run.path.name)
    with open_run(offline, None, name="rows", resume=True, overwrite=False) as again:
        assert again.path == run.path
    with open_run(make_recipe(), None, name="rows", resume=False, overwrite=False) as run:
        assert run.path.name.endswith("-rows")


def test_the_folder_of_the_recipe(tmp_path):
    recipe = make_recipe({"run": {"folder": str(tmp_path / "there")}})
    open_run(recipe, None, name="rows", resume=False, overwrite=False).close()
    assert (tmp_path / "there" / "run.json").exists()
    open_run(recipe, tmp_path / "here", name="rows", resume=False, overwrite=False).close()
    assert (tmp_path / "here" / "run.json").exists()


def test_differences():
    before = {"a": 1, "b": {"c": 2, "d": {"e": [1]}}, "gone": True, "run": {"folder": "x", "keep_checkpoints": 1}}
    after = {
        "a": 1,
        "b": {"c": 3, "d": {"e": [1, 2]}},
        "new": None,
        "more": 1,
        "run": {"folder": "y", "keep_checkpoints": 2},
    }
    assert differences(before, after) == [
        ("b.c", 2, 3),
        ("b.d.e", [1], [1, 2]),
        ("gone", True, None),
        ("run.keep_checkpoints", 1, 2),
        ("more", None, 1),
    ]
    assert differences(after, after) == []
    assert differences({"model": {"lora": None}}, {"model": {"lora": {"rank": 4}}}) == [
        ("model.lora", None, {"rank": 4})
    ]


def test_versions(monkeypatch):
    installed = versions()
    assert installed["groupwise"] == groupwise.__version__
    assert installed["torch"] == version("torch")
    assert installed["transformers"] == version("transformers")
    monkeypatch.setattr(run_folder, "PACKAGES", ("torch", "no-such-package"))
    assert set(versions()) == {"groupwise", "python", "machine", "torch"}


def test_recipe_and_versions_of_a_run(tmp_path):
    trainer = small_trainer(tmp_path / "run", QUICK)
    go(trainer, 1)
    assert make_recipe(read_json(tmp_path / "run" / "recipe.json")) == trainer.recipe
    assert read_json(tmp_path / "run" / "versions.json") == versions()
