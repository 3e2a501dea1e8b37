"""The agents against reference loops and Stable-Baselines3, and their settings."""

from __future__ import annotations

import copy
import itertools
import math
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

from groupwise.control.algorithms import GRPOAgent, PPOAgent, make_agent, play_out
from groupwise.control.environments import make_environments
from groupwise.control.main import CONFIG
from groupwise.control.policies import GaussianPolicy
from groupwise.control.settings import PRESETS, GRPOSettings, PPOSettings, config_of, settings_of
from groupwise.control.utils import GRPOBuffer, PPOBuffer, Shape
from groupwise.errors import ConfigError, ControlError, InputError

SHAPE = Shape(observation=3, actions=4, threshold=None, time_limit=100)
BOX = Shape(observation=3, actions=2, threshold=None, time_limit=100, continuous=True)


@pytest.fixture
def _doubles():
    """Double precision, because Adam's division by tiny gradients amplifies rounding errors."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def policy_of(actor, states):
    """The distribution of torch for the outputs of an actor."""
    if isinstance(actor, GaussianPolicy):
        return Independent(Normal(actor(states), actor.log_std.exp()), 1)
    return Categorical(logits=actor(states))


def random_episodes(rng, agent, groups, *, spread=True):
    """Episodes of random lengths, sampled by a perturbed policy; every third group has equal returns."""
    kind = agent.actor[0].weight.dtype
    sampler = copy.deepcopy(agent.actor)
    for weight in sampler.parameters():
        weight.data += 0.15 * torch.from_numpy(rng.normal(size=weight.shape)).to(kind)
    episodes = []
    for group in range(groups):
        for _ in range(agent.settings.group_size):
            length = int(rng.integers(1, 9))
            states = torch.from_numpy(rng.normal(size=(length, SHAPE.observation))).to(kind)
            if isinstance(sampler, GaussianPolicy):
                actions = torch.from_numpy(rng.normal(size=(length, BOX.actions))).to(kind)
            else:
                actions = torch.from_numpy(rng.integers(SHAPE.actions, size=length))
            rewards = torch.from_numpy(rng.normal(size=length))
            if group % 3 == 1 or not spread:
                rewards = torch.zeros(length, dtype=torch.float64)
                rewards[rng.integers(length)] = 2.0
            logps = policy_of(sampler, states).log_prob(actions).detach()
            episode = {"states": states, "actions": actions, "logps": logps, "rewards": rewards}
            episodes.append(episode | {"return": rewards.sum(), "weight": torch.tensor(1 / length)})
    return episodes


def population(values):
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def normalised(values, settings):
    """(R_i − mean) / (std + ε) of one group."""
    mean, std = population(values)
    return [(value - mean) / ((std + 1e-8) if settings.divide_by_std else 1) for value in values]


def reference_advantages(group, settings):
    """The advantage of each step of each episode of one group."""
    rewards = [episode["rewards"].tolist() for episode in group]
    if settings.credit == "outcome":
        values = normalised([sum(row) for row in rewards], settings)
        return [[values[i]] * len(row) for i, row in enumerate(rewards)]
    advantages = [[0.0] * len(row) for row in rewards]
    for t in range(max(map(len, rewards))):
        to_go = [sum(settings.gamma ** (k - t) * row[k] for k in range(t, len(row))) for row in rewards]
        for i, value in enumerate(normalised(to_go, settings)):
            if t < len(rewards[i]):
                advantages[i][t] = value
    return advantages


class ReferenceGRPO:
    """The GRPO update as a loop over episodes, with all settings."""

    def __init__(self, agent):
        self.settings, self.actor = agent.settings, copy.deepcopy(agent.actor)
        self.reference = copy.deepcopy(agent.actor)
        self.optimizer = torch.optim.Adam(self.actor.parameters(), lr=self.settings.lr)

    def update(self, episodes):
        settings, advantages = self.settings, []
        for start in range(0, len(episodes), settings.group_size):
            advantages += reference_advantages(episodes[start : start + settings.group_size], settings)
        total_steps = sum(len(episode["rewards"]) for episode in episodes)
        for _ in range(settings.epochs):
            loss, clipped = torch.zeros(()), 0
            for episode, values in zip(episodes, advantages, strict=True):
                advantage = torch.tensor(values)
                logps = policy_of(self.actor, episode["states"]).log_prob(episode["actions"])
                ratio = torch.exp(logps - episode["logps"])
                clipped_ratio = ratio.clip(1 - settings.clip, 1 + settings.clip)
                objective = torch.minimum(ratio * advantage, clipped_ratio * advantage)
                clipped += int((clipped_ratio * advantage < ratio * advantage).sum())
                if settings.kl_coef:
                    before = policy_of(self.reference, episode["states"]).log_prob(episode["actions"])
                    distance = before.detach() - logps
                    objective = objective - settings.kl_coef * (distance.exp() - distance - 1)
                weight = 1 / total_steps
                if settings.length_norm == "episode":
                    weight = episode["weight"] / len(episodes)
                loss = loss - weight * objective.sum()
            descend(loss, self.optimizer, settings.max_grad_norm)
        return {"loss": loss.item(), "clip_fraction": clipped / total_steps}


def descend(loss, optimizer, largest):
    """One optimizer step with gradient norm clipping."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    optimizer.zero_grad()
    loss.backward()
    norm = math.sqrt(sum(float(weight.grad.square().sum()) for weight in weights))
    for weight in weights:
        weight.grad *= min(1.0, largest / (norm + 1e-6))
    optimizer.step()


