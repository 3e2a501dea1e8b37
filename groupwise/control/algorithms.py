"""The GRPO and PPO agents.

GRPO: the advantage is A_i = (R_i − mean) / std within the episodes of one first state, the same for every step of an
episode, and each episode has the weight 1/T_i (DeepSeekMath, arXiv 2402.03300, with the return as the reward). PPO
(arXiv 1707.06347): GAE (arXiv 1506.02438) from a critic, c₁ times the critic's loss, c₂ times the entropy. Clipping,
group advantages, KL and GAE come from `groupwise.core`. Episodes stay a list, group after group, until each has its
advantage; then one forward pass serves the states of all of them, and each keeps its own weight. A group of equal
returns, which has no gradient, is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.control.environments import Environments
from groupwise.control.policies import make_policy
from groupwise.control.settings import AgentSettings, GRPOSettings, PPOSettings
from groupwise.control.utils import MLP, AnyArray, Episode, GRPOBuffer, PPOBuffer, Shape
from groupwise.core import aggregate, group_advantages, group_statistics, kl_estimate, policy_loss, value_loss
from groupwise.errors import MAX_FLOAT32, MAX_GRADIENT_NORM, ControlError, InputError

REMEDY = "a smaller learning rate (lr) may help, or smaller rewards and weights of the loss"


class Agent(nn.Module):
    """An actor and its optimizer. ``generator`` is the source of all sampling."""

    def __init__(self, shape: Shape, settings: AgentSettings, seed: int, *, with_critic: bool = False) -> None:
        super().__init__()
        self.settings = settings
        self.generator = np.random.default_rng(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = make_policy(shape, settings.hidden)
            if with_critic:
                self.critic = MLP(shape.observation, 1, settings.hidden)
        self._weights = list(self.parameters())
        self.optimizer = torch.optim.Adam(self._weights, lr=settings.lr, fused=True)
        linear = [layer for layer in self.actor if isinstance(layer, nn.Linear)]
        self._layers = [(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in linear]  # views

    def get_action(
        self, states: AnyArray, *, greedy: bool = False, generator: np.random.Generator | None = None
    ) -> tuple[AnyArray, AnyArray]:
        """The action for a state and its log-probability: sampled, or with ``greedy`` the most likely one.

        For a batch of states, ``(B, observation)``, both have a row for each. This is NumPy, which for the few rows of
        one step is several times faster than torch.
        """
        outputs = np.atleast_2d(states)
        for weight, bias in self._layers[:-1]:
            outputs = np.tanh(outputs @ weight.T + bias)
        weight, bias = self._layers[-1]
        outputs = outputs @ weight.T + bias
        if not np.isfinite(outputs).all():
            largest = float(np.abs(states).max())
            raise ControlError(
                f"the policy's outputs are NaN or infinite, for observations up to {largest:g}; if these are large, "
                "scale them, else a smaller learning rate (lr) may help"
            )
        actions, logps = self.actor.draw(outputs, None if greedy else generator or self.generator)
        return (actions, logps) if np.ndim(states) > 1 else (actions[0], logps[0])

    def _step(self, loss: Tensor) -> None:
        if not bool(torch.isfinite(loss)):
            raise ControlError(f"the loss is {loss.item()}; {REMEDY}")
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        norm, limit = nn.utils.get_total_norm(gradients), self.settings.max_grad_norm
        if not bool(norm <= (MAX_GRADIENT_NORM if limit is None or limit > MAX_GRADIENT_NORM else MAX_FLOAT32)):
            raise ControlError(f"the gradient's norm is {norm.item():g}, and the weights have not changed; {REMEDY}")
        if limit is not None:
            nn.utils.clip_grads_with_norm_(self._weights, limit, norm)
        self.optimizer.step()


class GRPOAgent(Agent):
    """An actor without a critic: the baseline of an episode is the mean of its group."""

    settings: GRPOSettings

    def __init__(self, shape: Shape, settings: GRPOSettings | None = None, seed: int = 0) -> None:
        super().__init__(shape, settings or GRPOSettings(), seed)
        if self.settings.kl_coef:
            self.reference = copy.deepcopy(self.actor).requires_grad_(False)

    def update(self, buffer: GRPOBuffer | Sequence[Episode]) -> dict[str, float]:
        """Learn from the episodes of a buffer, or from a list of them; return the metrics.

        Each consecutive ``group_size`` episodes are a group.
        """
        settings = self.settings
        episodes = buffer.episodes() if isinstance(buffer, GRPOBuffer) else buffer
        if not episodes or len(episodes) % settings.group_size:
            raise InputError(
                f"an update needs complete groups of {settings.group_size} episodes (group_size), got {len(episodes)}"
            )
        returns = torch.stack([episode["return"] for episode in episodes])
        groups = group_statistics(returns, settings.group_size, unbiased=False)
        metrics = {
            "zero_spread_groups": float(groups.equal.double().mean()),
            "group_spread": float(groups.std.mean()),
            "episode_length": float(np.mean([len(episode["rewards"]) for episode in episodes])),
            "train_return": float(returns.mean()),
        }
        mask, advantages = self._advantages(episodes, returns)  # (B, T) each
        # Episodes with advantage 0 have a gradient only through the KL term.
        contributes = mask.any(1) if settings.kl_coef else (advantages != 0).any(1)
        if not bool(contributes.any()):
            return metrics
        kept = [episode for episode, keep in zip(episodes, contributes.tolist(), strict=True) if keep]
        states, actions = (torch.cat([episode[name] for episode in kept]) for name in ("states", "actions"))
        present, advantages = mask[contributes], advantages[contributes]
        old_logps = _padded(torch.cat([episode["logps"] for episode in kept]), present)
        # The episodes left out count in the denominators, so that leaving them out changes nothing.
        totals: dict[str, Any] = {"total_sequences": len(episodes), "total_tokens": int(mask.sum())}
        loss_name, mean = ("grpo", "sequence_mean") if settings.length_norm == "episode" else ("dapo", "token_mean")
        if settings.kl_coef:
            with torch.no_grad():
                reference = _padded(self.reference.evaluate(states, actions)[0], present)
        for _ in range(settings.epochs):
            flat, entropy = self.actor.evaluate(states, actions)
            logps = _padded(flat, present)
            loss, statistics = policy_loss(
                logps, old_logps, advantages, present, loss=loss_name, clip_low=settings.clip, **totals
            )
            if settings.kl_coef:
                kl = kl_estimate(logps, reference, mask=present)
                loss = loss + settings.kl_coef * aggregate(kl, present, mean, **totals)
                metrics["kl"] = float(kl.detach().sum() / present.sum())
            self._step(loss)
        return metrics | _loss_metrics(loss, entropy, statistics)

    def _advantages(self, episodes: Sequence[Episode], returns: Tensor) -> tuple[Tensor, Tensor]:
        """The mask of existing steps, (B, T), and the advantage of each step.

        With ``credit="outcome"`` all steps of an episode have the same advantage. With the reward to go, each step is
        compared with the same step of the other episodes of its group; for an episode that has ended, that is 0.
        """
        settings = self.settings
        scale = "group" if settings.divide_by_std else "none"
        options: dict[str, Any] = {"scale": scale, "eps": 1e-8, "unbiased": False}
        lengths = torch.tensor([len(episode["rewards"]) for episode in episodes])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        if settings.credit == "outcome":
            advantages = group_advantages(returns, settings.group_size, **options).float()
            return mask, advantages[:, None] * mask
        to_go = torch.zeros(mask.shape, dtype=torch.float64)
        for row, episode in zip(to_go, episodes, strict=True):
            row[: len(episode["rewards"])] = _reward_to_go(episode["rewards"], settings.gamma)
        group = torch.arange(len(episodes))[:, None] // settings.group_size
        labels = group * mask.shape[1] + torch.arange(mask.shape[1])
        return mask, group_advantages(to_go.flatten(), labels.flatten(), **options).view(mask.shape).float() * mask


class PPOAgent(Agent):
    """An actor and a critic with one optimizer."""

    settings: PPOSettings

    def __init__(self, shape: Shape, settings: PPOSettings | None = None, seed: int = 0) -> None:
        super().__init__(shape, settings or PPOSettings(), seed, with_critic=True)

    def update(self, buffer: PPOBuffer) -> dict[str, float]:
        """Learn from the transitions of a buffer in mini-batches; return the metrics of the last one."""
        settings = self.settings
        steps = buffer.transitions()
        advantages, returns = buffer.advantages(steps, self.critic, settings.gamma, settings.gae_lambda)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        columns = (steps["states"], steps["actions"], steps["logps"], advantages, returns)
        batch = [column.flatten(0, 1) for column in columns]
        for _ in range(settings.epochs):
            order = torch.from_numpy(self.generator.permutation(len(batch[0])))
            for rows in torch.split(order, settings.minibatch):
                states, actions, old_logps, advantage, target = (column[rows] for column in batch)
                logps, entropy = self.actor.evaluate(states, actions)
                # One row, so that every step has the same weight.
                policy, statistics = policy_loss(
                    logps[None], old_logps[None], advantage[None], torch.ones_like(logps[None]), clip_low=settings.clip
                )
                critic = value_loss(self.critic(states).squeeze(-1), target)
                loss = policy + settings.value_coef * critic - settings.entropy_coef * entropy
                self._step(loss)
        return {"value_loss": float(critic.detach())} | _loss_metrics(loss, entropy, statistics)


def make_agent(shape: Shape, settings: GRPOSettings | PPOSettings, seed: int) -> GRPOAgent | PPOAgent:
    return GRPOAgent(shape, settings, seed) if isinstance(settings, GRPOSettings) else PPOAgent(shape, settings, seed)


def play_out(
    agent: GRPOAgent | PPOAgent, environments: Environments, seeds: Sequence[int], *, greedy: bool
) -> AnyArray:
    """The return of one episode from each first state, with greedy or with sampled actions."""
    generator = np.random.default_rng(0)
    returns = np.zeros(len(seeds))
    members = np.arange(len(seeds))
    states = environments.reset(members, seeds)
    while len(members):
        actions, _ = agent.get_action(states, greedy=greedy, generator=generator)
        steps = environments.step(members, actions)
        returns[members] += steps.rewards
        running = ~steps.done
        members, states = members[running], steps.observations[running]
    return returns


def _padded(flat: Tensor, present: Tensor) -> Tensor:
    """The values of the existing steps, ``(steps,)``, as a padded ``(B, T)``."""
    return torch.zeros(present.shape).masked_scatter(present, flat)


def _reward_to_go(rewards: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ G_{t+1}."""
    to_go, total = rewards.double().tolist(), 0.0
    for t in reversed(range(len(to_go))):
        total = to_go[t] = to_go[t] + gamma * total
    return torch.tensor(to_go, dtype=torch.float64)


def _loss_metrics(loss: Tensor, entropy: Tensor, statistics: Mapping[str, Tensor]) -> dict[str, float]:
    clipped = statistics["clip_fraction_low"] + statistics["clip_fraction_high"]
    return {
        "loss": float(loss.detach()),
        "entropy": float(entropy.detach()),
        "clip_fraction": float(clipped),
        "approx_kl": float(statistics["approx_kl"]),
    }
