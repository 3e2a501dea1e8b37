"""Tools: Python functions that a model may call.

A tool is a function or a method, plain or async, with annotations and a docstring in Google style. A plain one is
called in a thread. Whatever goes wrong becomes a message for the model: a tool that does not exist, arguments that do
not fit, an exception (its type and text, no traceback), a time limit. Two kinds of errors are not for the model and end
the conversation: `EnvironmentFailed`, and `ConfigError`, by which a tool says that this machine cannot run it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from groupwise.environments.arguments import WrongArguments, convert_arguments
from groupwise.environments.background import Outcome, Worker, run_limited
from groupwise.environments.contract import EnvironmentFailed, Limits, Schema, ToolCall, ToolResult
from groupwise.environments.message_text import limited_text, message_text
from groupwise.environments.tool_schema import annotations_of, tool_schema
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.text import shown

LONGEST_ERROR = 500  # characters of an exception's text
FOR_THE_USER = (EnvironmentFailed, ConfigError)

_descriptions: WeakKeyDictionary[Any, dict[tuple[str, bool], tuple[dict[str, Any], Schema]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Tool:
    """A function with its description for the model."""

    name: str
    function: Callable[..., Any]
    schema: Schema
    annotations: Mapping[str, Any]

    @property
    def is_async(self) -> bool:
        """Whether a call returns a coroutine."""
        return inspect.iscoroutinefunction(self.function)

    def convert(self, arguments: Any) -> dict[str, Any]:
        """The arguments as the function wants them, or `WrongArguments`."""
        properties = self.schema["function"]["parameters"]["properties"]
        choices = {name: entry["enum"] for name, entry in properties.items() if "enum" in entry}
        parameters = inspect.signature(self.function).parameters
        return convert_arguments(self.name, arguments, parameters, self.annotations, choices)

    async def call(self, call: ToolCall, worker: Worker, limits: Limits, seconds: float | None = None) -> ToolResult:
        """Answer a call; the function has ``seconds``, by default those of the limits."""
        start = time.monotonic()
        seconds = limits.tool_seconds if seconds is None else min(seconds, limits.tool_seconds)
        try:
            arguments = self.convert(call.arguments)
        except WrongArguments as wrong:
            return failed(call, str(wrong), limits)
        if self.is_async:
            outcome = await run_limited(self.function(**arguments), seconds)
        else:
            outcome = await worker.call(lambda: self.function(**arguments), seconds=seconds)
        if outcome.is_value and not isinstance(outcome.value, str):  # JSON of a huge value takes time, too
            outcome = await worker.call(message_text, outcome.value, limits.max_reply_chars, seconds=seconds)
        if outcome.is_value:
            content = limited_text(outcome.value, limits.max_reply_chars)
        else:
            content = error_text(_problem(self.name, outcome, seconds), limits)
        return ToolResult(call, content, outcome.is_value, time.monotonic() - start)


def make_tools(functions: Iterable[Callable[..., Any] | Tool]) -> tuple[Tool, ...]:
    """The functions as tools, or a `ConfigError` that says which function and argument lack what."""
    tools = []
    for function in functions:
        if isinstance(function, Tool):
            tools.append(function)
            continue
        annotations, schema = _description(function)
        tools.append(Tool(function.__name__, function, schema, annotations))
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{names.count(name)} tools have the name {name!r}; rename all but one")
    return tuple(tools)


def _description(function: Any) -> tuple[dict[str, Any], Schema]:
    """The annotations and the schema of a function; of a method of many objects they are read once."""
    plain, is_method = getattr(function, "__func__", function), inspect.ismethod(function)
    if not inspect.isfunction(plain):
        annotations_of(function)  # refuses it
    known = _descriptions.setdefault(plain, {})
    if (function.__name__, is_method) not in known:
        known[function.__name__, is_method] = annotations_of(function), tool_schema(function)
    return known[function.__name__, is_method]


def failed(call: ToolCall, problem: str, limits: Limits) -> ToolResult:
    """The answer to a call that was not made."""
    return ToolResult(call, error_text(problem, limits), ok=False)


def error_text(problem: str, limits: Limits) -> str:
    """A problem as the model reads it."""
    return limited_text(f"Error: {problem}", limits.max_reply_chars)


def _problem(name: str, outcome: Outcome, seconds: float) -> str:
    """What went wrong in a call, for the model; errors that are for the user are raised."""
    error = outcome.error
    if error is None:
        return f"{name} did not finish within {seconds:.3g} s"
    if isinstance(error, FOR_THE_USER):
        raise error
    text = limited_text(str(error) if _has_text(error) else shown(error), LONGEST_ERROR)
    if isinstance(error, GroupwiseError):  # its text says all
        return f"{name}: {text}"
    return f"{name} raised {type(error).__name__}" + (f": {text}" if text else "")


def _has_text(error: BaseException) -> bool:
    try:
        str(error)
    except Exception:  # someone else's __str__
        return False
    return True
