"""Settings by name: all of them, those that a schedule may drive, and what a misspelt one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from groupwise.config.fields import fields_of, hint, kinds_of
from groupwise.config.sections import Recipe
from groupwise.errors import ConfigError

# What other libraries call a setting, for the hint only: an unknown key stays an error.
KNOWN_ELSEWHERE = {
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
    "bf16": "model.dtype",
    "output_dir": "run.folder",
    "save_steps": "run.checkpoint_every",
    "eval_steps": "evaluate.every",
}

# The settings that a schedule may drive: read anew in every step. The rest (model, data, run, …) is fixed.
SCHEDULED_SECTIONS = ("sampling", "advantages", "loss", "masks", "reference", "optimizer", "scoring")
SCHEDULED_OF = {
    "train": ("batch_size", "accumulation", "iterations", "mini_batches", "resample_rounds", "max_logp_mismatch"),
    "preference": ("weight", "beta", "label_smoothing", "discopop_tau", "pairs_per_group", "min_margin"),
}
NOT_SCHEDULED = {"sampling.max_num_seqs", "optimizer.warmup_steps", "optimizer.final", "optimizer.beta1", "optimizer.beta2",
                 "optimizer.eps", "scoring.timeout"}  # fmt: skip


def setting_names() -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted setting with its field, in the order of the sections."""
    yield from fields_of(Recipe)


def scheduled_names(recipe: Recipe) -> dict[str, Any]:
    """The settings that a schedule may drive, with their values; None where one is off."""
    found: dict[str, Any] = {}
    for name, field in setting_names():
        section, _, key = name.partition(".")
        allowed = section in SCHEDULED_SECTIONS or key in SCHEDULED_OF.get(section, ())
        if allowed and name not in NOT_SCHEDULED and kinds_of(field) & {int, float}:
            found[name] = recipe.get(name)
    return found


def resolve_scheduled(recipe: Recipe, name: str) -> str:
    """The dotted name of a setting that a schedule drives, from a bare name (``temperature``) or the dotted one."""
    known = scheduled_names(recipe)
    matches = [full for full in known if name in (full, full.split(".")[-1])]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{name!r} could be {' or '.join(matches)}; write the one that is meant")
    everything = {full for full, _ in setting_names()}
    if any(name in (full, full.split(".")[-1]) for full in everything):
        raise ConfigError(f"{name!r} is fixed for a run and cannot be scheduled (possible: {', '.join(known)})")
    elsewhere = KNOWN_ELSEWHERE.get(name.split(".")[-1])
    near = f"; did you mean {elsewhere!r}?" if elsewhere in known else ""
    near = near or hint(name, [*known, *(full.split(".")[-1] for full in known)])
    raise ConfigError(f"unknown setting {name!r} in a schedule{near}")


def elsewhere(key: str) -> str:
    """The settings of that name in any section, or what another library calls so."""
    found = [full for full, _ in setting_names() if full.split(".")[-1] == key]
    found += [KNOWN_ELSEWHERE[key]] if key in KNOWN_ELSEWHERE else []
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def find_field(name: str) -> FieldInfo:
    """The field of a dotted setting; an error that names its nearest neighbour if there is none."""
    known = dict(setting_names())
    if name in known:
        return known[name]
    if name in section_names():
        own = ", ".join(f"--{full}" for full in known if full.startswith(f"{name}."))
        raise ConfigError(f"--{name} is a section and has no value of its own; its settings are {own}")
    key = name.split(".")[-1]
    near = hint(name, [full for full in known if full.split(".")[-1] == key]) if "." in name else ""
    near = near or elsewhere(key) or (hint(name, list(known)) if "." in name else "")
    if not near and (keys := difflib.get_close_matches(key, [full.split(".")[-1] for full in known], n=1)):
        near = elsewhere(keys[0])
    raise ConfigError(f"unknown setting --{name}{near} (`groupwise train --help` lists all)")


def section_names() -> set[str]:
    """The sections that hold settings, by their dotted names."""
    return {full.rpartition(".")[0] for full, _ in setting_names()} - {""}
