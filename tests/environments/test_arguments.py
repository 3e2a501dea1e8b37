"""Arguments of calls, checked and converted against annotations."""

from __future__ import annotations

import inspect
import json
from typing import Any, List, Literal, Optional, get_type_hints  # noqa: UP035 - tools of users are written like this

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.environments.arguments import WrongArguments, convert, convert_arguments, describe


def tool_arguments(function, arguments, choices=None):
    parameters = inspect.signature(function).parameters
    annotations = get_type_hints(function)
    return convert_arguments("f", arguments, parameters, annotations, choices or {})


@pytest.mark.parametrize(
    ("annotation", "value", "result"),
    [
        (int, 3, 3),
        (int, 3.0, 3),
        (int, " 3 ", 3),
        (int, "-12", -12),
        (float, 3, 3.0),
        (float, "1e3", 1000.0),
        (float, ".5", 0.5),
        (str, "x", "x"),
        (str, 5, "5"),
        (bool, True, True),
        (bool, "False", False),
        (type(None), None, None),
        (Any, {"a": 1}, {"a": 1}),
        (list, [1, "a"], [1, "a"]),
        (list[int], ["1", 2.0], [1, 2]),
        (list[int], "[1, 2]", [1, 2]),
        (List, [1], [1]),  # noqa: UP006
        (tuple[int, str], [1, "a"], (1, "a")),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (dict, '{"a": 1}', {"a": 1}),
        (Literal["a", "b"], "a", "a"),
        (Literal[1, 2], "2", 2),
        (Optional[int], None, None),  # noqa: UP045
        (int | None, "3", 3),
        (int | str, "3", "3"),  # it fits as it is
        (str | int, 3, 3),
        (float | int, 3, 3),
        (list[int] | int, [1], [1]),
        (list[int] | str, "[1]", "[1]"),
    ],
)
def test_what_fits_is_converted(annotation, value, result):
    converted = convert(value, annotation)
    assert converted == result
    assert type(converted) is type(result)


@pytest.mark.parametrize(
    ("annotation", "value", "word"),
    [
        (int, "three", "an integer"),
        (int, 3.5, "an integer"),
        (int, True, "an integer"),
        (int, None, "an integer"),
        (int, "9" * 5000, "an integer"),
        (float, "nan", "a number"),
        (float, float("inf"), "a number"),
        (float, "1e999", "a number"),
        (str, None, "a text"),
        (str, ["a"], "a text"),
        (str, True, "a text"),
        (bool, 1, "true or false"),
        (list[int], ["a"], "a list (each an integer)"),
        (list[int], "1, 2", "a list (each an integer)"),
        (list, {"a": 1}, "a list"),
        (tuple[int, int], [1], "a list of 2 (an integer, an integer)"),
        (dict[str, int], {"a": "b"}, "an object (each value an integer)"),
        (dict, "[" * 100_000, "an object"),
        (Literal["a", "b"], "c", '"a" or "b"'),
        (Literal[1], True, "1"),
        (int | None, "x", "an integer or null"),
    ],
)
def test_what_does_not_fit_is_described_to_the_model(annotation, value, word):
    parameters = {"x": inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD)}
    with pytest.raises(WrongArguments) as problem:
        convert_arguments("f", {"x": value}, parameters, {"x": annotation}, {})
    assert f"'x' of f must be {word}, got " in str(problem.value)
    assert len(str(problem.value)) < 300


def search(query: str, limit: int = 3): ...


def test_arguments_are_named():
    assert tool_arguments(search, {"query": "a"}) == {"query": "a"}
    assert tool_arguments(search, {"limit": "4", "query": "a"}) == {"limit": 4, "query": "a"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["needs the argument 'query' (a text)"]),
        ({"query": "a", "limits": 1}, ["no argument 'limits'", "did you mean 'limit'?", "query, limit"]),
        ({"limit": "x"}, ["needs the argument 'query'", "'limit' of f must be an integer"]),
        (["a"], ["must be a JSON object"]),
        ({"query": "a", 5: 1}, ["no argument 5"]),
    ],
)
def test_every_problem_of_a_call_is_named(arguments, words):
    with pytest.raises(WrongArguments) as problem:
        tool_arguments(search, arguments)
    assert all(word in str(problem.value) for word in words)


def test_choices_of_the_docstring_are_checked():
    assert tool_arguments(search, {"query": "tea"}, {"query": ["tea", "coffee"]}) == {"query": "tea"}
    with pytest.raises(WrongArguments, match="one of 'tea', 'coffee', got 'cocoa'"):
        tool_arguments(search, {"query": "cocoa"}, {"query": ["tea", "coffee"]})


@given(st.lists(st.integers()), st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)))
def test_values_survive_json_and_a_second_encoding(numbers, table):
    for value, annotation in ((numbers, list[int]), (table, dict[str, float])):
        once = json.dumps(value)
        assert convert(json.loads(once), annotation) == value
        assert convert(once, annotation) == value


def test_descriptions():
    assert describe(Any) == "any value"
    assert describe(Literal["a", None]) == '"a" or null'
    assert describe(list[dict[str, int]]) == "a list (each an object (each value an integer))"


def test_a_huge_integer_is_no_number():
    with pytest.raises(WrongArguments, match="must be a number, got"):
        convert_arguments("f", {"query": 10**400}, inspect.signature(search).parameters, {"query": float}, {})
