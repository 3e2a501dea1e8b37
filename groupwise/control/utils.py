"""The network, environments, buffers, live plot and videos of both algorithms.

Environments step together: all episodes of an update run at once with one forward pass of the network per step, and an
episode that has ended drops out. CartPole uses Gymnasium's vectorised environment; others are stepped in a loop.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from groupwise.core import gae
from groupwise.errors import ControlError, InputError, MissingExtraError
from groupwise.plots import COLOURS, new_figure, save_figure
from groupwise.rundir import write_bytes

AnyArray = NDArray[Any]
LONGEST_EPISODE = 10_000  # steps, for an environment without a time limit


# --- the network -----------------------------------------------------------------------------------------------------


class MLP(nn.Sequential):
    """Tanh layers and a linear output: one per action for the actor, a single one for the critic.

    The weights are initialised orthogonally. ``gain`` scales the last layer; 0.01 makes a new policy nearly uniform.
    """

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int] = (64, 64), gain: float = 1.0) -> None:
        widths = [inputs, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [_linear(before, after, 2**0.5), nn.Tanh()]
        super().__init__(*layers, _linear(widths[-1], outputs, gain))


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


# --- one environment -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What the agents need to know about an environment."""

    observation: int  # size of a flattened observation
    actions: int
    threshold: float | None  # the mean return that counts as solved, if the environment defines one
    time_limit: int


class SeededGymEnv:
    """A Gymnasium environment with flat observations, actions 0 … n − 1, and a seeded first state.

    ``reset(seed=s)`` gives every member of a group the same first state s0, and the same noise in its transitions;
    ``noise_seed`` sets another noise. Errors of the environment are reported with its name, the seed and the step.
    """

    def __init__(self, name: str, options: Mapping[str, Any] | None = None, *, render_mode: str | None = None) -> None:
        self.name = name
        gym = import_gymnasium()
        if render_mode is not None and not has_display():
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame needs it without a display
        self.env = _make(name, dict(options or {}), render_mode)
        limit = self.env.spec.max_episode_steps if self.env.spec else None
        if limit is None:
            self.env = gym.wrappers.TimeLimit(self.env, LONGEST_EPISODE)
        space, actions = self.env.observation_space, self.env.action_space
        if not isinstance(actions, gym.spaces.Discrete):
            raise ControlError(
                f"{name} has the action space {actions}: only discrete actions (Discrete) are supported. "
                "gymnasium.wrappers.DiscretizeAction makes a continuous one discrete"
            )
        self._first_action = int(actions.start)
        self._flatten = _flattener(name, space)
        threshold = self.env.spec.reward_threshold if self.env.spec else None
        size = int(gym.spaces.flatdim(space))
        self.shape = Shape(size, int(actions.n), threshold, int(limit or LONGEST_EPISODE))
        self._seed, self._steps = 0, 0

    def reset(self, *, seed: int, noise_seed: int | None = None) -> AnyArray:
        self._seed, self._steps = seed, 0
        try:
            observation, _ = self.env.reset(seed=seed)
            if noise_seed is not None:
                self.env.unwrapped.np_random = np.random.default_rng(noise_seed)
        except Exception as error:
            raise ControlError(f"{self.name} could not be reset with seed {seed}: {_describe(error)}") from error
        return self._checked(observation, "its first observation")

    def step(self, action: int) -> tuple[AnyArray, float, bool, bool]:
        """The next observation, the reward, and whether the episode terminated or was truncated."""
        self._steps += 1
        try:
            observation, reward, terminated, truncated, _ = self.env.step(self._first_action + int(action))
            reward = float(reward)
        except Exception as error:
            raise ControlError(f"{self._where} failed on action {action}: {_describe(error)}") from error
        if not np.isfinite(reward):
            raise ControlError(f"{self._where} gave the reward {reward}; rewards must be finite")
        return self._checked(observation, "the observation"), reward, bool(terminated), bool(truncated)

    def render(self) -> AnyArray:
        """The current frame, (height, width, 3); empty in the mode "human", where each step draws in a window."""
        try:
            frame = None if self.env.render_mode == "human" else self.env.render()
        except Exception as error:
            raise ControlError(f"{self._where} could not be rendered: {_describe(error)}") from error
        return np.asarray([] if frame is None else frame)

    def close(self) -> None:
        self.env.close()

    @property
    def _where(self) -> str:
        return f"{self.name}, step {self._steps} of the episode with seed {self._seed},"

    def _checked(self, observation: Any, what: str) -> AnyArray:
        try:
            flat = self._flatten(observation)
        except Exception as error:
            raise ControlError(f"{self._where} broke its observation space: {_describe(error)}") from error
        if flat.shape != (self.shape.observation,):
            raise ControlError(
                f"{self._where} gave an observation of shape {flat.shape}; its space says ({self.shape.observation},)"
            )
        if not np.isfinite(flat).all():
            raise ControlError(f"{self._where}: {what} holds NaN or an infinity: {flat.tolist()}")
        return flat


