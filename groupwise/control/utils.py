"""What both algorithms stand on: the network, the environments, the buffers and the live plot.

The fifth document's first file. It deviates in that environments step together: all episodes of an update run at once,
one forward of the network serves them all, and an episode that has ended drops out. Gymnasium's own vectorised CartPole
is used where it exists; any other environment is a loop.
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

Array = NDArray[Any]
LONGEST_EPISODE = 10_000  # steps, for an environment that has no time limit of its own


# --- the network -----------------------------------------------------------------------------------------------------


class MLP(nn.Sequential):
    """Input → hidden (tanh) → hidden (tanh) → output: the actor with one output per action, the critic with one.

    Orthogonal weights. ``gain`` scales the last layer's: 0.01 makes a fresh policy nearly uniform.
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
    """What the agents need to know of an environment."""

    observation: int  # numbers in an observation, flattened
    actions: int
    threshold: float | None  # the mean return at which it counts as solved, if its makers named one
    time_limit: int


class SeededGymEnv:
    """A Gymnasium environment with flat observations, actions 0 … n − 1, and a first state that a seed decides.

    ``reset(seed=s)`` gives every member of a group the same s0. It also fixes the noise of the transitions that
    follow; ``noise_seed`` replaces that, so that members share s0 alone. What the environment gets wrong is reported
    with its name, the seed and the step.
    """

    def __init__(self, name: str, options: Mapping[str, Any] | None = None, *, render_mode: str | None = None) -> None:
        self.name = name
        gym = import_gymnasium()
        if render_mode is not None and not has_display():
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame complains of the missing display otherwise
        self.env = _make(name, dict(options or {}), render_mode)
        limit = self.env.spec.max_episode_steps if self.env.spec else None
        if limit is None:
            self.env = gym.wrappers.TimeLimit(self.env, LONGEST_EPISODE)
        space, actions = self.env.observation_space, self.env.action_space
        if not isinstance(actions, gym.spaces.Discrete):
            raise ControlError(
                f"{name} has the action space {actions}: only discrete actions (Discrete) can be learned here. "
                "A continuous one can be cut into steps with gymnasium.wrappers.DiscretizeAction"
            )
        self._first_action = int(actions.start)
        self._flatten = _flattener(name, space)
        threshold = self.env.spec.reward_threshold if self.env.spec else None
        size = int(gym.spaces.flatdim(space))
        self.shape = Shape(size, int(actions.n), threshold, int(limit or LONGEST_EPISODE))
        self._seed, self._steps = 0, 0

    def reset(self, *, seed: int, noise_seed: int | None = None) -> Array:
        self._seed, self._steps = seed, 0
        try:
            observation, _ = self.env.reset(seed=seed)
            if noise_seed is not None:
                self.env.unwrapped.np_random = np.random.default_rng(noise_seed)
        except Exception as error:
            raise ControlError(f"{self.name} could not be reset with seed {seed}: {_told(error)}") from error
        return self._checked(observation, "its first observation")

    def step(self, action: int) -> tuple[Array, float, bool, bool]:
        """The next observation, the reward, and whether the episode terminated or was truncated."""
        self._steps += 1
        try:
            observation, reward, terminated, truncated, _ = self.env.step(self._first_action + int(action))
            reward = float(reward)
        except Exception as error:
            raise ControlError(f"{self._where} failed on action {action}: {_told(error)}") from error
        if not np.isfinite(reward):
            raise ControlError(f"{self._where} gave the reward {reward}; rewards must be finite")
        return self._checked(observation, "the observation"), reward, bool(terminated), bool(truncated)

    def render(self) -> Array:
        """The picture of this moment, (height, width, 3); no number at all where a window shows it, at every step."""
        try:
            frame = None if self.env.render_mode == "human" else self.env.render()
        except Exception as error:
            raise ControlError(f"{self._where} could not be drawn: {_told(error)}") from error
        return np.asarray([] if frame is None else frame)

    def close(self) -> None:
        self.env.close()

    @property
    def _where(self) -> str:
        return f"{self.name}, step {self._steps} of the episode with seed {self._seed},"

    def _checked(self, observation: Any, what: str) -> Array:
        try:
            flat = self._flatten(observation)
        except Exception as error:
            raise ControlError(f"{self._where} broke its observation space: {_told(error)}") from error
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
    if render_mode is not None:  # even None would reach an environment that has no such argument
        options["render_mode"] = render_mode
    try:
        # Gymnasium's checker warns of what is only odd, at every step; what would be wrong is checked here.
        return import_gymnasium().make(name, disable_env_checker=True, **options)
    except Exception as error:  # an environment may raise anything while it is made
        raise ControlError(f"the environment {name!r} cannot be made: {_told(error)}") from error


