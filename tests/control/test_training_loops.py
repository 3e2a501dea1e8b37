"""The training loops as a student writes them: one environment and one state at a time."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from groupwise.control.algorithms import GRPOAgent, PPOAgent
from groupwise.control.settings import GRPOSettings, PPOSettings
from groupwise.control.utils import GRPOBuffer, PPOBuffer, SeededGymEnv

SEEDS = range(1000, 1020)  # of the evaluation


class Target(gymnasium.Env):
    """Three steps, at each of which the action should hit the target that the state shows."""

    observation_space = spaces.Box(-1, 1, (2,))

    def __init__(self, continuous=False):
        self.action_space = spaces.Box(-2, 2, (2,)) if continuous else spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.target = 0, self.np_random.uniform(-0.8, 0.8, size=2)
        return np.float32(self.target), {}

    def step(self, action):
        self.time += 1
        if isinstance(self.action_space, spaces.Box):
            reward = -float(((action - 2 * self.target) ** 2).sum())
        else:
            reward = float(action == (self.target[0] > 0))
        return np.float32(self.target), reward, self.time == 3, False, {}


@pytest.fixture(scope="module", autouse=True)
def _environment():
    gymnasium.register("GroupwiseTarget-v0", entry_point=Target)
    yield
    gymnasium.registry.pop("GroupwiseTarget-v0")


def train_grpo(env, agent, updates, groups):
    rng = np.random.default_rng(0)
    for _ in range(updates):
        buffer = GRPOBuffer()
        for _ in range(groups):
            seed = int(rng.integers(1000))
            for _ in range(agent.settings.group_size):
                state = env.reset(seed)
                done = False
                while not done:
                    action, log_prob = agent.get_action(state)
                    next_state, reward, terminated, truncated = env.step(action)
                    buffer.store(state, action, reward, log_prob)
                    state = next_state
                    done = terminated or truncated
                buffer.end_episode()
        agent.update(buffer)


def train_ppo(env, agent, updates, steps):
    buffer = PPOBuffer()
    state = env.reset(seed=0)
    for _ in range(updates):
        for _ in range(steps):
            action, log_prob = agent.get_action(state)
            next_state, reward, terminated, truncated = env.step(action)
            buffer.store(state, action, reward, next_state, log_prob, terminated, truncated)
            state = env.reset() if terminated or truncated else next_state
        agent.update(buffer)


def mean_return(env, agent):
    total = 0.0
    for seed in SEEDS:
        state, done = env.reset(seed), False
        while not done:
            action, _ = agent.get_action(state, greedy=True)
            state, reward, terminated, truncated = env.step(action)
            total, done = total + reward, terminated or truncated
    return total / len(SEEDS)


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_loops_learn_to_hit_the_target(algorithm, continuous):
    env = SeededGymEnv("GroupwiseTarget-v0", {"continuous": continuous})
    if algorithm == "grpo":
        agent = GRPOAgent(env.shape, GRPOSettings(lr=0.01, group_size=8, epochs=4), seed=1)
        before = mean_return(env, agent)
        train_grpo(env, agent, updates=30, groups=4)
    else:
        agent = PPOAgent(env.shape, PPOSettings(lr=0.01, epochs=6), seed=1)
        before = mean_return(env, agent)
        train_ppo(env, agent, updates=8, steps=256)
    after = mean_return(env, agent)
    if continuous:  # of 0
        assert before < -4
        assert after > -2
    else:  # of 3
        assert before < 1
        assert after > 2.5
