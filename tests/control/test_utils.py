"""Seeded first states and noise, vectorised against scalar environments, buffers, plots and videos."""

from __future__ import annotations

import math

import gymnasium
import imageio.v3 as imageio
import matplotlib
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colors
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from torch import nn

from groupwise.control.environments import EnvironmentLoop, VectorCartPole, make_environments
from groupwise.control.play import write_video
from groupwise.control.utils import LONGEST_EPISODE, MLP, GRPOBuffer, LivePlotter, PPOBuffer, SeededGymEnv
from groupwise.errors import ControlError, InputError
from groupwise.plots import COLOURS

# --- the network -----------------------------------------------------------------------------------------------------


def test_the_network_is_two_hidden_layers_with_tanh():
    network = MLP(4, 2)
    assert [type(layer) for layer in network] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    assert [tuple(network[i].weight.shape) for i in (0, 2, 4)] == [(64, 4), (64, 64), (2, 64)]
    assert [tuple(w.weight.shape) for w in list(MLP(3, 5, (7, 6)))[::2]] == [(7, 3), (6, 7), (5, 6)]
    states = torch.randn(9, 4)
    first, second, last = network[0], network[2], network[4]
    hidden = torch.tanh(torch.tanh(states @ first.weight.T + first.bias) @ second.weight.T + second.bias)
    torch.testing.assert_close(network(states), hidden @ last.weight.T + last.bias)


