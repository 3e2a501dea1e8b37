"""Calls of tools, as a model wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from groupwise.environments import ToolCall


def call_id(number: int) -> str:
    """The id of a call that has none of its own: nine letters and digits, as Mistral's templates require."""
    return f"call{number:05d}"


class FoundCalls(NamedTuple):
    """What a format finds in a text: the rest of the text, the calls, and what is wrong with others."""

    content: str
    calls: list[ToolCall]
    problems: list[str]


class CallError(Exception):
    """What is wrong with a call, in a sentence without its end."""


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The schema of each parameter, by the names of the tools: ``{"search": {"query": {"type": "string"}}}``."""
    parameters = {}
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") or {}
        parameters[str(function.get("name"))] = dict(schema.get("properties") or {})
    return parameters
