"""Settings by name: all of them, those that a schedule may change, former names, and hints for misspelt ones."""

from __future__ import annotations

import difflib
import functools
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from groupwise.config.fields import fields_of, section_of, types_of
from groupwise.config.other_libraries import OTHER_LIBRARIES, Hint
from groupwise.config.sections import LOSS_NAMES, PREFERENCE_KINDS, Recipe
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

# What most users set; the short help lists them, and a hint names them first.
USUAL_SETTINGS = (
    *("algorithm", "model.source", "model.lora.rank", "data.train", "data.held_out", "data.max_prompt_length"),
    *("sampling.samples_per_prompt", "sampling.max_new_tokens", "sampling.temperature"),
    *("loss.kl_coef", "loss.clip_low", "loss.clip_high", "optimizer.learning_rate"),
    *("train.steps", "train.batch_size", "train.accumulation", "train.seed"),
    *("evaluate.every", "run.folder", "run.checkpoint_every"),
)
# Lists of tables, whose entries are set by number: --rewards.0.weight.
LIST_KEYS = {"rewards": "weight", "phases": "steps", "rules": "over"}  # with a key as an example
# Below this similarity (of difflib) a name is not suggested: two names of settings can share many letters by chance.
SIMILAR = 0.75
VERY_SIMILAR = 0.85  # for names with their section

# A schedule may change what is read anew in every step. The rest (model, data, run, …) is fixed for a run.
SCHEDULED_SECTIONS = ("sampling", "advantages", "loss", "masks", "reference", "optimizer", "scoring")
SCHEDULED_OF = {
    "train": ("batch_size", "accumulation", "iterations", "mini_batches", "resample_rounds", "max_logp_mismatch"),
    "preference": ("weight", "beta", "label_smoothing", "discopop_tau", "pairs_per_group", "min_margin"),
    "distillation": ("weight",),
}
NOT_SCHEDULED = {
    *("sampling.max_num_seqs", "scoring.timeout", "scoring.concurrency"),
    *("optimizer.warmup_steps", "optimizer.final_lr_ratio"),
    *("optimizer.beta1", "optimizer.beta2", "optimizer.eps"),
}


def setting_names() -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted setting with its field, in the order of the sections."""
    return iter(_settings())


@functools.cache
def _settings() -> tuple[tuple[str, FieldInfo], ...]:
    return tuple(fields_of(Recipe))


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
    others = [full for full in OTHER_LIBRARIES.get(_snake(_key(name)), Hint()).settings if full in scheduled]
    allowed = [*scheduled, *map(_key, scheduled)]
    near = f"; did you mean {others[0]!r}?" if others else did_you_mean(name, allowed, SIMILAR)
    raise ConfigError(f"unknown setting {name!r} in a schedule{near}")


def new_name(name: str) -> str | None:
    """The present name of a renamed setting or section, or of a setting in a renamed section."""
    section, dot, key = name.partition(".")
    in_section = f"{RENAMED[section]}.{key}" if dot and section in RENAMED else None
    return RENAMED.get(name, in_section)


def suggest(name: str, value: Any = None, *, command_line: bool = False) -> str:
    """What another library's name means, or the settings with this key in any section, as the end of a sentence.

    ``value``: what was given, on the command line as a text.
    """
    if name in OTHER_LIBRARIES and "." in name:
        return f"; did you mean {OTHER_LIBRARIES[name].settings[0]!r}?"
    key = _snake(_key(name))
    names = [full for full, _ in setting_names() if _key(full) == key]
    names.sort(key=lambda full: full not in USUAL_SETTINGS)
    misspelt = "." in name and name.rpartition(".")[0] not in section_names()
    if misspelt and (nearest := difflib.get_close_matches(name, names, n=1, cutoff=SIMILAR)):
        return f"; did you mean {nearest[0]!r}?"
    hint = OTHER_LIBRARIES.get(key, Hint())
    given = value if hint.same_value else hint.value
    settings = _that_take(given, hint.settings) if hint.same_value else hint.settings
    shown = [_with_value(full, given, command_line) for full in settings] or [repr(full) for full in names]
    note = f" ({hint.note})" if shown and hint.note else f"; {hint.note}" if hint.note else ""
    return (f"; did you mean {' or '.join(shown)}?" if shown else "") + note


def _that_take(value: Any, settings: Sequence[str]) -> Sequence[str]:
    """The settings of which a value, or an entry of it, is a known name; all of them if there is none."""
    words = set(re.findall(r"\w+", str(value)))
    known = {"loss.name": LOSS_NAMES, "preference.kind": PREFERENCE_KINDS}
    return [name for name in settings if words & set(known.get(name, ()))] or settings


def _with_value(name: str, value: Any, command_line: bool) -> str:
    """A setting in quotes, with its value as one would type it."""
    if value is None:
        return repr(name)
    if command_line:
        text = str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))
        return f"`--{name} {text}`"
    return f"`{name} = {json.dumps(value)}`"


def find_field(name: str, command: str = "train", text: str | None = None) -> FieldInfo | None:
    """The field of a setting on the command line, None for a key of the user's choice; an error if it is unknown.

    ``text`` is its value, for the hint in that error.

    An entry of a list of tables has a number: ``rewards.0.weight``. The keys of [[phases]], [[rules]] and of a reward's
    options are not known here.
    """
    fields = dict(setting_names())
    if name in fields:
        return fields[name]
    first, _, rest = name.partition(".")
    if first in LIST_KEYS:
        return _find_in_list(name, first, rest, fields[first])
    if name in section_names():
        settings = ", ".join(f"--{full}" for full in fields if full.startswith(f"{name}."))
        raise ConfigError(f"--{name} is a section and takes no value; its settings are {settings}")
    if (renamed := new_name(name)) is not None:
        raise ConfigError(f"--{name} is now --{renamed}")
    section, _, key = name.rpartition(".")
    keys = [_key(full) for full in fields if full.rpartition(".")[0] == section]
    near = suggest(name, text, command_line=True)
    if not near and section and (nearest := difflib.get_close_matches(key, keys, n=1, cutoff=SIMILAR)):
        near = f"; did you mean '{section}.{nearest[0]}'?"
    if not near and (nearest := difflib.get_close_matches(_snake(key), map(_key, fields), n=1, cutoff=SIMILAR)):
        near = suggest(nearest[0], command_line=True)
    near = near or did_you_mean(name, [*fields, *sorted(section_names())], VERY_SIMILAR)
    raise ConfigError(f"unknown setting --{name}{near} (`groupwise {command} --help all` lists all)")


def _find_in_list(name: str, table: str, rest: str, field: FieldInfo) -> FieldInfo | None:
    """The field of a setting of an entry, as in ``rewards.0.weight``."""
    number, _, key = rest.partition(".")
    if not number.isdecimal() or not key:
        raise ConfigError(
            f"--{name}: [[{table}]] is a list; give the number of an entry, from 0, and a key, such as "
            f"--{table}.0.{LIST_KEYS[table]}"
        )
    section = section_of(field)
    if section is None or key.startswith("options."):
        return None
    if key not in section.model_fields:
        allowed = section.model_fields
        near = did_you_mean(key, allowed) or f" (there are: {', '.join(allowed)})"
        raise ConfigError(f"unknown key {key!r} in --{name}{near}")
    return section.model_fields[key]


def _key(name: str) -> str:
    return name.rpartition(".")[2]


def _snake(name: str) -> str:
    """``numGenerations`` as ``num_generations``, as names are written here."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