def test_a_small_gain_makes_a_new_policy_nearly_uniform():
    small, default = MLP(4, 3, gain=0.01), MLP(4, 3)
    torch.testing.assert_close(small[4].weight @ small[4].weight.T, 1e-4 * torch.eye(3), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(default[4].weight @ default[4].weight.T, torch.eye(3), rtol=1e-4, atol=1e-6)
    assert (small(torch.randn(50, 4)).softmax(-1) - 1 / 3).abs().max() < 0.05


# --- one environment -------------------------------------------------------------------------------------------------


class Toy(gymnasium.Env):
    """A noisy walk that never ends, with any space, and with a fault at some step.

    It takes no ``render_mode``, like many custom environments.
    """

    def __init__(self, space=None, actions=None, fault=None, at=3):
        self.observation_space = space or spaces.Box(-np.inf, np.inf, (2,))
        self.action_space = actions or spaces.Discrete(2)
        self.walks = space is None
        self.fault, self.at = fault, at
        self.taken = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.position, self.taken = 0, self.np_random.normal(), []
        return self._observed(), {}

    def step(self, action):
        self.time += 1
        self.taken.append(action)
        self.position += self.np_random.normal()
        wrong = {"nan reward": np.nan, "infinite reward": -np.inf, "reward that is not a number": "much"}
        reward = wrong.get(self.fault, 1.0) if self.time == self.at else 1.0
        return self._observed(), reward, False, False, {}

    def _observed(self):
        if self.time == self.at:
            if self.fault == "raise":
                raise ZeroDivisionError("the pole\n broke")
            if self.fault == "observation":
                return self.wrong_observation()
        return np.array([self.position, self.time]) if self.walks else self.observation_space.sample()

    def wrong_observation(self):
        return [np.nan, 1.0]


class TooLong(Toy):
    def wrong_observation(self):
        return np.zeros(3)


class Boxed(Toy):
    def wrong_observation(self):
        return np.zeros((1, 2))


class OffTheBoard(Toy):
    def __init__(self, **options):
        super().__init__(space=spaces.Discrete(4), **options)

    def wrong_observation(self):
        return 4


class Unmakeable(Toy):
    def __init__(self):
        raise OSError("no licence")


TOYS = {f"Groupwise{kind.__name__}-v0": kind for kind in (Toy, TooLong, Boxed, OffTheBoard, Unmakeable)}
TOY = "GroupwiseToy-v0"


@pytest.fixture(scope="module", autouse=True)
def _toys():
    for name, kind in TOYS.items():
        gymnasium.register(name, entry_point=kind)
    yield
    for name in TOYS:
        gymnasium.registry.pop(name)


def walk(environment, actions):
    """The observations, rewards and ends of these actions, up to the end of the episode."""
    steps = []
    for action in actions:
        observation, reward, terminated, truncated = environment.step(action)
        steps.append((observation.tolist(), reward, terminated, truncated))
        if terminated or truncated:
            break
    return steps


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1", TOY])
def test_a_seed_determines_the_first_state(name):
    environment, plain = SeededGymEnv(name), gymnasium.make(name, disable_env_checker=True)
    starts = {}
    for seed in range(20):
        starts[seed] = environment.reset(seed=seed)
        np.testing.assert_array_equal(starts[seed], np.float32(plain.reset(seed=seed)[0]))
        assert starts[seed].dtype == np.float32
    environment.step(1)
    for seed in (7, 7, 3):
        np.testing.assert_array_equal(environment.reset(seed=seed), starts[seed])
    assert len({tuple(start.tolist()) for start in starts.values()}) == 20


def test_the_seed_also_determines_the_noise_unless_there_is_a_noise_seed():
    one, two = SeededGymEnv("FrozenLake-v1"), SeededGymEnv("FrozenLake-v1")
    actions = np.random.default_rng(0).integers(4, size=100).tolist()
    different = 0
    for seed in range(10):
        np.testing.assert_array_equal(one.reset(seed=seed), two.reset(seed=seed))
        assert walk(one, actions) == walk(two, actions)
        np.testing.assert_array_equal(one.reset(seed=seed, noise_seed=1), two.reset(seed=seed, noise_seed=2))
        different += walk(one, actions) != walk(two, actions)
        one.reset(seed=seed, noise_seed=1)
        two.reset(seed=seed, noise_seed=1)
        assert walk(one, actions) == walk(two, actions)
    assert different >= 9


def test_a_noise_seed_does_not_change_the_first_state():
    environment = SeededGymEnv(TOY)
    plain, other = environment.reset(seed=5), SeededGymEnv(TOY).reset(seed=6)
    steps = {}
    for noise in (1, 2):
        start = environment.reset(seed=5, noise_seed=noise)
        np.testing.assert_array_equal(start, plain)
        steps[noise] = [row[0][0] for row in walk(environment, [0] * 5)]
        expected = float(start[0]) + np.random.default_rng(noise).normal(size=5).cumsum()
        np.testing.assert_allclose(steps[noise], expected, rtol=1e-5)
    assert steps[1] != steps[2]
    assert plain.tolist() != other.tolist()


def one_hot(size, place):
    return [1.0 if i == place else 0.0 for i in range(size)]


def test_a_discrete_observation_is_one_hot():
    environment, plain = SeededGymEnv("FrozenLake-v1"), gymnasium.make("FrozenLake-v1")
    assert environment.shape.observation == 16
    actions = [1, 2, 2, 1, 1, 2] * 5
    for seed in range(5):
        assert environment.reset(seed=seed).tolist() == one_hot(16, plain.reset(seed=seed)[0])
        for action, step in zip(actions, walk(environment, actions), strict=False):
            place, reward, terminated, truncated, _ = plain.step(action)
            assert step == (one_hot(16, place), reward, terminated, truncated)


def test_a_tuple_is_concatenated():
    environment, plain = SeededGymEnv("Blackjack-v1"), gymnasium.make("Blackjack-v1")
    assert environment.shape.observation == 32 + 11 + 2
    for seed in range(5):
        hand, dealer, ace = plain.reset(seed=seed)[0]
        expected = one_hot(32, hand) + one_hot(11, dealer) + one_hot(2, ace)
        assert environment.reset(seed=seed).tolist() == expected
        (hand, dealer, ace), reward, terminated, _, _ = plain.step(1)
        expected = one_hot(32, hand) + one_hot(11, dealer) + one_hot(2, ace)
        assert walk(environment, [1]) == [(expected, reward, terminated, False)]


def test_a_dictionary_of_vectors_is_one_vector():
    space = spaces.Dict(speed=spaces.Box(-1, 1, (2,)), gear=spaces.Discrete(3, start=1), on=spaces.MultiBinary(4))
    environment = SeededGymEnv(TOY, {"space": space})
    assert environment.shape.observation == 3 + 4 + 2
    assert environment.reset(seed=0).shape == (9,)


def test_actions_start_at_zero():
    environment = SeededGymEnv(TOY, {"actions": spaces.Discrete(3, start=5)})
    assert environment.shape.actions == 3
    environment.reset(seed=0)
    walk(environment, [0, 1, 2, np.int64(1)])
    assert environment.env.unwrapped.taken == [5, 6, 7, 6]


@pytest.mark.parametrize(
    ("space", "drawn", "taken"),
    [
        (spaces.Box(-2, 2, (1,)), [[0.5], [-1.0], [3.0]], [[1.0], [-2.0], [2.0]]),
        (spaces.Box(0, 10, ()), [[0.0], [1.0], [-9.0]], [5.0, 10.0, 0.0]),
        (spaces.Box(-4, 0, (2, 2), np.float64), [[0.0, 1.0, -1.0, 0.5]], [[[-2.0, 0.0], [-4.0, -1.0]]]),
        (spaces.Box(np.array([-1, -5]), np.array([1, 5]), dtype=np.float32), [[0.3, 0.3]], [[0.3, 1.5]]),
        (spaces.Box(-np.inf, np.inf, (2,)), [[7.5, -0.25]], [[7.5, -0.25]]),
        (spaces.Box(0, np.inf, (2,)), [[7.5, -0.25]], [[7.5, 0.0]]),  # bounded on one side: clipped, not scaled
    ],
    ids=str,
)
def test_continuous_actions_are_scaled_and_clipped_to_the_box(space, drawn, taken):
    environment = SeededGymEnv(TOY, {"actions": space})
    assert environment.shape.continuous
    assert environment.shape.actions == len(drawn[0])
    environment.reset(seed=0)
    walk(environment, np.float32(drawn))
    for action, expected in zip(environment.env.unwrapped.taken, taken, strict=True):
        assert (action.shape, action.dtype) == (space.shape, space.dtype)
        assert space.contains(action)
        np.testing.assert_allclose(action, expected, rtol=1e-6)


def test_an_action_that_is_not_finite_is_refused():
    environment = SeededGymEnv("Pendulum-v1")
    environment.reset(4)
    with pytest.raises(ControlError, match=r"Pendulum-v1, step 1 .* seed 4, failed on action \[nan\]: .*learning rate"):
        environment.step([math.nan])


def test_the_seed_may_be_positional_or_missing():
    environment = SeededGymEnv("CartPole-v1")
    np.testing.assert_array_equal(environment.reset(7), environment.reset(seed=7))
    first, second = environment.reset(), environment.reset()
    assert first.tolist() != second.tolist()


def test_an_endless_episode_is_truncated():
    environment = SeededGymEnv(TOY)
    assert environment.shape.time_limit == LONGEST_EPISODE == 10_000
    environment.reset(seed=0)
    steps = walk(environment, [0] * 10_001)
    assert len(steps) == 10_000
    assert steps[-1][2:] == (False, True)
    assert SeededGymEnv("CartPole-v1").shape.time_limit == 500
    short = SeededGymEnv(TOY, {"max_episode_steps": 7})
    assert short.shape.time_limit == 7
    short.reset(seed=0)
    assert len(walk(short, [0] * 20)) == 7


def test_the_threshold_is_the_environments():
    assert SeededGymEnv("CartPole-v1").shape.threshold == 475
    assert SeededGymEnv(TOY).shape.threshold is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (TOY, {"actions": spaces.MultiDiscrete([2, 3])}, r"has the action space MultiDiscrete\(\[2 3\]\).*TransformAc"),
        (TOY, {"actions": spaces.MultiBinary(3)}, "action space MultiBinary.*only discrete .* and continuous ones"),
        (TOY, {"actions": spaces.Dict(a=spaces.Discrete(2))}, "action space Dict"),
        (TOY, {"actions": spaces.Tuple([spaces.Box(-1, 1, (2,))])}, "action space Tuple"),
        (TOY, {"actions": spaces.Box(0, 9, (2,), np.int64)}, r"action space Box\(0, 9, \(2,\), int64\).*Box of floats"),
        (TOY, {"actions": spaces.Box(-1, 1, (0,))}, r"action space Box.*\(0,\)"),
        (
            TOY,
            {"space": spaces.Box(0, 255, (8, 9, 3), np.uint8)},
            r"shape \(8, 9, 3\), such as images.*FlattenObservation",
        ),
        (TOY, {"space": spaces.Dict(a=spaces.Tuple([spaces.Box(0, 1, (2, 2))]))}, r"shape \(2, 2\), such as images"),
        (TOY, {"space": spaces.Graph(spaces.Box(0, 1, (2,)), None)}, "not a vector of a fixed length.*TransformObserv"),
        (TOY, {"space": spaces.Sequence(spaces.Discrete(2))}, "not a vector of a fixed length.*TransformObservation"),
        (TOY, {"space": spaces.Text(5)}, "not a vector of a fixed length.*TransformObservation"),
        (TOY, {"space": spaces.Tuple([spaces.Discrete(2), spaces.Text(5)])}, "not a vector of a fixed length"),
        (TOY, {"speed": 3}, f"'{TOY}' cannot be created: TypeError: .*'speed'"),
        ("CartPol-v1", {}, "'CartPol-v1' cannot be created: .* no environment of this id; did you mean 'CartPole-v1'"),
        ("nope", {}, "'nope' cannot be created: .* no environment of this id; an id looks like 'CartPole-v1'$"),
        ("CartPole-v7", {}, "'CartPole-v7' cannot be created: .*; did you mean 'CartPole-v1'"),
        ("no_such_module:Toy-v0", {}, "No module named 'no_such_module'"),
        ("", {}, "Malformed environment ID"),
        ("GroupwiseUnmakeable-v0", {}, "cannot be created: OSError: no licence"),
    ],
)
def test_unsupported_environments_are_refused(name, options, message):
    with pytest.raises(ControlError, match=message):
        SeededGymEnv(name, options)


