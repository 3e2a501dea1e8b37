"""Code of a user that ends the process, or raises what is no Exception: an error with status 2, never a success."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.cli import main

ROOT = Path(__file__).parents[2]
CODE = """
import os, sys
from groupwise.tasks import Task

def leave():
    {action}

def reward(completions, **columns):
    leave()

def build(x):
    leave()

def task(recipe):
    leave()

def graded(recipe):
    rows = [{{"prompt": "a"}}] * 4
    return Task("t", rows, rows, grades={{"right": lambda row, text: leave()}}, metric="right")

def loss(tokens, settings):
    leave()

def advantage(rewards, groups, weights):
    leave()

def grouping(batch):
    leave()

def numbers(completions, **columns):
    return [float(number % 2) for number in range(len(completions))]
"""
SMALL = [
    "--train.steps=1", "--train.batch_size=2", "--train.accumulation=1", "--sampling.samples_per_prompt=2",
    "--sampling.max_new_tokens=4", "--evaluate.before_training=true",
]  # fmt: skip
PLACES = {
    "reward": ["--data.train=rows.jsonl"],
    "build": ["--data.train=rows.jsonl"],
    "task": ["--task=code.py:task"],
    "graded": ["--task=code.py:graded"],
    "loss": ["--data.train=rows.jsonl", "--loss.name=code.py:loss"],
    "advantage": ["--data.train=rows.jsonl", "--advantages.function=code.py:advantage"],
    "grouping": ["--data.train=rows.jsonl", "--advantages.grouping=code.py:grouping"],
}
ENVIRONMENT = """
import os, sys
import gymnasium
import numpy as np

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {{}}

    def step(self, action):
        {action}

gymnasium.register("Leaves-v0", entry_point="leaving:Env", max_episode_steps=5)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return tmp_path


def write(where, action):
    Path("code.py").write_text(CODE.format(action=action))
    function = {"reward": "code.py:reward", "build": "code.py:build"}.get(where, "code.py:numbers")
    options = "options = { x = 1 }\n" if where == "build" else ""
    Path("recipe.toml").write_text(f'[[rewards]]\nfunction = "{function}"\n{options}')


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("action", ["sys.exit(0)", "raise GeneratorExit"])
def test_a_function_that_ends_the_process(place, where, action, capsys):
    write(where, action)
    assert main(["train", "recipe.toml", *PLACES[where], *SMALL]) == 2
    error = capsys.readouterr().err
    assert "code.py" in error
    assert ("SystemExit" if "exit" in action else "GeneratorExit") in error
    assert "line 6" in error


def test_a_file_that_ends_the_process_when_it_is_imported(place, capsys):
    Path("code.py").write_text("import sys\nsys.exit(0)\n")
    Path("recipe.toml").write_text('[[rewards]]\nfunction = "code.py:reward"\n')
    assert main(["train", "recipe.toml", "--data.train=rows.jsonl", *SMALL]) == 2
    assert "its import raised SystemExit: 0 (code.py, line 2)" in capsys.readouterr().err


def test_the_exit_of_the_process_is_what_it_was_before(place):
    exit_now = os._exit
    assert main(["train", "no-such-recipe.toml"]) == 2
    assert os._exit is exit_now


def run(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "groupwise", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


@pytest.mark.slow
def test_a_reward_that_calls_os_exit(place):
    write("reward", "os._exit(0)")
    done = run("train", "recipe.toml", *PLACES["reward"], *SMALL)
    assert done.returncode == 2
    assert "code.py, line 6: code that is not groupwise's ended the command" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "command"),
    [("os._exit(0)", "train"), ("sys.exit(0)", "train"), ("os._exit(0)", "compare")],
)
def test_an_environment_that_ends_the_process(place, action, command):
    Path("leaving.py").write_text(ENVIRONMENT.format(action=action))
    options = {
        "train": ["--env=leaving:Leaves-v0", "--out=run"],
        "compare": ["--envs=leaving:Leaves-v0", "--out=runs", "--seeds=1", "--jobs=1"],
    }
    done = run("control", command, *options[command], "--steps=20", "--starts=1")
    assert done.returncode == 2
    assert ("os._exit" if "os" in action else "called sys.exit(0)") in done.stderr
    assert "Traceback" not in done.stderr
