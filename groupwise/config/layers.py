"""From files and overrides to a recipe: the preset, then the file, then the command line, merged key by key."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from groupwise.algorithms import find_algorithm
from groupwise.config.checks import contradictions
from groupwise.config.faults import option_fault, recipe_fault, source_of
from groupwise.config.fields import choices_of, types_of
from groupwise.config.names import LIST_KEYS, RENAMED_VALUES, find_field, section_names
from groupwise.config.sections import Recipe
from groupwise.errors import MAX_FLOAT32, ConfigError, RecipeErrors
from groupwise.packaged import find_recipe
from groupwise.paths import read_file
from groupwise.redaction import without_secrets
from groupwise.text import excerpt, plural

Options = TypeVar("Options", bound=BaseModel)

# Settings that may name a file, by section and key. A recipe's files are looked for in its folder first.
DATA_FILES = (
    ("data", "train"), ("data", "held_out"), ("preference", "train"), ("preference", "held_out"),
    ("environment", "chat_template"),
)  # fmt: skip
FUNCTION_FILES = (
    ("", "task"), ("loss", "name"), ("advantages", "function"), ("advantages", "grouping"),
    ("environment", "factory"), ("environment", "tools"), ("environment", "rollout"),
)  # fmt: skip
DEEPEST = 100  # levels of tables and lists; a recipe has five
SURROGATE = re.compile("[\ud800-\udfff]")  # from a \\u escape of JSON, or a byte of the command line that is not UTF-8
DOTTED_KEY = re.compile(rf"""(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEEPEST}}}""")
TOO_DEEP = "its tables or lists are nested too deeply"
# Tables with keys of the user's choice: a new table replaces the old one.
REPLACED = {"chat_template_kwargs", "ramps"}

EPOCHS_BESIDE_PHASES = (
    "train.epochs cannot be set beside [[phases]] that all have a length of their own: the run ends with the last "
    "phase. Change the phases, leave train.epochs out (--train.epochs none), or leave out the last phase's length; "
    "train.steps ends a run earlier"
)


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a TOML file, in a run's ``recipe.json``, or the packaged one of a name, with ``overrides`` on top.

    Files that a TOML recipe names are looked for in its folder, then in the current one; overrides and a
    ``recipe.json`` name them relative to the current folder. Only a function's file in an override is also looked for
    in the recipe's folder, which for a packaged recipe nobody knows: ``--task modes.py:task_with_worse``. A
    ``recipe.json`` holds every setting, so no preset is applied below it, and its algorithm cannot be overridden.
    """
    path, overrides = find_recipe(path), dict(overrides or {})
    try:
        text = read_file(path, ConfigError, stream=True).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the recipe {path} cannot be read: it is not UTF-8 ({error})") from error
    if path.suffix.lower() != ".json":
        try:
            table = _read_toml(text)
        except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of thousands of digits
            reason = TOO_DEEP if isinstance(error, RecursionError) else error
            raise ConfigError(f"{path} is not valid TOML: {reason}{_quotes_hint(text, str(error))}") from error
        check_values(table, str(path))
        overrides = _resolve_functions(overrides, path.parent)
        return make_recipe(_resolve_files(table, path.parent), where=str(path), overrides=overrides)
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"(at line {error.lineno}, column {error.colno})"
        raise ConfigError(f"{path} is not valid JSON: {error.msg} {place}") from error
    except (ValueError, RecursionError) as error:
        reason = TOO_DEEP if isinstance(error, RecursionError) else error
        raise ConfigError(f"{path} is not valid JSON: {reason}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} is not a recipe: a run's recipe.json is one object, with a key for each section")
    algorithm = table.get("algorithm", overrides.get("algorithm"))
    if overrides.get("algorithm", algorithm) != algorithm:
        raise ConfigError(
            f"{path} holds every setting of a run with {algorithm!r}, so the preset {overrides['algorithm']!r} would "
            "change nothing; set the algorithm in the recipe that the run was made from"
        )
    return make_recipe(table, where=str(path), base={}, overrides=overrides)


def _read_toml(text: str) -> dict[str, Any]:
    """The tables of a text; tomllib takes time and memory in the square of a dotted key's parts."""
    if DOTTED_KEY.search(text):
        raise ValueError(f"a dotted key has more than {DEEPEST} parts")
    return tomllib.loads(text)


def _quotes_hint(text: str, message: str) -> str:
    """The end of the sentence about a value that is a text without quotes."""
    place = re.match(r"Invalid value \(at line (\d+), column \d+\)", message)
    line = text.split("\n")[int(place[1]) - 1] if place else ""
    bare = re.match(r"\s*([\w.-]+)\s*=\s*([A-Za-z./~][^\s#]*)\s*(?:#.*)?$", line)
    return f'; a text needs quotes: {bare[1]} = "{without_secrets(bare[2], bare[1])}"' if bare else ""