@pytest.mark.parametrize(
    ("kind", "fault", "what"),
    [
        ("Toy", "raise", "failed on action 1: ZeroDivisionError: the pole broke"),
        ("Toy", "observation", r"gave an observation with NaN or an infinity: \[nan, 1.0\]"),
        ("Toy", "nan reward", "gave the reward nan; rewards must be finite"),
        ("Toy", "infinite reward", "gave the reward -inf"),
        ("Toy", "reward that is not a number", "failed on action 1: ValueError: .*'much'"),
        ("TooLong", "observation", r"gave an observation of shape \(3,\); its space says \(2,\)"),
        ("Boxed", "observation", r"gave an observation of shape \(1, 2\); its space says \(2,\)"),
        ("OffTheBoard", "observation", "broke its observation space: ValueError: 4 is not in Discrete"),
    ],
)
def test_a_fault_is_reported_with_its_seed_and_step(kind, fault, what):
    name = f"Groupwise{kind}-v0"
    environments = make_environments(name, 2, {"fault": fault, "at": 3})
    members = np.arange(2)
    environments.reset(members, [8, 11])
    for _ in range(2):
        environments.step(members, np.ones(2, dtype=np.int64))
    with pytest.raises(ControlError, match=rf"{name}, step 3 of the episode with seed 11,.* {what}"):
        environments.step(members[1:], np.ones(1, dtype=np.int64))


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("raise", f"{TOY} could not be reset with seed 23: ZeroDivisionError: the pole broke"),
        ("observation", f"{TOY}, step 0 of the episode with seed 23, gave an observation with NaN"),
    ],
)
def test_a_fault_in_reset_is_reported_with_its_seed(fault, what):
    with pytest.raises(ControlError, match=what):
        SeededGymEnv(TOY, {"fault": fault, "at": 0}).reset(seed=23)


