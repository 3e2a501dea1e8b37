"""Control: environments that misbehave at some step, and saved models and checkpoints with something wrong in them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from groupwise.control.main import train
from groupwise.control.models import load_agent
from groupwise.control.settings import config_of
from groupwise.errors import ControlError
from tests.fuzz import accepted, many
from tests.fuzz.mutate import JUNK, as_json, damaged, mutated

pytestmark = pytest.mark.filterwarnings("ignore")  # of gymnasium and NumPy about odd values
PLACES = ("make", "observation_space", "action_space", "reset", "step", "close")
RAISED = (SystemExit(0), SystemExit("\x1b[2J"), GeneratorExit(), StopIteration(), MemoryError(), RecursionError("deep"))
SPACES: list[Any] = [
    None, spaces.Discrete(3), spaces.Discrete(10**12), spaces.MultiBinary(4), spaces.MultiDiscrete([3, 2]),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,)))), spaces.Dict(a=spaces.Box(-np.inf, np.inf, (1,))),
    spaces.Box(-1, 1, (2, 2)), spaces.Box(-1, 1, (0,)), spaces.Text(5), spaces.Box(0, 255, (3,), np.uint8),
]  # fmt: skip


class Faulty(gym.Env):
    """Three numbers, two actions, five steps; ``fault`` says what goes wrong, where, and at which call."""

    fault: tuple[str, int, Any] = ("", 0, None)  # set by the test

    def __init__(self) -> None:
        self.calls = 0
        self.observation_space = self._faulty("observation_space", spaces.Box(-1, 1, (3,)))
        self.action_space = self._faulty("action_space", spaces.Discrete(2))
        self._faulty("make", None)

    def _faulty(self, place: str, value: Any) -> Any:
        where, call, fault = self.fault
        if place != where:
            return value
        self.calls += 1
        if self.calls < call:
            return value
        if isinstance(fault, BaseException):
            raise fault
        return fault

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.length = 0
        return self._faulty("reset", (np.zeros(3, np.float32), {}))

    def step(self, action: Any) -> Any:
        self.length += 1
        return self._faulty("step", (np.zeros(3, np.float32), float(action), self.length >= 5, False, {}))

    def close(self) -> None:
        self._faulty("close", None)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    gym.register("GroupwiseFaulty-v0", entry_point=Faulty, max_episode_steps=5)
    yield
    del gym.registry["GroupwiseFaulty-v0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("control") / "run"
    Faulty.fault = ("", 0, None)
    train(settings(), folder).close()
    return folder


def settings(**changes: Any) -> Any:
    values = {"environment": "GroupwiseFaulty-v0", "algorithm": "grpo:group_size=2:groups=1", "starts": 1, "steps": 20}
    return config_of(**{**values, **changes})


@st.composite
def step_results(draw: st.DrawFn) -> Any:
    parts = [np.zeros(3, np.float32), 1.0, False, False, {}]
    place = draw(st.integers(0, 4))
    odd = [
        np.full(3, np.nan),
        np.zeros(4),
        np.zeros((3, 1)),
        "abc",
        np.array([1, 2]),
        10**400,
        float("inf"),
        1e308,
        "3",
    ]
    parts[place] = draw(st.one_of(st.sampled_from(odd), JUNK))
    return tuple(parts[: draw(st.sampled_from([5, 5, 5, 4]))])


FAULTS = st.one_of(
    st.tuples(st.sampled_from(PLACES), st.integers(1, 20), st.sampled_from(RAISED)),
    st.tuples(st.just("step"), st.integers(1, 20), st.one_of(step_results(), JUNK)),
    st.tuples(st.just("reset"), st.integers(1, 6), st.one_of(step_results().map(lambda parts: parts[:2]), JUNK)),
    st.tuples(st.sampled_from(["observation_space", "action_space"]), st.just(1), st.sampled_from(SPACES)),
)


@many(2)
@given(FAULTS, st.sampled_from(["grpo:group_size=2:groups=1", "ppo:steps=10:environments=2:minibatches=1:epochs=1"]))
def test_environments_that_misbehave(fault, algorithm):
    def play(folder: str) -> None:
        Faulty.fault = fault
        training = train(settings(algorithm=algorithm), Path(folder) / "run")
        training.close()

    with tempfile.TemporaryDirectory() as folder:
        try:
            accepted("control: environments", lambda: play(folder))
        finally:
            Faulty.fault = ("", 0, None)


@contextmanager
def copy_of(run: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(shutil.copytree(run, Path(name) / "run"))


@many(3)
@given(st.data())
def test_saved_models(run, data):
    with copy_of(run) as folder:
        if data.draw(st.booleans()):
            about = data.draw(mutated(json.loads((folder / "best_model.json").read_bytes())))
            (folder / "best_model.json").write_bytes(as_json(about))
        else:
            file = data.draw(st.sampled_from(["best_model.json", "best_model.pt"]))
            (folder / file).write_bytes(data.draw(damaged((folder / file).read_bytes())))
        accepted("control: saved models", lambda: load_agent(folder))


@many(3)
@given(st.data())
def test_checkpoints(run, data):
    """Every entry of a checkpoint may be missing or have another value."""
    with copy_of(run) as folder:
        if data.draw(st.booleans()):
            state = torch.load(folder / "state.pt", weights_only=True)
            plain = {key: state[key] for key in ("config", "progress", "generators", "format")}
            changed = data.draw(mutated(plain))
            changed = changed if isinstance(changed, dict) else {**plain, "progress": changed}
            state = {key: value for key, value in state.items() if key not in plain} | changed
            if data.draw(st.booleans()):
                state[data.draw(st.sampled_from(sorted(state)))] = data.draw(JUNK)
            torch.save(state, folder / "state.pt")
        else:
            file = data.draw(st.sampled_from(["state.pt", "config.json", "metrics.jsonl"]))
            (folder / file).write_bytes(data.draw(damaged((folder / file).read_bytes())))
        accepted("control: checkpoints", lambda: train(settings(steps=30), folder, resume=True).close())


def test_a_run_without_faults_is_accepted(run, monkeypatch):
    assert load_agent(run)[0].environment == "GroupwiseFaulty-v0"
    monkeypatch.setattr(Faulty, "fault", ("reset", 1, SystemExit(0)))
    with pytest.raises(ControlError, match=r"called sys\.exit\(0\)"):
        train(settings(), run.parent / "other")
