"""From files and overrides to a recipe: preset below file below command line, key by key; a sentence for each fault."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from groupwise.algorithms import find_algorithm
from groupwise.config.fields import choices_of, expected_of, field_at, hint, inner_of, kinds_of, remedy_for
from groupwise.config.names import elsewhere, find_field, section_names
from groupwise.config.sections import Recipe
from groupwise.core.losses import LOSSES
from groupwise.core.preference import SMOOTHED_KINDS, check_kinds
from groupwise.errors import ConfigError, InputError

# Settings that may name a file, by section and key: a recipe finds it beside itself. Its rewards do so too.
DATA_FILES = (
    ("data", "train"),
    ("data", "held_out"),
    ("usmle", "vocabulary"),
    ("preference", "train"),
    ("preference", "held_out"),
)
FUNCTION_FILES = (("", "task"), ("loss", "name"), ("advantages", "function"), ("advantages", "grouping"))


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a TOML file, or a run's ``recipe.json``, with dotted ``overrides`` on top.

    Files that a TOML file names are looked for beside it, and then in the current folder; overrides start in the
    current folder. A ``recipe.json`` names them as the run found them. It holds every setting, so no preset lies
    beneath it; for the same reason its algorithm stays what it is.
    """
    path, overrides = Path(path), dict(overrides or {})
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe {path}{_nearest_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error}") from error
    if path.suffix.lower() != ".json":
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is no valid TOML: {error}") from error
        return make_recipe(_beside(table, path.parent), where=str(path), overrides=overrides)
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is no valid JSON: {error.msg} (at line {error.lineno}, column {error.colno})"
        ) from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} is no recipe: a run's recipe.json is one object, with a section for each key")
    kept = table.get("algorithm", overrides.get("algorithm"))
    if overrides.get("algorithm", kept) != kept:
        raise ConfigError(
            f"{path} holds every setting of a run of {kept!r}, so the preset {overrides['algorithm']!r} beneath them "
            "would change nothing; change the algorithm in the recipe that the run was made from"
        )
    return make_recipe(table, where=str(path), base={}, overrides=overrides)


