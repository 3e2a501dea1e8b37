"""What breaks while a run is writing: killed at any moment, or no room left. No finished step may be lost."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from groupwise.rundir import RunDir, read_json, verify_manifest

WRITER = """
import itertools, sys, torch
from groupwise.rundir import RunDir, write_json, write_safetensors
path = sys.argv[1]
run = RunDir.create(path) if sys.argv[2] == "create" else RunDir.resume(path)
start = (run.metrics.last_step or 0) + 1
print("ready", flush=True)
for step in itertools.count(start):
    weights = {"w": torch.full((200_000,), float(step))}
    with run.folder(f"checkpoint-{step}") as folder:
        write_safetensors(folder / "model.safetensors", weights)
        write_json(folder / "state.json", {"step": step})
    run.write_json("latest.json", {"step": step, "padding": "x" * 100_000})
    run.metrics.record(step, {"reward": step / 7})
"""


@pytest.mark.parametrize("wait", [0.05, 0.11, 0.23])
def test_killed_at_any_moment(tmp_path, wait):
    path = tmp_path / "run"
    seen = 0
    for how in ("create", "resume", "resume"):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        time.sleep(wait + seen % 7 * 0.01)
        process.kill()
        process.communicate()
        with RunDir.resume(path) as run:
            steps = run.metrics.last_step or 0
            assert steps >= seen
            seen = steps
            whole = run.finished()
            assert not list(path.glob(".unfinished-*"))
            # Every checkpoint that has its final name is whole, and none that was recorded is missing.
            assert whole == sorted(path.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
            assert len(whole) in (steps, steps + 1)
            for folder in whole[steps:]:  # the folder of a step that was not recorded yet is done again
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()
            for folder in whole[:steps]:
                verify_manifest(folder)
            if steps:
                assert read_json(path / "latest.json")["step"] in (steps, steps + 1)
    assert seen > 0


FULL = """
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


def test_no_room_left(tmp_path):
    """A limit on the size of files stands in for a full disk: the same system call fails in the same place."""
    path = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["CheckpointError True", "CheckpointError True", "RunDirError True"]
    from safetensors.torch import load_file

    assert load_file(path / "model.safetensors")["w"].sum() == 0
    with RunDir.resume(path) as run:
        assert run.metrics.last_step == 2
        assert [folder.name for folder in run.finished()] == ["checkpoint-1"]