def import_gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError("control", "gymnasium", "control") from error
    return gymnasium


def _make(name: str, options: dict[str, Any], render_mode: str | None) -> Any:
    if render_mode is not None:  # not all environments take this argument
        options["render_mode"] = render_mode
    try:
        # Gymnasium's checker is slow and warns about harmless things; SeededGymEnv checks what matters.
        return import_gymnasium().make(name, disable_env_checker=True, **options)
    except Exception as error:  # an environment may raise anything
        raise ControlError(f"the environment {name!r} cannot be created: {_describe(error)}") from error


def _flattener(name: str, space: Any) -> Callable[[Any], AnyArray]:
    spaces = import_gymnasium().spaces
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return lambda observation: np.asarray(observation, dtype=np.float32)
    for part in _parts(space):
        if isinstance(part, spaces.Box) and len(part.shape) > 1:
            raise ControlError(
                f"{name} has observations of shape {part.shape}, such as images; only vectors are supported. "
                "gymnasium.wrappers.FlattenObservation may help"
            )
    if not space.is_np_flattenable or any(isinstance(part, spaces.Text) for part in _parts(space)):
        raise ControlError(
            f"{name} has the observation space {space}, which is not a vector of a fixed length. "
            "gymnasium.wrappers.TransformObservation can make one"
        )

    def flat(observation: Any) -> AnyArray:
        if not space.contains(observation):  # flatten would accept −1 for a Discrete space
            raise ValueError(f"{observation!r} is not in {space}")
        return np.asarray(spaces.flatten(space, observation), dtype=np.float32)

    return flat


def _parts(space: Any) -> list[Any]:
    inner = getattr(space, "spaces", ())
    inner = list(inner.values()) if isinstance(inner, Mapping) else list(inner)
    return [part for child in inner for part in _parts(child)] if inner else [space]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"


# --- many environments at once ---------------------------------------------------------------------------------------


class StepResult(NamedTuple):
    """One step of n environments."""

    observations: AnyArray  # (n, observation)
    rewards: AnyArray  # (n,)
    terminated: AnyArray  # (n,) the episode ended
    truncated: AnyArray  # (n,) the episode was cut off, as by a time limit

    def ends(self) -> dict[str, AnyArray]:
        return {"rewards": self.rewards, "terminated": self.terminated, "truncated": self.truncated}

    @property
    def done(self) -> AnyArray:
        return np.asarray(self.terminated | self.truncated)


class Environments(Protocol):
    """N copies of an environment, the members 0 … N − 1. Each call is for some of them."""

    shape: Shape

    def reset(self, members: AnyArray, seeds: Sequence[int], noise_seeds: Sequence[int] | None = None) -> AnyArray: ...

    def step(self, members: AnyArray, actions: AnyArray) -> StepResult: ...

    def close(self) -> None: ...