def _beside(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The table with the files that lie in the recipe's folder under the names by which they are found from here.

    What is no file, or not where it should be, stays as it is: whoever reads it has a sentence for it.
    """

    def data(value: Any) -> Any:
        if isinstance(value, list):
            return [data(entry) for entry in value]
        return str(folder / value) if isinstance(value, str) and value and (folder / value).exists() else value

    def function(value: Any) -> Any:
        file, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        return f"{folder / file}:{name}" if file and (folder / file).is_file() else value

    def reward(entry: Any) -> Any:
        options = entry.get("options")
        rubric = options.get("rubric") if isinstance(options, Mapping) else None
        if isinstance(rubric, str) and os.path.isfile(folder / rubric):  # a judge's; a text is no file's name
            entry = {**entry, "options": {**entry["options"], "rubric": str(folder / rubric)}}
        return {**entry, "function": function(entry["function"])} if "function" in entry else entry

    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    for locate, names in ((data, DATA_FILES), (function, FUNCTION_FILES)):
        for section, key in names:
            holder = found.get(section) if section else found
            if isinstance(holder, dict) and key in holder:
                holder[key] = locate(holder[key])
    if isinstance(found.get("rewards"), list) and all(isinstance(entry, Mapping) for entry in found["rewards"]):
        found["rewards"] = [reward(entry) for entry in found["rewards"]]
    return found


def make_recipe(
    table: Mapping[str, Any] | None = None,
    *,
    where: str = "the recipe",
    base: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Recipe:
    """A recipe from nested tables such as TOML gives, with dotted ``overrides``; ``base`` replaces the preset below."""
    overrides = overrides or {}
    table = _merge(table or {}, nested(overrides))
    if base is None:
        name = table.get("algorithm", Recipe.model_fields["algorithm"].default)
        try:
            base = nested(find_algorithm(name).settings)
        except ConfigError as error:
            raise ConfigError(f"{_giver(['algorithm'], where, overrides)}: {error}") from None
    merged = _merge(base, table)
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        faults = dict.fromkeys(_sentence(fault, merged, where, overrides) for fault in error.errors())
        raise ConfigError("; ".join(faults)) from error
    _check(recipe, where)
    return recipe


def parse_override(name: str, text: str) -> Any:
    """The value of ``--section.key TEXT``: TOML where it is that (a number, true, a list), else the text itself."""
    if text.lower() in ("none", "null") and name in section_names():
        return None  # a section that may be left out, as in --model.lora none
    field = find_field(name)
    kinds = kinds_of(field)
    if text in choices_of(field):
        return text  # "none" is a choice of its own in advantages.scale
    if text.lower() in ("none", "null"):
        return None
    if text in ("True", "False") and bool in kinds:
        return text == "True"
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return _number_or_text(text, kinds)
    value: Any = parsed["value"] if len(parsed) == 1 else text
    if float in kinds and int not in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return text if kinds <= {str, list, type(None)} and not isinstance(value, (str, *(kinds & {list}))) else value


def _number_or_text(text: str, kinds: Collection[Any]) -> Any:
    """Python reads numbers that TOML does not, such as .5 and 007."""
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def _check(recipe: Recipe, where: str) -> None:
    """What concerns more than one setting."""
    if recipe.loss.name not in LOSSES and ":" not in recipe.loss.name:
        raise ConfigError(f"{where}: unknown loss {recipe.loss.name!r}{hint(recipe.loss.name, LOSSES)} (allowed: "
                          f"{', '.join(LOSSES)}, or module:function)")  # fmt: skip
    if (
        recipe.loss.name in LOSSES
        and recipe.loss.ratio is not None
        and recipe.loss.ratio not in LOSSES[recipe.loss.name].ratios
    ):
        raise ConfigError(
            f"{where}: the loss {recipe.loss.name!r} has no {recipe.loss.ratio} ratio; leave loss.ratio out or use "
            f"{LOSSES[recipe.loss.name].ratios[0]!r}"
        )
    if recipe.train.steps is None and recipe.train.epochs is None:
        raise ConfigError(f"{where}: give train.steps or train.epochs; without either the run would have no end")
    if recipe.sampling.min_new_tokens > recipe.sampling.max_new_tokens:
        raise ConfigError(
            f"{where}: sampling.min_new_tokens {recipe.sampling.min_new_tokens} is more than sampling.max_new_tokens "
            f"{recipe.sampling.max_new_tokens}"
        )
    if (
        recipe.loss.policy_coef
        and recipe.sampling.samples_per_prompt == 1
        and recipe.advantages.baseline != "none"
        and recipe.advantages.grouping in ("prompt", "similarity")
    ):
        raise ConfigError(
            f"{where}: sampling.samples_per_prompt is 1, so no answer has a sibling to be compared with and "
            "nothing can be learned; use at least 2"
        )
    _check_shrinkage(recipe, where)
    _check_preference(recipe, where)
    if recipe.masks.keep_sampling_mask and not _filters(recipe):
        raise ConfigError(
            f"{where}: masks.keep_sampling_mask renormalises over what top_k, top_p and min_p leave, but none of them is set"
        )
    prompts = recipe.train.batch_size * recipe.train.accumulation
    if not samples_answers(recipe):
        _check_pair_batches(recipe, where)
    elif recipe.train.mini_batches > prompts:
        raise ConfigError(
            f"{where}: train.mini_batches {recipe.train.mini_batches} is more than the {prompts} prompts of a step "
            "(train.batch_size × train.accumulation)"
        )


def samples_answers(now: Recipe, driven: Collection[str] = ()) -> bool:
    """Whether a step samples answers: all but a step on a data set of pairs alone.

    Of a whole run it is asked with the settings that its schedule drives, which may be anything at some time.
    """
    asking = ["loss.policy_coef", "loss.kl_coef", "loss.entropy_coef"]
    asking += ["preference.weight"] if now.preference.pairs != "data" else []
    return any(now.get(name) or name in driven for name in asking)


def _check_shrinkage(recipe: Recipe, where: str) -> None:
    """Small clusters borrow from their prompt only if there are clusters, and a mean to move."""
    how, single = recipe.advantages, recipe.grouping.skip_single_members
    if how.shrinkage and how.grouping == "prompt":
        raise ConfigError(
            f"{where}: advantages.shrinkage is {how.shrinkage:g}, but answers are compared with all others to their "
            "prompt, so there is nothing to borrow; set advantages.grouping to 'similarity', or leave it out"
        )
    if how.shrinkage and how.baseline != "mean":
        raise ConfigError(
            f"{where}: advantages.shrinkage moves a cluster's mean, so it needs advantages.baseline 'mean', not "
            f"{how.baseline!r}"
        )
    if single and (how.shrinkage or how.baseline == "none"):
        given = "advantages.shrinkage is above 0" if how.shrinkage else "advantages.baseline is 'none'"
        raise ConfigError(
            f"{where}: grouping.skip_single_members leaves out rewards that teach nothing, but {given}, and then an "
            "answer that is alone in its cluster teaches; drop one of the two"
        )


def _check_preference(recipe: Recipe, where: str) -> None:
    """The kinds of preference loss and what they need; a data set of pairs that nobody would look at."""
    how = recipe.preference
    try:
        check_kinds(
            how.kind,
            how.kind_weights,
            beta=how.beta,
            label_smoothing=how.label_smoothing,
            discopop_tau=how.discopop_tau,
        )
    except InputError as error:
        raise ConfigError(f"{where}: [preference] {error}") from error
    if how.label_smoothing and not SMOOTHED_KINDS.intersection(how.kinds):
        raise ConfigError(
            f"{where}: preference.label_smoothing has no effect on the kind {', '.join(how.kinds)}; for pairs that may "
            "be the wrong way round use preference.kind 'robust'"
        )
    if how.pairs == "group" and (how.train is not None or how.held_out_from_train):
        given = "train" if how.train is not None else "held_out_from_train"
        raise ConfigError(
            f"{where}: preference.{given} is set, but preference.pairs is 'group', which takes pairs from the sampled "
            "answers alone; set it to 'data' or 'both'"
        )
    if how.pairs == "group" and how.weight and recipe.sampling.samples_per_prompt == 1:
        raise ConfigError(
            f"{where}: sampling.samples_per_prompt is 1, so no group has two answers to make a pair of; use at least 2"
        )


def _check_pair_batches(recipe: Recipe, where: str) -> None:
    if recipe.train.mini_batches > recipe.preference.batch_size:
        raise ConfigError(
            f"{where}: train.mini_batches {recipe.train.mini_batches} is more than the {recipe.preference.batch_size} "
            "pairs of a step (preference.batch_size)"
        )


def _filters(recipe: Recipe) -> bool:
    sampling = recipe.sampling
    return bool(sampling.top_k) or sampling.top_p < 1 or bool(sampling.min_p)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested tables."""
    tables: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, key = name.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{name!r} cannot be set: {section!r} is not a section")
        table[key] = value
    return tables


# Tables whose keys are the user's own: given anew they replace the old ones as a whole.
WHOLE = {"chat_template_kwargs", "ramps"}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and key not in WHOLE:
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _sentence(fault: Any, merged: Mapping[str, Any], where: str, overrides: Collection[str]) -> str:
    """One of pydantic's findings as a sentence that names the setting, what it is and what it should be."""
    place = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        allowed = _keys_of(place[:-1])
        near = elsewhere(place[-1]) or hint(place[-1], allowed)
        there = f" (there are: {', '.join(allowed)})" if not near else ""
        in_list = len(place) > 1 and place[1].isdigit()
        what = "key" if len(place) > 1 else "section or key"
        name = f"{place[-1]!r} in {_shown(place[:-1])}" if in_list else repr(_shown(place))
        return f"{_giver(place, where, overrides)}: unknown {what} {name}{near}{there}"
    path, field = field_at(Recipe, place)
    name, given = _shown(path), _value_at(merged, path)
    giver = _giver(path, where, overrides)
    start = f"{giver}: {name}"
    if fault["type"] == "missing":
        return f"{giver}: {_shown(path[:-1])} has no {path[-1]!r}"
    if fault["type"] == "literal_error" and field is not None:
        allowed = list(choices_of(field))
        return f"{start} cannot be {given!r}{hint(str(given), allowed)} (allowed: {', '.join(allowed)})"
    if field is None:
        return f"{start} = {given!r} cannot be used; it should be a section, written [{name}]"
    expected = expected_of(path[-1], field) + remedy_for(given, field)
    return f"{start} = {given!r} cannot be used; it should be {expected}"


def _shown(path: Sequence[str]) -> str:
    """The dotted name of a setting; an entry of a list is counted from 1."""
    if len(path) > 1 and path[1].isdigit():
        return f"[[{path[0]}]] number {int(path[1]) + 1}{''.join(f', {key}' for key in path[2:])}"
    return ".".join(path)


def _giver(path: Sequence[str], where: str, overrides: Collection[str]) -> str:
    """Who gave a setting: the command line or the file."""
    return "on the command line" if ".".join(path) in overrides else where


def _value_at(table: Any, path: Sequence[str]) -> Any:
    for part in path:
        if isinstance(table, list):
            table = table[int(part)]
        elif isinstance(table, Mapping):
            table = table.get(part)
    return table


def _nearest_file(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    nearest = difflib.get_close_matches(path.name, [found.name for found in folder.glob("*.toml")], n=1)
    return f"; did you mean {folder / nearest[0]}?" if nearest else ""


def _keys_of(place: Sequence[str]) -> list[str]:
    model: Any = Recipe
    for part in place:
        if not part.isdigit():
            model = inner_of(model.model_fields[part])
    return list(model.model_fields)
