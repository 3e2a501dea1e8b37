"""The arguments of a tool call, checked and converted against the annotations of the tool.

A conversion is made only where one reading is possible: ``3.0`` and ``"3"`` are an integer where one is expected, and a
text with a JSON list is a list. What does not fit is a `WrongArguments` whose text tells the model what to write.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from groupwise.errors import did_you_mean
from groupwise.text import excerpt

_INTEGER = re.compile(r"[+-]?[0-9]{1,300}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})([eE][+-]?[0-9]{1,3})?")
_WORDS = {"true": True, "false": False}


class WrongArguments(Exception):
    """Arguments that do not fit the tool; the text is for the model."""


class _Misfit(Exception):
    """A value that an annotation does not allow."""


def convert_arguments(
    tool: str,
    arguments: Any,
    parameters: Mapping[str, inspect.Parameter],
    annotations: Mapping[str, Any],
    choices: Mapping[str, list[Any]],
) -> dict[str, Any]:
    """The arguments as the tool wants them. ``choices`` are the values that the docstring allows, by argument."""
    if not isinstance(arguments, Mapping):
        raise WrongArguments(f"the arguments of {tool} must be a JSON object, got {excerpt(arguments)}")
    problems = [
        f"{tool} has no argument {excerpt(name)}{did_you_mean(name, annotations)}"
        f" (its arguments: {', '.join(annotations) or 'none'})"
        for name in arguments
        if name not in annotations
    ]
    converted = {}
    for name, annotation in annotations.items():
        if name not in arguments:
            if parameters[name].default is inspect.Parameter.empty:
                problems.append(f"{tool} needs the argument {name!r} ({describe(annotation)})")
            continue
        try:
            value = convert(arguments[name], annotation)
        except _Misfit:
            value = arguments[name]
            problems.append(f"the argument {name!r} of {tool} must be {describe(annotation)}, got {excerpt(value)}")
        else:
            if name in choices and value not in choices[name]:
                listed = ", ".join(map(repr, choices[name]))
                problems.append(f"the argument {name!r} of {tool} must be one of {listed}, got {excerpt(value)}")
        converted[name] = value
    if problems:
        raise WrongArguments("; ".join(problems))
    return converted


def convert(value: Any, annotation: Any) -> Any:
    """The value as one of the annotated type, or a `_Misfit`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin is Literal:
        return _choice(value, parts)
    if origin in (Union, types.UnionType):
        return _union(value, parts)
    return _CONVERSIONS[annotation if origin is None else origin](value, parts)


def _union(value: Any, options: tuple[Any, ...]) -> Any:
    """The value by the first option that it fits as it is, or else by the first to which it can be converted."""
    results = []
    for option in options:
        try:
            results.append(convert(value, option))
        except _Misfit:
            continue
    if not results:
        raise _Misfit
    return next((result for result in results if type(result) is type(value) and result == value), results[0])


def _choice(value: Any, options: tuple[Any, ...]) -> Any:
    for option in options:
        if type(option) is type(value) and option == value:
            return option
    for option in options:  # an integer as a text, as formats without types write it
        if isinstance(value, str) and not isinstance(option, str) and json.dumps(option) == value:
            return option
    raise _Misfit


def _integer(value: Any, _: Any) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Misfit
    return value


def _float(value: Any, _: Any) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Misfit
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        raise _Misfit from None
    if not math.isfinite(number):
        raise _Misfit
    return number


def _text(value: Any, _: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str):
        raise _Misfit
    return value


def _boolean(value: Any, _: Any) -> bool:
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    if not isinstance(value, bool):
        raise _Misfit
    return value


def _none(value: Any, _: Any) -> None:
    if value is not None:
        raise _Misfit


def _list(value: Any, parts: tuple[Any, ...]) -> list[Any]:
    value = _parsed(value)
    if not isinstance(value, (list, tuple)):
        raise _Misfit
    return [convert(item, parts[0]) for item in value] if parts else list(value)


def _tuple(value: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    value = _parsed(value)
    if not isinstance(value, (list, tuple)) or (parts and len(parts) != len(value)):
        raise _Misfit
    return tuple(convert(item, part) for item, part in zip(value, parts, strict=True)) if parts else tuple(value)


def _dict(value: Any, parts: tuple[Any, ...]) -> dict[Any, Any]:
    value = _parsed(value)
    if not isinstance(value, Mapping):
        raise _Misfit
    return {convert(key, parts[0]): convert(item, parts[1]) for key, item in value.items()} if parts else dict(value)


def _parsed(value: Any) -> Any:
    """A text as the JSON that it may be: models often encode lists and objects twice."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise _Misfit from None


_CONVERSIONS: dict[Any, Callable[[Any, tuple[Any, ...]], Any]] = {
    int: _integer, float: _float, str: _text, bool: _boolean, type(None): _none, None: _none,
    list: _list, tuple: _tuple, dict: _dict,
}  # fmt: skip

_NOUNS = {
    int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null", None: "null",
    list: "a list", tuple: "a list", dict: "an object", Any: "any value",
}  # fmt: skip


def describe(annotation: Any) -> str:
    """What a value of an annotation is, for a model: ``an integer``, ``a list (each an integer)``, ``1 or 2``."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is None or not parts:
        return _NOUNS[origin or annotation]
    if origin is Literal:
        return " or ".join(json.dumps(part, ensure_ascii=False) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(describe, parts)))
    if origin is dict:
        return f"an object (each value {describe(parts[1])})"
    if origin is tuple:
        return f"a list of {len(parts)} ({', '.join(map(describe, parts))})"
    return f"a list (each {describe(parts[0])})"
