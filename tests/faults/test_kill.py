"""A run that is killed at any point of a save goes on from a whole checkpoint, as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.rundir import RunDir, read_json, verify_manifest
from groupwise.tasks import Task
from groupwise.training.store import checkpoint
from groupwise.training.trainer import Trainer
from tests.training.runs import ROWS, check_same, metrics_of, small_trainer

ROOT = Path(__file__).parents[2]
CHANGES = {
    "train": {"steps": 3, "batch_size": 2},
    "sampling": {"max_new_tokens": 4},
    "evaluate": {"every": 1, "first": False, "max_new_tokens": 1},
    "run": {"keep": 1},
    "loss": {"kl_coef": 0.05},
}


class Rising:
    """A grade that is better from step to step: each checkpoint is the best, and the one before it may go."""

    trainer: Trainer

    def __call__(self, row: dict[str, Any], answer: str) -> bool:
        return ROWS.index(row) < self.trainer.step


def trainer_of(folder: Path, **options: Any) -> Trainer:
    grade = Rising()
    task = Task("rising", ROWS, ROWS[:3], grades={"right": grade}, metric="right")
    grade.trainer = small_trainer(folder, CHANGES, task=task, **options)
    return grade.trainer


# After step 2 has been recorded, before it is evaluated and saved, the run is copied and forked once for each point:
# the copy's process dies there. A point is every operation on files below the run's folder, and half a file of tensors.
DRIVER = """
import itertools, json, os, shutil, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import safetensors.torch
from groupwise.rundir import MetricsRecorder
from groupwise.training.trainer import Callback
from tests.faults.test_kill import trainer_of

base = Path(sys.argv[1])
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Killer:
    def __init__(self, folder, deadly):
        self.folder, self.deadly, self.count, self.names = str(folder), deadly, 0, []

    def point(self, name, path, half=None):
        if not str(path).startswith(self.folder):
            return
        self.count += 1
        self.names.append(f"{name} {os.path.relpath(str(path), self.folder)}")
        if self.count == self.deadly:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self):
        def hook(event, arguments):
            if event == "open" and isinstance(arguments[0], (str, os.PathLike)) and (arguments[2] or 0) & WRITING:
                self.point("open", arguments[0])
            elif event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
                # rmtree names what it removes by a folder's descriptor, which is of this run.
                path = arguments[0]
                self.point(event, path if os.path.isabs(str(path)) else os.path.join(self.folder, str(path)))

        sys.addaudithook(hook)
        fsync, save_file = os.fsync, safetensors.torch.save_file

        def flushed(descriptor):
            self.point("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        def saved(tensors, path, *arguments, **options):
            def half():
                save_file(tensors, path, *arguments, **options)
                os.truncate(path, os.path.getsize(path) // 2)

            self.point("save_file", path, half)
            save_file(tensors, path, *arguments, **options)

        os.fsync, safetensors.torch.save_file = flushed, saved


class Fork(Callback):
    killer = None

    def on_step(self, trainer, report):
        if report.step != 2:
            return
        for number in itertools.count(1):
            folder = base / f"killed-{number}"
            # Files are replaced, never written to, but for one: links will do.
            shutil.copytree(trainer.run_dir.path, folder, copy_function=os.link)
            (folder / "metrics.jsonl").unlink()
            shutil.copy(trainer.run_dir.path / "metrics.jsonl", folder)
            child = os.fork()
            if not child:
                trainer.run_dir.path = folder
                trainer.run_dir.metrics = MetricsRecorder(folder / "metrics.jsonl")
                self.killer = Killer(folder, number)
                self.killer.install()
                return
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status):
                if os.WEXITSTATUS(status):
                    raise SystemExit("the save failed by itself")
                (base / "whole").write_text(str(number))
                os._exit(0)

    def on_checkpoint(self, trainer, folder):
        if self.killer is not None:
            (base / "points.json").write_text(json.dumps(self.killer.names))
            os._exit(0)


with trainer_of(base / "run", callbacks=[Fork()]) as trainer:
    for _ in trainer.steps():
        pass
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder with ``killed-1``, ``killed-2``, … in it, and what each process was about to do."""
    base = tmp_path_factory.mktemp("kill")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(base)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    points = json.loads((base / "points.json").read_text())
    assert int((base / "whole").read_text()) == len(points) + 1
    return base, points


def test_killed_at_every_point(killed):
    base, points = killed
    kinds = {point.split()[0] for point in points}
    assert kinds == {"open", "fsync", "save_file", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
    chosen = []
    for number, point in enumerate(points, start=1):
        with RunDir.resume(base / f"killed-{number}") as run:
            found = checkpoint.newest(run)
            assert found is not None, point
            verify_manifest(found)
            assert checkpoint.read_state(found)["step"] == checkpoint.step_of(found)
            chosen.append(checkpoint.step_of(found))
            # Whatever has a checkpoint's name is one, and best.json names one that is there.
            assert run.finished() == sorted(run.path.glob("checkpoint-*")), point
            best = read_json(run.path / "best.json")
            verify_manifest(run.path / best["checkpoint"])
            assert not list(run.path.rglob(".unfinished-*"))
    # First the old one, from some point on the new one, and never anything in between.
    assert chosen == sorted(chosen)
    assert set(chosen) == {1, 2}
    assert chosen[points.index("os.rename checkpoint-1")] == 2


def test_the_run_goes_on(killed, tmp_path):
    """Resumed, it ends in the same bits, whether the new checkpoint had got its name or not."""
    base, points = killed
    trainer_of(tmp_path / "whole").run()
    name = points.index("os.rename checkpoint-1") + 1
    for number in (1, len(points) // 3, name):
        folder = base / f"killed-{number}"
        with RunDir.resume(folder) as run:
            done = checkpoint.step_of(checkpoint.newest(run))
        trainer = trainer_of(folder, resume=True)
        trainer.run()
        assert trainer.display.steps == list(range(done + 1, 4))
        check_same(tmp_path / "whole", folder, 3)
        assert [row["step"] for row in metrics_of(folder)] == [1, 1, 2, 2, 3, 3]
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3"]
