"""The JSON schema of a tool, from a function's signature and its docstring, as transformers makes it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from inspect import Parameter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from groupwise.environments.contract import Schema
from groupwise.errors import ConfigError
from groupwise.text import error_reason, excerpt

PLAIN_TYPES = (int, float, str, bool, list, tuple, dict, type(None), Any)
ALLOWED = "int, float, str, bool, list[…], tuple[…], dict[str, …], Literal[…], a union of these, or Any"


def tool_schema(function: Callable[..., Any]) -> Schema:
    """The description of a function for a chat template, or a `ConfigError` that says what the function lacks."""
    from transformers.utils.chat_template_utils import get_json_schema

    hints = annotations_of(function)
    where = f"tool {function.__name__}"
    if not inspect.getdoc(function):
        raise ConfigError(
            f"{where} has no docstring; write one that tells the model what it does"
            + (', with a section "Args:" that has a line "name: description" for each argument' if hints else "")
        )
    try:
        schema: Schema = get_json_schema(function)
    except Exception as error:  # of transformers: the docstring lacks something, or its choices are no JSON
        missing = next((name for name in hints if f"'{name}'" in str(error)), None)
        if missing is None:
            raise ConfigError(f"{where}: {error_reason(error)}") from error
        raise ConfigError(
            f"{where}: its docstring does not describe the argument {missing!r}; write a line "
            f'"{missing}: description" below "Args:"'
        ) from error
    return schema


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of each argument, or a `ConfigError` if the function cannot be a tool."""
    name = getattr(function, "__name__", None)
    if not (inspect.isfunction(function) or inspect.ismethod(function)) or name is None or not name.isidentifier():
        remedy = "write a function with def, a docstring and annotations"
        raise ConfigError(f"a tool must be a function or a method, got {excerpt(function)}; {remedy}")
    where = f"tool {name}"
    try:
        hints = get_type_hints(function)
    except Exception as error:  # a name in an annotation that does not exist
        raise ConfigError(f"{where}: its annotations cannot be read: {error_reason(error)}") from error
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: a model passes arguments by name, so {str(parameter)!r} must be a plain one")
        if parameter.name not in hints:
            raise ConfigError(
                f"{where}: the argument {parameter.name!r} has no annotation; write {parameter.name}: str, for example"
            )
        if (wrong := _unsupported(hints[parameter.name])) is not None:
            raise ConfigError(
                f"{where}: JSON has no values of the type {excerpt(wrong)}, the annotation of the argument "
                f"{parameter.name!r}; write one of {ALLOWED}"
            )
    if get_origin(hints.get("return")) is not None and _unsupported(hints["return"]) is not None:
        wrong = excerpt(hints["return"])
        raise ConfigError(f"{where}: JSON has no values of the type {wrong}, which it returns; write str, or nothing")
    return {name: hints[name] for name in parameters}


def _unsupported(annotation: Any) -> Any:
    """The part of an annotation that JSON lacks; None if it has all."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is None:
        return None if annotation in PLAIN_TYPES or annotation is None else annotation
    if origin is Literal:
        return None if all(isinstance(part, (int, float, str, bool, type(None))) for part in parts) else annotation
    if origin not in (list, tuple, dict, Union, types.UnionType):
        return annotation
    if origin is tuple and (... in parts or len(parts) == 1):
        return annotation
    if origin is dict and parts and parts[0] not in (str, int, Any):
        return annotation
    return next((wrong for part in parts if (wrong := _unsupported(part)) is not None), None)