def test_rendering():
    environment = SeededGymEnv("CartPole-v1", render_mode="rgb_array")
    with pytest.raises(ControlError, match=r"CartPole-v1, step 0 .* could not be rendered: ResetNeeded"):
        environment.render()
    environment.reset(seed=0)
    first = environment.render()
    assert first.shape == (400, 600, 3)
    walk(environment, [1] * 5)
    assert (environment.render() != first).any()
    environment.close()
    with pytest.raises(ControlError, match=f"'{TOY}' cannot be created: .*render_mode"):
        SeededGymEnv(TOY, render_mode="rgb_array")


# --- many environments at once ---------------------------------------------------------------------------------------


class Scalars:
    """Gymnasium's scalar environments."""

    def __init__(self, name, number, options):
        self.members = [gymnasium.make(name, **options) for _ in range(number)]

    def reset(self, member, seed):
        return self.members[member].reset(seed=seed)[0]

    def check(self, members, actions, steps):
        for row, (member, action) in enumerate(zip(members, actions, strict=True)):
            observation, reward, terminated, truncated, _ = self.members[member].step(int(action))
            np.testing.assert_allclose(steps.observations[row], observation, rtol=0, atol=1e-6)
            assert steps.rewards[row] == reward
            assert steps.terminated[row] == terminated
            assert steps.truncated[row] == truncated
            assert steps.done[row] == (terminated or truncated)


