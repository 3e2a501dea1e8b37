"""Tools: their schemas, what is refused, and what the model is told."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from groupwise.environments import EnvironmentFailed, Limits, ToolCall, make_tools
from groupwise.environments.background import Worker
from groupwise.errors import ConfigError, InputError

HANG = threading.Event()  # never set


def call(function, arguments, limits=None, **options):
    (tool,) = make_tools([function])
    return asyncio.run(tool.call(ToolCall(tool.name, arguments, "7"), Worker("test"), limits or Limits(), **options))


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second one.

    Returns:
        Their sum.
    """
    return a + b


def pick(
    drink: str, size: Literal["small", "large"], extras: list[str] | None = None, prices: dict[str, float] | None = None
):
    """Orders a drink.

    Args:
        drink: What to drink (choices: ["tea", "coffee"])
        size: How much
            of it.
        extras: What else.
        prices: By name.
    """
    return f"{size} {drink}"


async def wait_for(seconds: float) -> str:
    """Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


def nothing():
    """Does nothing."""


class Counter:
    def __init__(self):
        self.value = 0

    def count(self, by: int) -> int:
        """Counts up.

        Args:
            by: The step.
        """
        self.value += by
        return self.value


@pytest.mark.parametrize("function", [add, pick, wait_for, nothing, Counter().count])
def test_a_schema_has_the_form_of_transformers(function):
    (tool,) = make_tools([function])
    assert tool.schema == get_json_schema(function)
    assert tool.name == function.__name__


def test_a_schema_in_full():
    (tool,) = make_tools([pick])
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "pick",
            "description": "Orders a drink.",
            "parameters": {
                "type": "object",
                "properties": {
                    "drink": {"type": "string", "enum": ["tea", "coffee"], "description": "What to drink"},
                    "size": {
                        "type": "string",
                        "enum": ["small", "large"],
                        "description": "How much of it.",
                    },
                    "extras": {
                        "type": "array",
                        "items": {"type": "string"},
                        "nullable": True,
                        "description": "What else.",
                    },
                    "prices": {
                        "type": "object",
                        "additionalProperties": {"type": "number"},
                        "nullable": True,
                        "description": "By name.",
                    },
                },
                "required": ["drink", "size"],
            },
        },
    }


def no_docstring(a: int): ...


def no_annotation(a):
    """Does.

    Args:
        a: The thing.
    """


def not_described(a: int, b: int):
    """Does.

    Args:
        a: The first.
    """


def set_of(a: set[int]):
    """Does.

    Args:
        a: The set.
    """


def own_class(a: Counter):
    """Does.

    Args:
        a: The counter.
    """


def any_number(*numbers: int):
    """Does.

    Args:
        numbers: The numbers.
    """


def any_names(**names: int):
    """Does."""


def by_place(a: int, /):
    """Does.

    Args:
        a: The number.
    """


def unknown_name(a: NoSuchType):  # noqa: F821
    """Does.

    Args:
        a: The thing.
    """


def wrong_choices(a: str):
    """Does.

    Args:
        a: The thing (choices: [tea])
    """


def returns_iterator() -> Iterator[str]:
    """Does."""
    yield ""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_docstring, ["tool no_docstring", "no docstring", "Args:"]),
        (no_annotation, ["tool no_annotation", "'a' has no annotation", "a: str"]),
        (not_described, ["tool not_described", "'b'", "b: description"]),
        (set_of, ["tool set_of", "'a'", "set[int]", "list[…]"]),
        (own_class, ["tool own_class", "'a'", "Counter"]),
        (any_number, ["tool any_number", "*numbers"]),
        (any_names, ["tool any_names", "**names"]),
        (by_place, ["tool by_place", "a"]),
        (unknown_name, ["tool unknown_name", "NoSuchType"]),
        (wrong_choices, ["tool wrong_choices"]),
        (returns_iterator, ["tool returns_iterator", "Iterator", "returns"]),
        (lambda a: a, ["must be a function", "def"]),
        (functools.partial(add, 1), ["must be a function"]),
        (Counter, ["must be a function"]),
        ("add", ["must be a function", "'add'"]),
        (len, ["must be a function"]),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_with_what_to_write(function, words):
    with pytest.raises(ConfigError) as problem:
        make_tools([function])
    assert all(word in str(problem.value) for word in words), str(problem.value)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="2 tools have the name 'add'"):
        make_tools([add, add])


def test_a_tool_may_be_given_again():
    tools = make_tools([add, nothing])
    assert make_tools(tools) == tools


def test_the_methods_of_two_objects_are_two_tools():
    first, second = (make_tools([Counter().count])[0] for _ in range(2))
    assert first.schema is second.schema  # is made once
    assert first.function.__self__ is not second.function.__self__
    (unbound,) = make_tools([add])
    assert make_tools([add])[0].schema is unbound.schema


def test_a_renamed_function_has_another_schema():
    def first() -> str:
        """Does."""
        return ""

    assert make_tools([first])[0].schema["function"]["name"] == "first"
    first.__name__ = "second"
    assert make_tools([first])[0].schema["function"]["name"] == "second"


def test_a_call_is_answered():
    result = call(add, {"a": "2"})
    assert (result.ok, result.content, result.call.id) == (True, "3", "7")
    assert result.seconds >= 0
    assert call(wait_for, {"seconds": 0}).content == "done"
    assert call(nothing, {}).content == "(no result)"
    assert call(Counter().count, {"by": 2}).content == "2"


@pytest.mark.parametrize(
    ("arguments", "word"), [({}, "needs"), ({"a": "x"}, "integer"), ({"a": 1, "c": 2}, "no argument"), (None, "object")]
)
def test_wrong_arguments_are_told_and_the_tool_is_not_called(arguments, word):
    result = call(add, arguments)
    assert not result.ok
    assert result.content.startswith("Error: ")
    assert word in result.content


def raising(error: Any):
    def fails() -> str:
        """Fails."""
        raise error

    return fails


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("a"), "Error: fails raised KeyError: 'a'"),
        (ValueError(), "Error: fails raised ValueError"),
        (InputError("division by zero"), "Error: fails: division by zero"),
        (SystemExit(3), "Error: fails raised SystemExit: 3"),
        (KeyboardInterrupt(), "Error: fails raised KeyboardInterrupt"),
        (StopIteration(), "Error: fails raised StopIteration"),
        (asyncio.CancelledError(), "Error: fails raised CancelledError"),
        (RuntimeError("bad \x00 byte"), "Error: fails raised RuntimeError: bad \\x00 byte"),
        (Silent(), "Error: fails raised Silent: Silent()"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_becomes_a_message_without_a_traceback(error, text):
    plain = raising(error)
    result = call(plain, {})
    assert not result.ok
    assert result.content == text

    async def fails() -> str:
        """Fails."""
        raise error

    assert call(fails, {}).content == text.replace(
        "raised StopIteration", "raised RuntimeError: coroutine raised StopIteration"
    )


def test_a_long_exception_is_cut():
    assert len(call(raising(ValueError("x" * 10**6)), {}).content) < 600


@pytest.mark.parametrize("error", [EnvironmentFailed("is gone", "server"), ConfigError("this machine has no Docker")])
def test_errors_for_the_user_are_raised(error):
    with pytest.raises(type(error), match=str(error)):
        call(raising(error), {})


def test_a_tool_that_hangs_is_abandoned_and_the_model_is_told():
    def hangs() -> str:
        """Hangs."""
        HANG.wait()
        return ""

    async def hangs_too() -> str:
        """Hangs."""
        await asyncio.Event().wait()
        return ""

    async def ignores_the_end() -> str:
        """Hangs."""
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "late"

    for function in (hangs, hangs_too, ignores_the_end):
        result = call(function, {}, Limits(tool_seconds=0.05))
        assert not result.ok
        assert result.content == f"Error: {function.__name__} did not finish within 0.05 s"


def test_a_plain_function_may_return_an_awaitable():
    def later(seconds: float) -> Any:
        """Waits.

        Args:
            seconds: How long.
        """
        return wait_for(seconds)

    assert call(later, {"seconds": 0}).content == "done"
    assert "did not finish" in call(later, {"seconds": 1000}, Limits(tool_seconds=0.05)).content


@pytest.mark.parametrize("size", [10**6, 3 * 10**6])
def test_a_megabyte_is_cut(size):
    def much(as_list: bool):
        """Returns much.

        Args:
            as_list: Whether in a list.
        """
        return ["x" * size] if as_list else "x" * size

    for as_list in (False, True):
        result = call(much, {"as_list": as_list}, Limits(max_reply_chars=300))
        assert result.ok
        assert len(result.content) == 300
        assert "left out" in result.content


def test_a_result_that_takes_for_ever_to_show_is_abandoned():
    class Endless(dict):
        def items(self):
            time.sleep(0.2)
            HANG.wait()

    def endless() -> Any:
        """Returns it."""
        return Endless(a=1)

    assert "did not finish" in call(endless, {}, Limits(tool_seconds=0.05)).content


def test_calls_run_in_one_thread():
    def thread() -> int:
        """Names its thread."""
        return threading.get_ident()

    (tool,) = make_tools([thread])
    worker = Worker("test")

    async def twice():
        return [(await tool.call(ToolCall("thread", {}), worker, Limits())).content for _ in range(2)]

    first, second = asyncio.run(twice())
    assert first == second != str(threading.get_ident())
