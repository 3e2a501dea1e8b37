"""A run: its files, resuming, evaluations, and failures."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from itertools import accumulate, pairwise
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from PIL import Image

from groupwise.control import main as control
from groupwise.control.algorithms import GRPOAgent, make_agent, play_out
from groupwise.control.environments import HELD_OUT, make_environments
from groupwise.control.main import CONFIG, Training, grpo_updates, main, read_progress, train
from groupwise.control.models import load_agent, read_model
from groupwise.control.play import play
from groupwise.control.settings import config_of, settings_of
from groupwise.control.utils import SeededGymEnv
from groupwise.errors import CheckpointError, ConfigError, ControlError, RunDirError
from groupwise.rundir import RunDir, read_json, read_metrics, write_json

SMALL = {"steps": 1000, "starts": 3, "evaluate_every": 256, "save_every": 2}
GRPO = "grpo-fast:groups=2:group_size=4"  # 8 episodes an update
PPO = "ppo-fast:steps=256:epochs=2:minibatch=128"
COLUMNS = ["update", "env_steps", "cpu_seconds", "greedy_return", "sampled_return"]


class Walk(gymnasium.Env):
    """A noisy walk between two walls. The steps of all members are counted together.

    ``trouble`` is (place, number, kind): what happens at that step of the training or of the evaluations.
    """

    taken: ClassVar = {"training": 0, "evaluation": 0}
    trouble: tuple[str, int, str] | None = None
    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Discrete(2)

    @classmethod
    def begin(cls, trouble=None):
        cls.taken, cls.trouble = {"training": 0, "evaluation": 0}, trouble

    @classmethod
    def clock(cls):
        return float(sum(cls.taken.values()))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = "evaluation" if seed >= HELD_OUT else "training"
        self.position, self.noise = self.np_random.normal(scale=0.1), 0.0
        return np.float32([self.position, self.noise]), {}

    def step(self, action):
        self.taken[self.place] += 1
        self.noise = self.np_random.normal(scale=0.3)
        self.position += self.noise + 0.2 * (2 * action - 1)
        observation, reward = np.float32([self.position, self.noise]), 1.0
        if self.trouble and self.trouble[:2] == (self.place, self.taken[self.place]):
            kind = self.trouble[2]
            if kind == "raise":
                raise ZeroDivisionError("the pole broke")
            if kind == "signal":
                os.kill(os.getpid(), signal.SIGINT)
            observation, reward = (
                np.where(kind == "observation", np.nan, observation),
                {"reward": np.nan}.get(kind, 1.0),
            )
        return observation, reward, bool(abs(self.position) > 1), False, {}


class Scripted(gymnasium.Env):
    """Episodes of one step. The greedy return of evaluation n is ``script[n]``, its sampled return is 100."""

    script: ClassVar = [1.0, 9.0, 1.0, 9.0, 9.0, 3.0, 9.0, 9.0, 0.0, 0.0, 0.0]
    played = 0  # episodes from held-out starts; with one start, two per evaluation
    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.reward = None
        if seed >= HELD_OUT:
            number, sampled = divmod(Scripted.played, 2)
            self.reward = 100.0 if sampled else self.script[number]
            Scripted.played += 1
        return np.float32(self.np_random.normal(size=2)), {}

    def step(self, action):
        reward = self.np_random.normal() + action if self.reward is None else self.reward
        return np.float32(self.np_random.normal(size=2)), reward, True, False, {}


class Blank(Walk):
    """It claims to render frames, but returns None."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return None


class Levers(Walk):
    """Two actions at a time, which the agents do not have."""

    action_space = spaces.MultiDiscrete([2, 3])


WALK, SCRIPTED, BLANK = "GroupwiseWalk-v0", "GroupwiseScripted-v0", "GroupwiseBlank-v0"
LEVERS = "GroupwiseLevers-v0"


@pytest.fixture(scope="module", autouse=True)
def _environments():
    gymnasium.register(WALK, entry_point=Walk, max_episode_steps=60)
    gymnasium.register(BLANK, entry_point=Blank, max_episode_steps=60)
    gymnasium.register(LEVERS, entry_point=Levers)
    gymnasium.register(SCRIPTED, entry_point=Scripted, reward_threshold=9.0)
    yield
    for name in (WALK, BLANK, LEVERS, SCRIPTED):
        gymnasium.registry.pop(name)


@pytest.fixture(autouse=True)
def _reset_environments():
    Walk.begin()
    Scripted.played = 0


def small(**changes):
    return config_of(**{**SMALL, "algorithm": GRPO, **changes})


def rows_of(folder):
    """The rows of progress.csv without the CPU seconds."""
    return [
        {name: row[name] for name in row if name != "cpu_seconds"} for row in read_progress(folder / "progress.csv")
    ]


def weights(path):
    model = read_model(path / "state.pt" if path.is_dir() else path)
    return {name: weight.tolist() for name, weight in model["weights"].items()}


