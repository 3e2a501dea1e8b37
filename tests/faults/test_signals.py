"""Ctrl-C and SIGTERM in a real process: the step is finished and saved, and the run goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.rundir import verify_manifest
from groupwise.rundir.signals import StopRequest, stop_on_signals
from tests.training.runs import check_same, metrics_of

ROOT = Path(__file__).parents[2]
REWARD = """
import os, pathlib, time

calls = 0


def score(completions, **_):
    global calls
    calls += 1
    held = os.environ.get("HOLD")
    if held:
        place = pathlib.Path(held)
        (place / f"waiting-{calls}").touch()
        until = time.monotonic() + 40
        while not (place / "go").exists() and time.monotonic() < until and calls == 2:
            time.sleep(0.01)
    return [sum(ord(letter) % 2 == 0 for letter in text) / max(1, len(text)) for text in completions]
"""
RECIPE = """
[model]
gradient_checkpointing = false
[data]
train = "rows.jsonl"
chat = false
[[rewards]]
function = "reward.py:score"
[train]
steps = 3
batch_size = 2
accumulation = 1
[sampling]
samples_per_prompt = 3
max_new_tokens = 4
[optimizer]
learning_rate = 1e-3
[run]
checkpoint_every = 0
tensorboard = false
picture = false
"""


@pytest.fixture
def recipe(tmp_path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}: "}) + "\n" for i in range(5)))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


@contextmanager
def held_in_step_two(recipe: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that trains, and waits in the reward of its second step until there is a file called ``go``."""
    hold = recipe.parent / "hold"
    hold.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "groupwise", "train", str(recipe), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOLD": str(hold)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background ignores SIGINT, and its children would.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until = time.monotonic() + 90
        while not (hold / "waiting-2").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def go_on(recipe: Path) -> None:
    (recipe.parent / "hold" / "go").touch()


def check_resumed(recipe: Path, folder: Path, first: int, capsys) -> None:
    """Resumed, the run does the steps from ``first`` on and ends like one that nobody stopped."""
    capsys.readouterr()
    assert main(["train", str(recipe), "--run.folder", str(folder), "--resume"]) == 0
    said = capsys.readouterr().out
    assert (f"going on after step {first - 1}" if first > 1 else "it begins anew") in said
    whole = folder.with_name("whole")
    assert main(["train", str(recipe), "--run.folder", str(whole)]) == 0
    check_same(whole, folder, 3)


@pytest.mark.parametrize(
    ("number", "status", "name"), [(signal.SIGINT, 130, "SIGINT"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_finishes_the_step_and_saves(recipe, tmp_path, capsys, number, status, name):
    """Meanwhile nobody else gets the folder."""
    folder = tmp_path / "run"
    with held_in_step_two(recipe, "--run.folder", str(folder)) as process:
        for word in ("--resume", "--overwrite"):
            assert main(["train", str(recipe), "--run.folder", str(folder), word]) == 2
            refused = capsys.readouterr().err
            assert f"{folder} is in use by process {process.pid} on" in refused
            assert refused.rstrip().endswith("wait for it, stop it, or choose another folder")
        process.send_signal(number)
        go_on(recipe)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert f"{name}: finishing this step and saving; Ctrl-C once more ends at once, without saving" in out
    assert "stopped after step 2 of 3; go on with --resume" in out
    assert err == ""
    verify_manifest(folder / "checkpoint-2")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    assert [row["step"] for row in metrics_of(folder)] == [1, 2]
    assert not (folder / "model").exists()
    check_resumed(recipe, folder, 3, capsys)
    assert (folder / "model" / "config.json").exists()


def test_a_second_one_ends_at_once(recipe, tmp_path, capsys):
    """Without a checkpoint, in the middle of a reward that would take long."""
    folder = tmp_path / "run"
    with held_in_step_two(recipe, "--run.folder", str(folder), "--run.checkpoint_every", "1") as process:
        process.send_signal(signal.SIGINT)
        assert "SIGINT: finishing this step" in "".join(iter_until(process, "SIGINT"))
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - begun < 15
    assert process.returncode == 130
    assert err == "groupwise: interrupted\n"
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    assert not list(folder.rglob(".unfinished*"))
    check_resumed(recipe, folder, 2, capsys)


def iter_until(process: subprocess.Popen[str], word: str) -> Iterator[str]:
    """The lines that a process prints, up to one with ``word`` in it."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if word in line:
            return


def test_a_request():
    said: list[str] = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_signals(said.append) as request:
        assert not request
        assert request.exit_status == 0
        signal.raise_signal(signal.SIGTERM)
        assert request
        assert request.exit_status == 143
        signal.raise_signal(signal.SIGTERM)  # asked twice by a scheduler: that is no Ctrl-C
        assert said[0] == ("SIGTERM: finishing this step and saving; Ctrl-C once more ends at once, without saving")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert StopRequest().exit_status == 0


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)

    def fail() -> None:
        with stop_on_signals(lambda text: None):
            assert signal.getsignal(signal.SIGINT) is not before
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_in_the_middle_of_a_line():
    """The stream that is being written to cannot take a second line then; the request counts all the same."""

    def say(text: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with stop_on_signals(say) as request:
        signal.raise_signal(signal.SIGINT)
        assert request.exit_status == 130


def test_off_the_main_thread():
    """There signals cannot be caught; a run works, and is not stopped by them."""
    found: list[bool] = []

    def run() -> None:
        with stop_on_signals(lambda text: None) as request:
            found.append(bool(request))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]
    assert signal.getsignal(signal.SIGINT) is before
