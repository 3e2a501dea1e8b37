"""Many environments at once.

All episodes of an update run together, with one forward pass of the network per step, and an episode that has ended
drops out. CartPole uses Gymnasium's vectorised environment; others are stepped in a loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from groupwise.control.utils import AnyArray, SeededGymEnv, Shape

HELD_OUT = 2**30  # evaluation uses the seeds from here on, training those below


class StepResult(NamedTuple):
    """One step of n environments."""

    observations: AnyArray  # (n, observation)
    rewards: AnyArray  # (n,)
    terminated: AnyArray  # (n,) the episode ended
    truncated: AnyArray  # (n,) the episode was cut off, as by a time limit

    @property
    def done(self) -> AnyArray:
        return np.asarray(self.terminated | self.truncated)


class EnvironmentLoop:
    """Steps one environment after another: the members 0 … N − 1. Each call is for some of them."""

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


Environments = EnvironmentLoop | VectorCartPole


def shape_of(name: str, options: Mapping[str, Any]) -> Shape:
    environment = SeededGymEnv(name, options)
    environment.close()
    return environment.shape


def make_environments(name: str, number: int, options: Mapping[str, Any] | None = None) -> Environments:
    """``number`` members of the environment, vectorised for CartPole."""
    first = SeededGymEnv(name, options)
    entry = first.env.spec.vector_entry_point if first.env.spec else None
    if entry == "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv":
        import gymnasium

        vector = gymnasium.make_vec(name, number, vectorization_mode="vector_entry_point", **dict(options or {}))
        return VectorCartPole(first, vector.unwrapped)
    return EnvironmentLoop([first, *(SeededGymEnv(name, options) for _ in range(number - 1))])