def assert_same_run(one, other):
    """The same rows, metrics, weights, optimizer, generators and models, bit for bit."""
    assert rows_of(one) == rows_of(other)
    assert read_metrics(one / "metrics.jsonl") == read_metrics(other / "metrics.jsonl")
    models = [path.relative_to(one) for path in sorted(one.rglob("*.pt"))]
    assert models == [path.relative_to(other) for path in sorted(other.rglob("*.pt"))]
    assert len(models) >= 2
    for name in models:
        assert weights(one / name) == weights(other / name), name
    states = [read_model(folder / "state.pt") for folder in (one, other)]
    assert states[0]["generators"] == states[1]["generators"]
    moments = [[value.tolist() for value in state["optimizer"]["state"][0].values()] for state in states]
    assert moments[0] == moments[1]
    results = [read_json(folder / "result.json") | {"cpu_seconds": 0} for folder in (one, other)]
    assert results[0] == results[1]


def stop_at(number):
    """A report function that presses Ctrl-C at the row of that number."""
    rows = []

    def report(row):
        rows.append(row)
        if len(rows) == number + 1:
            os.kill(os.getpid(), signal.SIGINT)

    return report


def python(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, **options)


# --- the files of a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_the_files_of_a_run(tmp_path, algorithm):
    reported = []
    threads, one_dnn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    training = train(small(algorithm=algorithm), tmp_path / "run", report=reported.append)
    assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == (threads, one_dnn)
    folder, updates = tmp_path / "run", training.progress.update
    assert updates > 3
    saved = {f"models/update-{number}.{kind}" for number in range(2, updates + 1, 2) for kind in ("pt", "json")}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".lock"}
    expected = {"config.json", "progress.csv", "result.json", "state.pt", "metrics.jsonl", "run.json"}
    assert files == expected | {"best_model.pt", "best_model.json"} | saved
    assert read_json(folder / "config.json") == small(algorithm=algorithm).model_dump(mode="json")

    rows = read_progress(folder / "progress.csv")
    assert rows == reported == training.progress.rows
    header = (folder / "progress.csv").read_text().splitlines()[0].split(",")
    assert header[:5] == COLUMNS
    special = {"zero_spread_groups", "group_spread"} if algorithm == GRPO else {"value_loss"}
    assert {"clip_fraction", "entropy", "episode_length", "loss", "approx_kl", "train_return"} | special == set(
        header[5:]
    )
    assert list(rows[0]) == COLUMNS
    assert rows[0]["update"] == rows[0]["env_steps"] == rows[0]["cpu_seconds"] == 0

    metrics = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, updates + 1))
    for before, row in pairwise(rows):
        between = [update for update in metrics if before["update"] < update["step"] <= row["update"]]
        assert row["env_steps"] == between[-1]["env_steps"]
        assert row["env_steps"] - before["env_steps"] >= 256 or row is rows[-1]
        assert len(between) == 1 or between[-2]["env_steps"] - before["env_steps"] < 256
        assert row["cpu_seconds"] > before["cpu_seconds"]
        for name in header[5:]:
            values = [update[name] for update in between if name in update]
            assert row[name] == pytest.approx(np.mean(values), rel=1e-12)

    last = rows[-1]
    assert last["env_steps"] >= SMALL["steps"] > metrics[-2]["env_steps"]
    assert read_json(folder / "result.json") == {
        "env_steps": last["env_steps"],
        "cpu_seconds": last["cpu_seconds"],
        "greedy_return": last["greedy_return"],
        "sampled_return": last["sampled_return"],
        "best": list(max((row["greedy_return"], row["sampled_return"]) for row in rows)),
        "threshold": 475.0,
        "solved_at": None,
    }


@pytest.mark.parametrize("algorithm", [GRPO, pytest.param(PPO, marks=pytest.mark.slow)])
def test_a_run_depends_on_its_seed_and_not_on_the_threads(tmp_path, algorithm):
    for name, seed, threads in (("one", 0, 1), ("same", 0, 2), ("other", 1, 1)):
        torch.set_num_threads(threads)
        train(small(algorithm=algorithm, seed=seed, steps=800), tmp_path / name)
        assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "same")
    assert weights(tmp_path / "one") == weights(tmp_path / "same")
    pairs = list(zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "other"), strict=False))
    assert all(one != other for one, other in pairs)
    agent = make_agent(SeededGymEnv("CartPole-v1").shape, settings_of(algorithm), 0)
    held_out = make_environments("CartPole-v1", 3)
    first = rows_of(tmp_path / "one")[0]
    for kind in ("greedy", "sampled"):
        returns = play_out(agent, held_out, range(HELD_OUT, HELD_OUT + 3), greedy=kind == "greedy")
        assert first[f"{kind}_return"] == returns.mean()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"update,env_steps\n1,many\n", b"update\n1,2\n"])
def test_a_damaged_progress_file_is_refused(tmp_path, content):
    (tmp_path / "progress.csv").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"progress.csv cannot be read"):
        read_progress(tmp_path / "progress.csv")


def test_a_progress_file_without_a_column_is_refused(tmp_path):
    (tmp_path / "progress.csv").write_text("update,env_steps,cpu_seconds,sampled_return\n0,0,0,9\n")
    with pytest.raises(CheckpointError, match=r"row 1 has no greedy_return; train this run again"):
        read_progress(tmp_path / "progress.csv")


