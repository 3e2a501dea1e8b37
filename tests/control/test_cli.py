"""The command `groupwise control`: train, compare, play, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import ClassVar

import gymnasium
import imageio.v3 as imageio
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from groupwise.cli import main
from groupwise.control.algorithms import play_out
from groupwise.control.environments import HELD_OUT, make_environments
from groupwise.control.main import read_progress
from groupwise.control.models import load_agent, read_model
from groupwise.control.settings import PRESETS, settings_of
from groupwise.control.utils import LivePlotter
from groupwise.rundir import read_json

SMALL = ["--steps", "500", "--starts", "3", "--evaluate-every", "250"]
STILL = "grpo-fast:lr=1e-6"  # it hardly learns, so its videos are short
INTERRUPTED, LEVERS = "GroupwiseInterrupted-v0", "GroupwiseLevers-v0"


class Interrupted(gymnasium.Env):
    """An environment that presses Ctrl-C at its 300th step."""

    taken: ClassVar[list[int]] = []
    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.float32(self.np_random.normal(size=2)), {}

    def step(self, action):
        self.time += 1
        self.taken.append(action)
        if len(self.taken) == 300:
            os.kill(os.getpid(), signal.SIGINT)
        return np.float32(self.np_random.normal(size=2)), float(action), self.time > 5, False, {}


class Levers(Interrupted):
    """An environment with two actions at a time, which the agents do not have."""

    action_space = spaces.MultiDiscrete([2, 3])


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch, tmp_path):
    """No display, and an empty current folder."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs on CartPole and one on FrozenLake."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LivePlotter, "draw", lambda plotter: None)  # takes longer than these short runs
        for name, words in {
            "grpo": ["--algo", STILL],
            "ppo": ["--algo", "ppo-fast:lr=1e-6:steps=256:minibatch=128", "--seed", "3"],
            "lake": ["--env", "FrozenLake-v1", "--env-option", "is_slippery=false", "--env-option", "map_name=8x8"],
        }.items():
            assert main(["control", "train", *SMALL, "--out", str(root / name), *words]) == 0
    return root


@pytest.fixture
def runs(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "kept")


