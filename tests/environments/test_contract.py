"""The contract: its records, its limits, and how a prompt and an opening become one conversation."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from groupwise.environments import AssistantTurn, Environment, EnvironmentFailed, Limits, ToolCall, with_opening
from groupwise.errors import GroupwiseError, InputError


def test_a_turn_is_final_only_without_calls_and_without_problems():
    assert AssistantTurn("42").is_final
    assert AssistantTurn("", thinking="hm").is_final
    assert not AssistantTurn("", calls=(ToolCall("add", {}),)).is_final
    assert not AssistantTurn("", problems=("the call is not JSON",)).is_final


def test_the_defaults_of_an_environment():
    class Smallest(Environment):
        pass

    environment = Smallest()
    assert tuple(environment.schemas) == ()
    assert dict(environment.counts) == {}
    assert asyncio.run(environment.reward()) is None
    assert asyncio.run(environment.close()) is None
    assert environment.state_key() is None


def test_a_failure_says_what_and_where_also_after_pickling():
    failure = EnvironmentFailed("raised KeyError: 'a'", "Maze.respond", timed_out=True)
    assert isinstance(failure, GroupwiseError)
    assert isinstance(failure, RuntimeError)
    for error in (failure, pickle.loads(pickle.dumps(failure))):
        assert str(error) == "Maze.respond raised KeyError: 'a'"
        assert (error.what, error.where, error.timed_out) == ("raised KeyError: 'a'", "Maze.respond", True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("turn_seconds", 0),
        ("turn_seconds", "3"),
        ("tool_seconds", True),
        ("tool_seconds", float("nan")),
        ("wait_seconds", float("inf")),
        ("wait_seconds", 1e300),
        ("max_reply_chars", 10),
        ("max_reply_chars", 1e4),
        ("max_tool_calls", 0),
    ],
)
def test_a_wrong_limit_is_refused_by_its_name(name, value):
    with pytest.raises(InputError, match=name):
        Limits(**{name: value})


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def test_the_opening_follows_the_prompt():
    assert with_opening([user("a")], None) == [user("a")]
    assert with_opening([], [user("a")]) == [user("a")]
    assert with_opening([system("s"), user("a")], [user(" b")]) == [system("s"), user("a b")]
    assert with_opening([user("a")], [system("s"), user("b")]) == [system("s"), user("ab")]
    answer = {"role": "assistant", "content": "x"}
    assert with_opening([user("a"), answer], [user("b")]) == [user("a"), answer, user("b")]


def test_joining_changes_neither_the_prompt_nor_the_opening():
    prompt, opening = [user("a")], [user("b")]
    with_opening(prompt, opening)
    assert (prompt, opening) == ([user("a")], [user("b")])


def test_two_system_messages_are_refused():
    with pytest.raises(InputError, match="system message"):
        with_opening([system("a"), user("b")], [system("c")])