def make_environments(name: str, number: int, options: Mapping[str, Any] | None = None) -> Environments:
    """``number`` members of the environment, vectorised for CartPole."""
    gym = import_gymnasium()
    first = SeededGymEnv(name, options)
    entry = first.env.spec.vector_entry_point if first.env.spec else None
    if entry == "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv":
        vector = gym.make_vec(name, number, vectorization_mode="vector_entry_point", **dict(options or {}))
        return VectorCartPole(first, vector.unwrapped)
    return EnvironmentLoop([first, *(SeededGymEnv(name, options) for _ in range(number - 1))])


class EnvironmentLoop:
    """Steps one environment after another."""

    def __init__(self, members: Sequence[SeededGymEnv]) -> None:
        self.members = list(members)
        self.shape = members[0].shape

    def reset(self, members: AnyArray, seeds: Sequence[int], noise_seeds: Sequence[int] | None = None) -> AnyArray:
        noise = [None] * len(seeds) if noise_seeds is None else noise_seeds
        return np.stack(
            [self.members[m].reset(seed=s, noise_seed=n) for m, s, n in zip(members, seeds, noise, strict=True)]
        )

    def step(self, members: AnyArray, actions: AnyArray) -> StepResult:
        taken = [self.members[m].step(a) for m, a in zip(members, actions.tolist(), strict=True)]
        observations, rewards, terminated, truncated = zip(*taken, strict=True)
        return StepResult(np.stack(observations), np.array(rewards), np.array(terminated), np.array(truncated))

    def close(self) -> None:
        for member in self.members:
            member.close()


class VectorCartPole:
    """Gymnasium's vectorised CartPole, with the state of each member set from a reset of the scalar environment.

    Its own ``reset(seed=s)`` would give every member a different state. All members move at each step; the results of
    those that were not asked for are ignored.
    """

    def __init__(self, scalar: SeededGymEnv, vector: Any) -> None:
        self._scalar, self._vector = scalar, vector
        self.shape = scalar.shape
        vector.reset(seed=0)
        vector.max_episode_steps = scalar.shape.time_limit

    def reset(self, members: AnyArray, seeds: Sequence[int], noise_seeds: Sequence[int] | None = None) -> AnyArray:
        states = {}
        for seed in dict.fromkeys(seeds):
            self._scalar.reset(seed=seed)
            states[seed] = self._scalar.env.unwrapped.state
        tiled = np.stack([states[seed] for seed in seeds])
        self._vector.state[:, members] = tiled.T
        self._vector.steps[members] = 0
        self._vector.prev_done[members] = False
        return tiled.astype(np.float32)

    def step(self, members: AnyArray, actions: AnyArray) -> StepResult:
        all_actions = np.zeros(self._vector.num_envs, dtype=np.int64)
        all_actions[members] = actions
        observations, rewards, terminated, truncated, _ = self._vector.step(all_actions)
        return StepResult(observations[members], rewards[members], terminated[members], truncated[members])

    def close(self) -> None:
        self._scalar.close()
        self._vector.close()


# --- the buffers -----------------------------------------------------------------------------------------------------

Episode = dict[str, Tensor]  # states (T, observation), actions (T,), logps (T,), rewards (T,), return (), weight ()