def refused(capsys, *words):
    """The error of a refused command: status 2, one line on the standard error, no output."""
    assert main(["control", *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("groupwise: ")
    assert error.count("\n") == 1
    return error


def greedy_returns(folder, starts):
    """The greedy returns of a run's best model from some held-out starts."""
    config, agent = load_agent(folder)
    environments = make_environments(config.environment, starts, config.options)
    return play_out(agent, environments, range(HELD_OUT, HELD_OUT + starts), greedy=True)


# --- train -----------------------------------------------------------------------------------------------------------


def test_training_prints_its_rows_its_outcome_and_the_next_command(capsys, tmp_path):
    words = ["control", "train", "--algo", STILL, "--seed", "5", "--save-every", "1", *SMALL]
    assert main(words) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-CartPole-v1-grpo-fast_lr_1e-6")
    config = read_json(folder / "config.json")
    expected = {"environment": "CartPole-v1", "algorithm": STILL, "seed": 5, "steps": 500, "starts": 3}
    assert config | expected | {"evaluate_every": 250, "save_every": 1} == config
    rows = read_progress(folder / "progress.csv")
    out, error = capsys.readouterr()
    assert error == ""
    *lines, outcome, ending = out.splitlines()
    assert len(lines) == len(rows) > 1
    for line, row in zip(lines, rows, strict=True):
        assert line.split()[:2] == [f"{row['env_steps']:,.0f}", "steps"]
        assert f"greedy {row['greedy_return']:8.2f}   sampled {row['sampled_return']:8.2f}" in line
    last = rows[-1]
    assert outcome == (
        f"return {last['greedy_return']:g} greedy and {last['sampled_return']:g} sampled after "
        f"{last['env_steps']:,.0f} steps, not solved (that is 475 twice in a row)"
    )
    name = folder.relative_to(tmp_path)
    assert ending == f"{name} has the curve (progress.png) and the best model; watch it: groupwise control play {name}"
    with Image.open(folder / "progress.png") as image:
        assert image.format == "PNG"
    assert len(list((folder / "models").glob("*.pt"))) == last["update"]


def test_options_reach_the_environment(runs):
    config, _ = load_agent(runs / "lake")
    assert config.options == {"is_slippery": False, "map_name": "8x8"}
    assert read_model(runs / "lake/best_model.pt")["weights"]["actor.0.weight"].shape == (64, 64)  # 8 × 8 places
    starts = greedy_returns(runs / "lake", 6)
    assert len(set(starts)) == 1  # without slipping every episode is the same


@pytest.mark.slow
def test_options_reach_the_environments_of_a_comparison(capsys, tmp_path):
    words = ["compare", "--envs", "FrozenLake-v1", "--algos", "grpo-fast", "--seeds", "1", "--jobs", "1", *SMALL]
    words += ["--out", "lakes", "--env-option"]
    assert main(["control", *words, "map_name=8x8"]) == 0
    (config,) = (read_json(path) for path in tmp_path.rglob("config.json"))
    assert config["options"] == {"map_name": "8x8"}
    assert len(load_agent(next(tmp_path.rglob("best_model.pt")))[1].actor[0].weight.T) == 64
    capsys.readouterr()
    assert "was started with options = {'map_name': '8x8'}, not" in refused(capsys, *words, "map_name=4x4")


def test_an_interrupted_run_can_be_resumed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(LivePlotter, "draw", lambda plotter: None)
    gymnasium.register(INTERRUPTED, entry_point=Interrupted, reward_threshold=0.0)
    Interrupted.taken.clear()
    try:
        words = ["control", "train", "--env", INTERRUPTED, "--out", "run", *SMALL, "--steps", "1000"]
        assert main(words) == 130
        *lines, outcome, ending = capsys.readouterr().out.splitlines()
        assert "--resume" in ending
        assert "solved" in outcome
        assert main([*words, "--resume"]) == 0
        *more, outcome, ending = capsys.readouterr().out.splitlines()
        assert more[: len(lines)] == lines
        assert len(more) > len(lines)
        assert "solved after" in outcome
        assert read_json(tmp_path / "run/result.json")["env_steps"] >= 1000
        assert "already holds a run" in refused(capsys, *words[1:])
        assert main([*words, "--overwrite", "--stop-when-solved", "--threshold", "-1"]) == 0
        assert len(read_progress(tmp_path / "run/progress.csv")) == 2
    finally:
        gymnasium.registry.pop(INTERRUPTED)


OWN = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class {name}(CartPoleEnv):
    pass
"""


def test_an_environment_of_a_module_in_the_current_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.setattr(LivePlotter, "draw", lambda plotter: None)
    register = "gymnasium.register('OwnPole-v0', entry_point='own_poles:OwnPole', max_episode_steps=20)\n"
    (tmp_path / "own_poles.py").write_text(OWN.format(name="OwnPole") + register)
    (tmp_path / "only_a_class.py").write_text(OWN.format(name="Pole"))
    (tmp_path / "broken.py").write_text("import gone_for_good\n")
    error = refused(capsys, "train", "--env", "only_a_class:Pole")
    assert "gymnasium.register(id='Pole-v0', entry_point='only_a_class:Pole')" in error
    assert "No module named 'gone_for_good'" in refused(capsys, "train", "--env", "broken:Pole-v0")
    try:
        assert main(["control", "train", "--env", "own_poles:OwnPole-v0", "--out", "run", *SMALL]) == 0
        assert max(row["greedy_return"] for row in read_progress(tmp_path / "run/progress.csv")) <= 20
    finally:
        gymnasium.registry.pop("OwnPole-v0")


@pytest.mark.slow
def test_an_own_environment_as_a_process(tmp_path):
    """Without the current folder on Python's path, as in the installed command; also in the processes of compare."""
    register = "gymnasium.register('OwnPole-v0', entry_point='own_poles:OwnPole', max_episode_steps=20)\n"
    (tmp_path / "own_poles.py").write_text(OWN.format(name="OwnPole") + register)
    program = "import sys; sys.path = [p for p in sys.path if p]; from groupwise.cli import main; sys.exit(main())"
    words = ["compare", "--envs", "own_poles:OwnPole-v0", "--algos", "grpo-fast", "--seeds", "2", "--jobs", "2", *SMALL]
    done = subprocess.run(
        [sys.executable, "-c", program, "control", *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- play ------------------------------------------------------------------------------------------------------------


def read_gif(path):
    with Image.open(path) as video:
        assert video.format == "GIF"
        return video.size, video.n_frames


def test_one_run_plays_into_a_gif_in_its_folder(capsys, runs):
    path = runs / "grpo"
    (value, *_) = greedy_returns(path, 1)
    assert main(["control", "play", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: return {value:g}\nthe video is {path / 'play.gif'}\n"
    (width, _), frames = read_gif(path / "play.gif")
    assert (width, frames > 3) == (400, True)


@pytest.mark.slow
def test_two_runs_play_side_by_side_from_the_same_first_state(capsys, runs):
    both = [runs / "grpo", runs / "ppo"]
    assert main(["control", "play", *map(str, both)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        *(f"{path}: return {greedy_returns(path, 1)[0]:g}" for path in both),
        f"the video is {runs / 'grpo/play.gif'}",
    ]
    (width, _), _ = read_gif(runs / "grpo/play.gif")
    assert width == 800
    first = np.asarray(imageio.imread(runs / "grpo/play.gif", index=0))[40:]
    assert first.std() > 0  # there is a cart
    np.testing.assert_array_equal(first[:, :400], first[:, 400:])


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of imageio's reader
def test_a_saved_model_plays_into_an_mp4(capsys, runs, tmp_path):
    model = runs / "grpo/best_model.pt"
    (value, *_) = greedy_returns(runs / "grpo", 1)
    assert main(["control", "play", str(model), "--out", "video.mp4", "--seed", str(HELD_OUT)]) == 0
    assert capsys.readouterr().out == f"{model}: return {value:g}\nthe video is video.mp4\n"
    with imageio.imopen(tmp_path / "video.mp4", "r", plugin="FFMPEG") as video:
        frames = np.stack(list(video.iter()))
    assert frames.shape[2:] == (400, 3)
    assert len(frames) > 5
    assert not (runs / "grpo/play.gif").exists()


def test_with_a_display_one_run_plays_in_a_window(capsys, runs, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # SDL's invisible screen
    assert main(["control", "play", str(runs / "grpo")]) == 0
    assert capsys.readouterr().out == f"{runs / 'grpo'}: return {greedy_returns(runs / 'grpo', 1)[0]:g}\n"
    assert not (runs / "grpo/play.gif").exists()


def test_runs_that_cannot_play_together_are_refused(capsys, runs):
    words = ["play", str(runs / "grpo"), str(runs / "lake")]
    assert "one environment, not on CartPole-v1 and FrozenLake-v1" in refused(capsys, *words)
    assert "must end in .gif or .mp4" in refused(capsys, *words[:2], "--out", "video.avi")
    assert not list(runs.rglob("play.gif"))


# --- what is refused -------------------------------------------------------------------------------------------------


REFUSED = [
    ("train --env CartPole-v9", "the environment 'CartPole-v9' cannot be created"),
    ("train --env nowhere:Cart-v0", "the environment 'nowhere:Cart-v0' cannot be created"),
    ("train --env nowhere:Cart-v0", "the module is looked for in {here} and on Python's path"),
    ("train --env own.py:MyEnv", "names a file; give the module and an id that it registers, as in own:MyEnv-v0"),
    ("train --env ./own.py:MyEnv", "as in own:MyEnv-v0"),
    (f"train --env {LEVERS}", "only discrete actions (Discrete) and continuous ones (a Box of floats)"),
    ("train --env-option gravity", "--env-option needs KEY=VALUE, got 'gravity'"),
    ("train --env-option =3", "--env-option needs KEY=VALUE, got '=3'"),
    ("train --env-option gravity=3", "'CartPole-v1' cannot be created"),
    ("train --algo grpo-fats", "unknown algorithm 'grpo-fats'; did you mean 'grpo-fast'?"),
    ("train --algo grpo:goups=3", "unknown setting of grpo 'goups'; did you mean 'groups'?"),
    ("train --algo grpo:groups=few", "grpo:groups=few: groups must be an integer, got 'few'"),
    ("train --algo ppo:steps=100:environments=16", "steps (100) must be a multiple of environments (16)"),
    ("train --steps -5", "--steps must be an integer of at least 1, got -5"),
    ("train --starts 0", "--starts must be an integer of at least 1, got 0"),
    ("train --evaluate-every 0", "--evaluate-every must be an integer of at least 1"),
    ("train --seed -1", "--seed must be an integer of at least 0, got -1"),
    ("train --seed 3000000000", "seed must be less than 2147483648"),
    ("train --threshold nan", "threshold must be finite, got nan"),
    ("train --resume", "--resume needs --out, the folder of the run to continue"),
    ("train --resume --out nowhere", "nowhere holds no run (there is no run.json in it): nothing to resume"),
    ("compare --seeds 0", "of at least 1, got 0"),
    ("compare --jobs 0", "of at least 1, got 0"),
    ("compare --algos ppo,grpo,ppo", "--algos needs a comma-separated list"),
    ("compare --algos ,", "--algos needs a comma-separated list"),
    ("compare --envs CartPole-v1,CartPole-v1", "--envs needs a comma-separated list"),
    (f"compare --envs CartPole-v1,{LEVERS}", "only discrete actions"),
    ("compare --algos ppo,grpo-paper", "the algorithm 'grpo-paper' is called 'grpo' now"),
    ("compare --algos ppo,dqn", "unknown algorithm 'dqn'"),
    ("compare --steps 0", "--steps must be an integer of at least 1, got 0"),
    ("compare --env-option gravity=3", "'CartPole-v1' cannot be created"),
    ("play nowhere", "nowhere does not exist: give the folder of a run"),
    ("", "`groupwise control` needs train, compare or play"),
    ("walk", "there is no `groupwise control walk` (there are: train, compare, play)"),
    ("trian", "did you mean 'train'?"),
    ("play", "RUN is missing; usage: groupwise control play RUN … [options], as in: groupwise control play runs"),
    ("play a --seed x", "--seed must be an integer of at least 0, got x"),
    ("train --step 5", "`groupwise control train` has no option --step; did you mean '--steps'?"),
    ("train --steps many", "--steps must be an integer of at least 1, got many"),
    ("train --steps", "--steps needs a value"),
    ("train --threshold high", "--threshold must be a number, got 'high'"),
    ("train --epochs 5", "no option --epochs; it is a setting of the algorithm: --algo grpo:epochs=VALUE"),
    ("compare --gae-lambda=1", "--algo ppo:gae_lambda=VALUE"),
    ("train CartPole-v1", "'CartPole-v1' is not expected; usage: groupwise control train [options]"),
    ("play .", "best_model.pt does not exist; a run writes best_model.pt at its first evaluation"),
]


def test_invalid_input_is_one_line(capsys, tmp_path):
    gymnasium.register(LEVERS, entry_point=Levers)
    try:
        errors = {words: refused(capsys, *words.split()).replace(str(tmp_path), "{here}") for words, _ in REFUSED}
    finally:
        gymnasium.registry.pop(LEVERS)
    assert [(words, errors[words]) for words, message in REFUSED if message not in errors[words]] == []
    assert not list(tmp_path.iterdir())


def test_a_misspelt_run_is_suggested(capsys, tmp_path):
    (tmp_path / "cartpole").mkdir()
    assert "cartpol does not exist: give the folder of a run or a saved model; did you mean cartpole?" in refused(
        capsys, "play", "cartpol"
    )


def test_without_gymnasium_its_extra_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    message = "control needs the package 'gymnasium'; install it with: pip install 'groupwise[control]'"
    for action in ("train", "compare"):
        assert refused(capsys, action) == f"groupwise: {message}\n"
    assert not list(tmp_path.iterdir())


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["train", "compare"])
def test_help_lists_the_presets_and_all_settings(capsys, action):
    with pytest.raises(SystemExit) as caught:
        main(["control", action, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    presets, grpo, ppo = out.split("presets:")[1].split("settings of ")
    for name in PRESETS:
        assert f"  {name}" in presets
    assert "the ratio is always 1, clipping never acts" in " ".join(presets.split("grpo-fast")[0].split())
    for text, preset in ((grpo, "grpo"), (ppo, "ppo")):
        settings = PRESETS[preset]
        lines = {line.split("=")[0].strip(): line for line in text.splitlines()[1:] if "=" in line}
        typed = ":".join(line.split()[0] for line in lines.values())
        assert settings_of(f"{preset}:{typed}") == settings  # can be typed as shown
        assert set(lines) == set(type(settings).model_fields) - {"algorithm"}
        for name, line in lines.items():
            assert line.endswith(f" {type(settings).model_fields[name].description}")
    assert "  lr=0.0003 " in grpo
    assert "  hidden=64x64 " in grpo
    assert "  max_grad_norm=none " in grpo
    assert "  same_start=true " in grpo
    assert "  epochs=10 " in ppo


def test_help_of_play_has_no_presets(capsys):
    with pytest.raises(SystemExit):
        main(["control", "play", "--help"])
    out = capsys.readouterr().out
    assert "presets" not in out
    assert ".gif or .mp4" in out
