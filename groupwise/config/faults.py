"""Pydantic's validation errors as sentences that name the setting, its value, where it was set and what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from groupwise.config.fields import choices_of, expected_of, field_at, remedy_for, section_of
from groupwise.config.names import RENAMED_VALUES, SIMILAR, new_name, suggest
from groupwise.config.sections import Recipe
from groupwise.errors import did_you_mean
from groupwise.redaction import without_secrets


def recipe_fault(fault: Any, table: Mapping[str, Any], where: str, overrides: Collection[str]) -> tuple[str, str]:
    """The source and the sentence for one error of `Recipe.model_validate(table)`."""
    place = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        return source_of(place, where, overrides), _unknown_key(place, _value_at(table, place))
    path, field = field_at(Recipe, place)
    source, name, value = source_of(path, where, overrides), _shown(path), _value_at(table, path)
    if ".".join(path) in overrides:
        name = ".".join(path)  # as it was typed, also in a list: rewards.0.weight
    if fault["type"] == "missing":
        return source, f"{_shown(path[:-1])} has no {path[-1]!r}"
    if field is None:
        return source, f"{name} = {value!r} cannot be used; it should be a section, written [{name}]"
    return source, wrong_value(name, value, path[-1], field, RENAMED_VALUES.get(name))


def option_fault(fault: Any, table: Mapping[str, Any], model: type[BaseModel]) -> str:
    """The sentence for one error of a task's options."""
    key = str(fault["loc"][0]) if fault["loc"] else ""
    if key not in model.model_fields:
        if fault["type"] != "extra_forbidden":
            return str(fault["msg"])  # from a validator of the model
        allowed = model.model_fields
        return f"unknown option {key!r}{did_you_mean(key, allowed)} (allowed: {', '.join(allowed)})"
    if fault["type"] == "missing":
        return f"{key!r} is required"
    path, field = field_at(model, [str(part) for part in fault["loc"]])
    if field is None or len(path) > 1:
        return f"{'.'.join(path)} cannot be used: {fault['msg']}"
    return wrong_value(key, without_secrets(table[key], key), key, field, RENAMED_VALUES.get(f"task_options.{key}"))


def wrong_value(name: str, value: Any, key: str, field: FieldInfo, renamed: Mapping[str, str] | None = None) -> str:
    """What is wrong with a value and what is allowed; ``renamed`` are former values of the setting."""
    if isinstance(value, str) and renamed and value in renamed:
        return f"{name} {value!r} is now {renamed[value]!r}"
    if choices := choices_of(field):
        return f"{name} cannot be {value!r}{did_you_mean(str(value), choices)} (allowed: {', '.join(choices)})"
    return f"{name} = {value!r} cannot be used; it should be {expected_of(key, field)}{remedy_for(value, field)}"


def source_of(path: Sequence[str], where: str, overrides: Collection[str]) -> str:
    return "on the command line" if ".".join(path) in overrides else where


def _unknown_key(place: Sequence[str], value: Any) -> str:
    name = ".".join(place)
    if (renamed := new_name(name)) is not None:
        return f"{name} is now {renamed}" if "." in name else f"[{name}] is now [{renamed}]"
    *parents, key = place
    in_list = len(place) > 1 and place[1].isdigit()
    model: Any = Recipe
    for part in parents:
        model = model if part.isdigit() else section_of(model.model_fields[part])
    near = "" if in_list else suggest(name, value)
    near = near or did_you_mean(key, model.model_fields, 0.6 if in_list else SIMILAR)
    known = "" if near else f" (there are: {', '.join(model.model_fields)})"
    shown = f"{key!r} in {_shown(parents)}" if in_list else repr(name)
    return f"unknown {'key' if parents else 'section or key'} {shown}{near}{known}"


def _shown(path: Sequence[str]) -> str:
    """The dotted name of a setting; an entry of a list is counted from 1."""
    if len(path) > 1 and path[1].isdigit():
        return f"[[{path[0]}]] number {int(path[1]) + 1}{''.join(f', {key}' for key in path[2:])}"
    return ".".join(path)


def _value_at(table: Any, path: Sequence[str]) -> Any:
    for part in path:
        if isinstance(table, list):
            table = table[int(part)]
        elif isinstance(table, Mapping):
            table = table.get(part)
    return without_secrets(table, path[-1] if path else "")
