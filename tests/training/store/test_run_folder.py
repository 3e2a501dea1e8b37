"""The folder of a run: created, resumed or overwritten; the recipe and versions that are kept in it."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

import groupwise
from groupwise.config import make_recipe
from groupwise.errors import ConfigError, InputError, RunDirError
from groupwise.rundir import RunDir, files, package_versions, read_json
from groupwise.tasks import Task
from groupwise.training.store import run_folder
from groupwise.training.store.run_folder import (
    PACKAGES,
    differences,
    find_run,
    mark_finished,
    nothing_to_resume,
    open_run,
    write_recipe,
)
from tests.training.runs import ROWS, metrics_of, run_steps, small_trainer, vowels

QUICK = {"train": {"steps": 2, "batch_size": 2}, "sampling": {"max_new_tokens": 4}, "evaluate": {"max_new_tokens": 2}}


def test_an_existing_run_is_not_written_over(tmp_path):
    folder = tmp_path / "run"
    run_steps(small_trainer(folder, QUICK), 1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunDirError, match=r"run already holds a run: .*--resume"):
        small_trainer(folder, QUICK)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    run_steps(small_trainer(folder, QUICK, {"evaluate": {"before_training": False}}, overwrite=True), 1)
    assert [row["step"] for row in metrics_of(folder)] == [1]


def test_overwriting_begins_anew(tmp_path):
    with open_run(make_recipe(), tmp_path / "run", name="rows", resume=False, overwrite=False) as run:
        run.metrics.record(5, {"x": 1})
        (run.path / "checkpoint-5").mkdir()
    with open_run(make_recipe(), tmp_path / "run", name="rows", resume=False, overwrite=True) as run:
        assert run.metrics.last_step == 5  # nothing is deleted before the new run can start
        run.clear()
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


def test_a_failed_start_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_run(make_recipe(), None, name="rows").discard()
    open_run(make_recipe(), "a/b/c", name="rows").discard()
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    open_run(make_recipe(), "mine/run", name="rows").discard()
    assert (tmp_path / "mine").is_dir()  # it was there before
    one = open_run(make_recipe(), "runs/one", name="rows")
    with open_run(make_recipe(), "runs/two", name="rows"):
        one.discard()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["two"]


def test_a_finished_run_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def sentence(**train):
        evaluate = {"patience": train.pop("patience", 3)}
        recipe = make_recipe({"train": {"epochs": 2.0, **train}, "evaluate": evaluate, "run": {"folder": "run"}})
        return recipe, nothing_to_resume(recipe, Path("run"))

    recipe, said = sentence()
    assert said is None  # there is no run: opening it raises the error
    with RunDir.create("run") as run:
        write_recipe(run, recipe, lambda text: None, resuming=False)
        assert sentence()[1] is None  # not finished
        mark_finished(run, 7, 7)
        assert sentence()[1] is None  # without its checkpoint
        (run.path / "checkpoint-7").mkdir()
        said = sentence()[1]
        assert said.startswith("the run in run has finished its 7 steps; there is nothing to resume. To continue, ")
        assert "--train.epochs 4" in said
        for train in ({"epochs": 3.0}, {"steps": 8}, {"batch_size": 1}, {"patience": 4}):
            assert sentence(**train)[1] is None, train
        assert "nothing to resume (train.seed would change nothing)" in sentence(seed=5)[1]
        assert "--train.steps 14" in sentence(steps=7)[1]
        mark_finished(run, 7, 20)
        said = sentence()[1]
        assert "stopped early after 7 steps of 20; there is nothing to resume" in said
        assert "--evaluate.patience 6" in said
        (run.path / "checkpoint-9").mkdir()
        assert sentence()[1] is None  # it was continued and stopped


def test_a_finished_run_of_phases_is_continued_by_a_longer_phase(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def recipe(**length):
        phases = [{"name": "a", "steps": 3, "kl_coef": 0.1}, {"name": "b", "kl_coef": 0.2, **length}]
        return make_recipe({"phases": phases, "run": {"folder": "run"}})

    with RunDir.create("run") as run:
        write_recipe(run, recipe(epochs=0.5), lambda text: None, resuming=False)
        mark_finished(run, 7, 7)
        (run.path / "checkpoint-7").mkdir()
        assert "make a phase longer (--phases.1.epochs 1)" in nothing_to_resume(recipe(epochs=0.5), Path("run"))
        assert nothing_to_resume(recipe(epochs=1), Path("run")) is None
        assert nothing_to_resume(recipe(steps=5), Path("run")) is None


def test_a_run_that_failed_before_its_first_step_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def started(stamp, steps):
        with RunDir.create(Path("runs") / f"{stamp}-quiz") as run:
            for step in range(steps + 1):
                run.metrics.record(step, {"reward": 0.0})
        return run.path

    def resumed():
        with open_run(make_recipe(), None, name="quiz", resume=True) as run:
            return run.path

    failed = started("20260101-000003", 0)
    assert resumed() == failed  # there is no other
    good = started("20260101-000001", 2)
    assert resumed() == good
    assert resumed() != started("20260101-000004", 0)
    assert started("20260101-000005", 1) == resumed()


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


def test_recipe_and_versions_of_a_run(tmp_path):
    trainer = small_trainer(tmp_path / "run", QUICK)
    run_steps(trainer, 1)
    assert make_recipe(read_json(tmp_path / "run" / "recipe.json")) == trainer.recipe
    versions = read_json(tmp_path / "run" / "versions.json")
    assert versions == package_versions(PACKAGES)
    assert set(package_versions(["torch", "no-such-package"])) == {"groupwise", "python", "machine", "torch"}
    assert versions["groupwise"] == groupwise.__version__
    assert versions["torch"] == version("torch")


def started(recipe_file: str | None, name: str = "quiz") -> Path:
    with open_run(make_recipe(), None, name=name) as run:
        run.write_json(run_folder.INPUTS, {"recipe": recipe_file})
        return run.path


def test_a_run_is_found_by_its_recipes_file(tmp_path, monkeypatch):
    """Not by a name that begins alike, and not because another recipe has the same task."""
    monkeypatch.chdir(tmp_path)
    mine = [started("mine.toml") for _ in range(2)][-1]
    for other in ("mine-too.toml", "other.toml", None):
        started(other)
    started("other.toml", name="quiz-large")
    with open_run(make_recipe(), None, name="quiz", recipe_file="mine.toml", resume=True) as run:
        assert run.path == mine
    with pytest.raises(RunDirError, match=r"there is no run of the recipe new\.toml below runs/"):
        open_run(make_recipe(), None, name="quiz", recipe_file="new.toml", resume=True)
    latest = started(None)
    started("large.toml", name="quiz-large")
    with open_run(make_recipe(), None, name="quiz", resume=True) as run:
        assert run.path == latest  # without a file by the name alone, which is all of it


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ("training rows", {"task": Task("try", [*ROWS[:-1], {"prompt": "Other: "}], ROWS[:2])}),
        pytest.param("held-out rows", {"task": Task("try", ROWS, ROWS[1:3])}, marks=pytest.mark.slow),
        pytest.param("rewards", {"rewards": [vowels]}, marks=pytest.mark.slow),
        pytest.param("model", {"model": True}, marks=pytest.mark.slow),
    ],
)
def test_other_inputs_are_refused_unless_allowed(tmp_path, changed, options):
    trainer = run_steps(small_trainer(tmp_path / "run", QUICK), 1)
    settings = dict(QUICK)
    if options.pop("model", False):
        settings["model"] = {"source": str(trainer.run_dir.path / "checkpoint-1" / "policy")}
    recipe = read_json(tmp_path / "run" / "recipe.json")
    with pytest.raises(ConfigError, match=rf"other inputs: {changed} \(before: .*--allow-changed"):
        small_trainer(tmp_path / "run", settings, **options, resume=True)
    assert read_json(tmp_path / "run" / "recipe.json") == recipe
    with small_trainer(tmp_path / "run", settings, **options, resume=True, allow_changed=True) as again:
        assert len(list(again.steps())) == 1


def test_a_run_of_an_earlier_version_is_refused(tmp_path):
    run_steps(small_trainer(tmp_path / "run", QUICK), 1)
    (tmp_path / "run" / "inputs.json").unlink()
    with pytest.raises(RunDirError, match=r"no inputs\.json.*earlier version"):
        small_trainer(tmp_path / "run", QUICK, resume=True)


def test_a_resume_hashes_a_checkpoint_once(tmp_path, monkeypatch):
    run_steps(small_trainer(tmp_path / "run", QUICK, {"run": {"checkpoint_every": 2}}), 2)
    hashed = []
    real = files.file_sha256
    monkeypatch.setattr(files, "file_sha256", lambda path: hashed.append(path.name) or real(path))
    with small_trainer(tmp_path / "run", QUICK, {"train": {"steps": 3}}, resume=True) as trainer:
        next(trainer.steps())
        assert hashed.count("masters.safetensors") == 2  # once to resume, once for the manifest of checkpoint-3


def test_the_newest_run_of_a_recipe_whatever_its_folder_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = make_recipe()

    def start(folder, recipe_file):
        with RunDir.create(folder) as run:
            run.write_json("inputs.json", {"recipe": recipe_file})
            run.metrics.record(1, {"reward": 0.0})

    start("runs/20300101-000000-mine", "mine.toml")
    start("runs/named", "mine.toml")
    start("runs/other", "other.toml")
    start("elsewhere/later", "mine.toml")
    assert find_run(recipe, None, "mine.toml") == Path("runs/named")
    assert find_run(recipe, None, "other.toml") == Path("runs/other")
    assert find_run(recipe, "elsewhere/later", "mine.toml") == Path("elsewhere/later")