class GRPOBuffer:
    """Complete episodes of several members, played at the same time.

    `end_episode` creates the tensors of a member, its return and its weight 1 / T_i; `episodes` returns the list of all
    members, in order, so that groups stay together.
    """

    def __init__(self, members: int = 1) -> None:
        self._lengths = np.zeros(members, dtype=np.int64)
        self._columns: dict[str, AnyArray] = {}  # (member, time, …), with spare capacity in time
        self._finished: dict[int, Episode] = {}

    def store(self, members: AnyArray, **rows: AnyArray) -> None:
        """Add one step of each of ``members``: states, actions, logps and rewards, a row per member."""
        times = self._lengths[members]
        latest = int(times.max())
        for name, row in rows.items():
            if name not in self._columns:
                self._columns[name] = np.empty((len(self._lengths), 16, *row.shape[1:]), dtype=row.dtype)
            elif latest >= self._columns[name].shape[1]:
                column = self._columns[name]
                self._columns[name] = np.concatenate((column, np.empty_like(column)), axis=1)
            self._columns[name][members, times] = row
        self._lengths[members] += 1

    def end_episode(self, *members: int) -> None:
        """End the episodes of these members (by default of member 0)."""
        for member in members or (0,):
            length = int(self._lengths[member])
            if member in self._finished or not length:
                raise InputError(f"member {member} has no step of a new episode: store one first")
            episode = {name: torch.from_numpy(rows[member, :length].copy()) for name, rows in self._columns.items()}
            episode["return"] = episode["rewards"].sum(dtype=torch.float64)
            episode["weight"] = torch.tensor(1 / length)
            self._finished[member] = episode

    def episodes(self) -> list[Episode]:
        """The episodes of all members. The buffer is empty afterwards."""
        number = len(self._lengths)
        unfinished = number - len(self._finished)
        if unfinished:
            raise InputError(f"{unfinished} of {number} episodes have not ended yet")
        episodes = [self._finished[member] for member in range(number)]
        self._lengths[:] = 0
        self._finished = {}
        return episodes


