"""`groupwise train --processes N` and torchrun: starting, stopping, restarting, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.distributed import launch
from groupwise.errors import ConfigError, RankError
from groupwise.rundir import read_json, read_metrics

ROOT = Path(__file__).parents[2]
RECIPE = """
[data]
train = "rows.jsonl"
chat = false
[[rewards]]
function = "reward.py:reward"
[model]
source = "tiny"
device = "cpu"
[train]
steps = 4
batch_size = 3
accumulation = 1
[sampling]
samples_per_prompt = 4
max_new_tokens = 4
[run]
folder = "run"
tensorboard = false
plot = false
checkpoint_every = 1
keep_checkpoints = 9
"""
REWARD = """
import os, signal
def reward(completions, trainer_state, **_):
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if os.environ.get("KILLED") == os.environ.get("RANK") and trainer_state.global_step == 2 and first:
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(set(text))) for text in completions]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "Say {number}"}}\n' for number in range(9)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*command: str, **environment: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
def test_a_number_of_processes_that_makes_no_sense(folder, capsys, number):
    assert main(["train", "recipe.toml", "--processes", number]) == 2
    assert "--processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["missing.toml"], "missing.toml"),
        (["recipe.toml", "--train.stepz", "3"], "train.stepz"),
        (["recipe.toml", "--sampling.generator", "engin"], "engin"),
        (["recipe.toml", "--resume"], "holds no run"),
    ],
)
def test_what_is_wrong_is_said_once_before_processes_start(folder, capsys, monkeypatch, words, sentence):
    monkeypatch.setattr(launch, "launch", None)
    assert main(["train", *words, "--processes", "2"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_processes_within_torchrun(folder, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "recipe.toml", "--processes", "2"]) == 2
    assert "torchrun, which has --nproc-per-node" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN  # only a process that ends ignores it


def test_more_processes_than_gpus(folder, capsys, monkeypatch):
    monkeypatch.setattr("groupwise.model.device.gpu_count", lambda: 2)
    assert main(["train", "recipe.toml", "--processes", "4", "--model.device", "cuda"]) == 2
    assert "this machine has 2; use --processes 2" in capsys.readouterr().err


def test_one_rank_prints_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for rank, reported in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert launch.reports(ConfigError("wrong")) is reported
        assert launch.reports(RankError("rank 2 failed")) is reported
    assert launch.reports(RankError("rank 0 is gone", main_is_lost=True))
    monkeypatch.setenv("LOCAL_RANK", "0")  # on another machine, whose files may be others
    assert launch.reports(ConfigError("missing"))


@pytest.mark.slow
def test_a_signal_stops_all_processes_after_the_step(folder):
    """Then the run goes on, from one line of text to the end."""
    process = start("groupwise", "train", "recipe.toml", "--processes", "2", "--train.steps", "100000")
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step "):
            process.send_signal(signal.SIGINT)
            break
    out, error = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGINT, out + error
    text = "".join(lines) + out
    assert "stopped after step" in text
    assert text.count("go on with --resume") == 1
    assert "Traceback" not in error
    saved = max(int(path.name.split("-")[1]) for path in (folder / "run").glob("checkpoint-*"))
    process = start("groupwise", "train", "recipe.toml", "--resume", "--processes", "2", f"--train.steps={saved + 1}")
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, out + error
    assert f"resuming after step {saved}" in out
    assert out.count("resuming after step") == 1
    assert (folder / "run" / "model" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_restarts_from_the_last_checkpoint(folder, rank):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    process = start(*torchrun, "-m", "groupwise", "train", "recipe.toml", KILLED=rank)
    out, error = process.communicate(timeout=200)
    assert process.returncode == 0, out + error
    assert "resuming after step 2, from checkpoint-2" in out
    assert [row["step"] for row in read_metrics(folder / "run" / "metrics.jsonl") if "reward" in row] == [1, 2, 3, 4]
    assert read_json(folder / "run" / "finished.json")["step"] == 4
    if rank == "1":
        assert "saved up to checkpoint-2; go on with --resume" in " ".join(error.split())
