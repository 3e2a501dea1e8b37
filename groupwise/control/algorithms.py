"""The two agents, and their settings as data.

The fifth document's second file. GRPO: A_i = (R_i − mean) / std within the episodes from one s0, the same for every
step of the episode, and 1/T_i per episode. PPO: GAE from a critic, c₁ times its loss, c₂ times the entropy. Clipping,
group advantages, KL and GAE are those of `groupwise.core`. It deviates in how the work is done, not in what: the list
of episodes goes through the network at once, and a group whose returns are all equal, which would teach nothing, does
not go through it at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from torch import Tensor, nn

from groupwise.control.utils import MLP, Array, Environments, Episode, PPOBuffer, Shape
from groupwise.core import aggregate, group_advantages, group_statistics, kl_estimate, policy_loss, value_loss
from groupwise.errors import ConfigError, ControlError, check_choice

Model = TypeVar("Model", bound=BaseModel)

# --- settings --------------------------------------------------------------------------------------------------------


class Settings(BaseModel):
    """What both algorithms have. A description is what `groupwise control train --help` says."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lr: float = Field(default=3e-4, gt=0, description="Adam's learning rate")
    clip: float = Field(default=0.2, ge=0, description="the ratio is held within 1 ± this")
    epochs: int = Field(default=1, ge=1, description="how often each batch is gone through")
    gamma: float = Field(default=0.99, ge=0, le=1, description="the discount of later rewards")
    max_grad_norm: float | None = Field(default=None, gt=0, description="the gradient's norm is cut to this, or not")
    hidden: tuple[PositiveInt, ...] = Field(default=(64, 64), description="the widths of the network's hidden layers")


class GRPOSettings(Settings):
    algorithm: Literal["grpo"] = "grpo"
    group_size: int = Field(default=16, ge=2, description="G, the episodes that are compared with each other")
    groups: int = Field(default=2, ge=1, description="groups per update")
    same_start: bool = Field(default=True, description="a group's episodes share their first state")
    independent_noise: bool = Field(
        default=False, description="members share the first state alone, not the noise of the transitions as well"
    )
    credit: Literal["outcome", "reward_to_go"] = Field(
        default="outcome",
        description="an action is credited with the whole return, or with what came after it",
    )
    divide_by_std: bool = Field(default=True, description="divide a group's advantages by its standard deviation")
    length_norm: Literal["episode", "step"] = Field(
        default="episode", description="weight 1/T_i, so that episodes count alike; or every step counts alike"
    )
    kl_coef: float = Field(default=0.0, ge=0, description="the weight of the KL to the policy as it was at the start")


class PPOSettings(Settings):
    algorithm: Literal["ppo"] = "ppo"
    epochs: int = Field(default=10, ge=1, description="how often each batch is gone through")
    max_grad_norm: float | None = Field(default=0.5, gt=0, description="the gradient's norm is cut to this, or not")
    environments: int = Field(default=8, ge=1, description="environments that step at once")
    steps: int = Field(default=2048, ge=2, description="steps per update, of all environments together")
    minibatch: int = Field(default=64, ge=2, description="steps per optimizer step")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="GAE's λ")
    value_coef: float = Field(default=0.5, ge=0, description="c₁, the weight of the critic's loss")
    entropy_coef: float = Field(default=0.0, ge=0, description="c₂, the weight of the entropy")

    @model_validator(mode="after")
    def _whole_steps(self) -> Self:
        if self.steps % self.environments:
            raise ValueError(f"steps ({self.steps}) must be a multiple of environments ({self.environments})")
        return self


def grpo_paper() -> GRPOSettings:
    """The document's numbers: lr 3e-4, two groups of 16, population std, clip 0.2, one optimizer step.

    With one step per batch the policy that is trained is still the one that sampled: the ratio is always 1, clipping
    never acts, and this is REINFORCE with the group as its baseline.
    """
    return GRPOSettings()


def grpo_fast() -> GRPOSettings:
    """Three groups of 8 and a learning rate of 0.02: CartPole in a tenth of the steps.

    Still one pass over each batch: with more, the gradient's noise is repeated and many runs collapse.
    """
    return GRPOSettings(lr=0.02, group_size=8, groups=3)


def ppo() -> PPOSettings:
    """The document's numbers: lr 3e-4, 2048 steps per update, clip 0.2, advantages normalised over the batch.

    Of what it leaves open: 10 passes in minibatches of 64, γ 0.99, λ 0.95, c₁ 0.5, c₂ 0, gradients cut to 0.5.
    """
    return PPOSettings()


def ppo_fast() -> PPOSettings:
    """Twice as many environments at once, larger minibatches, fewer passes and ten times the learning rate."""
    return PPOSettings(lr=0.003, environments=16, minibatch=256, epochs=6, gamma=0.98, clip=0.3, value_coef=0.25)


