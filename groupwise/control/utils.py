"""The network, the environment, the buffers and the live plot of both algorithms."""

from __future__ import annotations

import difflib
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from groupwise.core import gae
from groupwise.errors import ControlError, GroupwiseError, InputError, MissingExtraError
from groupwise.plots import COLOURS, new_figure, plain_label, save_figure
from groupwise.text import excerpt, one_line

AnyArray = NDArray[Any]
SIMILAR = 0.75  # of difflib: ids that differ by a typo
VERSION = r"-v\d+$"  # the end of an id
LARGEST_REWARD = 1e30  # the returns of 10,000 of them are far below the largest float32
LONGEST_EPISODE = 10_000  # steps, for an environment without a time limit
LONGEST_REASON = 500  # characters of an environment's own error in a message
LARGEST_SPACE = 10**6  # numbers of a flat observation or action; the policy is a dense network


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


@dataclass(frozen=True)
class Shape:
    """What the agents need to know about an environment."""

    observation: int  # size of a flattened observation
    actions: int  # their number, or the number of their dimensions if they are continuous
    threshold: float | None  # the mean return that counts as solved, if the environment defines one
    time_limit: int
    continuous: bool = False


class SeededGymEnv:
    """A Gymnasium environment with flat observations, a seeded first state, and actions as a policy draws them.

    Discrete actions are 0 … n − 1. Continuous ones are vectors: −1 … 1 is the range of each bounded dimension, so that
    a new policy fits a box of any size; what lies outside is clipped. ``reset(seed)`` gives every member of a group
    the same first state s0, and the same noise in its transitions; ``noise_seed`` sets another noise. Errors of the
    environment are reported with its name, the seed and the step.
    """

    def __init__(self, name: str, options: Mapping[str, Any] | None = None, *, render_mode: str | None = None) -> None:
        try:
            import gymnasium as gym
        except ImportError as error:
            raise MissingExtraError("control", "gymnasium", "control") from error
        self.name = name
        _check_name(name)
        arguments = dict(options or {})
        if render_mode is not None:  # not all environments take this argument
            arguments["render_mode"] = render_mode
            if not has_display():
                os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame needs it without a display
        self._seed: int | None = None
        self._steps = 0
        try:
            # Gymnasium's checker is slow and warns about harmless things; this class checks what matters.
            self.env: Any = gym.make(name, disable_env_checker=True, **arguments)
            limit = self.env.spec.max_episode_steps if self.env.spec else None
            if limit is None:
                self.env = gym.wrappers.TimeLimit(self.env, LONGEST_EPISODE)
            self.shape = self._read_shape(limit or LONGEST_EPISODE)
        except (GroupwiseError, KeyboardInterrupt):
            raise
        except BaseException as error:  # an environment may raise anything
            reason = _describe_unknown(name, error) or f"{_describe(error).rstrip('.')}{_remedy(name, error)}"
            raise ControlError(f"the environment {name!r} cannot be created: {reason}") from error

    def _read_shape(self, limit: int) -> Shape:
        from gymnasium import spaces

        space, actions = self.env.observation_space, self.env.action_space
        self._to_action = _action_reader(self.name, actions)
        self._flatten = _flattener(self.name, space)
        sizes = int(spaces.flatdim(space)), int(spaces.flatdim(actions))
        if not 0 < min(sizes) <= max(sizes) <= LARGEST_SPACE:
            raise ControlError(
                f"{self.name} has observations of {sizes[0]:,} and actions of {sizes[1]:,} numbers; the policy is a "
                f"dense network for 1 to {LARGEST_SPACE:,}; gymnasium.wrappers.TransformObservation can change them"
            )
        threshold = self.env.spec.reward_threshold if self.env.spec else None
        return Shape(*sizes, threshold, int(limit), isinstance(actions, spaces.Box))

    def reset(self, seed: int | None = None, *, noise_seed: int | None = None) -> AnyArray:
        """The first state of an episode; without a seed, a new one."""
        self._seed, self._steps = seed, 0
        try:
            observation, _ = self.env.reset(seed=seed)
            if noise_seed is not None:
                self.env.unwrapped.np_random = np.random.default_rng(noise_seed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ControlError(f"{self.name} could not be reset with seed {seed}: {_describe(error)}") from error
        return self._checked(observation)

    def step(self, action: Any) -> tuple[AnyArray, float, bool, bool]:
        """The next observation, the reward, and whether the episode terminated or was truncated."""
        self._steps += 1
        try:
            observation, reward, terminated, truncated, _ = self.env.step(self._to_action(action))
            reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ControlError(f"{self._where} failed on action {action}: {_describe(error)}") from error
        if not abs(reward) <= LARGEST_REWARD:  # NaN, too
            limit = f"rewards must be finite and at most {LARGEST_REWARD:g}"
            raise ControlError(f"{self._where} gave the reward {reward:g}; {limit}; scale them")
        return self._checked(observation), reward, terminated, truncated

    def render(self) -> AnyArray:
        """The current frame, (height, width, 3); empty in the mode "human", where each step draws in a window."""
        try:
            frame = None if self.env.render_mode == "human" else self.env.render()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ControlError(f"{self._where} could not be rendered: {_describe(error)}") from error
        return np.asarray([] if frame is None else frame)

    def close(self) -> None:
        try:
            self.env.close()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ControlError(f"{self.name} could not be closed: {_describe(error)}") from error

    @property
    def _where(self) -> str:
        return f"{self.name}, step {self._steps} of the episode with seed {self._seed},"

    def _checked(self, observation: Any) -> AnyArray:
        try:
            flat = self._flatten(observation)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ControlError(f"{self._where} broke its observation space: {_describe(error)}") from error
        if flat.shape != (self.shape.observation,):
            raise ControlError(
                f"{self._where} gave an observation of shape {flat.shape}; its space says ({self.shape.observation},)"
            )
        if not np.isfinite(flat).all():
            raise ControlError(f"{self._where} gave an observation with NaN or an infinity: {excerpt(flat.tolist())}")
        return flat


def _action_reader(name: str, space: Any) -> Callable[[Any], Any]:
    """A function from an action of the policy to one of the environment."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return lambda action: first + int(action)
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating) or not np.prod(space.shape):
        raise ControlError(
            f"{name} has the action space {space}: only discrete actions (Discrete) and continuous ones (a Box of "
            "floats) are supported. gymnasium.wrappers.TransformAction can map one of these to it"
        )
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(bounded, space.low, -1.0), np.where(bounded, space.high, 1.0)
    middle, half = (high + low) / 2, (high - low) / 2

    def scaled(action: Any) -> AnyArray:
        if not np.isfinite(action).all():
            raise ValueError("the policy gave an action with NaN or an infinity; a smaller learning rate may help")
        values = middle + half * np.reshape(action, space.shape)
        return np.asarray(np.clip(values, space.low, space.high), dtype=space.dtype)

    return scaled


def _flattener(name: str, space: Any) -> Callable[[Any], AnyArray]:
    from gymnasium import spaces

    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return lambda observation: np.asarray(observation, dtype=np.float32)
    parts = _parts(space)
    for part in parts:
        if isinstance(part, spaces.Box) and len(part.shape) > 1:
            raise ControlError(
                f"{name} has observations of shape {part.shape}, such as images; only vectors are supported. "
                "gymnasium.wrappers.FlattenObservation may help"
            )
    if not space.is_np_flattenable or any(isinstance(part, spaces.Text) for part in parts):
        raise ControlError(
            f"{name} has the observation space {space}, which is not a vector of a fixed length. "
            "gymnasium.wrappers.TransformObservation can make one"
        )

    def flat(observation: Any) -> AnyArray:
        if not space.contains(observation):  # flatten would accept −1 for a Discrete space
            raise ValueError(f"{excerpt(observation)} is not in {space}")
        return np.asarray(spaces.flatten(space, observation), dtype=np.float32)

    return flat


def _parts(space: Any) -> list[Any]:
    inner = getattr(space, "spaces", ())
    inner = list(inner.values()) if isinstance(inner, Mapping) else list(inner)
    return [part for child in inner for part in _parts(child)] if inner else [space]


def _check_name(name: str) -> None:
    """Let a module of the current folder be found; an error if a file or a folder is given instead of a module."""
    module, colon, _ = name.rpartition(":")
    if not colon:
        return
    if module.endswith(".py") or "/" in module or "\\" in module:
        raise ControlError(
            f"the environment {name!r} names a file; give the module and an id that it registers, as in "
            f"{Path(module).stem}:MyEnv-v0, from the folder of the file"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that it hides no other module


def _remedy(name: str, error: BaseException) -> str:
    """What to do if a module does not exist, or does not register the id."""
    module, colon, identifier = name.rpartition(":")
    if not colon:
        return ""
    if isinstance(error, ModuleNotFoundError):
        return f"; the module is looked for in {os.getcwd()} and on Python's path" if error.name is None else ""
    if module in sys.modules and isinstance(getattr(sys.modules[module], identifier, None), type):
        return (
            f"; {identifier} is a class, so give it an id in {module}: "
            f"gymnasium.register(id='{identifier}-v0', entry_point='{module}:{identifier}')"
        )
    return ""


def _describe_unknown(name: str, error: BaseException) -> str:
    """The reason if Gymnasium knows no such id, with the newest version of the nearest one; "" for other errors."""
    import gymnasium as gym

    module, colon, identifier = name.rpartition(":")
    if not isinstance(error, gym.error.UnregisteredEnv) or _remedy(name, error):
        return ""
    newest = {
        re.sub(VERSION, "", spec.id).lower(): spec.id
        for spec in sorted(gym.registry.values(), key=lambda spec: spec.version or 0)
    }
    near = difflib.get_close_matches(re.sub(VERSION, "", identifier).lower(), newest, n=1, cutoff=SIMILAR)
    hint = f"; did you mean {f'{module}{colon}{newest[near[0]]}'!r}?" if near else "; an id looks like 'CartPole-v1'"
    return f"Gymnasium has no environment of this id{hint}"


def _describe(error: BaseException) -> str:
    """Why an environment failed. A SystemExit is a failure, too: its run is not finished."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({excerpt(error.code)})"
    reason = one_line(str(error))[:LONGEST_REASON]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


# states (T, observation), actions (T,) or (T, dimensions), rewards (T,), logps (T,), return (), weight ()
Episode = dict[str, Tensor]


class GRPOBuffer:
    """Complete episodes, played one after the other, or by several members at the same time."""

    def __init__(self, members: int = 1) -> None:
        self._members = members
        self._clear()

    def _clear(self) -> None:
        self._steps: list[dict[str, AnyArray]] = []
        self._playing = np.arange(self._members)  # the number of the episode that each member plays
        self._begun = self._members
        self._ended: set[int] = set()

    def store(self, states: Any, actions: Any, rewards: Any, logps: Any, members: AnyArray | None = None) -> None:
        """Add one transition of an episode, or one of the episode of each of ``members``, a row per member."""
        rows = {"states": states, "actions": actions, "rewards": rewards, "logps": logps}
        if members is None:
            members, rows = np.zeros(1, dtype=np.int64), _as_rows(rows)
        self._steps.append({"numbers": self._playing[members], **rows})

    def end_episode(self, *members: int) -> None:
        """End the episode, or the episodes of these members. The next transition begins another one."""
        for member in members or (0,):
            self._ended.add(int(self._playing[member]))
            self._playing[member] = self._begun
            self._begun += 1

    def episodes(self) -> list[Episode]:
        """The episodes in the order of the members and of time, so that groups stay together; empties the buffer.

        Each has its return and its weight 1 / T_i.
        """
        numbers = np.concatenate([np.arange(0), *(step["numbers"] for step in self._steps)])
        order, (played, lengths) = numbers.argsort(kind="stable"), np.unique(numbers, return_counts=True)
        expected = {*played.tolist(), *range(self._members)}
        if missing := len(expected - self._ended):
            raise InputError(f"{missing} of {len(expected)} episodes have not ended yet; end_episode() ends one")
        if self._ended != expected:
            raise InputError("end_episode() ended an episode that has no transitions")
        names = ("states", "actions", "rewards", "logps")
        columns = {name: np.concatenate([step[name] for step in self._steps]) for name in names}
        self._clear()
        parts = {n: torch.split(torch.from_numpy(column[order]), lengths.tolist()) for n, column in columns.items()}
        episodes = [{name: part[place] for name, part in parts.items()} for place in range(len(played))]
        for episode in episodes:
            episode["return"] = episode["rewards"].sum(dtype=torch.float64)
            episode["weight"] = torch.tensor(1 / len(episode["rewards"]))
        return episodes


class PPOBuffer:
    """Transitions (s, a, r, s′, log π) of N environments, and their GAE advantages."""

    def __init__(self) -> None:
        self._steps: list[dict[str, AnyArray]] = []

    def store(
        self, states: Any, actions: Any, rewards: Any, next_states: Any, logps: Any, terminated: Any, truncated: Any
    ) -> None:
        """Add one transition, or one of each environment, a row per environment.

        At the end of an episode, next_states has the final state, not the first one of the next episode.
        """
        rows = {"states": states, "actions": actions, "rewards": rewards, "next_states": next_states, "logps": logps}
        rows |= {"terminated": terminated, "truncated": truncated}
        self._steps.append(rows if np.ndim(states) > 1 else _as_rows(rows))

    def transitions(self) -> dict[str, Tensor]:
        """All steps, (time, environment, …). The buffer is empty afterwards."""
        if not self._steps:
            raise InputError("the buffer has no transitions")
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


def _as_rows(transition: Mapping[str, Any]) -> dict[str, AnyArray]:
    return {name: np.asarray(value)[None] for name, value in transition.items()}


class LivePlotter:
    """Plots returns during training, in a window that does not block, or without a display in an image file.

    Drawing is slow compared to an update, so after each drawing there is none for ``pause`` times its duration.
    """

    def __init__(
        self, image: Path, *, title: str = "", threshold: float | None = None, window: bool = True, pause: float = 4.0
    ) -> None:
        self._image, self._title, self._threshold, self._pause = image, title, threshold, pause
        self._rows: dict[str, list[Mapping[str, float]]] = {}
        self._next = float("-inf")
        self._figure = new_figure(10, 4)
        self._plt = _interactive_pyplot() if window and has_display() else None
        if self._plt:
            self._figure = self._plt.figure(figsize=(10, 4), layout="constrained")
        self._panels = self._figure.subplots(1, 2, sharey=True)

    def add(self, name: str, row: Mapping[str, float]) -> None:
        """Add a row of progress of the run ``name``, and draw if the pause is over."""
        self._rows.setdefault(name, []).append(row)
        if time.monotonic() >= self._next:
            self.draw()

    def draw(self) -> None:
        started = time.monotonic()
        columns = {"env_steps": "environment steps", "cpu_seconds": "CPU seconds"}
        for axes, (x, label) in zip(self._panels, columns.items(), strict=True):
            axes.clear()
            for number, (name, rows) in enumerate(self._rows.items()):
                for measure, style in (("greedy", "-"), ("sampled", ":")):
                    points = [row[f"{measure}_return"] for row in rows]
                    colour = COLOURS[number % len(COLOURS)]
                    curve = plain_label(f"{name}, {measure}")
                    axes.plot([row[x] for row in rows], points, style, color=colour, label=curve)
            if self._threshold is not None:
                axes.axhline(self._threshold, color="0.4", linewidth=1, linestyle=(0, (4, 3)), label="solved")
            axes.set(xlabel=label)
        self._panels[0].set(ylabel="mean return on held-out starts")
        self._figure.legends.clear()
        lines, names = self._panels[0].get_legend_handles_labels()
        self._figure.legend(lines, names, frameon=False, fontsize=8, loc="outside lower center", ncols=5)
        self._figure.suptitle(plain_label(self._title), fontsize=11, x=0.01, ha="left")
        if self._plt:
            self._figure.canvas.draw_idle()
            self._plt.pause(0.001)
        else:
            save_figure(self._figure, self._image)
        ended = time.monotonic()
        self._next = ended + self._pause * (ended - started)

    def close(self) -> None:
        """Draw the last rows and write the image file."""
        if self._rows:
            self.draw()
            if self._plt:
                save_figure(self._figure, self._image)
        if self._plt:
            self._plt.close(self._figure)


def _interactive_pyplot() -> Any:
    """pyplot in interactive mode; None if matplotlib has no backend for windows."""
    import matplotlib.pyplot as plt

    plt.ion()
    return None if plt.get_backend().lower() in ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template") else plt


def has_display() -> bool:
    """Whether a window can be opened."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