class PPOBuffer:
    """Transitions (s, a, r, s′, log π) of N environments, and their GAE advantages."""

    def __init__(self) -> None:
        self._steps: list[dict[str, AnyArray]] = []

    def store(self, **rows: AnyArray) -> None:
        """Add one step of all environments: states, actions, logps, rewards, next_states, terminated and truncated.

        At the end of an episode, next_states has the final state, not the first one of the next episode.
        """
        self._steps.append(rows)

    def transitions(self) -> dict[str, Tensor]:
        """All steps, (time, environment, …). The buffer is empty afterwards."""
        if not self._steps:
            raise InputError("the buffer is empty: store a step before learning from it")
        names = self._steps[0]
        columns = {name: torch.from_numpy(np.stack([step[name] for step in self._steps])) for name in names}
        self._steps = []
        return columns

    @staticmethod
    @torch.no_grad()
    def advantages(steps: Mapping[str, Tensor], critic: nn.Module, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
        """GAE's advantages and returns, (time, environment). A truncated episode bootstraps from V(s′)."""
        values, next_values = critic(steps["states"]).squeeze(-1), critic(steps["next_states"]).squeeze(-1)
        terminated, truncated = steps["terminated"], steps["truncated"]
        rewards = steps["rewards"].to(values.dtype)
        return gae(rewards, values, terminated, truncated, next_values=next_values, gamma=gamma, lam=lam)


# --- plots and videos ------------------------------------------------------------------------------------------------


def has_display() -> bool:
    """Whether a window can be opened."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


class LivePlotter:
    """Plots returns during training, in a window that does not block, or without a display in an image file.

    Drawing is slow compared to an update, so after each drawing there is none for ``pause`` times its duration.
    """

    def __init__(
        self,
        image: Path,
        *,
        title: str = "",
        threshold: float | None = None,
        window: bool = True,
        pause: float = 4.0,
    ) -> None:
        self._image, self._title, self._threshold, self._pause = image, title, threshold, pause
        self._rows: dict[str, list[Mapping[str, float]]] = {}
        self._next = float("-inf")
        self._plt = _interactive_pyplot() if window and has_display() else None
        self._figure = (
            new_figure(10, 4) if self._plt is None else self._plt.figure(figsize=(10, 4), layout="constrained")
        )
        self._panels = self._figure.subplots(1, 2, sharey=True)

    def add(self, name: str, row: Mapping[str, float]) -> None:
        """Add a row of progress of the run ``name``, and draw if the pause is over."""
        self._rows.setdefault(name, []).append(row)
        if time.monotonic() >= self._next:
            self.draw()

    def draw(self) -> None:
        started = time.monotonic()
        for axes, x, label in zip(
            self._panels, ("env_steps", "cpu_seconds"), ("environment steps", "CPU seconds"), strict=True
        ):
            axes.clear()
            for number, (name, rows) in enumerate(self._rows.items()):
                for measure, style in (("greedy", "-"), ("sampled", ":")):
                    points = [row[f"{measure}_return"] for row in rows]
                    colour = COLOURS[number % len(COLOURS)]
                    axes.plot([row[x] for row in rows], points, style, color=colour, label=f"{name}, {measure}")
            if self._threshold is not None:
                axes.axhline(self._threshold, color="0.4", linewidth=1, linestyle=(0, (4, 3)), label="solved")
            axes.set(xlabel=label)
        self._panels[0].set(ylabel="mean return on held-out starts")
        self._figure.legends.clear()
        lines, names = self._panels[0].get_legend_handles_labels()
        self._figure.legend(lines, names, frameon=False, fontsize=8, loc="outside lower center", ncols=5)
        self._figure.suptitle(self._title, fontsize=11, x=0.01, ha="left")
        if self._plt is None:
            save_figure(self._figure, self._image)
        else:
            self._figure.canvas.draw_idle()
            self._plt.pause(0.001)
        ended = time.monotonic()
        self._next = ended + self._pause * (ended - started)

    def __enter__(self) -> LivePlotter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Draw the last rows and write the image file."""
        if self._rows:
            self.draw()
        if self._plt is not None:
            if self._rows:
                save_figure(self._figure, self._image)
            self._plt.close(self._figure)


def _interactive_pyplot() -> Any:
    """pyplot in interactive mode; None if matplotlib has no backend for windows."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingExtraError("the live plot", "matplotlib", "plot") from error
    plt.ion()
    return None if plt.get_backend().lower() in ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template") else plt


def write_video(path: Path, videos: Sequence[Sequence[tuple[AnyArray, str]]], fps: float) -> None:
    """Write frames with captions, the videos side by side, as .gif or .mp4. A shorter video keeps its last frame."""
    if path.suffix not in (".gif", ".mp4"):
        raise InputError(f"a video's name must end in .gif or .mp4, got {path.name!r}")
    try:
        import imageio.v3 as imageio
    except ImportError as error:
        raise MissingExtraError("a video", "imageio", "control") from error
    every = max(1, round(fps / 25))  # 25 frames per second are enough, and some viewers slow down at more
    length = max(map(len, videos))
    indices = [*range(0, length - 1, every), length - 1]
    frames = [np.hstack([_captioned(*video[min(index, len(video) - 1)]) for video in videos]) for index in indices]
    frames += [frames[-1]] * round(fps / every)  # show the end for a second
    gif = path.suffix == ".gif"
    timing: dict[str, Any] = {"duration": 1000 * every / fps, "loop": 0} if gif else {"fps": fps / every}
    write_bytes(path, imageio.imwrite("<bytes>", np.stack(frames), extension=path.suffix, **timing))


def _captioned(frame: AnyArray, caption: str, width: int = 400) -> AnyArray:
    """The frame, ``width`` pixels wide, below its caption. Both sides are multiples of 16, as video codecs need."""
    from PIL import Image, ImageDraw, ImageFont

    height = round(frame.shape[0] * width / frame.shape[1])
    canvas = Image.new("RGB", (width, -(-(height + 32) // 16) * 16), "white")
    canvas.paste(Image.fromarray(frame.astype(np.uint8)).resize((width, height)), (0, 32))
    ImageDraw.Draw(canvas).text((8, 7), caption, fill="black", font=ImageFont.load_default(16))
    return np.asarray(canvas)
