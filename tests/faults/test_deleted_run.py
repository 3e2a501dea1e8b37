"""A run folder that is deleted, moved or replaced during the run: it stops, says so, and creates nothing again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli import main
from groupwise.control.main import train
from groupwise.control.settings import config_of
from groupwise.errors import GroupwiseError, RunDirError
from groupwise.rundir import RunDir, atomic_folder, read_json, write_json
from groupwise.training.store import checkpoint, export
from groupwise.training.trainer import Callback
from tests.training.runs import SMALL, small_trainer

QUICK = {"train": {"steps": 3, "batch_size": 2}, "sampling": {"max_new_tokens": 3}, "evaluate": {"every": 0}}
GONE = "was deleted, moved or replaced during the run"


def replace(folder: Path) -> None:
    shutil.rmtree(folder)
    RunDir.create(folder).close()


DEEDS = {"deleted": shutil.rmtree, "moved": lambda folder: folder.rename(f"{folder}-2"), "replaced": replace}


class Deed(Callback):
    def __init__(self, do: Any, step: int = 2) -> None:
        self.do, self.step = do, step

    def on_step(self, trainer: Any, report: Any) -> None:
        if report.step == self.step:
            self.do(trainer.run_dir.path)


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_during_the_run(tmp_path, deed, step):
    """After the last step, too, where only the export is left."""
    folder = tmp_path / "runs" / "run"
    with pytest.raises(RunDirError, match=f"run {GONE}.*--resume, or start a new run"):
        small_trainer(folder, QUICK, callbacks=[Deed(DEEDS[deed], step)]).run()
    left = {path.name for path in folder.iterdir()} if folder.exists() else set()
    assert left == ({"run.json", "metrics.jsonl", ".lock"} if deed == "replaced" else set())


def test_the_command_line(tmp_path, capsys, monkeypatch):
    """One line and status 2."""
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text(
        "import shutil\n\ndef score(completions, **_):\n    shutil.rmtree('runs/mine', ignore_errors=True)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    Path("rows.jsonl").write_text('{"prompt": "Say: "}\n')
    settings = [
        f"--{section}.{key}={value}" for section in ("train", "sampling") for key, value in SMALL[section].items()
    ]
    Path("recipe.toml").write_text(
        '[data]\ntrain = "rows.jsonl"\nchat = false\n[[rewards]]\nfunction = "reward.py:score"\n'
    )
    assert main(["train", "recipe.toml", "--run.folder", "runs/mine", *settings]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines() == [line for line in err.splitlines() if GONE in line]
    assert "model:" not in out
    assert not Path("runs/mine").exists()


@pytest.mark.parametrize("deed", ["deleted", "moved"])
def test_while_a_checkpoint_is_written(tmp_path, monkeypatch, deed):
    """After the tensors, before the policy: a library that creates folders must not bring half of it back."""
    folder, real = tmp_path / "run", checkpoint.export_model

    def delete_first(model: Any, to: Path, **options: Any) -> Any:
        DEEDS[deed](folder)
        return real(model, to, **options)

    monkeypatch.setattr(checkpoint, "export_model", delete_first)
    with pytest.raises(GroupwiseError, match=GONE):
        small_trainer(folder, QUICK).run()
    assert not folder.exists()


def test_while_the_model_is_exported(tmp_path, monkeypatch):
    folder, real = tmp_path / "run", export.export_model

    def save(model: Any, to: Path, *, tokenizer: Any, **options: Any) -> Any:
        class Deleting:
            def save_pretrained(self, path: str) -> None:
                shutil.rmtree(folder)
                tokenizer.save_pretrained(path)

        return real(model, to, tokenizer=Deleting(), **options)

    monkeypatch.setattr(export, "export_model", save)
    with pytest.raises(GroupwiseError, match="was deleted or moved while model was written"):
        small_trainer(folder, QUICK).run()
    assert not folder.exists()


def test_a_folder_that_is_created_again_by_a_library(tmp_path):
    """As transformers does when it saves: the new folder has not what was written to the old one."""

    def write() -> None:
        with atomic_folder(tmp_path / "run" / "checkpoint") as folder:
            (folder / "first.json").write_text("1")
            shutil.rmtree(tmp_path / "run")
            os.makedirs(folder)
            (folder / "second.json").write_text("2")

    with pytest.raises(RunDirError, match="deleted or moved while checkpoint was written"):
        write()
    assert not (tmp_path / "run").exists()


def test_a_deleted_lock(tmp_path):
    """The lock is taken again, unless another process was faster."""
    with RunDir.create(tmp_path / "run") as run:
        (run.path / ".lock").unlink()
        run.write_json("a.json", 1)
        with pytest.raises(RunDirError, match="in use by process"):
            RunDir.resume(run.path)
        (run.path / ".lock").unlink()
        code = f"from groupwise.rundir import RunDir; run = RunDir.resume({str(run.path)!r}); input()"
        with subprocess.Popen(
            [sys.executable, "-c", f"{code}; run.close()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            while read_json(run.path / ".holder.json")["pid"] != other.pid:
                assert other.poll() is None
            with pytest.raises(RunDirError, match=f"in use by process {other.pid} on"):
                run.write_json("a.json", 2)
            other.communicate(b"\n")
        assert read_json(run.path / "a.json") == 1


@pytest.mark.parametrize("deed", ["deleted", "replaced"])
def test_control(tmp_path, deed):
    config = config_of(environment="CartPole-v1", algorithm="grpo", steps=600, evaluate_every=100, starts=2)
    rows: list[Any] = []

    def report(row: Any) -> None:
        rows.append(row)
        if len(rows) == 2:
            DEEDS[deed](tmp_path / "run")

    with pytest.raises(RunDirError, match=GONE):
        train(config, tmp_path / "run", report=report)
    assert len(rows) == 2
    assert (tmp_path / "run").exists() == (deed == "replaced")


def test_an_unused_folder_that_is_gone(tmp_path):
    """A run that fails before its first step, in a folder that was deleted, tells its own error."""
    run = RunDir.create(tmp_path / "run")
    shutil.rmtree(run.path)
    run.discard()
    assert not (tmp_path / "run").exists()
    write_json(tmp_path / "answers" / "new.json", 1)  # other files still get their folder