def assert_same_weights(network, reference, before, lr):
    """The weights have moved, and are equal to a thousandth of the learning rate."""
    for (name, weight), expected, start in zip(
        network.named_parameters(), reference.parameters(), before.parameters(), strict=True
    ):
        assert (expected - start).abs().max() > 0.5 * lr, name
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-3 * lr, msg=lambda text, name=name: name + text)


def bits(agent):
    return [weight.detach().clone() for weight in agent.parameters()]


# --- GRPO ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize(
    ("length_norm", "divide_by_std", "kl_coef", "credit", "epochs", "shape"),
    [
        ("episode", True, 0.0, "outcome", 4, SHAPE),
        ("episode", False, 0.3, "reward_to_go", 4, SHAPE),
        ("step", True, 0.3, "outcome", 4, SHAPE),
        ("step", False, 0.0, "reward_to_go", 1, SHAPE),
        ("episode", True, 0.3, "outcome", 4, BOX),
    ],
)
def test_grpo_is_the_reference_loop(length_norm, divide_by_std, kl_coef, credit, epochs, shape):
    check_grpo(length_norm, divide_by_std, kl_coef, credit, epochs, shape)


@pytest.mark.slow
@pytest.mark.usefixtures("_doubles")
def test_grpo_is_the_reference_loop_with_all_settings():
    switches = ("episode", "step"), (True, False), (0.0, 0.3), ("outcome", "reward_to_go"), (1, 4)
    for values in itertools.product(*switches, (SHAPE, BOX)):
        check_grpo(*values)


def check_grpo(length_norm, divide_by_std, kl_coef, credit, epochs, shape):
    settings = GRPOSettings(
        lr=0.01,
        epochs=epochs,
        group_size=4,
        gamma=0.9,
        length_norm=length_norm,
        divide_by_std=divide_by_std,
        kl_coef=kl_coef,
        credit=credit,
        hidden=(8, 7),
        max_grad_norm=0.3 if epochs == 4 else 100.0,
    )
    agent = GRPOAgent(shape, settings, seed=1)
    reference, before = ReferenceGRPO(agent), copy.deepcopy(agent.actor)
    rng = np.random.default_rng(5)
    for groups in (3, 4):  # the second update also depends on Adam's moments
        episodes = random_episodes(rng, agent, groups)
        metrics, expected = agent.update(episodes), reference.update(episodes)
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
        assert metrics["clip_fraction"] == pytest.approx(expected["clip_fraction"], abs=1e-6)
        assert expected["clip_fraction"] > 0.02
        assert_same_weights(agent.actor, reference.actor, before, settings.lr)