def _flattener(name: str, space: Any) -> Callable[[Any], Array]:
    spaces = import_gymnasium().spaces
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return lambda observation: np.asarray(observation, dtype=np.float32)
    for part in _parts(space):
        if isinstance(part, spaces.Box) and len(part.shape) > 1:
            raise ControlError(
                f"{name} has observations of shape {part.shape}, as images have; the network here takes a vector. "
                "gymnasium.wrappers.FlattenObservation makes one where that is sensible"
            )
    if not space.is_np_flattenable or any(isinstance(part, spaces.Text) for part in _parts(space)):
        raise ControlError(
            f"{name} has the observation space {space}, which is no vector of a fixed length. "
            "gymnasium.wrappers.TransformObservation can make one of it"
        )

    def flat(observation: Any) -> Array:
        if not space.contains(observation):  # flatten would take −1 for the last of a Discrete space
            raise ValueError(f"{observation!r} is not in {space}")
        return np.asarray(spaces.flatten(space, observation), dtype=np.float32)

    return flat


def _parts(space: Any) -> list[Any]:
    inner = getattr(space, "spaces", ())
    inner = list(inner.values()) if isinstance(inner, Mapping) else list(inner)
    return [part for child in inner for part in _parts(child)] if inner else [space]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"


# --- many environments at once ---------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """What one step of several environments gave, a row each."""

    observations: Array  # (n, observation)
    rewards: Array  # (n,)
    terminated: Array  # (n,) the episode is over
    truncated: Array  # (n,) the episode was only cut off

    def ends(self) -> dict[str, Array]:
        return {"rewards": self.rewards, "terminated": self.terminated, "truncated": self.truncated}

    @property
    def done(self) -> Array:
        return np.asarray(self.terminated | self.truncated)


class Environments(Protocol):
    """Members 0 … N − 1 of one environment; each call names the members it is about."""

    shape: Shape

    def reset(self, members: Array, seeds: Sequence[int], noise_seeds: Sequence[int] | None = None) -> Array: ...

    def step(self, members: Array, actions: Array) -> Steps: ...

    def close(self) -> None: ...


def make_environments(name: str, number: int, options: Mapping[str, Any] | None = None) -> Environments:
    """``number`` members of the environment, vectorised where Gymnasium has that and its state can be set."""
    gym = import_gymnasium()
    first = SeededGymEnv(name, options)
    entry = first.env.spec.vector_entry_point if first.env.spec else None
    if entry == "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv":
        vector = gym.make_vec(name, number, vectorization_mode="vector_entry_point", **dict(options or {}))
        return CartPoles(first, vector.unwrapped)
    return EnvironmentLoop([first, *(SeededGymEnv(name, options) for _ in range(number - 1))])


class EnvironmentLoop:
    """One environment after another."""

    def __init__(self, members: Sequence[SeededGymEnv]) -> None:
        self.members = list(members)
        self.shape = members[0].shape

    def reset(self, members: Array, seeds: Sequence[int], noise_seeds: Sequence[int] | None = None) -> Array:
        noise = [None] * len(seeds) if noise_seeds is None else noise_seeds
        return np.stack(
            [self.members[m].reset(seed=s, noise_seed=n) for m, s, n in zip(members, seeds, noise, strict=True)]
        )

    def step(self, members: Array, actions: Array) -> Steps:
        taken = [self.members[m].step(a) for m, a in zip(members, actions.tolist(), strict=True)]
        observations, rewards, terminated, truncated = zip(*taken, strict=True)
        return Steps(np.stack(observations), np.array(rewards), np.array(terminated), np.array(truncated))

    def close(self) -> None:
        for member in self.members:
            member.close()


