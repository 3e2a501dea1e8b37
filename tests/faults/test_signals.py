"""Ctrl-C, SIGTERM, SIGHUP, a broken pipe: the step is finished and saved, and the run resumes to the same bits."""

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
from typing import Any

import pytest

from groupwise.cli import main
from groupwise.rundir import verify_manifest
from groupwise.rundir.signals import STOPPING, StopRequest, stop_on_signals
from tests.training.runs import check_same, metrics_of

ROOT = Path(__file__).parents[2]
# In its second call this reward waits for the file "go", or sends a signal to its own process.
REWARD = """
import os, pathlib, signal, time

calls = 0


def score(completions, **_):
    global calls
    calls += 1
    if calls == 2 and os.environ.get("SEND"):
        os.kill(os.getpid(), int(os.environ["SEND"]))
    if calls == 2 and os.environ.get("HOLD"):
        hold = pathlib.Path(os.environ["HOLD"])
        (hold / "waiting").touch()
        while not (hold / "go").exists():
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
plot = false
"""


@pytest.fixture
def recipe(tmp_path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}: "}) + "\n" for i in range(5)))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


@pytest.fixture(autouse=True)
def _no_signal_is_ignored() -> Iterator[None]:
    """A test run in the background ignores SIGINT, and one under nohup SIGHUP."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def held_in_step_two(recipe: Path, *words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A training process that waits in the reward of its second step for the file ``go``."""
    hold = recipe.parent / "hold"
    hold.mkdir()
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        [sys.executable, "-m", "groupwise", "train", str(recipe), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOLD": str(hold)},
        **(streams | options),
    )
    try:
        deadline = time.monotonic() + 600
        while not (hold / "waiting").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def check_resumed(recipe: Path, folder: Path, first: int, capsys) -> None:
    """Resumed, the run does the steps from ``first`` on and ends like an uninterrupted one."""
    capsys.readouterr()
    assert main(["train", str(recipe), "--run.folder", str(folder), "--resume"]) == 0
    out = capsys.readouterr().out
    assert (f"resuming after step {first - 1}" if first > 1 else "it begins anew") in out
    uninterrupted = folder.with_name("uninterrupted")
    assert main(["train", str(recipe), "--run.folder", str(uninterrupted)]) == 0
    check_same(uninterrupted, folder, 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_this_process(recipe, tmp_path, capsys, monkeypatch, number):
    folder = tmp_path / "run"
    monkeypatch.setenv("SEND", str(number.value))
    assert main(["train", str(recipe), "--run.folder", str(folder)]) == 128 + number
    assert f"{number.name}: finishing this step and saving" in capsys.readouterr().out
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    monkeypatch.delenv("SEND")
    check_resumed(recipe, folder, 3, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "name"),
    [(signal.SIGINT, 130, "SIGINT"), (signal.SIGTERM, 143, "SIGTERM"), (signal.SIGHUP, 129, "SIGHUP")],
)
def test_finishes_the_step_and_saves(recipe, tmp_path, capsys, number, status, name):
    """Until then no other process gets the folder."""
    folder = tmp_path / "run"
    with held_in_step_two(recipe, "--run.folder", str(folder)) as process:
        for word in ("--resume", "--overwrite"):
            assert main(["train", str(recipe), "--run.folder", str(folder), word]) == 2
            assert f"{folder} is in use by process {process.pid} on" in capsys.readouterr().err
        process.send_signal(number)
        (recipe.parent / "hold" / "go").touch()
        out, err = process.communicate(timeout=600)
    assert process.returncode == status, err
    assert f"{name}: finishing this step and saving" in out
    assert "stopped after step 2 of 3" in out
    assert err == ""
    verify_manifest(folder / "checkpoint-2")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    assert [row["step"] for row in metrics_of(folder)] == [1, 2]
    assert not (folder / "model").exists()
    check_resumed(recipe, folder, 3, capsys)
    assert (folder / "model" / "config.json").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(recipe, tmp_path, capsys):
    """Without a checkpoint, in the middle of a reward that never returns."""
    folder = tmp_path / "run"
    with held_in_step_two(recipe, "--run.folder", str(folder), "--run.checkpoint_every", "1") as process:
        process.send_signal(signal.SIGINT)
        assert "SIGINT: finishing this step" in "".join(lines_until(process, "SIGINT"))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert err.startswith("groupwise: stopped at once")
    assert len(err.splitlines()) == 1
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    assert not list(folder.rglob(".unfinished*"))
    check_resumed(recipe, folder, 2, capsys)