def balance(observations):
    """Good enough for 500 steps of CartPole."""
    return (observations[:, 2] + 0.5 * observations[:, 3] + 0.05 * observations[:, 1] > 0).astype(np.int64)


@pytest.mark.parametrize("engine", [VectorCartPole, EnvironmentLoop])
def test_members_that_end_drop_out_and_the_others_continue(engine):
    name, number = ("CartPole-v1", 8) if engine is VectorCartPole else ("Acrobot-v1", 3)
    options = {} if engine is VectorCartPole else {"max_episode_steps": 25}
    environments, scalars = make_environments(name, number, options), Scalars(name, number, options)
    assert isinstance(environments, engine)
    rng, lengths = np.random.default_rng(1), []
    for group in range(2):  # the second starts after members that dropped out have moved on
        members = np.arange(number)
        seeds = (100 * group + members).tolist()
        states = environments.reset(members, seeds)
        for member, seed in enumerate(seeds):
            np.testing.assert_array_equal(states[member], scalars.reset(member, seed))
        for step in range(1, 502):
            actions = rng.integers(environments.shape.actions, size=len(members))
            if engine is VectorCartPole:
                actions = np.where(members % 4 == 3, balance(states), actions)
            steps = environments.step(members, actions)
            scalars.check(members, actions, steps)
            lengths += [step] * int(steps.done.sum())
            members, states = members[~steps.done], steps.observations[~steps.done]
            if not len(members):
                break
        assert not len(members)
    environments.close()
    assert len(lengths) == 2 * number
    assert lengths.count(500 if engine is VectorCartPole else 25) >= 4  # the time limit was reached
    assert engine is EnvironmentLoop or len(set(lengths)) > 8


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CartPole-v1", {}),
        ("CartPole-v1", {"max_episode_steps": 15}),
        ("CartPole-v1", {"max_episode_steps": -1}),
        ("CartPole-v1", {"sutton_barto_reward": True}),
        ("Acrobot-v1", {"max_episode_steps": 9}),
    ],
    ids=["CartPole", "short CartPole", "CartPole without a limit", "CartPole with another reward", "Acrobot"],
)
def test_a_member_that_is_reset_in_the_middle_loses_no_step(name, options):
    number = 5
    environments, scalars = make_environments(name, number, options), Scalars(name, number, options)
    rng, members = np.random.default_rng(2), np.arange(number)
    for member, start in enumerate(environments.reset(members, list(range(number)))):
        np.testing.assert_array_equal(start, scalars.reset(member, member))
    ends = 0
    for _ in range(150 if "Cart" in name else 40):
        actions = rng.integers(environments.shape.actions, size=number)
        steps = environments.step(members, actions)
        scalars.check(members, actions, steps)
        done = members[steps.done]
        if len(done):
            seeds = rng.integers(1000, size=len(done)).tolist()
            for member, seed, start in zip(done, seeds, environments.reset(done, seeds), strict=True):
                np.testing.assert_array_equal(start, scalars.reset(member, seed))
        ends += len(done)
    assert ends > 15


def test_members_with_the_same_seed_behave_the_same():
    environments = make_environments("CartPole-v1", 6)
    members = np.arange(6)
    states = environments.reset(members, [4, 4, 9, 4, 9, 9])
    assert len({tuple(state) for state in states.tolist()}) == 2
    for action in (1, 0, 1):
        steps = environments.step(members, np.full(6, action))
        for same in ([0, 1, 3], [2, 4, 5]):
            np.testing.assert_array_equal(steps.observations[same], steps.observations[same[:1] * 3])


def test_each_member_of_a_loop_has_its_noise_seed():
    environments = make_environments(TOY, 3)
    members, still = np.arange(3), np.zeros(3, dtype=np.int64)
    start = environments.reset(members, [5, 5, 5], [1, 2, 1])
    assert (start == start[0]).all()
    after = environments.step(members, still).observations
    assert after[0].tolist() == after[2].tolist() != after[1].tolist()


