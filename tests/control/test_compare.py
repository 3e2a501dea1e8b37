"""Comparisons: runs in parallel processes, continued where they stopped."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import gymnasium
import pytest
from PIL import Image

from groupwise.cli import main as groupwise
from groupwise.control.comparison import compare as comparing
from groupwise.control.comparison import write
from groupwise.control.comparison.compare import compare
from groupwise.control.main import read_progress, train
from groupwise.control.models import read_model
from groupwise.control.settings import config_of
from groupwise.errors import ConfigError, ControlError
from groupwise.rundir import read_json

ALGORITHMS = ("grpo-fast", "ppo-fast:steps=512:epochs=2")
FOLDERS = ("grpo-fast", "ppo-fast_steps=512_epochs=2")
SMALL = {"steps": 1000, "starts": 4, "evaluate_every": 500, "save_every": 2}
TROUBLED = "troubled_environment:GroupwiseTroubled-v0"
LEVERS = "GroupwiseLevers-v0"

# A custom environment. The file "trouble" beside it says what happens at its hundredth step.
ENVIRONMENT = """
import os
import signal
import time
from pathlib import Path

import gymnasium
import numpy as np


def wait_for_sigterm():
    Path(__file__).with_name("waiting").touch()
    received = []
    handler = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: (received.append(number), handler(number, frame)))
    while not received:
        time.sleep(0.01)


class Troubled(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    taken = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.normal(size=2), {}

    def step(self, action):
        self.time += 1
        Troubled.taken += 1
        if Troubled.taken == 100:
            trouble = Path(__file__).with_name("trouble").read_text()
            if trouble == "raise":
                raise ZeroDivisionError("the pole broke")
            if trouble == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if trouble == "wait":
                wait_for_sigterm()
        return self.np_random.normal(size=2), float(action), self.time > 5, False, {}


gymnasium.register("GroupwiseTroubled-v0", entry_point=Troubled)
"""


@pytest.fixture
def trouble(tmp_path, monkeypatch):
    """The file that says what the environment does; child processes find the module through the same path."""
    folder = tmp_path / "module"
    folder.mkdir()
    (folder / "troubled_environment.py").write_text(ENVIRONMENT)
    (folder / "trouble").write_text("")
    monkeypatch.syspath_prepend(folder)
    yield folder / "trouble"
    sys.modules.pop("troubled_environment", None)
    gymnasium.registry.pop("GroupwiseTroubled-v0", None)


def configs_of(seeds=2, environments=("CartPole-v1",), **changes):
    return [
        config_of(**{**SMALL, "environment": environment, "algorithm": algorithm, "seed": seed, **changes})
        for environment in environments
        for seed in range(seeds)
        for algorithm in ALGORITHMS
    ]


class InlineExecutor(ProcessPoolExecutor):
    """Runs everything in this process, which is quicker than starting others."""

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of four runs: its folder, its text and its messages."""
    folder = tmp_path_factory.mktemp("compared") / "comparison"
    messages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "ProcessPoolExecutor", InlineExecutor)
        text = compare(configs_of(), folder, report=messages.append)
    return folder, text, messages


@pytest.fixture
def copy(compared, tmp_path):
    return Path(shutil.copytree(compared[0], tmp_path / "comparison"))