PRESETS: dict[str, Callable[[], GRPOSettings | PPOSettings]] = {
    "grpo-paper": grpo_paper,
    "grpo-fast": grpo_fast,
    "ppo": ppo,
    "ppo-fast": ppo_fast,
}
SHORT = {"grpo": "grpo-paper"}  # beside ppo, the document's own comparison


def checked(kind: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """``values`` as a ``kind``; the first that cannot be used is named in a ConfigError."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))} = {first['input']!r}" if first["loc"] else "these settings"
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}{what} cannot be used: {reason}") from error


def settings_of(algorithm: str, changes: Mapping[str, Any] | None = None) -> GRPOSettings | PPOSettings:
    """The settings of a preset with some of them changed: ``grpo-fast``, or ``grpo-fast:same_start=false:lr=0.003``."""
    name, *words = algorithm.split(":")
    name = SHORT.get(name, name)
    check_choice("algorithm", name, [*PRESETS, *SHORT], ConfigError)
    preset = PRESETS[name]()
    values: dict[str, Any] = dict(changes or {})
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{algorithm!r}: {word!r} is no change of a setting; write {name}:KEY=VALUE")
        values[key] = tuple(value.split("x")) if key == "hidden" else None if value == "none" else value
    for key in values:
        check_choice(f"setting of {name}", key, sorted(set(type(preset).model_fields) - {"algorithm"}), ConfigError)
    return checked(type(preset), {**preset.model_dump(), **values}, f"{algorithm}: ")


# --- the agents ------------------------------------------------------------------------------------------------------


class Agent:
    """The actor and its optimizer; sampling, and what is saved. ``generator`` decides what is sampled."""

    def __init__(self, shape: Shape, settings: Settings, seed: int = 0) -> None:
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
        self, states: Array, *, greedy: bool = False, generator: np.random.Generator | None = None
    ) -> tuple[Array, Array]:
        """An action for each state, and its log-probability: sampled, or the likeliest with ``greedy``.

        In NumPy, which for the few rows of one step takes a fraction of torch's time.
        """
        logits = states
        for weight, bias in self._layers[:-1]:
            logits = np.tanh(logits @ weight.T + bias)
        weight, bias = self._layers[-1]
        logits = logits @ weight.T + bias
        logps = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        if greedy:
            actions = logps.argmax(-1)
        else:  # the largest of the log-probabilities with Gumbel noise is a sample
            actions = (logps + (generator or self.generator).gumbel(size=logps.shape)).argmax(-1)
        return actions, logps[np.arange(len(actions)), actions]

    def _logps(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probabilities of actions under the policy, and the policy's mean entropy."""
        everything = self.actor(states).log_softmax(-1)
        entropy = -(everything.exp() * everything).sum(-1).mean()
        return everything.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropy

    def _step(self, loss: Tensor) -> None:
        if not bool(torch.isfinite(loss)):
            raise ControlError(f"the loss is {loss.item()}; a smaller learning rate (lr) may help")
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._weights, self.settings.max_grad_norm)
        self.optimizer.step()