# --- the buffers -----------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 6) | st.integers(15, 40), min_size=1, max_size=7), seed=st.integers(0, 1000))
def test_the_buffer_returns_the_steps_of_each_member(lengths, seed):
    rng = np.random.default_rng(seed)
    number = len(lengths)
    buffer = GRPOBuffer(number)
    for _ in range(2):  # the buffer is used again
        expected_episodes = [{"states": [], "actions": [], "logps": [], "rewards": []} for _ in lengths]
        for time in range(max(lengths)):
            members = rng.permutation([m for m in range(number) if lengths[m] > time])
            row = {
                "states": rng.normal(size=(len(members), 3)).astype(np.float32),
                "actions": rng.integers(4, size=len(members)),
                "logps": rng.normal(size=len(members)).astype(np.float32),
                "rewards": rng.normal(size=len(members)),
            }
            buffer.store(**row, members=members)
            for place, member in enumerate(members):
                for name, values in row.items():
                    expected_episodes[member][name].append(values[place])
            ended = [m for m in members.tolist() if lengths[m] == time + 1]
            if ended:
                buffer.end_episode(*ended)
        episodes = buffer.episodes()
        assert len(episodes) == number
        for episode, expected, length in zip(episodes, expected_episodes, lengths, strict=True):
            for name, values in expected.items():
                np.testing.assert_array_equal(episode[name].numpy(), np.stack(values))
                assert episode[name].numpy().dtype == np.stack(values).dtype
            assert episode["weight"].item() == np.float32(1 / length)
            assert episode["return"].item() == pytest.approx(math.fsum(expected["rewards"]), abs=1e-12)


def one_step(*members):
    size = len(members)
    columns = {"states": np.zeros((size, 2)), "actions": np.zeros(size), "logps": np.zeros(size)}
    return {"members": np.array(members), "rewards": np.ones(size), **columns}


def test_episodes_are_stored_one_transition_after_the_other():
    buffer = GRPOBuffer()
    for _ in range(2):  # the buffer is used again
        for length in (4, 1, 2):
            for step in range(length):
                buffer.store(np.float32([length, step]), np.int64(1), 0.5 * length, np.float32(-0.25))
            buffer.end_episode()
        episodes = buffer.episodes()
        assert [episode["states"].tolist() for episode in episodes] == [
            [[length, step] for step in range(length)] for length in (4, 1, 2)
        ]
        assert [episode["return"].item() for episode in episodes] == [8.0, 0.5, 2.0]
        assert [episode["weight"].item() for episode in episodes] == [0.25, 1.0, 0.5]
        assert [episode["actions"].tolist() for episode in episodes] == [[1] * 4, [1], [1] * 2]
        assert [episode["logps"].tolist() for episode in episodes] == [[-0.25] * 4, [-0.25], [-0.25] * 2]
        assert all(episode["logps"].dtype == torch.float32 for episode in episodes)


def test_a_member_plays_one_episode_after_the_other():
    buffer = GRPOBuffer(2)
    for members in ([0, 1], [1, 0], [0], [1]):
        buffer.store(**one_step(*members))
        if members == [1, 0]:
            buffer.end_episode(0, 1)
    buffer.end_episode(1)
    buffer.end_episode(0)
    assert [len(episode["rewards"]) for episode in buffer.episodes()] == [2, 2, 1, 1]


def test_all_episodes_must_have_ended():
    buffer = GRPOBuffer(3)
    buffer.store(**one_step(0, 1))
    buffer.end_episode(0)
    with pytest.raises(InputError, match="2 of 3 episodes have not ended yet"):
        buffer.episodes()
    buffer = GRPOBuffer()
    with pytest.raises(InputError, match="1 of 1 episodes have not ended yet"):
        buffer.episodes()
    buffer.store(np.zeros(2), 1, 1.0, 0.0)
    buffer.end_episode()
    buffer.store(np.zeros(2), 1, 1.0, 0.0)
    with pytest.raises(InputError, match=r"1 of 2 episodes have not ended yet; end_episode\(\) ends one"):
        buffer.episodes()
    buffer.end_episode()
    buffer.end_episode()
    with pytest.raises(InputError, match="ended an episode that has no transitions"):
        buffer.episodes()


def reference_gae(steps, critic, gamma, lam):
    """Σ_k (γλ)^k δ_{t+k} up to the end of the episode, with V(s′) = 0 where it terminated."""
    length, number = steps["rewards"].shape
    advantages = np.zeros((length, number))
    for column in range(number):

        def delta(t, column=column):
            ahead = 0.0 if steps["terminated"][t, column] else critic(steps["next_states"][t, column]).item()
            return steps["rewards"][t, column].item() + gamma * ahead - critic(steps["states"][t, column]).item()

        for t in range(length):
            for k in range(length - t):
                advantages[t, column] += (gamma * lam) ** k * delta(t + k)
                if steps["terminated"][t + k, column] or steps["truncated"][t + k, column]:
                    break
    return advantages


