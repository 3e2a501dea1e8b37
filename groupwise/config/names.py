"""Settings by name: all of them, those that a schedule may change, former names, and hints for misspelt ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from groupwise.config.fields import fields_of, types_of
from groupwise.config.sections import Recipe
from groupwise.errors import ConfigError, did_you_mean

# Former names of sections and settings. They are errors that give the present name.
RENAMED = {
    "warm_up": "sft",
    "usmle": "task_options",
    "model.name": "model.source",
    "data.too_long": "data.on_too_long",
    "sampling.max_rows": "sampling.max_num_seqs",
    "grouping.after": "grouping.text_after",
    "grouping.measure": "grouping.log_diversity",
    "preference.too_long": "preference.on_too_long",
    "preference.cache": "preference.cache_ref_logps",
    "masks.keep_sampling": "masks.keep_sampling_mask",
    "optimizer.decay": "optimizer.lr_schedule",
    "optimizer.final": "optimizer.final_lr_ratio",
    "train.refill": "train.resample_rounds",
    "train.skip_equal": "train.skip_equal_rewards",
    "train.not_finite": "train.on_non_finite",
    "train.self_check": "train.max_logp_mismatch",
    "train.term_gradients": "train.log_term_gradients_every",
    "evaluate.first": "evaluate.before_training",
    "run.keep": "run.keep_checkpoints",
    "run.rollouts": "run.save_rollouts",
    "run.picture": "run.plot",
    "run.push_to": "run.push_to_hub",
}
# Former values, by the present name of their setting.
RENAMED_VALUES = {
    "algorithm": {"enhanced_grpo_document": "enhanced_grpo_literal"},
    "task_options.prompt": {"document": "completion"},
    "data.on_too_long": {"cut": "truncate"},
    "preference.on_too_long": {"cut": "truncate"},
    "grouping.method": {"document": "ward_rows"},
    "loss.kl": {"full_document": "full_ratio_weighted"},
    "masks.off_policy": {"document": "reference_drift"},
}

# Names in TRL, verl and other libraries, for the hint only.
OTHER_LIBRARIES = {
    "lr": "optimizer.learning_rate",
    "num_generations": "sampling.samples_per_prompt",
    "num_samples_per_prompt": "sampling.samples_per_prompt",
    "max_completion_length": "sampling.max_new_tokens",
    "beta": "loss.kl_coef",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "loss_type": "loss.name",
    "importance_sampling_level": "loss.ratio",
    "scale_rewards": "advantages.scale",
    "num_iterations": "train.iterations",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.accumulation",
    "lr_scheduler_type": "optimizer.lr_schedule",
    "bf16": "model.dtype",
    "output_dir": "run.folder",
    "save_steps": "run.checkpoint_every",
    "eval_steps": "evaluate.every",
}

# A schedule may change what is read anew in every step. The rest (model, data, run, …) is fixed for a run.
SCHEDULED_SECTIONS = ("sampling", "advantages", "loss", "masks", "reference", "optimizer", "scoring")
SCHEDULED_OF = {
    "train": ("batch_size", "accumulation", "iterations", "mini_batches", "resample_rounds", "max_logp_mismatch"),
    "preference": ("weight", "beta", "label_smoothing", "discopop_tau", "pairs_per_group", "min_margin"),
}
NOT_SCHEDULED = {
    *("sampling.max_num_seqs", "scoring.timeout", "optimizer.warmup_steps", "optimizer.final_lr_ratio"),
    *("optimizer.beta1", "optimizer.beta2", "optimizer.eps"),
}


def setting_names() -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted setting with its field, in the order of the sections."""
    return fields_of(Recipe)


def section_names() -> set[str]:
    return {name.rpartition(".")[0] for name, _ in setting_names()} - {""}


def scheduled_names(recipe: Recipe) -> dict[str, Any]:
    """The settings that a schedule may change, with their values; None if one is off."""
    values: dict[str, Any] = {}
    for name, field in setting_names():
        section, _, key = name.partition(".")
        allowed = section in SCHEDULED_SECTIONS or key in SCHEDULED_OF.get(section, ())
        if allowed and name not in NOT_SCHEDULED and types_of(field) & {int, float}:
            values[name] = recipe.get(name)
    return values


def resolve_scheduled(recipe: Recipe, name: str) -> str:
    """The dotted name of a scheduled setting, from its bare name (``temperature``) or the dotted one."""
    scheduled = scheduled_names(recipe)
    matches = [full for full in scheduled if name in (full, _key(full))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{name!r} could be {' or '.join(matches)}; write the full name")
    if any(name in (full, _key(full)) for full, _ in setting_names()):
        raise ConfigError(f"{name!r} is fixed for a run and cannot be scheduled (possible: {', '.join(scheduled)})")
    for old, new in RENAMED.items():
        if name in (old, _key(old)) and new in scheduled:
            raise ConfigError(f"{old} is now {new}")
    other = OTHER_LIBRARIES.get(_key(name))
    near = (
        f"; did you mean {other!r}?" if other in scheduled else did_you_mean(name, [*scheduled, *map(_key, scheduled)])
    )
    raise ConfigError(f"unknown setting {name!r} in a schedule{near}")


def new_name(name: str) -> str | None:
    """The present name of a renamed setting or section, or of a setting in a renamed section."""
    section, dot, key = name.partition(".")
    in_section = f"{RENAMED[section]}.{key}" if dot and section in RENAMED else None
    return RENAMED.get(name, in_section)


def suggest(key: str) -> str:
    """The settings with this key in any section, or the one that another library calls so, as the end of a sentence."""
    names = [name for name, _ in setting_names() if _key(name) == key]
    names += [OTHER_LIBRARIES[key]] if key in OTHER_LIBRARIES else []
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""


def find_field(name: str) -> FieldInfo:
    """The field of a setting on the command line; an error with the present name or the nearest one if unknown."""
    fields = dict(setting_names())
    if name in fields:
        return fields[name]
    if name in section_names():
        settings = ", ".join(f"--{full}" for full in fields if full.startswith(f"{name}."))
        raise ConfigError(f"--{name} is a section and takes no value; its settings are {settings}")
    if (renamed := new_name(name)) is not None:
        raise ConfigError(f"--{name} is now --{renamed}")
    key = _key(name)
    near = did_you_mean(name, [full for full in fields if _key(full) == key]) if "." in name else ""
    near = near or suggest(key) or (did_you_mean(name, fields) if "." in name else "")
    if not near and (keys := difflib.get_close_matches(key, map(_key, fields), n=1)):
        near = suggest(keys[0])
    raise ConfigError(f"unknown setting --{name}{near} (`groupwise train --help` lists all)")


def _key(name: str) -> str:
    return name.rpartition(".")[2]
