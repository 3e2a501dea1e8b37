"""A run that is killed at any point of a save resumes from a complete checkpoint, to the same bits."""

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

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHANGES = {
    "train": {"steps": 3, "batch_size": 2},
    "sampling": {"max_new_tokens": 4},
    "evaluate": {"every": 1, "before_training": False, "max_new_tokens": 1},
    "run": {"keep_checkpoints": 1},
    "loss": {"kl_coef": 0.05},
}


class Rising:
    """A grade that improves with each step, so that each checkpoint is the best and replaces the one before."""

    trainer: Trainer

    def __call__(self, row: dict[str, Any], answer: str) -> bool:
        return ROWS.index(row) < self.trainer.step


def trainer_of(folder: Path, **options: Any) -> Trainer:
    grade = Rising()
    task = Task("rising", ROWS, ROWS[:3], grades={"right": grade}, metric="right")
    grade.trainer = small_trainer(folder, CHANGES, task=task, **options)
    return grade.trainer


# After step 2 is recorded, before it is saved and evaluated, the run is forked once for each file operation.
DRIVER = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from groupwise.training.trainer import Callback
from tests.faults.kill_points import fork_at_every_point
from tests.faults.test_kill import trainer_of

base = Path(sys.argv[1])


class Fork(Callback):
    point = None

    def on_step(self, trainer, report):
        if report.step == 2:
            trainer.run_dir.path, self.point = fork_at_every_point(trainer.run_dir.path, base)
            # The trainer's recorder holds the same object.
            trainer.run_dir.metrics.__init__(trainer.run_dir.path / "metrics.jsonl")


fork = Fork()
with trainer_of(base / "run", callbacks=[fork]) as trainer:
    for _ in trainer.steps():
        if fork.point is not None:
            fork.point.survived()
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder with ``killed-1``, ``killed-2``, …, and the operation at which each process was killed."""
    base = tmp_path_factory.mktemp("kill")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(base)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return base, json.loads((base / "points.json").read_text())


def test_killed_at_every_point(killed):
    base, points = killed
    kinds = {point.split()[0] for point in points}
    assert kinds == {"open", "fsync", "save_file", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
    chosen = []
    for number, point in enumerate(points, start=1):
        with RunDir.resume(base / f"killed-{number}") as run:
            newest = checkpoint.newest(run)
            assert newest is not None, point
            verify_manifest(newest)
            chosen.append(checkpoint.read_state(newest)["step"])
            assert newest.name == f"checkpoint-{chosen[-1]}"
            # Every folder with a checkpoint's name is complete, and best.json names an existing one.
            for folder in run.path.glob("checkpoint-*"):
                verify_manifest(folder)
            best = read_json(run.path / "best.json")
            verify_manifest(run.path / best["checkpoint"])
            assert not list(run.path.rglob(".unfinished-*"))
    # First the old checkpoint, from some point on the new one.
    assert chosen == sorted(chosen)
    assert set(chosen) == {1, 2}
    assert chosen[points.index("os.rename checkpoint-1")] == 2


def test_killed_runs_resume_to_the_same_bits(killed, tmp_path):
    """Whether the new checkpoint had its final name or not."""
    base, points = killed
    trainer_of(tmp_path / "uninterrupted").run()
    renamed = points.index("os.rename checkpoint-1") + 1
    for number in (1, len(points) // 3, renamed):
        folder = base / f"killed-{number}"
        with RunDir.resume(folder) as run:
            done = checkpoint.read_state(checkpoint.newest(run))["step"]
        trainer = trainer_of(folder, resume=True)
        trainer.run()
        assert trainer.display.steps == list(range(done + 1, 4))
        check_same(tmp_path / "uninterrupted", folder, 3)
        assert [row["step"] for row in metrics_of(folder)] == [1, 1, 2, 2, 3, 3]
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3"]