class CartPoles:
    """Gymnasium's vectorised CartPole, with each member's state set from a reset of the scalar one.

    It has no list of seeds, so ``reset(seed=s)`` there would give every member another state. A member that is not
    named in a step moves on too, and is reset by Gymnasium when it falls; whatever it does is left out.
    """

    def __init__(self, scalar: SeededGymEnv, vector: Any) -> None:
        self._scalar, self._vector = scalar, vector
        self.shape = scalar.shape
        vector.reset(seed=0)
        vector.max_episode_steps = scalar.shape.time_limit

    def reset(self, members: Array, seeds: Sequence[int], noise_seeds: Sequence[int] | None = None) -> Array:
        states = {}
        for seed in dict.fromkeys(seeds):
            self._scalar.reset(seed=seed)
            states[seed] = self._scalar.env.unwrapped.state
        tiled = np.stack([states[seed] for seed in seeds])
        self._vector.state[:, members] = tiled.T
        self._vector.steps[members] = 0
        self._vector.prev_done[members] = False
        return tiled.astype(np.float32)

    def step(self, members: Array, actions: Array) -> Steps:
        everyone = np.zeros(self._vector.num_envs, dtype=np.int64)
        everyone[members] = actions
        observations, rewards, terminated, truncated, _ = self._vector.step(everyone)
        return Steps(observations[members], rewards[members], terminated[members], truncated[members])

    def close(self) -> None:
        self._scalar.close()
        self._vector.close()


# --- the buffers -----------------------------------------------------------------------------------------------------

Episode = dict[str, Tensor]  # states (T, observation), actions (T,), logps (T,), rewards (T,), return (), weight ()


class GRPOBuffer:
    """Episodes as a list of dictionaries, in the order of their members, so that groups stay together.

    Several episodes may be under way at once, each a member. `end_episode` makes a member's tensors, its return and its
    weight 1 / T_i; `episodes` gives the list.
    """

    def __init__(self, members: int = 1) -> None:
        self._lengths = np.zeros(members, dtype=np.int64)
        self._columns: dict[str, Array] = {}  # (member, time, …), with room for some more steps
        self._finished: dict[int, Episode] = {}

    def store(self, members: Array, **rows: Array) -> None:
        """One step of each of ``members``: their states, actions, logps and rewards, a row each."""
        now = self._lengths[members]
        latest = int(now.max())
        for name, row in rows.items():
            if name not in self._columns:
                self._columns[name] = np.empty((len(self._lengths), 16, *row.shape[1:]), dtype=row.dtype)
            elif latest >= self._columns[name].shape[1]:
                column = self._columns[name]
                self._columns[name] = np.concatenate((column, np.empty_like(column)), axis=1)
            self._columns[name][members, now] = row
        self._lengths[members] += 1

    def end_episode(self, *members: int) -> None:
        """The episodes of these members have ended (member 0's if none is named)."""
        for member in members or (0,):
            length = int(self._lengths[member])
            if member in self._finished or not length:
                raise InputError(f"member {member} has no step of a new episode: store one before it ends")
            episode = {name: torch.from_numpy(rows[member, :length].copy()) for name, rows in self._columns.items()}
            episode["return"] = episode["rewards"].sum(dtype=torch.float64)
            episode["weight"] = torch.tensor(1 / length)
            self._finished[member] = episode

    def episodes(self) -> list[Episode]:
        """Every member's episode, and an empty buffer for the next ones."""
        number = len(self._lengths)
        unfinished = number - len(self._finished)
        if unfinished:
            raise InputError(f"{unfinished} of {number} episodes have not ended yet")
        episodes = [self._finished[member] for member in range(number)]
        self._lengths[:] = 0
        self._finished = {}
        return episodes


