"""What a setting may hold, read from its pydantic field: for error messages, ``--help`` and the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from groupwise.errors import MAX_FLOAT32

_TYPES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field by its dotted name, section by section; a list of sections is one field."""
    for key, field in model.model_fields.items():
        section = section_of(field)
        if section is not None and get_origin(field.annotation) is not list:
            yield from fields_of(section, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", field


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, also in ``X | None`` and ``list[X]``."""
    for member, _ in _members(field.annotation):
        kind = get_args(member)[0] if get_origin(member) is list else member
        if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, BaseModel):
            return kind
    return None


def field_at(model: type[BaseModel], place: Sequence[str]) -> tuple[list[str], FieldInfo | None]:
    """The path of the setting that contains a pydantic error location, and its field; None if it is a section."""
    section: type[BaseModel] | None = model
    field: FieldInfo | None = None
    path: list[str] = []
    for part in place:
        if section is None:
            break  # inside a value, or a member of a union
        path.append(part)
        if not part.isdigit():
            field = section.model_fields[part]
            section = section_of(field)
    while path and path[-1].isdigit():
        path.pop()  # an entry of a list that is not a section
    in_list = field is not None and get_origin(field.annotation) is list
    return path, field if section is None or in_list else None


def types_of(field: FieldInfo) -> set[Any]:
    """The plain types of a setting: ``{int, NoneType}``, ``{str, list}``."""
    types: set[Any] = set()
    for member, _ in _members(field.annotation):
        if get_origin(member) is Literal:
            types.update(map(type, get_args(member)))
        else:
            types.add(get_origin(member) or member)
    return types


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The allowed words of a setting that is one of a few."""
    literals = (get_args(member) for member, _ in _members(field.annotation) if get_origin(member) is Literal)
    return next(literals, ())


def expected_of(key: str, field: FieldInfo) -> str:
    """What the value of a setting should be: "an integer of at least 1"."""
    if key == "ramps":
        return "a table of tables, such as temperature = { from = 1.0, to = 0.7, steps = 200 } under [ramps]"
    expected: list[str] = []
    for member, limits in _members(field.annotation, field.metadata):
        origin, arguments = get_origin(member), get_args(member)
        if origin is Literal:
            expected.append(f"one of {', '.join(map(str, arguments))}")
        elif origin is list and arguments == (str,):
            expected.append('a list of strings, such as ["one", "two"]')
        elif origin is list:
            expected.append(f"a list of tables, each under [[{key}]]")
        elif origin is dict:
            expected.append("a table, such as { name = true }")
        elif member is not type(None):
            expected.append(_TYPES[member] + _limits(limits))
    return " or ".join(expected)


def remedy_for(value: Any, field: FieldInfo) -> str:
    """What to write instead of a wrong number, as the end of a sentence."""
    types = types_of(field)
    if isinstance(value, float) and not math.isfinite(value):
        return ", and finite"
    if isinstance(value, int | float) and not isinstance(value, bool) and types & {int, float}:
        limits = [limit for _, limits in _members(field.annotation, field.metadata) for limit in limits]
        if abs(value) > MAX_FLOAT32 and any(getattr(limit, "le", 0) == MAX_FLOAT32 for limit in limits):
            return f", and at most {MAX_FLOAT32:.3g}, the largest float32"
        if value >= 2**31 and any(getattr(limit, "lt", 0) == 2**31 for limit in limits):
            return f", and below {2**31:,}"
    if isinstance(value, float) and value.is_integer() and int in types:
        return f": write {int(value)}"
    if isinstance(value, str) and types & {int, float}:
        try:
            float(value)
        except ValueError:
            return ""
        return f": write {value.strip()} without quotes"
    return ""


def _members(annotation: Any, limits: Sequence[Any] = ()) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The members of a union, or the type itself, without ``Annotated``; each with its limits."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _members(arguments[0], [limit for extra in arguments[1:] for limit in extra.metadata])
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _members(argument, limits)
    else:
        yield annotation, limits


def _limits(limits: Sequence[Any]) -> str:
    bounds = {name: getattr(limit, name) for limit in limits for name in _BOUNDS if hasattr(limit, name)}
    words = [f"{_BOUNDS[name]} {bound:g}" for name, bound in bounds.items() if abs(bound) < 2**31]
    return f" {' and '.join(words).replace(' and of ', ' and ')}" if words else ""
