"""The Gaussian policy against torch.distributions and by hand, and that continuous actions are learned."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Independent, Normal

from groupwise.control.algorithms import GRPOAgent, PPOAgent
from groupwise.control.policies import GaussianPolicy, gaussian_logps
from groupwise.control.utils import Shape

SHAPE = Shape(observation=3, actions=2, threshold=None, time_limit=10, continuous=True)


def wide(kind=GRPOAgent):
    """An agent whose means depend on the state, and whose standard deviations differ."""
    agent = kind(SHAPE, seed=1)
    agent.actor[-1].weight.data *= 100
    agent.actor.log_std.data = torch.tensor([0.5, -1.5])
    return agent


def states_of(number, seed=0):
    return np.random.default_rng(seed).normal(size=(number, SHAPE.observation)).astype(np.float32)


def by_torch(agent, states):
    return Independent(Normal(agent.actor(torch.from_numpy(states)), agent.actor.log_std.exp()), 1)


def test_a_log_density_and_an_entropy_by_hand():
    policy = GaussianPolicy(1, 2, (3,))
    for weight in policy.parameters():
        weight.data.zero_()
    policy[-1].bias.data = torch.tensor([1.0, -2.0])
    policy.log_std.data = torch.tensor([math.log(2.0), math.log(0.5)])
    logps, entropy = policy.evaluate(torch.zeros(1, 1), torch.tensor([[3.0, -2.5]]))
    # z = (1, −1): −½ − ½ − log 2 − log ½ − log 2π
    assert logps.item() == pytest.approx(-1.0 - math.log(2 * math.pi), rel=1e-6)
    assert entropy.item() == pytest.approx(1.0 + math.log(2 * math.pi), rel=1e-6)


def test_log_densities_entropy_and_their_gradients_are_those_of_torch():
    agent = wide()
    states, actions = torch.from_numpy(states_of(50)), torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    gradients = []
    for exact in (False, True):
        if exact:
            policy = by_torch(agent, states.numpy())
            logps, entropy = policy.log_prob(actions), policy.entropy().mean()
        else:
            logps, entropy = agent.actor.evaluate(states, actions)
        weights = list(agent.actor.parameters())
        gradients.append([logps, entropy, *torch.autograd.grad(logps.square().mean() + 3 * entropy, weights)])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert gradients[0][2].shape == agent.actor.log_std.shape
    assert gradients[0][2].abs().min() > 0.1


@pytest.mark.parametrize("kind", [GRPOAgent, PPOAgent])
def test_actions_are_drawn_from_the_gaussian_with_its_log_density(kind):
    agent, states = wide(kind), states_of(4)
    for state in states:
        rows = np.tile(state, (20_000, 1))
        actions, logps = agent.get_action(rows)
        assert (actions.dtype, logps.dtype, actions.shape, logps.shape) == (
            np.float32,
            np.float32,
            (20_000, 2),
            (20_000,),
        )
        policy = by_torch(agent, rows)
        np.testing.assert_allclose(logps, policy.log_prob(torch.from_numpy(actions)).detach(), rtol=1e-4, atol=1e-4)
        std = np.exp([0.5, -1.5])
        standardised = (actions - policy.mean.detach().numpy()) / std
        np.testing.assert_allclose(standardised.mean(0), 0, atol=4 / math.sqrt(20_000))  # four standard errors
        np.testing.assert_allclose(standardised.std(0), 1, atol=4 / math.sqrt(40_000))
        assert abs(np.corrcoef(standardised.T)[0, 1]) < 4 / math.sqrt(20_000)


def test_the_greedy_action_is_the_mean():
    agent, states = wide(), states_of(20)
    actions, logps = agent.get_action(states, greedy=True)
    np.testing.assert_allclose(actions, by_torch(agent, states).mean.detach(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logps, -0.5 + 1.5 - math.log(2 * math.pi), rtol=1e-5)  # −Σ log σ − log 2π


def test_the_same_formula_serves_numpy_and_torch():
    rng = np.random.default_rng(0)
    actions, means, log_std = rng.normal(size=(5, 3)), rng.normal(size=(5, 3)), rng.normal(size=3)
    tensors = [torch.from_numpy(array) for array in (actions, means, log_std, np.exp(log_std))]
    np.testing.assert_allclose(gaussian_logps(actions, means, log_std, np.exp(log_std)), gaussian_logps(*tensors))


def test_a_new_policy_has_means_near_zero_and_standard_deviations_of_one():
    agent = GRPOAgent(SHAPE)
    actions, _ = agent.get_action(states_of(100), greedy=True)
    assert np.abs(actions).max() < 0.1
    assert agent.actor.log_std.tolist() == [0.0, 0.0]
    assert [group["params"] for group in agent.optimizer.param_groups] == [list(agent.actor.parameters())]
