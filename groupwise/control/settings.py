"""The settings of a run: of both algorithms, their presets, and the configuration that is saved as config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from groupwise.errors import MAX_FLOAT32, ConfigError, check_choice

# What pydantic refuses, in the words of other messages, by its names of the errors.
REASONS = {
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le:g}",
    "int_parsing": "must be an integer",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
    "literal_error": "must be {expected}",
    "finite_number": "must be finite",
    "extra_forbidden": "is not a setting",
}

Model = TypeVar("Model", bound=BaseModel)


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class AgentSettings(StrictModel):
    """The settings of both algorithms. The descriptions are shown by `groupwise control train --help`."""

    lr: float = Field(default=3e-4, gt=0, le=1, description="Adam's learning rate")
    clip: float = Field(default=0.2, ge=0, le=MAX_FLOAT32, description="the ratio is clipped to 1 ± this")
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
    kl_coef: float = Field(default=0.0, ge=0, le=MAX_FLOAT32, description="weight of the KL to the initial policy")


class PPOSettings(AgentSettings):
    algorithm: Literal["ppo"] = "ppo"
    epochs: int = Field(default=10, ge=1, description="passes over each batch")
    max_grad_norm: float | None = Field(default=0.5, gt=0, description="gradient norm clipping (none: no clipping)")
    environments: int = Field(default=8, ge=1, description="environments that step in parallel")
    steps: int = Field(default=2048, ge=2, description="steps per update, over all environments")
    minibatch: int = Field(default=64, ge=2, description="steps per optimizer step")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="GAE's λ")
    value_coef: float = Field(default=0.5, ge=0, le=MAX_FLOAT32, description="c₁, weight of the critic's loss")
    entropy_coef: float = Field(default=0.0, ge=0, le=MAX_FLOAT32, description="c₂, weight of the entropy")

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.steps % self.environments:
            raise ValueError(f"steps ({self.steps}) must be a multiple of environments ({self.environments})")
        return self


PRESETS: dict[str, GRPOSettings | PPOSettings] = {
    "grpo": GRPOSettings(),
    "grpo-fast": GRPOSettings(lr=0.02, group_size=8, groups=3),
    "ppo": PPOSettings(),
    "ppo-fast": PPOSettings(lr=0.003, environments=16, minibatch=256, epochs=6, gamma=0.98, clip=0.3, value_coef=0.25),
}
RENAMED = {"grpo-paper": "grpo"}
PRESET_HELP = {
    "grpo": "GRPO with lr 3e-4, two groups of 16, population std, clip 0.2 and one optimizer step per batch. "
    "With one step per batch the trained policy is the one that sampled: the ratio is always 1, clipping never acts, "
    "and this is REINFORCE with the group mean as its baseline.",
    "grpo-fast": "GRPO with three groups of 8 and lr 0.02: solves CartPole in a tenth of the steps. Still one pass "
    "over each batch: with more, many runs collapse.",
    "ppo": "PPO with lr 3e-4, 2048 steps per update, clip 0.2 and advantages normalised over the batch. 10 passes in "
    "mini-batches of 64, γ 0.99, λ 0.95, c₁ 0.5, c₂ 0, gradient norms clipped to 0.5.",
    "ppo-fast": "PPO with more environments, larger mini-batches, fewer passes and ten times the learning rate.",
}


class Config(StrictModel):
    """The configuration of a run, saved as config.json."""

    environment: str = Field(default="CartPole-v1", description="a Gymnasium id, or MODULE:ID")
    options: dict[str, Any] = Field(default={}, description="keyword arguments of the environment")
    algorithm: str = Field(default="grpo", description="a preset, with changes: grpo:same_start=false")
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the weights, first states and sampling")
    steps: int = Field(default=500_000, ge=1, description="environment steps to train for; the last update is finished")
    evaluate_every: int = Field(default=2048, ge=1, description="environment steps between evaluations")
    starts: int = Field(default=20, ge=1, description="held-out first states that an evaluation plays")
    threshold: float | None = Field(
        default=None, ge=-1e30, le=1e30, description="return that counts as solved (None: the environment's)"
    )
    stop_when_solved: bool = Field(default=False, description="stop after two evaluations in a row at the threshold")
    save_every: int = Field(default=50, ge=1, description="updates between checkpoints")

    settings: GRPOSettings | PPOSettings = Field(discriminator="algorithm", description="the algorithm's settings")


def config_of(**values: Any) -> Config:
    """A checked configuration. Without ``settings`` they are those of the algorithm's preset."""
    algorithm = values.get("algorithm", Config.model_fields["algorithm"].default)
    if "settings" not in values and isinstance(algorithm, str):
        values["settings"] = settings_of(algorithm).model_dump()
    return _validate(Config, values)


def settings_of(algorithm: str) -> GRPOSettings | PPOSettings:
    """The settings of a preset, optionally changed: ``grpo``, or ``grpo-fast:same_start=false:lr=0.003``."""
    name, *changes = algorithm.split(":")
    if name in RENAMED:
        raise ConfigError(f"the algorithm {name!r} is called {RENAMED[name]!r} now")
    check_choice("algorithm", name, PRESETS, ConfigError)
    preset = PRESETS[name]
    values = preset.model_dump()
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"{algorithm!r}: {change!r} does not change a setting; write {name}:KEY=VALUE")
        check_choice(f"setting of {name}", key, sorted(set(values) - {"algorithm"}), ConfigError)
        values[key] = tuple(value.split("x")) if key == "hidden" else None if value == "none" else value
    return _validate(type(preset), values, f"{algorithm}: ")


def _validate(kind: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """``values`` as a ``kind``; a ConfigError names the first invalid one."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        name, value = ".".join(map(str, first["loc"])), first["input"]
        reason = REASONS.get(first["type"], "").format(**first.get("ctx", {}))
        if not name or not reason:
            reason = f"cannot be used: {first['msg'].removeprefix('Value error, ')}"
        raise ConfigError(f"{where}{name or 'these settings'} {reason}{f', got {value!r}' if name else ''}") from error