class GRPOAgent(Agent):
    """An actor alone. What an episode is worth is told by the others of its group."""

    settings: GRPOSettings

    def __init__(self, shape: Shape, settings: GRPOSettings, seed: int = 0) -> None:
        super().__init__(shape, settings, seed)

    def _networks(self, shape: Shape) -> nn.ModuleDict:
        networks = super()._networks(shape)
        if self.settings.kl_coef:
            networks["reference"] = copy.deepcopy(self.actor).requires_grad_(False)
        return networks

    def update(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Learn from a list of episodes, each consecutive ``group_size`` of them a group; what there was to see."""
        settings = self.settings
        returns = torch.stack([episode["return"] for episode in episodes])
        groups = group_statistics(returns, settings.group_size, unbiased=False)
        seen = {
            "zero_spread_groups": float(groups.equal.double().mean()),
            "group_spread": float(groups.std.mean()),
            "episode_length": float(np.mean([len(episode["rewards"]) for episode in episodes])),
            "train_return": float(returns.mean()),
        }
        mask, advantages = self._advantages(episodes, returns)  # (B, T) each
        # Nothing is learned from equals, unless they too are held to the reference.
        teaching = mask.any(1) if settings.kl_coef else (advantages != 0).any(1)
        if not bool(teaching.any()):
            return seen
        kept = [episode for episode, teaches in zip(episodes, teaching.tolist(), strict=True) if teaches]
        states, actions = (torch.cat([episode[name] for episode in kept]) for name in ("states", "actions"))
        present, advantages = mask[teaching], advantages[teaching]
        old_logps = _padded(torch.cat([episode["logps"] for episode in kept]), present)
        # The episodes left out count in the means, so that leaving them out changes nothing.
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
                seen["kl"] = float(kl.detach().sum() / present.sum())
            self._step(loss)
        return seen | _seen(loss, entropy, statistics)

    def _advantages(self, episodes: Sequence[Episode], returns: Tensor) -> tuple[Tensor, Tensor]:
        """Which steps there are, (B, T), and the advantage of each.

        The outcome's is the same for all steps of an episode. With the reward to go, each step is compared with the
        same step of the others in its group; an episode that has ended by then has 0 to come.
        """
        settings = self.settings
        how: dict[str, Any] = {"scale": "group" if settings.divide_by_std else "none", "eps": 1e-8, "unbiased": False}
        lengths = torch.tensor([len(episode["rewards"]) for episode in episodes])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        if settings.credit == "outcome":
            own = group_advantages(returns, settings.group_size, **how).float()
            return mask, own[:, None] * mask
        to_come = torch.zeros(mask.shape, dtype=torch.float64)
        for row, episode in zip(to_come, episodes, strict=True):
            row[: len(episode["rewards"])] = _reward_to_go(episode["rewards"], settings.gamma)
        group = torch.arange(len(episodes))[:, None] // settings.group_size
        labels = group * mask.shape[1] + torch.arange(mask.shape[1])
        return mask, group_advantages(to_come.flatten(), labels.flatten(), **how).view(mask.shape).float() * mask

    @torch.no_grad()
    def _reference_logps(self, states: Tensor, actions: Tensor, present: Tensor) -> Tensor | None:
        if not self.settings.kl_coef:
            return None
        logps = self.networks["reference"](states).log_softmax(-1)
        return _padded(logps.gather(-1, actions.unsqueeze(-1)).squeeze(-1), present)


class PPOAgent(Agent):
    """An actor and a critic, one optimizer for both."""

    settings: PPOSettings

    def __init__(self, shape: Shape, settings: PPOSettings, seed: int = 0) -> None:
        super().__init__(shape, settings, seed)
        self.critic = self.networks["critic"]

    def _networks(self, shape: Shape) -> nn.ModuleDict:
        critic = MLP(shape.observation, 1, self.settings.hidden)
        return nn.ModuleDict({"actor": self.actor, "critic": critic})

    def update(self, buffer: PPOBuffer) -> dict[str, float]:
        """Learn from the transitions of a buffer, in minibatches; what there was to see."""
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
                # One row of many steps: each counts alike.
                policy, statistics = policy_loss(
                    logps[None], old_logps[None], advantage[None], torch.ones_like(logps[None]), clip_low=settings.clip
                )
                critic = value_loss(self.critic(states).squeeze(-1), target)
                loss = policy + settings.value_coef * critic - settings.entropy_coef * entropy
                self._step(loss)
        return {"value_loss": float(critic.detach())} | _seen(loss, entropy, statistics)


def make_agent(shape: Shape, settings: GRPOSettings | PPOSettings, seed: int) -> GRPOAgent | PPOAgent:
    return GRPOAgent(shape, settings, seed) if isinstance(settings, GRPOSettings) else PPOAgent(shape, settings, seed)


def play_out(agent: GRPOAgent | PPOAgent, environments: Environments, seeds: Sequence[int], *, greedy: bool) -> Array:
    """The return of one episode from each first state, with the likeliest actions or with sampled ones."""
    generator = np.random.default_rng(0)
    returns = np.zeros(len(seeds))
    members = np.arange(len(seeds))
    states = environments.reset(members, seeds)
    while len(members):
        actions, _ = agent.get_action(states, greedy=greedy, generator=generator)
        steps = environments.step(members, actions)
        returns[members] += steps.rewards
        going = ~steps.done
        members, states = members[going], steps.observations[going]
    return returns


def _padded(flat: Tensor, present: Tensor) -> Tensor:
    """One number per step that exists, put in its place in (B, T)."""
    return torch.zeros(present.shape).masked_scatter(present, flat)


def _reward_to_go(rewards: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ G_{t+1}."""
    to_come, total = rewards.double().tolist(), 0.0
    for t in reversed(range(len(to_come))):
        total = to_come[t] = to_come[t] + gamma * total
    return torch.tensor(to_come, dtype=torch.float64)


def _seen(loss: Tensor, entropy: Tensor, statistics: Mapping[str, Tensor]) -> dict[str, float]:
    clipped = statistics["clip_fraction_low"] + statistics["clip_fraction_high"]
    return {
        "loss": float(loss.detach()),
        "entropy": float(entropy.detach()),
        "clip_fraction": float(clipped),
        "approx_kl": float(statistics["approx_kl"]),
    }
