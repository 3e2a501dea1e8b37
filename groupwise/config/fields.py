"""What a setting may be, read from its typed field: for messages, for ``--help`` and for the command line.

Nothing here knows a recipe; it looks at pydantic's classes and says in plain words what they allow.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


def hint(given: str, allowed: Sequence[str] | Mapping[str, Any]) -> str:
    """The nearest neighbour of a misspelt name, as the end of a sentence."""
    nearest = difflib.get_close_matches(given, list(allowed), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field by its dotted name, section by section; a list of sections is one field."""
    for key, field in model.model_fields.items():
        inner = inner_of(field)
        if inner is not None and get_origin(field.annotation) is not list:
            yield from fields_of(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", field


def inner_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, also inside ``X | None`` and ``list[X]``."""
    waiting = [field.annotation]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, BaseModel):
            return kind
        waiting += list(get_args(kind))
    return None


def field_at(model: type[BaseModel], place: Sequence[str]) -> tuple[list[str], FieldInfo | None]:
    """The setting that one of pydantic's places lies in, and its field; None where it is a section."""
    inner: type[BaseModel] | None = model
    field: FieldInfo | None = None
    path: list[str] = []
    for part in place:
        if inner is None:
            break  # within a value, or a member of a union: the whole setting is what a user knows
        path.append(part)
        if not part.isdigit():
            field = inner.model_fields[part]
            inner = inner_of(field)
    while path and path[-1].isdigit():
        path.pop()  # an entry that is no section at all
    in_list = field is not None and get_origin(field.annotation) is list
    return path, field if inner is None or in_list else None


def kinds_of(field: FieldInfo) -> set[Any]:
    """The plain types that a setting may have."""
    found: set[Any] = set()
    waiting: list[Any] = [field.annotation]
    while waiting:
        kind = waiting.pop()
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Literal:
            found.update(type(choice) for choice in arguments)
        elif origin is Annotated:
            waiting.append(arguments[0])
        elif origin is Union or isinstance(kind, type(int | None)):
            waiting += arguments
        elif origin is not None:
            found.add(origin)
        elif isinstance(kind, type):
            found.add(kind)
    return found


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The words that a setting may be, if it is one of a few."""
    waiting: list[Any] = [field.annotation]
    while waiting:
        kind = waiting.pop()
        if get_origin(kind) is Literal:
            return get_args(kind)
        waiting += get_args(kind)
    return ()


def expected_of(key: str, field: FieldInfo) -> str:
    """What a setting's value should be, in plain words: "a whole number of at least 1"."""
    if key == "ramps":
        return "a table of tables, such as temperature = { from = 1.0, to = 0.7, steps = 200 } under [ramps]"
    waiting: list[tuple[Any, list[Any]]] = [(field.annotation, list(field.metadata))]
    found: list[str] = []
    while waiting:
        kind, limits = waiting.pop(0)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            waiting.append((arguments[0], [limit for extra in arguments[1:] for limit in extra.metadata]))
        elif origin is Literal:
            found.append(f"one of {', '.join(map(str, arguments))}")
        elif origin is list and arguments == (str,):
            found.append('a list of texts, such as ["one", "two"]')
        elif origin is list:
            found.append(f"a list of tables, each under its own [[{key}]]")
        elif origin is dict:
            found.append("a table, such as { name = true }")
        elif arguments:
            waiting += [(each, limits) for each in arguments if each is not type(None)]
        else:
            found.append(_WORDS[kind] + _limits(limits))
    return " or ".join(found)


def remedy_for(given: Any, field: FieldInfo) -> str:
    """What the user probably meant to write where a number was expected, as the end of a sentence."""
    kinds = kinds_of(field)
    if isinstance(given, float) and not math.isfinite(given):
        return ", and finite"
    if isinstance(given, float) and given.is_integer() and int in kinds:
        return f": write {int(given)}"
    if isinstance(given, str) and kinds & {int, float}:
        try:
            float(given)
        except ValueError:
            return ""
        return f": write {given.strip()} without quotes"
    return ""


def _limits(limits: Sequence[Any]) -> str:
    bounds = {name: getattr(each, name) for each in limits for name in _BOUNDS if hasattr(each, name)}
    words = [f"{_BOUNDS[name]} {bound:g}" for name, bound in bounds.items() if bound < 2**31]
    return f" {' and '.join(words).replace(' and of ', ' and ')}" if words else ""