def test_an_existing_run_is_not_overwritten_unless_asked(tmp_path):
    train(small(steps=1), tmp_path / "run")
    before = rows_of(tmp_path / "run")
    with pytest.raises(RunDirError, match="already holds a run"):
        train(small(seed=1), tmp_path / "run")
    assert rows_of(tmp_path / "run") == before
    train(small(seed=1, steps=1, save_every=50), tmp_path / "run", overwrite=True)
    assert rows_of(tmp_path / "run") != before
    assert not (tmp_path / "run/models").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"environment": LEVERS}, ControlError, "only discrete actions .* and continuous"),
        ({"environment": "CartPole-v7"}, ControlError, "'CartPole-v7' cannot be created"),
        ({"options": {"wind": 3}}, ControlError, "cannot be created: .*wind"),
        ({"algorithm": "grpo-fest"}, ConfigError, "did you mean 'grpo-fast'"),
        ({"steps": 0}, ConfigError, "steps must be at least 1, got 0"),
        ({"seed": -1}, ConfigError, "seed must be at least 0, got -1"),
        ({"threshold": float("nan")}, ConfigError, "threshold must be finite, got nan"),
        ({"start": 3}, ConfigError, "start is not a setting, got 3"),
    ],
    ids=lambda value: next(iter(value)) + str(*value.values()) if isinstance(value, dict) else "",
)
def test_invalid_configurations_are_refused_before_a_folder_is_created(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        train(small(**changes), tmp_path / "run")
    assert not list(tmp_path.iterdir())


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": GRPO},
        pytest.param(
            {"algorithm": f"{GRPO}:epochs=2:kl_coef=0.1:independent_noise=true", "environment": WALK},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["vectorised", "loop"],
)
def test_grpo_resumes_to_the_same_bits(tmp_path, changes):
    config = small(**changes)
    train(config, tmp_path / "uninterrupted")
    for stop in (0, 2):  # it stops after the update that follows this row
        folder = tmp_path / f"stopped-{stop}"
        stopped = train(config, folder, report=stop_at(stop))
        assert stopped.exit_status == 130
        assert stopped.progress.env_steps < config.steps
        assert len(stopped.progress.rows) == stop + 1
        assert not (folder / "result.json").exists()
        reported = []
        resumed = train(config, folder, resume=True, report=reported.append)
        assert resumed.exit_status == 0
        assert reported == read_progress(folder / "progress.csv")
        assert_same_run(folder, tmp_path / "uninterrupted")


@pytest.mark.parametrize(
    "environment", ["Pendulum-v1", pytest.param("MountainCarContinuous-v0", marks=pytest.mark.slow)]
)
def test_continuous_actions_are_trained_resumed_and_played(tmp_path, environment):
    for algorithm in (GRPO, PPO):
        config = small(environment=environment, algorithm=algorithm, options={"max_episode_steps": 40}, save_every=1)
        folder = tmp_path / algorithm.partition(":")[0]
        stopped = train(config, folder, report=stop_at(1))
        assert 0 < stopped.progress.env_steps < config.steps
        training = train(config, folder, resume=True)
        assert training.progress.env_steps >= config.steps
        weights = torch.load(folder / "best_model.pt", weights_only=True)
        assert weights["actor.log_std"].shape == (1,)
        make_agent(training.environments.shape, config.settings, 5).load_state_dict(weights)
        last = read_metrics(folder / "metrics.jsonl")[-1]
        assert last["entropy"] == pytest.approx(1.42, abs=0.2)  # ½ log 2πe for a standard deviation of 1
        if algorithm == GRPO:
            assert training.agent.actor.log_std.item() != 0
            train(config, tmp_path / "uninterrupted")
            assert_same_run(folder, tmp_path / "uninterrupted")
    _, agent = load_agent(folder)
    returns = play_out(agent, training.evaluation, range(HELD_OUT, HELD_OUT + 3), greedy=True)
    assert returns.mean() == pytest.approx(read_json(folder / "best_model.json")["scores"]["greedy_return"])
    assert play([folder], out=tmp_path / "play.gif") == pytest.approx(returns[:1], rel=1e-4)
    assert read_gif(tmp_path / "play.gif")[1] > 3


def test_ppo_resumes_with_its_weights_optimizer_and_counters(tmp_path):
    config = small(algorithm=PPO, save_every=50)
    stopped = train(config, tmp_path / "run", report=stop_at(3))
    progress = stopped.progress
    assert (stopped.exit_status, progress.update, progress.env_steps) == (130, 3, 3 * 256)
    again = Training(config)
    with RunDir.resume(tmp_path / "run") as run:
        again.restore(run)
    assert again.progress == progress
    pairs = zip(again.agent.parameters(), stopped.agent.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    before, after = (agent.optimizer.state_dict()["state"] for agent in (stopped.agent, again.agent))
    assert {place: {name: value.tolist() for name, value in state.items()} for place, state in after.items()} == {
        place: {name: value.tolist() for name, value in state.items()} for place, state in before.items()
    }
    rows = rows_of(tmp_path / "run")
    resumed = train(config, tmp_path / "run", resume=True)
    assert rows_of(tmp_path / "run")[: len(rows)] == rows
    assert [row["update"] for row in rows_of(tmp_path / "run")] == [0, 1, 2, 3, 4]
    assert resumed.progress.env_steps == 4 * 256 == read_json(tmp_path / "run/result.json")["env_steps"]
    assert resumed.progress.cpu_seconds > progress.cpu_seconds
    moments = resumed.agent.optimizer.state_dict()["state"][0]
    assert moments["step"] == 4 * 2 * 2  # updates, passes, mini-batches


KILLED = """
import os, signal, sys
from pathlib import Path
from groupwise.control.main import config_of, train

def report(row):
    if row["update"] == 5:
        os.kill(os.getpid(), signal.SIGKILL)

train(config_of(**eval(sys.argv[2])), Path(sys.argv[1]), report=report)
"""


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_checkpoint(tmp_path):
    config = small(evaluate_every=1, save_every=3, steps=2000)
    uninterrupted = train(config, tmp_path / "uninterrupted")
    assert uninterrupted.progress.update > 5
    done = python("-c", KILLED, str(tmp_path / "killed"), repr(config.model_dump()))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(rows_of(tmp_path / "killed")) == 6
    assert read_metrics(tmp_path / "killed/metrics.jsonl")[-1]["step"] == 5
    assert read_model(tmp_path / "killed/state.pt")["progress"]["update"] == 3
    (tmp_path / "killed/.unfinished-12345678-state.pt").write_bytes(b"half")
    train(config, tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "killed", tmp_path / "uninterrupted")


def test_two_interrupts_end_a_run_at_once_and_an_unsaved_run_cannot_be_resumed(tmp_path):
    def report(row):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(small(), tmp_path / "run", report=report)
    with pytest.raises(CheckpointError, match=r"state.pt does not exist; a run writes .* state.pt every"):
        train(small(), tmp_path / "run", resume=True)
    with pytest.raises(RunDirError, match="nothing to resume"):
        train(small(), tmp_path / "nowhere", resume=True)
    assert train(small(steps=1), tmp_path / "run", overwrite=True).exit_status == 0


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"algorithm": f"{GRPO}:lr=0.1"}, ("algorithm", f"'{GRPO}'", f"'{GRPO}:lr=0.1'")),
        ({"environment": "Acrobot-v1"}, ("environment", "'CartPole-v1'", "'Acrobot-v1'")),
        ({"options": {"sutton_barto_reward": True}}, ("options", r"\{\}", r"\{'sutton_barto_reward': True\}")),
        ({"seed": 7}, ("seed", "0", "7")),
        ({"starts": 5}, ("starts", "3", "5")),
        ({"evaluate_every": 100}, ("evaluate_every", "256", "100")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_run_resumes_only_with_its_configuration(tmp_path, changes, values):
    train(small(), tmp_path / "run", report=stop_at(1))
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    name, before, after = values
    with pytest.raises(ConfigError, match=rf"run was started with {name} = {before}, not {after};"):
        train(small(**changes), tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files


def test_a_finished_run_is_unchanged_or_continues_with_more_steps(tmp_path):
    folder = tmp_path / "run"
    first = train(small(), folder)
    kept = ("progress.csv", "best_model.pt", "result.json", "metrics.jsonl", "config.json")
    before, saved = {name: (folder / name).read_bytes() for name in kept}, weights(folder)
    assert train(small(), folder, resume=True).progress == first.progress
    assert {name: (folder / name).read_bytes() for name in kept} == before
    assert weights(folder) == saved

    rows = rows_of(folder)
    longer = small(steps=2000)
    stopped = train(longer, folder, resume=True, report=stop_at(len(rows)))
    assert stopped.exit_status == 130
    assert not (folder / "result.json").exists()  # the old one would mark this run as finished
    train(longer, folder, resume=True)
    assert rows_of(folder)[: len(rows)] == rows
    assert read_json(folder / "config.json")["steps"] == 2000
    assert read_json(folder / "result.json")["env_steps"] == rows_of(folder)[-1]["env_steps"] >= 2000
    train(longer, tmp_path / "uninterrupted")
    assert weights(folder) == weights(tmp_path / "uninterrupted")


def test_a_stopped_run_with_a_smaller_budget_is_evaluated_and_ends(tmp_path):
    config = small(evaluate_every=10_000)
    stopped = train(config, tmp_path / "run", report=stop_at(0))
    steps = stopped.progress.env_steps
    resumed = train(small(evaluate_every=10_000, steps=steps), tmp_path / "run", resume=True)
    assert resumed.progress.update == 1
    assert [row["env_steps"] for row in rows_of(tmp_path / "run")] == [0, steps]
    returns = play_out(resumed.agent, make_environments("CartPole-v1", 3), range(HELD_OUT, HELD_OUT + 3), greedy=True)
    assert (
        read_json(tmp_path / "run/result.json")["greedy_return"]
        == returns.mean()
        == rows_of(tmp_path / "run")[1]["greedy_return"]
    )


# --- evaluation ------------------------------------------------------------------------------------------------------


def reference_return(config, agent, seed):
    """The return of one greedy episode of the plain Gymnasium environment."""
    environment = gymnasium.make(config.environment, **config.options)
    observation, _ = environment.reset(seed=seed)
    total, done = 0.0, False
    while not done:
        vector = spaces.flatten(environment.observation_space, observation)
        with torch.no_grad():
            action = int(agent.actor(torch.from_numpy(np.float32(vector))).argmax())
        observation, reward, terminated, truncated, _ = environment.step(action)
        total, done = total + float(reward), terminated or truncated
    return total


@pytest.mark.parametrize(
    ("environment", "options", "algorithm"),
    [
        pytest.param("CartPole-v1", {}, GRPO, marks=pytest.mark.slow),
        pytest.param("FrozenLake-v1", {"is_slippery": False}, "grpo-fast", marks=pytest.mark.slow),
        (WALK, {}, PPO),
    ],
    ids=["CartPole", "FrozenLake", "a walk"],
)
def test_the_best_model_is_that_of_the_best_row(tmp_path, environment, options, algorithm):
    config = small(environment=environment, options=options, algorithm=algorithm, starts=6, steps=1500)
    train(config, tmp_path / "run")
    rows = read_progress(tmp_path / "run/progress.csv")
    model = read_json(tmp_path / "run/best_model.json")
    assert model["scores"] == max(rows, key=lambda row: (row["greedy_return"], row["sampled_return"]))
    assert model["config"] == config.model_dump(mode="json")
    assert model["config"]["seed"] == 0
    assert model["versions"]["gymnasium"] == gymnasium.__version__
    assert {"groupwise", "python", "torch", "numpy"} <= set(model["versions"])
    loaded, agent = load_agent(tmp_path / "run")
    assert loaded == config
    returns = [reference_return(config, agent, HELD_OUT + start) for start in range(6)]
    assert np.mean(returns) == pytest.approx(model["scores"]["greedy_return"], rel=1e-12)
    assert max(returns) > 0


def test_only_a_better_evaluation_replaces_the_best_model(tmp_path):
    config = small(environment=SCRIPTED, starts=1, evaluate_every=1, save_every=1, steps=8 * 10)
    train(config, tmp_path / "run")
    assert [row["greedy_return"] for row in rows_of(tmp_path / "run")] == Scripted.script
    assert read_model(tmp_path / "run/best_model.pt")["scores"]["update"] == 1
    assert weights(tmp_path / "run/best_model.pt") == weights(tmp_path / "run/models/update-1.pt")
    assert weights(tmp_path / "run/best_model.pt") != weights(tmp_path / "run/models/update-2.pt")
    _, agent = load_agent(tmp_path / "run/models/update-2.pt")
    assert agent.actor[0].weight.tolist() == weights(tmp_path / "run/models/update-2.pt")["actor.0.weight"]


@pytest.mark.parametrize("algorithm", [GRPO, pytest.param(PPO, marks=pytest.mark.slow)])
def test_evaluation_does_not_change_training(tmp_path, algorithm):
    train(small(algorithm=algorithm, environment=WALK), tmp_path / "often")
    train(small(algorithm=algorithm, environment=WALK, evaluate_every=10**9, starts=2), tmp_path / "never")
    assert len(rows_of(tmp_path / "often")) > 3
    assert len(rows_of(tmp_path / "never")) == 2
    assert weights(tmp_path / "often") == weights(tmp_path / "never")


@pytest.mark.parametrize("algorithm", [GRPO, pytest.param(PPO, marks=pytest.mark.slow)])
def test_evaluation_does_not_count_in_steps_and_cpu_seconds(tmp_path, monkeypatch, algorithm):
    monkeypatch.setattr(control.time, "process_time", Walk.clock)  # one second per step of any environment
    train(small(algorithm=algorithm, environment=WALK), tmp_path / "run")
    last = read_progress(tmp_path / "run/progress.csv")[-1]
    assert last["env_steps"] == last["cpu_seconds"] == Walk.taken["training"]
    assert Walk.taken["evaluation"] > 100
    if algorithm == GRPO:
        metrics = read_metrics(tmp_path / "run/metrics.jsonl")
        lengths = accumulate(8 * row["episode_length"] for row in metrics)
        assert [row["env_steps"] for row in metrics] == pytest.approx(list(lengths))


@pytest.mark.parametrize(
    ("threshold", "solved"),
    [
        (None, 4),
        pytest.param(9.0, 4, marks=pytest.mark.slow),
        pytest.param(3.0, 4, marks=pytest.mark.slow),
        (0.5, 1),
        (9.5, None),
    ],
)
def test_solved_means_two_evaluations_in_a_row_at_the_threshold(tmp_path, threshold, solved):
    config = small(environment=SCRIPTED, starts=1, evaluate_every=1, steps=8 * 10, threshold=threshold)
    training = train(config, tmp_path / "run")
    rows = read_progress(tmp_path / "run/progress.csv")
    assert len(rows) == 11
    expected = None if solved is None else [rows[solved]["env_steps"], rows[solved]["cpu_seconds"]]
    assert read_json(tmp_path / "run/result.json")["solved_at"] == expected
    if solved is None:
        assert training.outcome().endswith("after 80 steps, not solved (that is 9.5 twice in a row)")
    else:
        assert f"after 80 steps, solved after {8 * solved} steps and" in training.outcome()
    Scripted.played = 0
    train(config.model_copy(update={"stop_when_solved": True}), tmp_path / "stops")
    assert rows_of(tmp_path / "stops") == rows_of(tmp_path / "run")[: 11 if solved is None else solved + 1]
    assert read_json(tmp_path / "stops/result.json")["solved_at"] is not None or solved is None


def test_a_run_that_stops_between_the_two_evaluations_keeps_the_first(tmp_path):
    config = small(environment=SCRIPTED, starts=1, evaluate_every=1, steps=8 * 10, stop_when_solved=True)
    train(config, tmp_path / "run", report=stop_at(3))
    assert [row["greedy_return"] for row in rows_of(tmp_path / "run")] == Scripted.script[:4]
    resumed = train(config, tmp_path / "run", resume=True)
    assert [row["greedy_return"] for row in rows_of(tmp_path / "run")] == Scripted.script[:5]
    assert resumed.progress.solved_at == (4 * 8, resumed.progress.cpu_seconds)


def test_an_environment_without_a_threshold_is_never_solved(tmp_path):
    training = train(small(environment=WALK, steps=500), tmp_path / "run")
    assert read_json(tmp_path / "run/result.json")["threshold"] is None
    assert training.outcome().endswith(" steps")


# --- damaged models --------------------------------------------------------------------------------------------------


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "run"
    train(small(steps=1), folder)
    return folder / "best_model.pt"


def in_torchs_format(value):
    def write(path, weights):
        torch.save(value(path, weights) if callable(value) else value, path)

    return write


def with_about(change):
    """Damage to the JSON file beside the weights."""

    def write(path, weights):
        about = path.with_suffix(".json")
        write_json(about, change(read_json(about)))

    return write


DAMAGE = {
    "empty": lambda path, weights: path.write_bytes(b""),
    "half": lambda path, weights: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "text": lambda path, weights: path.write_text("no model at all"),
    "a pickle with code": lambda path, weights: path.write_bytes(pickle.dumps(Harm(str(path.parent / "harmed")))),
    "code": in_torchs_format(lambda path, weights: weights | {"more": Harm(str(path.parent / "harmed"))}),
    "a tensor": in_torchs_format(torch.zeros(3)),
    "nothing": in_torchs_format({}),
    "somebody else's": in_torchs_format({"state_dict": {}}),
    "another format": with_about(lambda about: about | {"format": 2}),
    "no config": with_about(lambda about: {"format": 1}),
    "not an object": with_about(lambda about: [1]),
    "not JSON": lambda path, weights: path.with_suffix(".json").write_text("{"),
    "without its JSON file": lambda path, weights: path.with_suffix(".json").unlink(),
    "no weights": in_torchs_format({"format": 1, "config": {}, "weights": None}),
    "of another environment": with_about(
        lambda about: about | {"config": about["config"] | {"environment": "Acrobot-v1"}}
    ),
    "with a layer too few": in_torchs_format(lambda path, weights: dict(list(weights.items())[:-1])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_refused(tmp_path, saved_model, damage):
    path = tmp_path / "best_model.pt"
    for file in (path, path.with_suffix(".json")):
        file.write_bytes(saved_model.with_suffix(file.suffix).read_bytes())
    DAMAGE[damage](path, torch.load(path, weights_only=True))
    for place in (path, tmp_path):
        with pytest.raises(CheckpointError, match=r"is not |does not fit|is damaged|without best_model.json") as caught:
            load_agent(place)
        assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("algorithm", [f"{GRPO}:kl_coef=0.1", PPO])
def test_every_saved_model_is_a_state_dict(tmp_path, algorithm):
    training = train(small(algorithm=algorithm, save_every=1), tmp_path / "run")
    files = [tmp_path / "run/best_model.pt", *(tmp_path / "run/models").glob("*.pt")]
    assert len(files) == 1 + training.progress.update
    for path in files:
        model = make_agent(training.environments.shape, settings_of(algorithm), seed=9)
        model.load_state_dict(torch.load(path, weights_only=True))
        for name, weight in load_agent(path)[1].state_dict().items():
            assert torch.equal(weight, model.state_dict()[name])
    last = training.agent.state_dict()
    saved = torch.load(tmp_path / f"run/models/update-{training.progress.update}.pt", weights_only=True)
    assert all(torch.equal(saved[name], weight) for name, weight in last.items())


def test_models_of_earlier_versions_still_load(tmp_path, saved_model):
    weights = torch.load(saved_model, weights_only=True)
    about = read_json(saved_model.with_suffix(".json"))
    about["config"] |= {"algorithm": "grpo-paper", "settings": settings_of("grpo").model_dump(mode="json")}
    torch.save(about | {"weights": weights}, tmp_path / "best_model.pt")
    config, agent = load_agent(tmp_path)
    assert config.settings == settings_of("grpo")
    assert all(torch.equal(weight, weights[name]) for name, weight in agent.state_dict().items())


def test_a_missing_model_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"best_model.pt does not exist; a run writes best_model.pt at its first"):
        load_agent(tmp_path)


def test_a_run_cannot_be_resumed_after_its_environment_changed(tmp_path):
    train(small(steps=500, environment=WALK), tmp_path / "run")
    state = read_model(tmp_path / "run/state.pt")
    state["weights"]["actor.0.weight"] = torch.zeros(64, 5)
    torch.save(state, tmp_path / "run/state.pt")
    with pytest.raises(CheckpointError, match=rf"state.pt does not fit the installed {WALK}: (?s:.*)size mismatch"):
        train(small(steps=500, environment=WALK), tmp_path / "run", resume=True)


# --- environments that fail ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    Walk.begin()
    config = small(environment=WALK, steps=2000, save_every=100)
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(config, folder)
    return config, folder


FAULTS = {
    "raise": r"failed on action [01]: ZeroDivisionError: the pole broke",
    "observation": r"gave an observation with NaN or an infinity: \[nan, nan\]",
    "reward": r"gave the reward nan; rewards must be finite",
}


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("training", "raise"),
        pytest.param("training", "observation", marks=pytest.mark.slow),
        pytest.param("training", "reward", marks=pytest.mark.slow),
        ("evaluation", "raise"),
    ],
)
def test_a_run_is_saved_before_a_failed_update_and_resumes(tmp_path, undisturbed, place, kind):
    config, expected = undisturbed
    Walk.begin((place, 1500 if place == "training" else 600, kind))
    with pytest.raises(ControlError, match=rf"{WALK}, step \d+ of the episode with seed \d+,.*{FAULTS[kind]}"):
        train(config, tmp_path / "run")
    saved = read_model(tmp_path / "run/state.pt")["progress"]
    if place == "training":
        assert 1500 - 8 * 60 <= saved["env_steps"] < 1500
    assert read_metrics(tmp_path / "run/metrics.jsonl")[-1]["step"] == saved["update"] > 1
    Walk.begin()
    train(config, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", expected)


def test_an_environment_that_fails_at_the_first_step(tmp_path):
    Walk.begin(("evaluation", 1, "raise"))
    with pytest.raises(ControlError, match=f"{WALK}, step 1 of the episode with seed {HELD_OUT}, failed on action"):
        train(small(environment=WALK), tmp_path / "run")
    assert not (tmp_path / "run/state.pt").exists()


# --- groups ----------------------------------------------------------------------------------------------------------


class RecordingAgent(GRPOAgent):
    """An agent that keeps its episodes."""

    greedy = False

    def get_action(self, states, **options):
        return super().get_action(states, **{"greedy": self.greedy, **options})

    def update(self, buffer):
        episodes, size = buffer.episodes(), self.settings.group_size
        self.groups = [episodes[i : i + size] for i in range(0, len(episodes), size)]
        return super().update(episodes)


def groups_of(environment, algorithm, *, greedy=False):
    """The groups of the second update."""
    settings = settings_of(algorithm)
    environments = make_environments(environment, settings.groups * settings.group_size)
    agent = RecordingAgent(environments.shape, settings)
    agent.greedy = greedy
    updates = grpo_updates(agent, environments, np.random.default_rng(0))
    next(updates)
    steps, metrics = next(updates)
    assert [len(group) for group in agent.groups] == [settings.group_size] * settings.groups
    assert steps == sum(len(episode["rewards"]) for group in agent.groups for episode in group)
    returns = [float(episode["return"]) for group in agent.groups for episode in group]
    assert metrics["train_return"] == pytest.approx(np.mean(returns))
    return agent.groups


@pytest.mark.parametrize("environment", ["CartPole-v1", WALK])
def test_the_episodes_of_a_group_have_the_same_first_state(environment):
    groups = groups_of(environment, "grpo-fast")
    starts = [{tuple(episode["states"][0].tolist()) for episode in group} for group in groups]
    assert [len(group) for group in starts] == [1, 1, 1]
    assert len(set.union(*starts)) == 3
    assert any(len({len(episode["rewards"]) for episode in group}) > 1 for group in groups)
    groups = groups_of(environment, "grpo-fast:same_start=false")
    assert len({tuple(episode["states"][0].tolist()) for group in groups for episode in group}) == 24


def test_the_episodes_of_a_group_have_the_same_noise_unless_it_is_independent():
    def second_noise(groups):
        """The noise of the first step of each episode, which the walk shows."""
        return [{float(episode["states"][1, 1]) for episode in group if len(episode["states"]) > 1} for group in groups]

    shared = second_noise(groups_of(WALK, "grpo-fast"))
    assert [len(group) for group in shared] == [1, 1, 1]
    assert len(set.union(*shared)) == 3
    groups = groups_of(WALK, "grpo-fast:independent_noise=true")
    assert len(set.union(*second_noise(groups))) > 20
    assert [len({tuple(episode["states"][0].tolist()) for episode in group}) for group in groups] == [1, 1, 1]


def test_on_frozen_lake_greedy_episodes_differ_only_with_independent_noise():
    def distinct_episodes(algorithm):
        groups = groups_of("FrozenLake-v1", algorithm, greedy=True)
        return [len({episode["states"].numpy().tobytes() for episode in group}) for group in groups]

    assert distinct_episodes("grpo-fast:group_size=16") == [1, 1, 1]
    assert min(distinct_episodes("grpo-fast:group_size=16:independent_noise=true")) > 5


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "steps"), [("grpo-fast", 20_000), pytest.param("ppo-fast", 12_000, marks=pytest.mark.slow)]
)
def test_cart_pole_is_learned(tmp_path, algorithm, steps):
    train(config_of(algorithm=algorithm, steps=steps, evaluate_every=4000, starts=4), tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert rows[0]["greedy_return"] < 20  # with this seed; some new greedy policies reach 200
    assert rows[0]["sampled_return"] < 40
    assert max(row["greedy_return"] for row in rows) >= 200
    assert max(row["sampled_return"] for row in rows) >= 150


# --- python -m groupwise.control.main --------------------------------------------------------------------------------


@pytest.fixture
def _no_display(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


def read_gif(path):
    with Image.open(path) as video:
        return video.size, video.n_frames


@pytest.mark.slow
@pytest.mark.usefixtures("_no_display")
def test_main_trains_plots_and_plays_its_config(tmp_path, capsys):
    small_config = {
        **CONFIG,
        "algorithms": ["grpo-fast:lr=1e-6", f"{PPO}:lr=1e-6"],
        "steps": 500,
        "folder": str(tmp_path),
    }
    main(small_config)
    out = capsys.readouterr().out
    folders = [tmp_path / name.replace(":", "_") for name in small_config["algorithms"]]
    for folder, name in zip(folders, small_config["algorithms"], strict=True):
        assert read_json(folder / "config.json")["algorithm"] == name
        assert read_json(folder / "result.json")["env_steps"] >= 500
        assert f"{name}: return " in out
    with Image.open(tmp_path / "live.png") as image:
        assert image.format == "PNG"
    (width, _), frames = read_gif(tmp_path / "play.gif")
    assert (width, frames > 3) == (800, True)
    last_line = out.splitlines()[-1]
    returns = [reference_return(*load_agent(folder), HELD_OUT) for folder in folders]
    assert last_line.startswith(f"{tmp_path / 'play.gif'} shows them")
    assert last_line.endswith(f"returns: {returns[0]:g}, {returns[1]:g}")

    states = [(folder / "state.pt").stat().st_mtime_ns for folder in folders]
    (tmp_path / "play.gif").unlink()
    main({**small_config, "mode": "play"})
    assert capsys.readouterr().out.splitlines() == [last_line]
    assert read_gif(tmp_path / "play.gif")[0][0] == 800
    assert [(folder / "state.pt").stat().st_mtime_ns for folder in folders] == states


@pytest.mark.slow
def test_main_as_a_process(tmp_path):
    code = (
        "import groupwise.control.main as m\n"
        "m.main({**m.CONFIG, 'steps': 500, 'algorithms': ['grpo:lr=1e-6'], 'folder': 'here'})"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    done = python("-W", "error::ResourceWarning", "-c", code, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"grpo_lr=1e-6", "live.png", "play.gif"}


def test_main_refuses_another_mode(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown mode 'tain'; did you mean 'train'\? \(allowed: 'train', 'play'\)"):
        main({**CONFIG, "mode": "tain", "folder": str(tmp_path)})


@pytest.mark.usefixtures("_no_display")
def test_an_interrupt_ends_all_runs_of_main(tmp_path):
    Walk.begin(("training", 500, "signal"))
    with pytest.raises(SystemExit) as caught:
        main({**CONFIG, "environment": WALK, "algorithms": ["grpo-fast", PPO], "steps": 3000, "folder": str(tmp_path)})
    assert caught.value.code == 130
    assert {path.name for path in tmp_path.iterdir()} == {"grpo-fast", "live.png"}
    assert (tmp_path / "grpo-fast/state.pt").exists()


def test_an_environment_without_frames_has_no_video(tmp_path):
    train(small(environment=BLANK, steps=100), tmp_path / "run")
    with pytest.raises(ControlError, match=f"{BLANK} does not render frames"):
        play([tmp_path / "run"], out=tmp_path / "play.gif")
    train(small(environment=WALK, steps=100), tmp_path / "other")
    with pytest.raises(ControlError, match=f"'{WALK}' cannot be created: .*render_mode"):
        play([tmp_path / "other"], out=tmp_path / "play.gif")
    assert not (tmp_path / "play.gif").exists()


@pytest.mark.parametrize("part", ["optimizer", "generators", "progress"])
def test_a_checkpoint_with_a_damaged_part(tmp_path, part):
    """It is an error with a sentence, whether the part is missing or of another type."""
    config = config_of(environment="CartPole-v1", algorithm="grpo", steps=300, evaluate_every=100, starts=2)
    train(config, tmp_path / "run")
    file = tmp_path / "run" / "state.pt"
    state = torch.load(file, weights_only=True)
    for value in (None, [], {}, {"update": "many"}, "[1]"):
        torch.save({**state, part: value}, file)
        with pytest.raises(CheckpointError, match=r"state\.pt is damaged"):
            train(config, tmp_path / "run", resume=True)
    torch.save({name: value for name, value in state.items() if name != part}, file)
    with pytest.raises(CheckpointError, match=r"state\.pt is damaged"):
        train(config, tmp_path / "run", resume=True)
    torch.save(state, file)
    assert train(config, tmp_path / "run", resume=True).is_over
