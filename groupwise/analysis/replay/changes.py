"""Which settings a replay may change, and why it refuses the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from groupwise.algorithms import find_algorithm
from groupwise.config import Recipe, make_recipe
from groupwise.config.names import find_field
from groupwise.errors import ConfigError
from groupwise.redaction import without_secrets


class SettingChange(NamedTuple):
    """A setting of the run, and its value in the replay."""

    name: str
    before: Any
    after: Any


# What recorded completions can be scored again with: rewards, groups, advantages, masks on texts and stop reasons,
# pairs, and the weight of each sample in the policy loss.
RESCORED = (
    *("rewards", "advantages", "grouping"),
    *("masks.truncated", "masks.drop_equal_rewards", "masks.validity", "masks.min_length", "masks.max_repetition"),
    *("preference.weight", "preference.pairs", "preference.pairs_per_group", "preference.min_margin"),
    *("preference.reward", "loss.name", "loss.aggregation", "loss.denominator", "loss.policy_coef"),
    *("scoring.overlong_buffer", "scoring.overlong_weight", "scoring.length_penalty", "scoring.success_threshold"),
    *("scoring.timeout", "scoring.on_error"),
)
SAMPLES = "it decides what is sampled, and the recorded completions would be others"
UPDATE = "it acts in the update, on log-probs and gradients that are not recorded"
NO_EFFECT = "it has no effect on a step"
NOT_RESCORED = {
    **dict.fromkeys(("sampling", "model", "data", "vllm", "task", "task_options", "sft"), SAMPLES),
    **dict.fromkeys(("train.seed", "train.batch_size", "train.accumulation", "train.resample_rounds"), SAMPLES),
    **dict.fromkeys(("train.max_staleness", "train.replay", "train.steps", "train.epochs"), SAMPLES),
    **dict.fromkeys(("run", "evaluate"), NO_EFFECT),
    **dict.fromkeys(("phases", "ramps", "rules"), "set the setting itself, which then holds for every step"),
}

CHECKPOINT = "the weights of the checkpoint belong to the model and the adapter that the run has"
ROWS = "the checkpoint is of a run over its own rows, prompts and pairs"
NOT_RETAKEN = {
    **dict.fromkeys(("model.source", "model.revision", "model.trust_remote_code", "model.lora"), CHECKPOINT),
    "model.sharding": "a replay has one process",
    **dict.fromkeys(("task", "task_options", "data"), ROWS),
    **dict.fromkeys((f"preference.{key}" for key in ("train", "held_out", "held_out_from_train", "subset")), ROWS),
    **dict.fromkeys((f"preference.{key}" for key in ("train_split", "held_out_split", "train_rows")), ROWS),
    **dict.fromkeys((f"preference.{key}" for key in ("held_out_rows", "prompt", "chosen", "rejected")), ROWS),
    **dict.fromkeys((f"preference.{key}" for key in ("max_length", "on_too_long", "shuffle")), ROWS),
    "sft": "it is done before the first step",
    "train.seed": "the order of the rows comes from it, and the checkpoint is in the middle of that order",
    **dict.fromkeys(("train.max_staleness", "train.replay"), "the checkpoint holds the groups that wait to be learned"),
    **dict.fromkeys(("run", "evaluate"), NO_EFFECT),
    **dict.fromkeys(("phases", "ramps", "rules"), "set the setting itself, which then holds for this step"),
}


def algorithm_settings(recipe: Recipe, algorithm: str) -> dict[str, Any]:
    """The settings that a recipe would have if it named another preset: those that differ.

    A setting that does not have the value of the run's own preset was set by the recipe, and stays.
    """
    old, new, defaults = find_algorithm(recipe.algorithm).settings, find_algorithm(algorithm).settings, Recipe()
    settings: dict[str, Any] = {}
    for name in dict.fromkeys([*new, *old]):
        default = defaults.get(name)
        value = new.get(name, default)
        if recipe.get(name) == old.get(name, default) and value != recipe.get(name):
            settings[name] = value
    return settings


def split_algorithm(
    recipe: Recipe, algorithm: str | None, *, rescored: bool
) -> tuple[dict[str, Any], list[SettingChange]]:
    """The settings of another preset that a replay can show, and the changes that it cannot."""
    if algorithm is None:
        return {}, []
    settings = algorithm_settings(recipe, algorithm)
    shown = {name: value for name, value in settings.items() if _refusal(name, rescored) is None}
    rest = [SettingChange(name, recipe.get(name), settings[name]) for name in settings if name not in shown]
    return {"algorithm": algorithm, **shown}, rest


def check_settings(settings: Mapping[str, Any], *, rescored: bool) -> None:
    """Raise an error for a setting that does not exist, or that this kind of replay cannot change."""
    for name in settings:
        if name == "algorithm":
            raise ConfigError("give the algorithm as --algorithm NAME (in Python algorithm=), not as a setting")
        find_field(name, "train")
        if (reason := _refusal(name, rescored)) is not None:
            instead = ""
            if rescored and _lookup(name, NOT_RETAKEN) is None:
                instead = (
                    f"; to take one step again with it, add --step N (in Python `retake(run, N, {{{name!r}: …}})`)"
                )
            what = "recorded rollouts" if rescored else "a step"
            raise ConfigError(f"{name} cannot be changed for {what}: {reason}{instead}")


def _refusal(name: str, rescored: bool) -> str | None:
    if not rescored:
        return _lookup(name, NOT_RETAKEN)
    if _lookup(name, dict.fromkeys(RESCORED, "")) is not None:
        return None
    return _lookup(name, NOT_RESCORED) or UPDATE


def _lookup(name: str, table: Mapping[str, str]) -> str | None:
    """The entry of a setting, or of a section that it is in."""
    parts = name.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((table[name] for name in names if name in table), None)


def apply_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with other settings, dotted; an entry of a list has its number, as in ``rewards.0.weight``."""
    if not settings:
        return recipe
    return make_recipe({}, base=recipe.model_dump(), overrides=settings)


def changes_of(recipe: Recipe, settings: Mapping[str, Any]) -> list[SettingChange]:
    """The settings with their values in the recipe and in the replay, without secrets."""

    def value(name: str) -> Any:
        first, _, rest = name.partition(".")
        number, _, key = rest.partition(".")
        if first == "rewards" and number.isdecimal():
            entry: Any = recipe.rewards[int(number)] if int(number) < len(recipe.rewards) else None
            for part in key.split("."):
                entry = entry.get(part) if isinstance(entry, dict) else getattr(entry, part, None)
            return entry
        return recipe.get(name)

    return [
        SettingChange(name, without_secrets(value(name), name), without_secrets(after, name))
        for name, after in settings.items()
    ]
