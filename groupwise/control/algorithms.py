"""GRPO and PPO agents and their settings.

GRPO: the advantage is A_i = (R_i − mean) / std within the episodes of one first state, the same for every step of an
episode, and each episode has the weight 1/T_i (DeepSeekMath, arXiv 2402.03300, with the return as the reward). PPO
(arXiv 1707.06347): GAE (arXiv 1506.02438) from a critic, c₁ times the critic's loss, c₂ times the entropy. Clipping,
group advantages, KL and GAE come from `groupwise.core`. All episodes go through the network in one batch, and a group
of equal returns, which has no gradient, is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from torch import Tensor, nn

from groupwise.control.utils import MLP, AnyArray, Environments, Episode, PPOBuffer, Shape
from groupwise.core import aggregate, group_advantages, group_statistics, kl_estimate, policy_loss, value_loss
from groupwise.errors import ConfigError, ControlError, check_choice

Model = TypeVar("Model", bound=BaseModel)

# --- settings --------------------------------------------------------------------------------------------------------


class AgentSettings(BaseModel):
    """The settings of both algorithms. The descriptions are shown by `groupwise control train --help`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lr: float = Field(default=3e-4, gt=0, description="Adam's learning rate")
    clip: float = Field(default=0.2, ge=0, description="the ratio is clipped to 1 ± this")
    epochs: int = Field(default=1, ge=1, description="passes over each batch")
    gamma: float = Field(default=0.99, ge=0, le=1, description="discount of later rewards")
    max_grad_norm: float | None = Field(default=None, gt=0, description="gradient norm clipping (none: no clipping)")
    hidden: tuple[PositiveInt, ...] = Field(default=(64, 64), description="widths of the hidden layers")


class GRPOSettings(AgentSettings):
    algorithm: Literal["grpo"] = "grpo"
    group_size: int = Field(default=16, ge=2, description="G, the episodes of a group")
    groups: int = Field(default=2, ge=1, description="groups per update")
    same_start: bool = Field(default=True, description="the episodes of a group have the same first state")
    independent_noise: bool = Field(
        default=False, description="the episodes of a group have different transition noise"
    )
    credit: Literal["outcome", "reward_to_go"] = Field(
        default="outcome",
        description="outcome: an action gets its episode's return; reward_to_go: only the rewards after it",
    )
    divide_by_std: bool = Field(default=True, description="divide a group's advantages by its standard deviation")
    length_norm: Literal["episode", "step"] = Field(
        default="episode", description="episode: equal weight for every episode (1/T_i); step: for every step"
    )
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the initial policy")


class PPOSettings(AgentSettings):
    algorithm: Literal["ppo"] = "ppo"
    epochs: int = Field(default=10, ge=1, description="passes over each batch")
    max_grad_norm: float | None = Field(default=0.5, gt=0, description="gradient norm clipping (none: no clipping)")
    environments: int = Field(default=8, ge=1, description="environments that step in parallel")
    steps: int = Field(default=2048, ge=2, description="steps per update, over all environments")
    minibatch: int = Field(default=64, ge=2, description="steps per optimizer step")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="GAE's λ")
    value_coef: float = Field(default=0.5, ge=0, description="c₁, weight of the critic's loss")
    entropy_coef: float = Field(default=0.0, ge=0, description="c₂, weight of the entropy")

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.steps % self.environments:
            raise ValueError(f"steps ({self.steps}) must be a multiple of environments ({self.environments})")
        return self


def grpo_paper() -> GRPOSettings:
    """GRPO with lr 3e-4, two groups of 16, population std, clip 0.2 and one optimizer step per batch.

    With one step per batch the trained policy is the one that sampled: the ratio is always 1, clipping never acts, and
    this is REINFORCE with the group mean as its baseline.
    """
    return GRPOSettings()


def grpo_fast() -> GRPOSettings:
    """GRPO with three groups of 8 and lr 0.02: solves CartPole in a tenth of the steps.

    Still one pass over each batch: with more, many runs collapse.
    """
    return GRPOSettings(lr=0.02, group_size=8, groups=3)


def ppo() -> PPOSettings:
    """PPO with lr 3e-4, 2048 steps per update, clip 0.2 and advantages normalised over the batch.

    10 passes in mini-batches of 64, γ 0.99, λ 0.95, c₁ 0.5, c₂ 0, gradient norms clipped to 0.5.
    """
    return PPOSettings()


def ppo_fast() -> PPOSettings:
    """PPO with more environments, larger mini-batches, fewer passes and ten times the learning rate."""
    return PPOSettings(lr=0.003, environments=16, minibatch=256, epochs=6, gamma=0.98, clip=0.3, value_coef=0.25)


PRESETS: dict[str, Callable[[], GRPOSettings | PPOSettings]] = {
    "grpo-paper": grpo_paper,
    "grpo-fast": grpo_fast,
    "ppo": ppo,
    "ppo-fast": ppo_fast,
}
ALIASES = {"grpo": "grpo-paper"}