class PPOBuffer:
    """Flat transitions (s, a, r, s′, log π) of N environments over some steps, and the advantages by GAE."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Array]] = []

    def store(self, **rows: Array) -> None:
        """One step of all environments: states, actions, logps, rewards, next_states, terminated and truncated.

        next_states are the states that the step led to, at the end of an episode too; not the next episode's first.
        """
        self._steps.append(rows)

    def transitions(self) -> dict[str, Tensor]:
        """All that was stored, (time, environment, …), and an empty buffer for the next steps."""
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


# --- pictures --------------------------------------------------------------------------------------------------------


def has_display() -> bool:
    """Whether a window can be opened here."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


class LivePlotter:
    """Returns as they are measured, in a window that does not block; where there is no display, in a picture file.

    Redraws are throttled, for a drawing takes longer than many an update: after each there is none for ``pause`` times
    as long as it took.
    """

    def __init__(
        self,
        picture: Path,
        *,
        title: str = "",
        threshold: float | None = None,
        window: bool = True,
        pause: float = 4.0,
    ) -> None:
        self._picture, self._title, self._threshold, self._pause = picture, title, threshold, pause
        self._rows: dict[str, list[Mapping[str, float]]] = {}
        self._next = float("-inf")
        self._plt = _interactive_pyplot() if window and has_display() else None
        self._figure = (
            new_figure(10, 4) if self._plt is None else self._plt.figure(figsize=(10, 4), layout="constrained")
        )
        self._panels = self._figure.subplots(1, 2, sharey=True)

    def add(self, name: str, row: Mapping[str, float]) -> None:
        """A row of progress of the run ``name``; it is drawn if the last drawing is long enough ago."""
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
            save_figure(self._figure, self._picture)
        else:
            self._figure.canvas.draw_idle()
            self._plt.pause(0.001)
        now = time.monotonic()
        self._next = now + self._pause * (now - started)

    def __enter__(self) -> LivePlotter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Draw what has not been drawn yet, and leave the picture file in either case."""
        if self._rows:
            self.draw()
        if self._plt is not None:
            if self._rows:
                save_figure(self._figure, self._picture)
            self._plt.close(self._figure)


def _interactive_pyplot() -> Any:
    """pyplot in interactive mode; None where matplotlib finds nothing to open windows with."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingExtraError("the live plot", "matplotlib", "plot") from error
    plt.ion()
    return None if plt.get_backend().lower() in ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template") else plt


def write_film(path: Path, films: Sequence[Sequence[tuple[Array, str]]], fps: float) -> None:
    """Frames with their captions, one film beside the other, as .gif or .mp4. A film that is over stands still."""
    if path.suffix not in (".gif", ".mp4"):
        raise InputError(f"a film's name must end in .gif or .mp4, got {path.name!r}")
    try:
        import imageio.v3 as imageio
    except ImportError as error:
        raise MissingExtraError("a film", "imageio", "control") from error
    every = max(1, round(fps / 25))  # more frames a second are for nothing, and many viewers slow them down
    length = max(map(len, films))
    moments = [*range(0, length - 1, every), length - 1]
    frames = [np.hstack([_captioned(*film[min(moment, len(film) - 1)]) for film in films]) for moment in moments]
    frames += [frames[-1]] * round(fps / every)  # the end is worth a second
    how: dict[str, Any] = {"duration": 1000 * every / fps, "loop": 0} if path.suffix == ".gif" else {"fps": fps / every}
    write_bytes(path, imageio.imwrite("<bytes>", np.stack(frames), extension=path.suffix, **how))


def _captioned(frame: Array, caption: str, width: int = 400) -> Array:
    """The frame, ``width`` pixels wide, below a line of text; both sides are multiples of 16, as video wants them."""
    from PIL import Image, ImageDraw, ImageFont

    height = round(frame.shape[0] * width / frame.shape[1])
    canvas = Image.new("RGB", (width, -(-(height + 32) // 16) * 16), "white")
    canvas.paste(Image.fromarray(frame.astype(np.uint8)).resize((width, height)), (0, 32))
    ImageDraw.Draw(canvas).text((8, 7), caption, fill="black", font=ImageFont.load_default(16))
    return np.asarray(canvas)
