"""A process that is killed or has no disk space left while it writes to a run folder loses no finished step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from groupwise.rundir import RunDir, read_json, read_metrics, verify_manifest, write_json, write_safetensors

ROOT = Path(__file__).parents[2]


def take_step(run: RunDir, step: int) -> None:
    with run.folder(f"checkpoint-{step}") as folder:
        write_safetensors(folder / "model.safetensors", {"w": torch.full((20_000,), float(step))})
        write_json(folder / "state.json", {"step": step})
    run.write_json("latest.json", {"step": step, "padding": "x" * 100_000})
    run.metrics.record(step, {"reward": step / 7})


def finished(run: RunDir) -> list[Path]:
    """The checkpoints that have their final name, each of them undamaged."""
    folders = sorted(run.path.glob("checkpoint-*"))
    for folder in folders:
        verify_manifest(folder)
    return folders


# Two complete steps, then one child for each file operation of the third, which dies there.
DRIVER = """
import sys
from pathlib import Path

import pytest
from groupwise.rundir import RunDir
from groupwise.rundir.metrics import MetricsRecorder
from tests.faults.kill_points import fork_at_every_point
from tests.faults.test_rundir import take_step

base = Path(sys.argv[1])
run = RunDir.create(base / "run")
take_step(run, 1)
take_step(run, 2)
run.path, point = fork_at_every_point(run.path, base)
run.metrics = MetricsRecorder(run.path / "metrics.jsonl")
take_step(run, 3)
point.survived()
"""


@pytest.mark.slow
def test_killed_at_every_point(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    points = json.loads((tmp_path / "points.json").read_text())
    kinds = {point.split()[0] for point in points}
    assert kinds == {"open", "fsync", "save_file", "os.rename", "os.mkdir", "os.remove"}
    latest = []
    for number, point in enumerate(points, start=1):
        with RunDir.resume(tmp_path / f"killed-{number}") as run:
            assert run.metrics.last_step == 2, point
            assert not list(run.path.rglob(".unfinished-*")), point
            # Every checkpoint that has its final name is complete, and no recorded one is missing.
            folders = finished(run)
            assert len(folders) in (2, 3), point
            latest.append(read_json(run.path / "latest.json")["step"])
            # An unrecorded step is done again.
            for folder in folders[2:]:
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()
            take_step(run, 3)
            assert [folder.name for folder in finished(run)] == [f"checkpoint-{step}" for step in (1, 2, 3)], point
        assert [row["step"] for row in read_metrics(run.path / "metrics.jsonl")] == [1, 2, 3], point
    assert set(latest) == {2, 3}
    assert latest == sorted(latest)  # the old file, and from some point on the new one


FULL_DISK = """
import resource, sys, torch
from groupwise.errors import GroupwiseError
from groupwise.rundir import RunDir, write_json, write_safetensors
run = RunDir.create(sys.argv[1])
run.metrics.record(1, {"x": 1})
write_safetensors(run.path / "model.safetensors", {"w": torch.zeros(10)})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for attempt in (
    lambda: write_json(run.path / "run.json", "x" * 10_000),
    lambda: write_safetensors(run.path / "model.safetensors", {"w": torch.ones(10_000)}),
    lambda: run.metrics.record(2, {"x": "y" * 10_000}),
):
    try:
        attempt()
    except GroupwiseError as error:
        print(type(error).__name__, "untouched" in str(error))
with run.folder("checkpoint-1") as folder:
    write_json(folder / "small.json", 1)
run.metrics.record(2, {"x": 2})
"""


def test_no_space_left(tmp_path):
    """A limit on the size of files stands in for a full disk: the same system call fails."""
    path = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["CheckpointError True", "CheckpointError True", "RunDirError True"]
    from safetensors.torch import load_file

    assert load_file(path / "model.safetensors")["w"].sum() == 0
    with RunDir.resume(path) as run:
        assert run.metrics.last_step == 2
        assert [folder.name for folder in finished(run)] == ["checkpoint-1"]