def validate(kind: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """``values`` as a ``kind``; a ConfigError names the first invalid one."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))} = {first['input']!r}" if first["loc"] else "these settings"
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}{what} cannot be used: {reason}") from error


def settings_of(algorithm: str, changes: Mapping[str, Any] | None = None) -> GRPOSettings | PPOSettings:
    """The settings of a preset, optionally changed: ``grpo-fast``, or ``grpo-fast:same_start=false:lr=0.003``."""
    name, *words = algorithm.split(":")
    name = ALIASES.get(name, name)
    check_choice("algorithm", name, [*PRESETS, *ALIASES], ConfigError)
    preset = PRESETS[name]()
    values: dict[str, Any] = dict(changes or {})
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{algorithm!r}: {word!r} does not change a setting; write {name}:KEY=VALUE")
        values[key] = tuple(value.split("x")) if key == "hidden" else None if value == "none" else value
    for key in values:
        check_choice(f"setting of {name}", key, sorted(set(type(preset).model_fields) - {"algorithm"}), ConfigError)
    return validate(type(preset), {**preset.model_dump(), **values}, f"{algorithm}: ")


# --- the agents ------------------------------------------------------------------------------------------------------


class Agent:
    """An actor and its optimizer. ``generator`` is the source of all sampling."""

    def __init__(self, shape: Shape, settings: AgentSettings, seed: int = 0) -> None:
        self.settings = settings
        self.generator = np.random.default_rng(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = MLP(shape.observation, shape.actions, settings.hidden, gain=0.01)
            self.networks = self._networks(shape)
        self._weights = [weight for weight in self.networks.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.Adam(self._weights, lr=settings.lr, fused=True)
        linear = [layer for layer in self.actor if isinstance(layer, nn.Linear)]
        self._layers = [(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in linear]  # views

    def _networks(self, shape: Shape) -> nn.ModuleDict:
        return nn.ModuleDict({"actor": self.actor})

    def get_action(
        self, states: AnyArray, *, greedy: bool = False, generator: np.random.Generator | None = None
    ) -> tuple[AnyArray, AnyArray]:
        """An action for each state and its log-probability: sampled, or with ``greedy`` the most likely one.

        This is NumPy, which for the few rows of one step is several times faster than torch.
        """
        logits = states
        for weight, bias in self._layers[:-1]:
            logits = np.tanh(logits @ weight.T + bias)
        weight, bias = self._layers[-1]
        logits = logits @ weight.T + bias
        logps = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        if greedy:
            actions = logps.argmax(-1)
        else:  # the Gumbel-max trick
            actions = (logps + (generator or self.generator).gumbel(size=logps.shape)).argmax(-1)
        return actions, logps[np.arange(len(actions)), actions]

    def _logps(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probabilities of actions under the policy, and the policy's mean entropy."""
        all_logps = self.actor(states).log_softmax(-1)
        entropy = -(all_logps.exp() * all_logps).sum(-1).mean()
        return all_logps.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropy

    def _step(self, loss: Tensor) -> None:
        if not bool(torch.isfinite(loss)):
            raise ControlError(f"the loss is {loss.item()}; a smaller learning rate (lr) may help")
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._weights, self.settings.max_grad_norm)
        self.optimizer.step()


class GRPOAgent(Agent):
    """An actor without a critic: the baseline of an episode is the mean of its group."""

    settings: GRPOSettings

    def __init__(self, shape: Shape, settings: GRPOSettings, seed: int = 0) -> None:
        super().__init__(shape, settings, seed)

    def _networks(self, shape: Shape) -> nn.ModuleDict:
        networks = super()._networks(shape)
        if self.settings.kl_coef:
            networks["reference"] = copy.deepcopy(self.actor).requires_grad_(False)
        return networks

    def update(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Learn from episodes, of which each consecutive ``group_size`` are a group; return the metrics."""
        settings = self.settings
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
        reference = self._reference_logps(states, actions, present)
        for _ in range(settings.epochs):
            flat, entropy = self._logps(states, actions)
            logps = _padded(flat, present)
            loss, statistics = policy_loss(
                logps, old_logps, advantages, present, loss=loss_name, clip_low=settings.clip, **totals
            )
            if reference is not None:
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
        options: dict[str, Any] = {
            "scale": "group" if settings.divide_by_std else "none",
            "eps": 1e-8,
            "unbiased": False,
        }
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

    @torch.no_grad()
    def _reference_logps(self, states: Tensor, actions: Tensor, present: Tensor) -> Tensor | None:
        if not self.settings.kl_coef:
            return None
        logps = self.networks["reference"](states).log_softmax(-1)
        return _padded(logps.gather(-1, actions.unsqueeze(-1)).squeeze(-1), present)


class PPOAgent(Agent):
    """An actor and a critic with one optimizer."""

    settings: PPOSettings

    def __init__(self, shape: Shape, settings: PPOSettings, seed: int = 0) -> None:
        super().__init__(shape, settings, seed)
        self.critic = self.networks["critic"]

    def _networks(self, shape: Shape) -> nn.ModuleDict:
        critic = MLP(shape.observation, 1, self.settings.hidden)
        return nn.ModuleDict({"actor": self.actor, "critic": critic})

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
                logps, entropy = self._logps(states, actions)
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