@given(
    seed=st.integers(0, 1000),
    length=st.integers(1, 12),
    number=st.integers(1, 3),
    gamma=st.sampled_from([0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_advantages_are_sums_of_deltas_up_to_the_end_of_the_episode(seed, length, number, gamma, lam):
    rng = np.random.default_rng(seed)
    critic = MLP(3, 1, (5, 5)).double()
    buffer = PPOBuffer()
    rows = [
        {
            "states": rng.normal(size=(number, 3)),
            "actions": rng.integers(4, size=number),
            "logps": rng.normal(size=number),
            "next_states": rng.normal(size=(number, 3)),
            "rewards": rng.normal(size=number),
            "terminated": rng.random(number) < 0.2,
            "truncated": rng.random(number) < 0.2,
        }
        for _ in range(length)
    ]
    for row in rows:
        buffer.store(**row)
    steps = buffer.transitions()
    for name, column in steps.items():
        np.testing.assert_array_equal(column.numpy(), np.stack([row[name] for row in rows]))
    advantages, returns = buffer.advantages(steps, critic, gamma, lam)
    expected = reference_gae(steps, critic, gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-9, atol=1e-9)
    values = critic(steps["states"]).squeeze(-1).detach().numpy()
    np.testing.assert_allclose(returns.numpy(), expected + values, rtol=1e-9, atol=1e-9)
    assert not advantages.requires_grad
    buffer.store(**rows[0])
    assert len(buffer.transitions()["rewards"]) == 1  # the earlier steps were removed


# --- plots and videos ------------------------------------------------------------------------------------------------


def progress(number):
    return {
        "env_steps": 1000.0 * number,
        "cpu_seconds": 0.5 * number,
        "greedy_return": 10.0 * number,
        "sampled_return": 9.0 * number,
    }


def pixels_of(path, colour):
    with Image.open(path) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels.shape == (600, 1500, 3)
    wanted = 255 * np.array(colors.to_rgb(colour))
    return int((np.abs(pixels - wanted).max(-1) < 12).sum())


@pytest.fixture
def _no_display(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")


@pytest.mark.usefixtures("_no_display")
def test_without_a_display_an_image_is_drawn_after_each_pause(tmp_path):
    image = tmp_path / "live.png"
    plotter = LivePlotter(image, title="CartPole", threshold=475.0, pause=1e6)
    plotter.add("grpo", progress(0))
    first = image.read_bytes()
    for number in range(1, 200):
        plotter.add("grpo", progress(number))
        plotter.add("ppo", progress(number))
    assert image.read_bytes() == first
    assert pixels_of(image, COLOURS[1]) < 100
    plotter.close()
    assert image.read_bytes() != first
    assert pixels_of(image, COLOURS[0]) > 300
    assert pixels_of(image, COLOURS[1]) > 300
    assert [path.name for path in tmp_path.iterdir()] == ["live.png"]


@pytest.mark.slow
def test_without_a_pause_every_row_is_drawn(tmp_path):
    image = tmp_path / "live.png"
    plotter = LivePlotter(image, window=False, pause=0.0)
    drawn = set()
    for number in range(3):
        plotter.add("grpo", progress(number))
        drawn.add(image.read_bytes())
    assert len(drawn) == 3


def test_a_plotter_without_rows_writes_nothing(tmp_path):
    LivePlotter(tmp_path / "live.png", window=False).close()
    assert not list(tmp_path.iterdir())


class FigureCanvas(FigureCanvasAgg):
    """Makes this module a pyplot backend with windows that need no screen."""

    waited: list[float]

    def start_event_loop(self, timeout=0):
        self.waited = [*getattr(self, "waited", []), timeout]


def show(block=None):
    assert block is False


@pytest.fixture
def pyplot(monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setenv("DISPLAY", ":0")
    before, interactive = matplotlib.get_backend(), plt.isinteractive()
    yield plt
    plt.switch_backend(before)
    plt.interactive(interactive)


@pytest.mark.slow
def test_a_window_is_drawn_without_blocking(tmp_path, pyplot):
    pyplot.switch_backend(f"module://{__name__}")
    plotter = LivePlotter(tmp_path / "live.png", pause=0.0, threshold=20.0)
    assert pyplot.isinteractive()
    (number,) = pyplot.get_fignums()
    figure = pyplot.figure(number)
    for row in range(2):
        plotter.add("grpo", progress(row))
    assert figure.canvas.waited == [0.001] * 2
    assert not list(tmp_path.iterdir())
    steps, seconds = figure.axes
    greedy, sampled, solved = steps.lines
    assert greedy.get_xydata().tolist() == [[0, 0], [1000, 10]]
    assert sampled.get_xydata().tolist() == [[0, 0], [1000, 9]]
    assert list(solved.get_ydata()) == [20, 20]
    assert seconds.lines[0].get_xydata().tolist() == [[0, 0], [0.5, 10]]
    (legend,) = figure.legends  # only one after several drawings
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["grpo, greedy", "grpo, sampled", "solved"]
    plotter.close()
    assert pyplot.get_fignums() == []
    assert (tmp_path / "live.png").exists()


def test_without_a_window_pyplot_is_not_used(tmp_path, pyplot):
    pyplot.switch_backend(f"module://{__name__}")
    pyplot.ioff()
    LivePlotter(tmp_path / "live.png", window=False).add("grpo", progress(1))
    assert (tmp_path / "live.png").exists()
    assert (pyplot.get_fignums(), pyplot.isinteractive()) == ([], False)


def test_without_a_backend_for_windows_the_image_is_written(tmp_path, pyplot):
    pyplot.switch_backend("agg")
    plotter = LivePlotter(tmp_path / "live.png")
    plotter.add("grpo", progress(1))
    assert (tmp_path / "live.png").exists()
    assert pyplot.get_fignums() == []


def grey_frames(length, shade):
    """Frames of 60 × 90 pixels, each brighter than the one before."""
    return [(np.full((60, 90, 3), shade + 12 * number, dtype=np.uint8), f"step {number}") for number in range(length)]


@pytest.mark.parametrize(
    ("fps", "indices"), [(50, [0, 2, 4, 6, 7]), pytest.param(20, list(range(8)), marks=pytest.mark.slow)]
)
def test_a_gif_has_the_frames_of_both_side_by_side(tmp_path, fps, indices):
    write_video(tmp_path / "play.gif", [grey_frames(8, 0), grey_frames(5, 100)], fps)
    with Image.open(tmp_path / "play.gif") as image:
        assert image.size == (800, 304)  # 400 × 267 each, below the caption
        assert image.n_frames == len(indices)
        durations = []
        for number, index in enumerate(indices):
            image.seek(number)
            durations.append(image.info["duration"])
            left, right = (image.convert("RGB").getpixel((x, 200)) for x in (200, 600))
            np.testing.assert_allclose(left, 12 * index, atol=4)
            np.testing.assert_allclose(right, 100 + 12 * min(index, 4), atol=4)  # its last frame stays
    duration = 1000 * (2 if fps == 50 else 1) / fps
    assert durations == [*[duration] * (len(indices) - 1), duration + 1000]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of imageio's reader
def test_an_mp4_has_the_frames_and_a_still_end(tmp_path):
    write_video(tmp_path / "play.mp4", [grey_frames(6, 40)], 30)
    with imageio.imopen(tmp_path / "play.mp4", "r", plugin="FFMPEG") as video:
        frames = np.stack(list(video.iter()))
        assert video.metadata()["fps"] == 30
    assert frames.shape == (6 + 30, 304, 400, 3)
    np.testing.assert_allclose(frames[:6, 200, 200, 0], [40 + 12 * number for number in range(6)], atol=6)
    np.testing.assert_allclose(frames[5:, 200, 200, 0], 100, atol=6)


def test_the_caption_is_above_the_frame(tmp_path):
    write_video(tmp_path / "play.gif", [[(np.zeros((60, 90, 3)), "grpo   step 3")]], 10)
    first = imageio.imread(tmp_path / "play.gif", index=0)
    text = first[:32].min(axis=-1) < 128
    assert 50 < text.sum() < 0.2 * text.size
    assert (first[36:290] < 10).all()


@pytest.mark.parametrize("name", ["play.avi", "play", "play.gif.txt"])
def test_other_video_formats_are_refused(tmp_path, name):
    with pytest.raises(InputError, match=rf"must end in .gif or .mp4, got '{name}'"):
        write_video(tmp_path / name, [grey_frames(2, 0)], 30)
    assert not list(tmp_path.iterdir())