def states(folder):
    """When each run was last saved."""
    return {str(path.parent.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("state.pt")}


def refuse(line):
    raise AssertionError(line)


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_comparison_writes_its_runs_tables_and_plot(compared):
    folder, text, messages = compared
    assert messages[0] == "4 runs, 0 of them finished already"
    assert sorted(line.partition("]")[0] for line in messages[1:]) == [f"[{number} of 4" for number in (1, 2, 3, 4)]
    names = {f"CartPole-v1, {algorithm}, seed {seed}" for algorithm in ALGORITHMS for seed in (0, 1)}
    assert {line.partition("] ")[2].partition(": return ")[0] for line in messages[1:]} == names
    assert {path.name for path in folder.iterdir()} == {
        "CartPole-v1",
        "CartPole-v1.png",
        "comparison.md",
        "curves.csv",
        "runs.csv",
    }
    assert set(states(folder)) == {f"CartPole-v1/{name}/seed-{seed}" for name in FOLDERS for seed in (0, 1)}
    with Image.open(folder / "CartPole-v1.png") as image:
        assert image.width > 500
    assert (folder / "comparison.md").read_text() == text
    assert "1,000 environment steps per run" in text
    assert "seeds 0, 1; returns measured on 4 held-out starts" in text
    assert table(folder / "curves.csv")[0]["environment"] == "CartPole-v1"


def test_the_runs_of_a_comparison_are_the_same_as_single_runs(compared, tmp_path):
    folder, _, _ = compared
    lines = {(line["algorithm"], int(line["seed"])): line for line in table(folder / "runs.csv")}
    assert len(lines) == 4
    for config in configs_of(seeds=1):
        path = folder / "CartPole-v1" / FOLDERS[ALGORITHMS.index(config.algorithm)] / f"seed-{config.seed}"
        alone = train(config, tmp_path / f"{config.algorithm}-{config.seed}")
        rows = [{**row, "cpu_seconds": 0} for row in read_progress(path / "progress.csv")]
        assert rows == [{**row, "cpu_seconds": 0} for row in alone.progress.rows]
        line = lines[config.algorithm, config.seed]
        assert float(line["final_greedy_return"]) == pytest.approx(rows[-1]["greedy_return"])
        assert float(line["best_greedy_return"]) == pytest.approx(max(row["greedy_return"] for row in rows))
        assert int(line["env_steps"]) == rows[-1]["env_steps"] >= 1000
        assert line["solved"] == "no"


@pytest.mark.slow
def test_parallel_processes_train_the_same_runs(compared, tmp_path):
    folder, _, _ = compared
    compare(configs_of(), tmp_path / "comparison", jobs=2, report=lambda line: None)
    for path in (path.relative_to(folder) for path in folder.rglob("progress.csv")):
        rows = [
            [{**row, "cpu_seconds": 0} for row in read_progress(root / path)]
            for root in (folder, tmp_path / "comparison")
        ]
        assert rows[0] == rows[1]


def test_finished_runs_are_not_trained_again(compared, copy, monkeypatch):
    monkeypatch.setattr(write, "plot_environment", lambda *arguments, **options: None)
    _, text, _ = compared
    before, messages = states(copy), []
    assert compare(configs_of(), copy, jobs=2, report=messages.append) == text
    assert messages == ["4 runs, 4 of them finished already"]
    assert states(copy) == before


@pytest.mark.slow
def test_only_missing_runs_are_trained_and_a_failed_one_does_not_stop_the_others(compared, copy, trouble):
    """A result is deleted; a seed and an environment that fails are added."""
    _, text, _ = compared
    trouble.write_text("raise")
    lost = copy / "CartPole-v1/grpo-fast/seed-1/result.json"
    result = read_json(lost)
    lost.unlink()
    before, messages = states(copy), []
    troubled = config_of(**SMALL, environment=TROUBLED, algorithm="grpo-fast")
    configs = [*configs_of(3), troubled]
    name = f"{TROUBLED}, grpo-fast, seed 0"
    reason = r"step \d of the episode with seed \d+, failed on action [01]: ZeroDivisionError: the pole broke"
    with pytest.raises(
        ControlError, match=rf"1 of 7 runs failed; the others are compared.*{name}: {TROUBLED}, {reason}"
    ):
        compare(configs, copy, jobs=1, report=messages.append)

    assert messages[0] == "7 runs, 3 of them finished already"
    assert len(messages) == 5
    assert [line for line in messages if "failed" in line and name in line]
    after = states(copy)
    changed = {path for path in after if after[path] != before.get(path)}
    failed = "troubled_environment_GroupwiseTroubled-v0/grpo-fast/seed-0"
    new = {f"CartPole-v1/{name}/seed-2" for name in FOLDERS}
    assert changed == {"CartPole-v1/grpo-fast/seed-1", failed} | new
    assert read_model(copy / failed / "state.pt")["progress"]["rows"][0]["greedy_return"] >= 0
    assert read_json(lost) == result  # it resumed at its end
    assert {(line["environment"], line["seed"]) for line in table(copy / "runs.csv")} == {
        ("CartPole-v1", seed) for seed in "012"
    }
    assert "seeds 0 to 2" in (copy / "comparison.md").read_text()
    assert compare(configs_of(), copy, jobs=1, report=lambda line: None) == text


@pytest.mark.slow
def test_a_killed_process_is_an_error(tmp_path, trouble):
    trouble.write_text("kill")
    configs = [config_of(**SMALL, environment=TROUBLED, algorithm="grpo-fast", seed=seed) for seed in range(2)]
    with pytest.raises(ControlError, match="process of a run ended before the run did"):
        compare(configs, tmp_path / "comparison", jobs=1, report=lambda line: None)
    assert not list((tmp_path / "comparison").rglob("result.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate_every": 100}, "seed-0 was started with evaluate_every = 500, not 100; choose another folder"),
        ({"starts": 5}, "seed-0 was started with starts = 4, not 5; choose another folder"),
        ({"threshold": 200.0}, "seed-0 was started with threshold = None, not 200.0; choose another folder"),
        ({"steps": 500}, "seed-0 was trained for 1,000 steps, not 500; choose another folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "stopped"])
def test_other_settings_in_the_same_folder_are_refused(copy, changes, message, finished):
    if not finished:
        for path in copy.rglob("result.json"):
            path.unlink()
    before = states(copy)
    with pytest.raises(ConfigError, match=message):
        compare(configs_of(**changes), copy, jobs=1, report=refuse)
    assert states(copy) == before


@pytest.fixture
def _levers():
    """An environment with two actions at a time, which the agents do not have."""
    space = gymnasium.spaces.MultiDiscrete([2, 2])
    gymnasium.register(
        LEVERS, lambda: gymnasium.wrappers.TransformAction(gymnasium.make("CartPole-v1"), lambda both: both[0], space)
    )
    yield
    gymnasium.registry.pop(LEVERS)


@pytest.mark.usefixtures("_levers")
def test_an_unsupported_environment_is_refused_before_any_training(tmp_path):
    with pytest.raises(ControlError, match=rf"{LEVERS} has the action space MultiDiscrete.* only discrete actions"):
        compare(configs_of(environments=("CartPole-v1", LEVERS)), tmp_path / "new", jobs=2, report=refuse)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_both_algorithms_are_compared_on_continuous_actions(tmp_path):
    names = ("Pendulum-v1", "MountainCarContinuous-v0")
    configs = configs_of(seeds=1, environments=names, options={"max_episode_steps": 60})
    text = compare(configs, tmp_path / "new", jobs=2, report=print)
    for name in names:
        assert f"## {name}" in text
        assert {row["algorithm"] for row in table(tmp_path / "new/runs.csv") if row["environment"] == name} == {
            *ALGORITHMS
        }


# --- interrupts ------------------------------------------------------------------------------------------------------


def wait_until(happened, process=None):
    deadline = time.monotonic() + 600
    while not happened():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_an_interrupted_comparison_continues_with_the_same_command(tmp_path, trouble, capsys):
    """Ctrl-C in a terminal reaches the workers too. One is in the middle of a run, and the next run is queued."""
    trouble.write_text("wait")
    folder, config = tmp_path / "comparison", {"environment": TROUBLED, "steps": 1500, "starts": 3}
    words = ["control", "compare", "--envs", TROUBLED, "--algos", "grpo-fast", "--seeds", "2", "--jobs", "1"]
    words += ["--steps", "1500", "--starts", "3", "--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "groupwise", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(trouble.parent), *sys.path)))},
        start_new_session=True,
        # A test run in the background ignores SIGINT, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    first = folder / "troubled_environment_GroupwiseTroubled-v0/grpo-fast/seed-0"
    wait_until(trouble.with_name("waiting").exists, process)
    worker = json.loads((first / ".holder.json").read_text())["pid"]
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=600)
    assert process.returncode == 130
    assert out == "2 runs, 0 of them finished already\n"
    assert error == "groupwise: interrupted; every run is saved, and the same command continues them\n"
    assert is_gone(worker)
    assert [path.name for path in first.parent.iterdir()] == ["seed-0"]
    assert not (first / "result.json").exists()
    assert 0 < read_model(first / "state.pt")["progress"]["env_steps"] < 1500

    trouble.write_text("")
    assert groupwise(words) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"2 runs, 0 of them finished already\n[1 of 2] {TROUBLED}, grpo-fast, seed 0: return ")
    assert f"{folder} has comparison.md, runs.csv, curves.csv" in out
    assert (folder / "comparison.md").read_text() in out
    uninterrupted = train(config_of(algorithm="grpo-fast", **config), tmp_path / "uninterrupted")
    rows = [{**row, "cpu_seconds": 0} for row in read_progress(first / "progress.csv")]
    assert rows == [{**row, "cpu_seconds": 0} for row in uninterrupted.progress.rows]


WATCHING = """
import os, time
from multiprocessing import get_context
from pathlib import Path


def work():
    from groupwise.rundir import end_with_parent

    end_with_parent()
    Path("unfinished").write_text(str(os.getpid()))
    os.rename("unfinished", "pid")
    time.sleep(3600)


if __name__ == "__main__":
    worker = get_context("spawn").Process(target=work)
    worker.start()
    while worker.is_alive() and not Path("pid").exists():
        time.sleep(0.02)
    os._exit(1)
"""


@pytest.mark.slow
def test_a_worker_ends_with_its_parent(tmp_path):
    (tmp_path / "watching.py").write_text(WATCHING)
    done = subprocess.run([sys.executable, "watching.py"], cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 1
    worker = int((tmp_path / "pid").read_text())
    wait_until(lambda: is_gone(worker))