def buffer_with(episodes):
    """A buffer to which the transitions of episodes were added one by one."""
    buffer = GRPOBuffer()
    for episode in episodes:
        columns = (episode[name].numpy() for name in ("states", "actions", "rewards", "logps"))
        for transition in zip(*columns, strict=True):
            buffer.store(*transition)
        buffer.end_episode()
    return buffer


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize("shape", [SHAPE, BOX], ids=["discrete", "continuous"])
def test_one_forward_pass_has_the_loss_and_gradient_of_a_loop_over_groups_and_episodes(shape):
    """The loop of the design: chunks of G, an advantage per episode, a forward pass per episode, a sum of losses."""
    agent = GRPOAgent(shape, GRPOSettings(group_size=4, hidden=(8, 7)), seed=1)
    episodes = random_episodes(np.random.default_rng(5), agent, 4)
    actor, total = copy.deepcopy(agent.actor), torch.zeros(())
    clipped = 0
    for start in range(0, len(episodes), 4):
        group = episodes[start : start + 4]
        mean, std = population([episode["return"].item() for episode in group])
        for episode in group:
            advantage = (episode["return"] - mean) / (std + 1e-8)
            ratio = (policy_of(actor, episode["states"]).log_prob(episode["actions"]) - episode["logps"]).exp()
            objective = torch.min(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
            clipped += int((objective < ratio * advantage).sum())
            total = total - objective.sum() * episode["weight"]
    total.backward()
    metrics = agent.update(buffer_with(episodes))
    assert clipped > 3
    assert metrics["loss"] == pytest.approx(total.item() / len(episodes), rel=1e-6)
    for (name, weight), expected in zip(agent.actor.named_parameters(), actor.parameters(), strict=True):
        assert expected.grad.abs().max() > 1e-4, name
        torch.testing.assert_close(weight.grad * len(episodes), expected.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("number", [0, 3, 6])
def test_an_update_needs_complete_groups(number):
    agent = GRPOAgent(SHAPE, GRPOSettings(group_size=4))
    episodes = random_episodes(np.random.default_rng(0), agent, 2)[:number]
    with pytest.raises(InputError, match=rf"complete groups of 4 episodes \(group_size\), got {number}"):
        agent.update(episodes)


def test_metrics_of_an_update():
    agent = GRPOAgent(SHAPE, GRPOSettings(group_size=2, groups=2))
    episodes = random_episodes(np.random.default_rng(0), agent, 2)  # the second group's returns are all 2
    first, second = (episode["return"].item() for episode in episodes[:2])
    metrics = agent.update(episodes)
    assert metrics["zero_spread_groups"] == 0.5
    assert metrics["group_spread"] == pytest.approx(abs(first - second) / 2 / 2)
    assert metrics["train_return"] == pytest.approx((first + second + 4) / 4)
    assert metrics["episode_length"] == sum(len(episode["rewards"]) for episode in episodes) / 4
    assert 0 < metrics["entropy"] <= math.log(4) + 1e-6


def played(agent, seed=0):
    """The episodes of one update on CartPole, as the training loop gathers them."""
    settings = agent.settings
    number = settings.groups * settings.group_size
    environments = make_environments("CartPole-v1", number)
    members, buffer = np.arange(number), GRPOBuffer(number)
    states = environments.reset(members, [seed + member // settings.group_size for member in range(number)])
    while len(members):
        actions, logps = agent.get_action(states)
        steps = environments.step(members, actions)
        buffer.store(states, actions, steps.rewards, logps, members)
        if steps.done.any():
            buffer.end_episode(*members[steps.done].tolist())
        members, states = members[~steps.done], steps.observations[~steps.done]
    return buffer.episodes()


CART_POLE = Shape(observation=4, actions=2, threshold=475.0, time_limit=500)


def test_with_one_epoch_the_ratio_is_one():
    agent = GRPOAgent(CART_POLE, settings_of("grpo"))
    for update in range(3):
        metrics = agent.update(played(agent, 10 * update))
        assert metrics["clip_fraction"] == 0
        assert abs(metrics["approx_kl"]) < 1e-6
        assert metrics["zero_spread_groups"] < 1


def test_with_more_epochs_and_a_large_learning_rate_the_ratio_is_clipped():
    agent = GRPOAgent(CART_POLE, settings_of("grpo:epochs=8:lr=0.02"))
    metrics = agent.update(played(agent))
    assert metrics["clip_fraction"] > 0.05
    assert metrics["approx_kl"] > 0.01


def test_equal_returns_change_nothing():
    agent = GRPOAgent(SHAPE, GRPOSettings(group_size=4, epochs=3, lr=0.1))
    before = bits(agent)
    metrics = agent.update(random_episodes(np.random.default_rng(1), agent, 3, spread=False))
    assert metrics["zero_spread_groups"] == 1.0
    assert metrics["group_spread"] == 0.0
    assert all(map(torch.equal, before, bits(agent)))
    assert not agent.optimizer.state  # Adam made no step


def test_equal_returns_still_have_the_kl_term():
    agent = GRPOAgent(SHAPE, GRPOSettings(group_size=4, epochs=3, lr=0.02, kl_coef=1.0))
    rng = np.random.default_rng(1)
    start = copy.deepcopy(agent.actor)
    for _ in range(3):
        agent.update(random_episodes(rng, agent, 1))
    reference = agent.reference
    assert all(map(torch.equal, start.parameters(), reference.parameters()))
    before, metrics = bits(agent), []
    for _ in range(15):
        metrics.append(agent.update(random_episodes(rng, agent, 3, spread=False)))
    assert {update["zero_spread_groups"] for update in metrics} == {1.0}
    assert not all(map(torch.equal, before, bits(agent)))
    assert metrics[-1]["kl"] < 0.2 * metrics[0]["kl"]


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_loss_that_is_not_finite_is_an_error_before_the_optimizer_steps(epochs):
    agent = GRPOAgent(SHAPE, GRPOSettings(group_size=4, epochs=epochs))
    episodes = random_episodes(np.random.default_rng(1), agent, 1)
    episodes[2]["logps"][0] = math.nan
    before = bits(agent)
    with pytest.raises(ControlError, match=r"the loss is nan; .*learning rate"):
        agent.update(episodes)
    assert all(map(torch.equal, before, bits(agent)))
    assert not agent.optimizer.state


# --- acting ----------------------------------------------------------------------------------------------------------


def opinionated(seed=0, scale=100.0):
    """An agent whose policy is far from uniform, unlike a new one's."""
    agent = GRPOAgent(SHAPE, GRPOSettings(group_size=4, lr=0.05), seed=seed)
    agent.actor[-1].weight.data *= scale
    agent.actor[-1].bias.data += torch.tensor([0.5, -0.7, 0.1, 0.0])
    return agent


def by_torch(agent, states):
    with torch.no_grad():
        return Categorical(logits=agent.actor(torch.from_numpy(states)))


def states_of(number, seed=0):
    return np.random.default_rng(seed).normal(size=(number, SHAPE.observation)).astype(np.float32)


def test_log_probabilities_are_those_of_torchs_categorical():
    agent, states = opinionated(), states_of(200)
    policy = by_torch(agent, states)
    for greedy in (False, True):
        actions, logps = agent.get_action(states, greedy=greedy)
        assert logps.dtype == np.float32
        np.testing.assert_allclose(logps, policy.log_prob(torch.from_numpy(actions)).numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(actions, policy.probs.argmax(-1).numpy())


def test_large_logits_give_finite_log_probabilities():
    agent = opinionated(scale=1e6)
    actions, logps = agent.get_action(states_of(50))
    assert np.isfinite(logps).all()
    np.testing.assert_array_equal(actions, agent.get_action(states_of(50), greedy=True)[0])


def test_the_frequencies_of_sampled_actions_are_their_probabilities():
    agent, number = opinionated(scale=20.0), 20_000
    for state in states_of(3):
        states = np.tile(state, (number, 1))
        expected = number * by_torch(agent, states[:1]).probs[0].double().numpy()
        assert expected.min() > 50
        counts = np.bincount(agent.get_action(states)[0], minlength=SHAPE.actions)
        assert ((counts - expected) ** 2 / expected).sum() < 16.27  # χ² with 3 degrees of freedom, p = 0.001


def test_a_batch_gives_the_same_as_its_rows_one_by_one():
    agent, states = opinionated(), states_of(40)
    actions, logps = agent.get_action(states, generator=np.random.default_rng(3))
    generator = np.random.default_rng(3)
    rows = [agent.get_action(state[None], generator=generator) for state in states]
    np.testing.assert_array_equal(actions, np.concatenate([row[0] for row in rows]))
    np.testing.assert_allclose(logps, np.concatenate([row[1] for row in rows]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [SHAPE, BOX], ids=["discrete", "continuous"])
@pytest.mark.parametrize("kind", [GRPOAgent, PPOAgent])
def test_one_state_gives_one_action_and_its_log_probability(kind, shape):
    agent, states = kind(shape), states_of(20)
    for greedy in (False, True):
        actions, logps = agent.get_action(states, greedy=greedy, generator=np.random.default_rng(3))
        generator = np.random.default_rng(3)
        for state, expected_action, expected_logp in zip(states, actions, logps, strict=True):
            action, logp = agent.get_action(state, greedy=greedy, generator=generator)
            assert np.shape(action) == ((2,) if shape is BOX else ())
            np.testing.assert_allclose(action, expected_action, rtol=1e-5, atol=1e-6)
            assert float(logp) == pytest.approx(float(expected_logp), rel=1e-5, abs=1e-6)


def test_another_generator_leaves_the_agents_generator_alone():
    one, two = opinionated(), opinionated()
    one.get_action(states_of(9), generator=np.random.default_rng(3))
    one.get_action(states_of(9), greedy=True)
    np.testing.assert_array_equal(one.get_action(states_of(50))[0], two.get_action(states_of(50))[0])


def test_actions_follow_the_weights():
    agent, other, states = opinionated(0), opinionated(1), states_of(50)
    all_logps = []
    for change in (
        lambda: None,
        lambda: agent.update(random_episodes(np.random.default_rng(2), agent, 2)),
        lambda: agent.load_state_dict(other.state_dict()),
        lambda: agent.update(random_episodes(np.random.default_rng(3), agent, 2)),
    ):
        change()
        actions, logps = agent.get_action(states, greedy=True)
        policy = by_torch(agent, states)
        np.testing.assert_allclose(logps, policy.log_prob(torch.from_numpy(actions)).numpy(), rtol=1e-5, atol=1e-5)
        all_logps.append(logps)
    for before, after in itertools.pairwise(all_logps):
        assert np.abs(before - after).max() > 1e-3


def test_a_seed_determines_the_weights_without_changing_torchs_generator():
    before = torch.get_rng_state()
    agents = [make_agent(SHAPE, settings_of(name), seed) for name in ("grpo", "ppo") for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), before)
    for same, again, other in (agents[:3], agents[3:]):
        assert all(map(torch.equal, bits(same), bits(again)))
        assert not torch.equal(bits(same)[0], bits(other)[0])
    assert [type(agent) for agent in agents[::3]] == [GRPOAgent, PPOAgent]


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1"])
def test_an_evaluation_is_one_episode_from_each_start(name):
    options = {"max_episode_steps": 60}
    environments = make_environments(name, 6, options)
    agent = make_agent(environments.shape, settings_of("ppo"), seed=2)
    agent.actor[-1].weight.data *= 100
    seeds, expected = [5, 3, 5, 8, 13, 21], []
    plain = gymnasium.make(name, **options)
    for seed in seeds:
        state, total, over = plain.reset(seed=seed)[0], 0.0, False
        while not over:
            action = int(agent.actor(torch.from_numpy(np.float32(state))).argmax())
            state, reward, terminated, truncated, _ = plain.step(action)
            total, over = total + reward, terminated or truncated
        expected.append(total)
    assert play_out(agent, environments, seeds, greedy=True).tolist() == expected
    generator_state = agent.generator.bit_generator.state
    sampled = play_out(agent, environments, seeds, greedy=False)
    np.testing.assert_array_equal(play_out(agent, environments, seeds, greedy=False), sampled)
    assert agent.generator.bit_generator.state == generator_state


# --- PPO -------------------------------------------------------------------------------------------------------------


def random_rows(rng, agent, steps, environments):
    """Transitions with perturbed log-probabilities, some of them terminated or truncated."""
    kind = np.float64 if agent.actor[0].weight.dtype == torch.float64 else np.float32
    rows = []
    for _ in range(steps):
        states = rng.normal(size=(environments, SHAPE.observation)).astype(kind)
        actions, logps = agent.get_action(states)
        rows.append(
            {
                "states": states,
                "next_states": rng.normal(size=states.shape).astype(kind),
                "actions": actions,
                "logps": (logps + 0.2 * rng.normal(size=environments)).astype(kind),
                "rewards": rng.normal(size=environments),
                "terminated": rng.random(environments) < 0.15,
                "truncated": rng.random(environments) < 0.15,
            }
        )
    return rows


def buffer_of(rows):
    buffer = PPOBuffer()
    for row in rows:
        buffer.store(**row)
    return buffer


def reference_gae(rows, critic, settings):
    advantages = torch.zeros(len(rows), len(rows[0]["rewards"]))
    for column in range(advantages.shape[1]):
        running = 0.0
        for t in reversed(range(len(rows))):
            row = {name: values[column] for name, values in rows[t].items()}
            ahead = 0.0 if row["terminated"] else critic(torch.from_numpy(row["next_states"])).item()
            delta = row["rewards"] + settings.gamma * ahead - critic(torch.from_numpy(row["states"])).item()
            if row["terminated"] or row["truncated"]:
                running = 0.0
            running = delta + settings.gamma * settings.gae_lambda * running
            advantages[t, column] = running
    return advantages


def reference_ppo(rows, actor, critic, optimizer, settings, generator):
    """The PPO update as a loop over mini-batches; returns the losses of the last one."""
    advantages = reference_gae(rows, critic, settings)
    flat = {name: torch.from_numpy(np.concatenate([row[name] for row in rows])) for name in rows[0]}
    with torch.no_grad():
        returns = advantages.flatten() + critic(flat["states"])[:, 0]
    advantages = advantages.flatten()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    number = len(advantages)
    for _ in range(settings.epochs):
        order = generator.permutation(number)
        for start in range(0, number, settings.minibatch):
            chosen = order[start : start + settings.minibatch]
            policy = policy_of(actor, flat["states"][chosen])
            ratio = (policy.log_prob(flat["actions"][chosen]) - flat["logps"][chosen]).exp()
            clipped = ratio.clip(1 - settings.clip, 1 + settings.clip)
            objective = torch.minimum(ratio * advantages[chosen], clipped * advantages[chosen]).mean()
            error = ((critic(flat["states"][chosen])[:, 0] - returns[chosen]) ** 2).mean()
            loss = -(objective - settings.value_coef * error + settings.entropy_coef * policy.entropy().mean())
            descend(loss, optimizer, settings.max_grad_norm)
    return loss.item(), error.item()


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize(
    ("value_coef", "entropy_coef", "max_grad_norm", "shape"),
    [(0.5, 0.0, 0.5, SHAPE), (1.3, 0.2, 100.0, SHAPE), (0.7, 0.05, 0.05, SHAPE), (0.7, 0.1, 0.5, BOX)],
)
def test_ppo_is_the_reference_loop(value_coef, entropy_coef, max_grad_norm, shape):
    settings = PPOSettings(
        lr=0.01,
        epochs=3,
        environments=3,
        steps=39,
        minibatch=16,
        gamma=0.9,
        gae_lambda=0.8,
        value_coef=value_coef,
        entropy_coef=entropy_coef,
        max_grad_norm=max_grad_norm,
        hidden=(8, 7),
    )
    agent, rng = PPOAgent(shape, settings, seed=4), np.random.default_rng(6)
    before = copy.deepcopy((agent.actor, agent.critic))
    actor, critic = copy.deepcopy(before)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=settings.lr)
    for _ in range(2):
        rows = random_rows(rng, agent, 13, 3)
        order = copy.deepcopy(agent.generator)
        metrics = agent.update(buffer_of(rows))
        loss, error = reference_ppo(rows, actor, critic, optimizer, settings, order)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
        assert metrics["value_loss"] == pytest.approx(error, rel=1e-6)
        assert_same_weights(agent.actor, actor, before[0], settings.lr)
        assert_same_weights(agent.critic, critic, before[1], settings.lr)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Stable-Baselines3
def test_ppo_is_that_of_stable_baselines():
    """Four passes over one batch of real episodes; both bootstrap where the time limit truncated one."""
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.logger import configure

    number, steps, options = 4, 40, {"max_episode_steps": 12}
    settings = PPOSettings(
        environments=number, steps=number * steps, minibatch=number * steps, epochs=4, entropy_coef=0.01
    )
    agent = PPOAgent(CART_POLE, settings, seed=1)
    before = copy.deepcopy((agent.actor, agent.critic))
    peer = sb3.PPO(
        "MlpPolicy",
        sb3.common.env_util.make_vec_env("CartPole-v1", number),
        learning_rate=settings.lr,
        n_steps=steps,
        batch_size=settings.minibatch,
        n_epochs=settings.epochs,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        ent_coef=settings.entropy_coef,
        policy_kwargs={"optimizer_kwargs": {"eps": 1e-8}},
        device="cpu",
    )
    peer.set_logger(configure(None, []))
    for ours, theirs in layers_of(agent, peer):
        theirs.load_state_dict(ours.state_dict())
    rows = _play_for_both(agent, peer, make_environments("CartPole-v1", number, options), steps)
    assert sum(row["truncated"].sum() for row in rows) > 5
    assert sum(row["terminated"].sum() for row in rows) > 0
    buffer = buffer_of(rows)
    transitions = buffer.transitions()
    advantages, returns = buffer.advantages(transitions, agent.critic, settings.gamma, settings.gae_lambda)
    np.testing.assert_allclose(advantages.numpy(), peer.rollout_buffer.advantages, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(returns.numpy(), peer.rollout_buffer.returns, rtol=1e-4, atol=1e-4)
    agent.update(buffer_of(rows))
    peer.train()
    starts = [layer for network in before for layer in list(network)[::2]]
    for (ours, theirs), start in zip(layers_of(agent, peer), starts, strict=True):
        assert (ours.weight - start.weight).abs().max() > settings.lr
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=0.05 * settings.lr)
        torch.testing.assert_close(ours.bias, theirs.bias, rtol=0, atol=0.05 * settings.lr)


def layers_of(agent, peer):
    """Our layers beside theirs: the actor's three, then the critic's."""
    extractor = peer.policy.mlp_extractor
    actor = [*list(extractor.policy_net)[::2], peer.policy.action_net]
    critic = [*list(extractor.value_net)[::2], peer.policy.value_net]
    return list(zip([*list(agent.actor)[::2], *list(agent.critic)[::2]], [*actor, *critic], strict=True))


@torch.no_grad()
def _play_for_both(agent, peer, environments, steps):
    """Transitions for our buffer, and the same in theirs, which adds γV(s′) to the reward of a truncated episode."""
    members = np.arange(agent.settings.environments)
    states, begins, rows = environments.reset(members, members.tolist()), np.ones(len(members)), []
    seeds = itertools.count(100)

    def value(of):
        return agent.critic(torch.from_numpy(of)).squeeze(-1)

    for _ in range(steps):
        actions, logps = agent.get_action(states)
        taken = environments.step(members, actions)
        ends = {"rewards": taken.rewards, "terminated": taken.terminated, "truncated": taken.truncated}
        rows.append({"states": states, "actions": actions, "logps": logps, "next_states": taken.observations, **ends})
        cut_off = taken.truncated & ~taken.terminated
        rewards = taken.rewards + cut_off * agent.settings.gamma * value(taken.observations).numpy()
        peer.rollout_buffer.add(states, actions, rewards, begins, value(states), torch.from_numpy(logps))
        states, begins = taken.observations.copy(), taken.done
        if begins.any():
            states[begins] = environments.reset(members[begins], [next(seeds) for _ in members[begins]])
    peer.rollout_buffer.compute_returns_and_advantage(value(states), begins)
    return rows


def test_an_empty_buffer_is_an_error():
    with pytest.raises(InputError, match="the buffer has no transitions"):
        PPOAgent(SHAPE).update(PPOBuffer())


def test_ppo_stops_before_a_loss_that_is_not_finite_moves_anything():
    agent = PPOAgent(SHAPE, PPOSettings(environments=2, steps=8, minibatch=8))
    rows = random_rows(np.random.default_rng(0), agent, 4, 2)
    rows[1]["rewards"][0] = 1e30  # its square is beyond float32
    before = bits(agent)
    with pytest.raises(ControlError, match=r"the loss is (inf|nan); a smaller learning rate"):
        agent.update(buffer_of(rows))
    assert all(map(torch.equal, before, bits(agent)))
    assert not agent.optimizer.state


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_gradient_beyond_float32_moves_nothing(kind):
    agent = make_agent(SHAPE, settings_of(kind), 0)
    before = bits(agent)
    with pytest.raises(ControlError, match=r"the gradient's norm is .*, and the weights have not changed"):
        agent._step((1e30 * agent._weights[0]).sum())
    assert all(map(torch.equal, before, bits(agent)))


def test_outputs_that_are_not_finite_are_refused():
    agent = GRPOAgent(SHAPE)
    with torch.no_grad():
        agent._weights[0].fill_(float("nan"))
    with pytest.raises(ControlError, match=r"outputs are NaN or infinite, for observations up to 2; .*learning rate"):
        agent.get_action(np.full((3, SHAPE.observation), 2.0, np.float32))


# --- settings --------------------------------------------------------------------------------------------------------


def test_the_values_of_the_presets():
    grpo, ppo = settings_of("grpo"), settings_of("ppo")
    assert isinstance(grpo, GRPOSettings)
    assert isinstance(ppo, PPOSettings)
    assert grpo.groups * grpo.group_size == 32
    assert (grpo.lr, grpo.group_size, grpo.clip, grpo.kl_coef, grpo.epochs) == (3e-4, 16, 0.2, 0.0, 1)
    assert (grpo.credit, grpo.length_norm, grpo.divide_by_std, grpo.same_start) == ("outcome", "episode", True, True)
    assert (ppo.lr, ppo.steps, ppo.clip) == (3e-4, 2048, 0.2)
    assert config_of().settings == grpo == GRPOAgent(SHAPE).settings
    assert PPOAgent(SHAPE).settings == ppo
    assert [settings_of(name) for name in CONFIG["algorithms"]] == [grpo, ppo]
    for name, preset in PRESETS.items():
        assert settings_of(name) == preset
        agent = make_agent(SHAPE, settings_of(name), 0)
        assert type(agent.optimizer) is torch.optim.Adam
        assert agent.optimizer.param_groups[0]["lr"] == settings_of(name).lr


def test_the_settings_in_the_sources_have_their_values():
    """docs/sources.md writes a setting of the design as a change of its preset that changes nothing."""
    text = (
        (Path(__file__).parents[2] / "docs/sources.md").read_text().partition("## GRPO against PPO on Gymnasium\n")[2]
    )
    cells = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")]
    changes = re.findall(r"`groupwise control train --algo ((\w+):[^`]+)`", "\n".join(cells))
    assert len(changes) > 15
    assert [change for change, preset in changes if settings_of(change) != PRESETS[preset]] == []


def test_settings_are_changed_by_name():
    settings = settings_of("grpo-fast:lr=0.5:same_start=false:credit=reward_to_go:hidden=32x16:max_grad_norm=none")
    changed = {"lr": 0.5, "same_start": False, "credit": "reward_to_go", "hidden": (32, 16), "max_grad_norm": None}
    assert settings.model_dump() == PRESETS["grpo-fast"].model_dump() | changed
    assert settings_of("ppo:steps=60:environments=6").steps == 60
    network = make_agent(SHAPE, settings_of("ppo:hidden=32x16"), 0).critic
    assert [tuple(layer.weight.shape) for layer in list(network)[::2]] == [(32, 3), (16, 32), (1, 16)]


REFUSED = [
    ("grpo-fest", "unknown algorithm 'grpo-fest'; did you mean 'grpo-fast'"),
    ("dqn", r"unknown algorithm 'dqn' \(allowed: 'grpo', 'grpo-fast', 'ppo', 'ppo-fast'\)"),
    ("grpo-paper:lr=0.1", "the algorithm 'grpo-paper' is called 'grpo' now"),
    ("grpo:group=5", "unknown setting of grpo 'group'; did you mean 'groups'"),
    ("grpo:steps=5", "unknown setting of grpo 'steps'"),
    ("ppo:group_size=5", "unknown setting of ppo 'group_size'"),
    ("ppo:algorithm=grpo", "unknown setting of ppo 'algorithm'"),
    ("grpo:lr", "'lr' does not change a setting; write grpo:KEY=VALUE"),
    ("grpo:", "'' does not change a setting"),
    ("grpo:lr=fast", "grpo:lr=fast: lr must be a number, got 'fast'"),
    ("grpo:lr=0", "lr must be greater than 0, got '0'"),
    ("grpo:lr=1e10", "lr must be at most 1, got '1e10'"),
    ("ppo:lr=1e39", "lr must be at most 1, got '1e39'"),
    ("ppo:value_coef=1e39", "value_coef must be at most 3.40282e.38, got '1e39'"),
    ("grpo:lr=nan", "lr must be finite, got 'nan'"),
    ("grpo:group_size=1", "group_size must be at least 2, got '1'"),
    ("grpo:epochs=1.5", "epochs must be an integer, got '1.5'"),
    ("grpo:same_start=perhaps", "same_start must be true or false, got 'perhaps'"),
    ("grpo:credit=all", "credit must be 'outcome' or 'reward_to_go', got 'all'"),
    ("grpo:gamma=1.01", "gamma must be at most 1, got '1.01'"),
    ("grpo:hidden=32xlarge", "hidden.1 must be an integer, got 'large'"),
    ("grpo:hidden=0", "hidden.0 must be greater than 0, got '0'"),
    ("ppo:hidden=64x-3", "hidden.1 must be greater than 0, got '-3'"),
    ("ppo:steps=2049", r"cannot be used: steps \(2049\) must be a multiple of environments \(8\)"),
    ("ppo:environments=3", r"cannot be used: steps \(2048\) must be a multiple of environments \(3\)"),
]


def test_invalid_settings_are_refused():
    failures = []
    for algorithm, message in REFUSED:
        try:
            settings_of(algorithm)
            failures.append(algorithm)
        except ConfigError as error:
            if not re.search(message, str(error)):
                failures.append(f"{algorithm}: {error}")
    assert failures == []
