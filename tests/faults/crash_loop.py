"""Kills a training process at each write of its saves, resumes it each time, and compares the result bit by bit.

    python -m tests.faults.crash_loop --kills 100              all kinds of runs (make test-crash)
    python -m tests.faults.crash_loop --kind lora --kills 30

A run of three steps saves and evaluates each of them. After its second step (then its first, if that gives too few)
the process is forked once for every file operation of the save that follows, and the child dies there by SIGKILL
(`kill_points`). Every killed run is then resumed to its end. Its weights, optimizer state, reference, metrics and
rollouts must equal those of the run that was never killed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from groupwise.rundir import RunDir, read_json, verify_manifest
from groupwise.rundir.metrics import MetricsRecorder
from groupwise.tasks import Task
from groupwise.training.store import checkpoint
from groupwise.training.trainer import Callback, Trainer
from tests.faults.kill_points import KillPoint, fork_at_every_point
from tests.training.runs import ROWS, check_same, metrics_of, small_trainer

ROOT = Path(__file__).parents[2]
STEPS = 3
SETTINGS: dict[str, Any] = {
    "train": {"steps": STEPS, "batch_size": 2},
    "sampling": {"samples_per_prompt": 3, "max_new_tokens": 4},
    "evaluate": {"every": 1, "before_training": False, "max_new_tokens": 1},
    "run": {"keep_checkpoints": 1},
}
LORA = {"model": {"lora": {"rank": 4}}, "optimizer": {"learning_rate": 1e-2}}
PAIRS = {"preference": {"pairs": "both", "train": "pairs.jsonl", "weight": 0.5, "batch_size": 3}}
SIMILARITY = {
    "algorithm": "similarity_group_grpo",
    "grouping": {"embedder": "wordllama", "workers": 0},
    "sampling": {"samples_per_prompt": 4, "max_new_tokens": 8},
}
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "full": ({"loss": {"kl_coef": 0.05}},),
    "lora": (LORA, {"loss": {"kl_coef": 0.05}, "reference": {"refresh_every": 2}}),
    "pairs": (PAIRS,),
    "similarity": (SIMILARITY,),
    "all": (SIMILARITY, PAIRS, LORA),
}


class Rising:
    """A grade that improves with each step, so that each checkpoint is the best and replaces the one before."""

    trainer: Trainer

    def __call__(self, row: dict[str, Any], answer: str) -> bool:
        return ROWS.index(row) < self.trainer.step


def trainer_of(kind: str, folder: Path, **options: Any) -> Trainer:
    """A run of this kind; the file of its pairs is beside its folder."""
    pairs = [
        {"prompt": f"Say number {n}: ", "chosen": "aei"[n % 3] * (2 + n % 4), "rejected": "xyz"[n % 3] * (2 + n % 3)}
        for n in range(8)
    ]
    file = folder.parent / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    more = {"preference": {"train": str(file)}} if PAIRS in KINDS[kind] else {}
    grade = Rising()
    task = Task("rising", ROWS, ROWS[:STEPS], grades={"right": grade}, metric="right")
    grade.trainer = small_trainer(folder, SETTINGS, *KINDS[kind], more, task=task, **options)
    return grade.trainer


class ForkAfter(Callback):
    """Forks after a step is recorded, before it is saved and evaluated."""

    point: KillPoint | None = None

    def __init__(self, step: int, base: Path) -> None:
        self.step, self.base = step, base

    def on_step(self, trainer: Any, report: Any) -> None:
        if report.step == self.step:
            trainer.run_dir.path, self.point = fork_at_every_point(trainer.run_dir.path, self.base)
            trainer.run_dir.metrics = MetricsRecorder(trainer.run_dir.path / "metrics.jsonl")


def drive(kind: str, step: int, base: Path) -> None:
    """Run until ``step``; then each child is killed in the save that follows, and the last one survives."""
    fork = ForkAfter(step, base)
    with trainer_of(kind, base / "run", callbacks=[fork]) as trainer:
        for _ in trainer.steps():
            if fork.point is not None:
                fork.point.survived()


def killed_runs(kind: str, step: int, base: Path) -> list[tuple[Path, str]]:
    """The folders of the runs that were killed in the save of ``step``, each with its last file operation."""
    base.mkdir()
    command = [sys.executable, "-m", "tests.faults.crash_loop", "--drive", str(step), "--kind", kind, "--in", str(base)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    points = json.loads((base / "points.json").read_text())
    return [(base / f"killed-{number}", point) for number, point in enumerate(points, start=1)]


class Counts(NamedTuple):
    kills: int
    points: int  # file operations of these saves
    from_step: dict[int, int]  # runs that were resumed after each step


def crash_loop(kind: str, kills: int, base: Path) -> Counts:
    """Kill and resume at least ``kills`` runs; an AssertionError tells the first one that differs.

    With fewer kills than there are file operations, they are spread evenly over them.
    """
    trainer_of(kind, base / "uninterrupted").run()
    from_step: dict[int, int] = {}
    done = points = 0
    for step in range(STEPS - 1, 0, -1):
        runs = killed_runs(kind, step, base / f"step-{step}")
        points += len(runs)
        wanted = min(len(runs), kills - done)
        for number in range(wanted):
            folder, point = runs[(2 * number + 1) * len(runs) // (2 * wanted)]
            resumed_after = _resume(kind, folder, step, point)
            from_step[resumed_after] = from_step.get(resumed_after, 0) + 1
            check_same(base / "uninterrupted", folder, STEPS)
            shutil.rmtree(folder)
        shutil.rmtree(base / f"step-{step}")
        done += wanted
        if done >= kills:
            break
    return Counts(done, points, from_step)


def _resume(kind: str, folder: Path, step: int, point: str) -> int:
    """Resume a killed run to its end; the step that it was resumed after."""
    with RunDir.resume(folder) as run:
        newest = checkpoint.newest(run)
        for other in folder.glob("checkpoint-*"):  # one that has its name is complete
            verify_manifest(other)
        if (folder / "best.json").exists():
            verify_manifest(folder / read_json(folder / "best.json")["checkpoint"])
        after = 0 if newest is None else int(checkpoint.read_state(newest)["step"])
    assert after in (step - 1, step), f"killed at {point}: {after} steps are left of {step}"
    trainer: Any = trainer_of(kind, folder, resume=True)
    trainer.run()
    assert trainer.display.steps == list(range(after + 1, STEPS + 1)), point
    assert [row["step"] for row in metrics_of(folder)] == [n for n in range(1, STEPS + 1) for _ in range(2)], point
    assert not list(folder.rglob(".unfinished-*")), point
    return after


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kind", choices=KINDS, action="append", help="of run; default: all of them")
    parser.add_argument("--kills", type=int, default=100, help="per kind (default: 100)")
    parser.add_argument("--drive", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--in", dest="base", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    if arguments.drive:
        drive(arguments.kind[0], arguments.drive, arguments.base)
        return
    total = 0
    for kind in arguments.kind or KINDS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as base:
            counts = crash_loop(kind, arguments.kills, Path(base))
        total += counts.kills
        starts = ", ".join(f"{count} after step {step}" for step, count in sorted(counts.from_step.items()))
        print(
            f"{kind}: {counts.kills} kills at {counts.points} file operations, all resumed to the same bits ({starts}; "
            f"{(time.monotonic() - began) / 60:.1f} min)",
            flush=True,
        )
    print(f"{total} kills; {total} resumed to the same bits")


if __name__ == "__main__":
    # As a module, so that the grade has the same source here, in the processes that are killed, and in pytest.
    from tests.faults.crash_loop import main as run

    run()