@pytest.mark.slow
def test_a_terminal_that_is_gone(recipe, tmp_path, capsys):
    """A closed window sends SIGHUP, and every write to it fails: the step is saved all the same."""
    folder = tmp_path / "run"
    controller, terminal = os.openpty()
    options = {"stdin": terminal, "stdout": terminal, "stderr": terminal, "start_new_session": True}
    with held_in_step_two(recipe, "--run.folder", str(folder), **options) as process:
        os.close(terminal)
        os.close(controller)
        process.send_signal(signal.SIGHUP)
        (recipe.parent / "hold" / "go").touch()
        assert process.wait(timeout=600) == 129
    verify_manifest(folder / "checkpoint-2")
    check_resumed(recipe, folder, 3, capsys)


@pytest.mark.slow
def test_ignored_signals_stay_ignored(recipe, tmp_path):
    """nohup ignores SIGHUP, and a script's background job SIGINT: neither stops the run."""
    folder = tmp_path / "run"

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with held_in_step_two(recipe, "--run.folder", str(folder), preexec_fn=ignore) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        (recipe.parent / "hold" / "go").touch()
        out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "saving" not in out
    assert (folder / "model" / "config.json").exists()


@pytest.mark.slow
def test_a_broken_pipe(recipe, tmp_path, capsys):
    """As `train … | head -1`: the step is saved, and the status is that of a process that SIGPIPE ends."""
    folder, words = tmp_path / "run", ("--train.steps", "200")
    with held_in_step_two(recipe, "--run.folder", str(folder), *words) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        (recipe.parent / "hold" / "go").touch()
        err = process.stderr.read() if process.stderr is not None else ""
        assert process.wait(timeout=600) == 141
    assert err == ""
    last = metrics_of(folder)[-1]["step"]
    assert 2 <= last < 200  # it is noticed when the next line is written
    verify_manifest(folder / f"checkpoint-{last}")
    steps = str(last + 1)
    assert main(["train", str(recipe), "--run.folder", str(folder), "--resume", "--train.steps", steps]) == 0
    assert f"resuming after step {last}" in capsys.readouterr().out


# The module of the reward is imported before the run begins.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_before_the_first_step(recipe, tmp_path, capsys, number):
    """It ends with a sentence, and leaves no folder."""
    file = recipe.parent / "reward.py"
    file.write_text(f"import os, signal\nos.kill(os.getpid(), {number.value})\nsignal.pause()\n" + REWARD)
    assert main(["train", str(recipe), "--run.folder", str(tmp_path / "run")]) == 128 + number
    err = capsys.readouterr().err
    assert "stopped at once" in err
    assert len(err.splitlines()) == 1
    assert ("SIG" in err) == (number != signal.SIGINT)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_another_command(recipe, capsys, number):
    file = recipe.parent / "reward.py"
    file.write_text(f"import os\n\ndef score(**_):\n    os.kill(os.getpid(), {number.value})\n    return []\n")
    assert main(["eval", str(recipe), "--data.held_out", str(recipe.parent / "rows.jsonl")]) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == f"groupwise: {number.name}: interrupted"


def lines_until(process: subprocess.Popen[str], word: str) -> Iterator[str]:
    """The lines of a process, up to the first one with ``word``."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if word in line:
            return


def test_a_stop_request():
    messages: list[str] = []
    before = [signal.getsignal(number) for number in STOPPING]
    with stop_on_signals(messages.append) as request:
        assert not request
        assert request.exit_status == 0
        signal.raise_signal(signal.SIGTERM)
        assert request
        assert request.exit_status == 143
        signal.raise_signal(signal.SIGTERM)  # a second SIGTERM, as schedulers send, is not a second Ctrl-C
        assert messages[0].startswith("SIGTERM: finishing this step and saving")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in STOPPING] == before
    assert StopRequest().exit_status == 0


def test_handlers_are_restored_after_an_error():
    before = signal.getsignal(signal.SIGINT)

    def fail() -> None:
        with stop_on_signals(lambda text: None):
            assert signal.getsignal(signal.SIGINT) is not before
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_in_the_middle_of_a_line():
    """The message cannot be printed then, but the request is set."""

    def say(text: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with stop_on_signals(say) as request:
        signal.raise_signal(signal.SIGINT)
        assert request.exit_status == 130


def test_off_the_main_thread():
    """Signals cannot be handled there; the block still runs."""
    requests: list[bool] = []

    def run() -> None:
        with stop_on_signals(lambda text: None) as request:
            requests.append(bool(request))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert requests == [False]
    assert signal.getsignal(signal.SIGINT) is before
