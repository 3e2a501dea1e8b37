"""Run folders: created, locked by one process, resumed by another."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from groupwise.errors import InputError, RunDirError
from groupwise.rundir import (
    RunDir,
    new_run_path,
    read_json,
    read_metrics,
    verify_manifest,
    write_json,
    write_safetensors,
)


def test_a_run_from_start_to_resume(tmp_path):
    path = tmp_path / "runs" / "quiz"
    with RunDir.create(path) as run:
        run.write_json("config.json", {"steps": 2})
        run.metrics.record(1, {"reward": 0.5})
        with run.folder("checkpoint-9") as folder:
            write_safetensors(folder / "model.safetensors", {"w": torch.ones(2)})
        with run.folder("checkpoint-10") as folder:
            write_json(folder / "state.json", {})
    with RunDir.resume(path) as run:
        assert run.metrics.last_step == 1
        for name in ("checkpoint-9", "checkpoint-10"):
            verify_manifest(path / name)
        run.metrics.record(2, {"reward": 0.7})
    assert len(read_metrics(path / "metrics.jsonl")) == 2
    assert read_json(path / "run.json")["format"] == 1


def test_an_existing_folder_is_never_overwritten(tmp_path):
    RunDir.create(tmp_path / "a").close()
    with pytest.raises(RunDirError, match="already holds a run"):
        RunDir.create(tmp_path / "a")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(RunDirError, match="is not empty and holds no run"):
        RunDir.create(tmp_path / "mine")
    with pytest.raises(RunDirError, match="is a file, not a folder"):
        RunDir.create(tmp_path / "mine" / "thesis.tex")
    with pytest.raises(RunDirError, match=r"cannot be created: .*thesis.tex is a file, not a folder"):
        RunDir.create(tmp_path / "mine" / "thesis.tex" / "run")
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_only_a_run_can_be_resumed(tmp_path):
    with pytest.raises(RunDirError, match=r"holds no run .*nothing to resume"):
        RunDir.resume(tmp_path)
    write_json(tmp_path / "run.json", {"format": 99})
    with pytest.raises(RunDirError, match="does not have format 1"):
        RunDir.resume(tmp_path)
    write_json(tmp_path / "run.json", {"format": 1})
    RunDir.resume(tmp_path).close()  # the error released the lock


def test_a_locked_folder_names_the_process_that_holds_it(tmp_path):
    path = tmp_path / "run"
    code = f"""
import sys
from groupwise.rundir import RunDir
run = RunDir.create({str(path)!r})
print("ready", flush=True)
sys.stdin.readline()
run.close()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(RunDirError, match=rf"is in use by process {holder.pid} on .* since \d{{4}}-") as error:
            RunDir.resume(path)
        assert "choose another folder" in str(error.value)
    finally:
        holder.communicate("\n", timeout=300)
    RunDir.resume(path).close()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    path = tmp_path / "run"
    code = f"""
import os, signal
from groupwise.rundir import RunDir
run = RunDir.create({str(path)!r})
run.metrics.record(1, {{"x": 1}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -9
    with RunDir.resume(path) as run:
        assert run.metrics.last_step == 1


def test_new_run_path(tmp_path):
    first = new_run_path(tmp_path, "quiz-grpo")
    assert re.fullmatch(r"\d{8}-\d{6}-quiz-grpo", first.name)
    first.mkdir()
    again = new_run_path(tmp_path, "quiz-grpo")
    assert not again.exists()
    assert again != first
    for name in ("", "../up", "a b", "-x"):
        with pytest.raises(InputError, match="may hold letters"):
            new_run_path(tmp_path, name)