def _resolve_files(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The table with files that exist in the recipe's folder replaced by their paths; other values are kept."""

    def data(value: Any) -> Any:
        if isinstance(value, list):
            return [data(entry) for entry in value]
        return str(folder / value) if isinstance(value, str) and value and os.path.exists(folder / value) else value

    def function(value: Any) -> Any:
        return _locate_function(value, folder)

    def reward(entry: Any) -> Any:
        options = entry.get("options")
        rubric = options.get("rubric") if isinstance(options, Mapping) else None
        if isinstance(rubric, str) and os.path.isfile(folder / rubric):  # of a judge: a file or the text itself
            entry = {**entry, "options": {**entry["options"], "rubric": str(folder / rubric)}}
        return {**entry, "function": function(entry["function"])} if "function" in entry else entry

    def option(value: Any) -> Any:
        # Only the task knows which of its options are files, so a value counts as one if it looks like a path.
        looks_like_path = isinstance(value, str) and os.path.splitext(value)[1] != ""
        return str(folder / value) if looks_like_path and os.path.isfile(folder / value) else value

    resolved = {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    if isinstance(resolved.get("task_options"), dict):
        resolved["task_options"] = {key: option(value) for key, value in resolved["task_options"].items()}
    for locate, names in ((data, DATA_FILES), (function, FUNCTION_FILES)):
        for section, key in names:
            holder = resolved.get(section) if section else resolved
            if isinstance(holder, dict) and key in holder:
                holder[key] = locate(holder[key])
    if isinstance(resolved.get("rewards"), list) and all(isinstance(entry, Mapping) for entry in resolved["rewards"]):
        resolved["rewards"] = [reward(entry) for entry in resolved["rewards"]]
    return resolved


def _resolve_functions(overrides: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The overrides with functions' files that exist in the recipe's folder, and not in the current one, replaced."""
    names = {f"{section}.{key}".strip(".") for section, key in FUNCTION_FILES}
    return {
        name: _locate_function(value, folder, here_first=True) if name in names else value
        for name, value in overrides.items()
    }


def _locate_function(value: Any, folder: Path, *, here_first: bool = False) -> Any:
    """A function's name, or a list of them, with a file that exists in the folder replaced by its path."""
    if isinstance(value, list):
        return [_locate_function(entry, folder, here_first=here_first) for entry in value]
    file, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not file or (here_first and os.path.exists(file)) or not os.path.isfile(folder / file):
        return value
    return f"{folder / file}:{name}"


def make_recipe(
    table: Mapping[str, Any] | None = None,
    *,
    where: str = "the recipe",
    base: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Recipe:
    """A recipe from nested tables, with dotted ``overrides`` on top and the preset (or ``base``) below."""
    overrides = overrides or {}
    check_values(table or {}, where)
    table = _merge(table or {}, nested({name: value for name, value in overrides.items() if not _is_entry(name)}))
    preset = _preset(table.get("algorithm", Recipe.model_fields["algorithm"].default), where, overrides)
    merged = _merge(nested(preset) if base is None else base, table)
    _set_entries(merged, {name: value for name, value in overrides.items() if _is_entry(name)})
    check_values(merged, "on the command line" if overrides else where)
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        faults = dict.fromkeys(recipe_fault(fault, merged, where, overrides) for fault in error.errors())
        raise _error_of(list(faults)) from error
    problems = [(where, problem) for problem in contradictions(recipe)]
    given = table if base is None else nested(overrides)  # a base, such as a run's recipe.json, has every setting
    if recipe.ends_with_phases and given.get("train", {}).get("epochs") is not None:
        problems.append((source_of(["train", "epochs"], where, overrides), EPOCHS_BESIDE_PHASES))
    if problems:
        raise _error_of(problems)
    return recipe


def check_values(table: Mapping[str, Any], where: str) -> None:
    """Raise an error for a value that no setting can have: nested without end, too large a number, or no Unicode."""
    level: list[tuple[str, Any]] = [(str(key), value) for key, value in table.items()]
    for _ in range(DEEPEST):
        inner: list[tuple[str, Any]] = []
        for name, value in level:
            if isinstance(value, Mapping):
                inner += ((f"{name}.{key}", entry) for key, entry in value.items())
            elif isinstance(value, (list, tuple)):
                inner += ((name, entry) for entry in value)
            elif isinstance(value, int) and abs(value) >= 2**63:
                raise ConfigError(f"{where}: {excerpt(name)} is an integer of more than 64 bits")
            elif isinstance(value, str) and SURROGATE.search(value):
                raise ConfigError(f"{where}: {excerpt(name)} is {excerpt(value)}, which is not valid Unicode")
        if not inner:
            return
        level = inner
    raise ConfigError(f"{where}: {excerpt(level[0][0])}: {TOO_DEEP}")


def _error_of(faults: Sequence[tuple[str, str]]) -> ConfigError:
    """One error, or a list of them; each fault is a source and a sentence."""
    return ConfigError(": ".join(faults[0])) if len(faults) == 1 else RecipeErrors(faults)


def _is_entry(name: str) -> bool:
    """Whether a dotted name is in a list of tables, such as ``rewards.0.weight``."""
    first, *rest = name.split(".")
    return first in LIST_KEYS and bool(rest)


def _set_entries(table: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set keys of entries of lists of tables, given as ``rewards.0.weight``; the lists are copied."""
    for name, value in values.items():
        first, number, *keys = name.split(".")
        entries = table.get(first, [])
        if not isinstance(entries, list) or not keys:
            raise ConfigError(f"on the command line: {name} cannot be set, because {first} is not a list of tables")
        if not number.isdecimal() or len(number) > 6 or int(number) >= len(entries):
            have = f"{plural(len(entries), 'entry', 'entries')} of [[{first}]], numbered from 0" if entries else ""
            raise ConfigError(
                f"on the command line: there is no {first}.{number}: the recipe has {have or f'no [[{first}]]'}"
            )
        entry = entries[int(number)]
        if isinstance(entry, Mapping):
            entry = _merge(entry, nested({".".join(keys): value}))
        table[first] = [*entries[: int(number)], entry, *entries[int(number) + 1 :]]


def read_options(model: type[Options], table: Mapping[str, Any], where: str) -> Options:
    """A plug-in's table, such as ``[task_options]``, as its own pydantic class; an error begins with ``where``."""
    try:
        return model.model_validate(dict(table))
    except ValidationError as error:
        faults = dict.fromkeys(option_fault(fault, table, model) for fault in error.errors())
        raise _error_of([(where, fault) for fault in faults]) from error


def _preset(algorithm: Any, where: str, overrides: Collection[str]) -> Mapping[str, Any]:
    source = source_of(["algorithm"], where, overrides)
    renamed = RENAMED_VALUES["algorithm"].get(algorithm) if isinstance(algorithm, str) else None
    if renamed is not None:
        raise ConfigError(f"{source}: algorithm {algorithm!r} is now {renamed!r}")
    if algorithm == "ppo":
        raise ConfigError(f"{source}: language models are not trained with PPO here; for control: groupwise control")
    try:
        return find_algorithm(algorithm).settings
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def with_settings(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """A copy of a recipe with other values of these dotted settings, validated."""
    return make_recipe(nested(values), base=recipe.model_dump())


def parse_override(name: str, text: str, command: str = "train") -> Any:
    """The value of ``--section.key TEXT``: a TOML value if it is one (a number, true, a list), else the text itself.

    ``command`` is the one that is told to list the settings, if there is none of this name.
    """
    is_none = text.lower() in ("none", "null")
    if is_none and name in section_names():
        return None  # an optional section, as in --model.lora none
    if name.startswith("task_options."):
        # Only the task knows the type, and it checks it. A date is a text.
        return None if is_none else _parse(text, {bool, int, float}, (str, bool, int, float, list, dict))
    field = find_field(name, command, text)
    if field is None:  # a key of the user's choice in a list of tables
        return None if is_none else _parse(text, {bool, int, float}, (str, bool, int, float, list, dict))
    types = types_of(field)
    if text in choices_of(field):
        return text  # "none" is a choice of advantages.scale
    if is_none:
        return None
    only_text = types <= {str, list, type(None)}
    value = _parse(text, types, (str, *(types & {list})) if only_text else (object,))
    is_float = float in types and int not in types and type(value) is int
    return float(value) if is_float and abs(value) <= MAX_FLOAT32 else value


def _parse(text: str, types: Collection[Any], allowed: tuple[type, ...]) -> Any:
    """The text as a TOML value of an ``allowed`` type, as a Python bool or number of ``types``, or as it is."""
    if text in ("True", "False") and bool in types:
        return text == "True"
    try:
        parsed = _read_toml(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or a number of thousands of digits
        for kind in (int, float):  # Python reads numbers that TOML does not, such as .5 and 007
            if kind in types:
                try:
                    return kind(text)
                except ValueError:
                    continue
        return text
    return parsed["value"] if len(parsed) == 1 and isinstance(parsed["value"], allowed) else text


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


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for key in below.keys() & above.keys() - REPLACED:
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            merged[key] = _merge(below[key], above[key])
    return merged
