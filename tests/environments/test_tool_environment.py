"""Tools given as functions, and as the methods of an object, as environments."""

from __future__ import annotations

import asyncio
import sqlite3
import threading

import pytest

from groupwise.environments import (
    AssistantTurn,
    EnvironmentFailed,
    Limits,
    MethodEnvironment,
    ToolCall,
    ToolEnvironment,
)
from groupwise.errors import ConfigError

HANG = threading.Event()  # never set


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def hang() -> str:
    """Hangs."""
    HANG.wait()
    return ""


def turn(*calls, problems=(), text=""):
    return AssistantTurn(text, tuple(calls), tuple(problems))


def play(environment, *turns, row=None, seed=0):
    """The opening and the replies to some turns."""

    async def run():
        opening = await environment.start(row or {}, seed)
        replies = [await environment.respond(entry) for entry in turns]
        await environment.close()
        return opening, replies

    return asyncio.run(run())


def test_a_conversation_with_a_tool():
    environment = ToolEnvironment([add])
    opening, (reply, last) = play(environment, turn(ToolCall("add", {"a": 1, "b": 2}, "c1")), turn(text="3"))
    assert opening is None
    assert reply.messages == [{"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"}]
    assert not reply.done
    assert reply.results[0].ok
    assert last.done
    assert last.messages == []
    assert [schema["function"]["name"] for schema in environment.schemas] == ["add"]
    assert {**environment.counts, "tool_seconds": 0} == {
        "tool_calls": 1,
        "tool_errors": 0,
        "unparsed_calls": 0,
        "tool_seconds": 0,
    }


def test_several_calls_are_answered_in_their_order():
    calls = [ToolCall("add", {"a": number, "b": 0}) for number in range(3)]
    _, (reply,) = play(ToolEnvironment([add]), turn(*calls))
    assert [message["content"] for message in reply.messages] == ["0", "1", "2"]
    assert "tool_call_id" not in reply.messages[0]


def test_a_call_that_could_not_be_parsed_is_not_a_final_answer():
    environment = ToolEnvironment([add])
    _, (alone, beside) = play(
        environment, turn(problems=["it is not JSON"]), turn(ToolCall("add", {"a": 1, "b": 1}), problems=["no name"])
    )
    assert not alone.done
    assert alone.messages == [{"role": "user", "content": "Error: a tool call could not be read: it is not JSON"}]
    (message,) = beside.messages
    assert message["role"] == "tool"
    assert message["content"] == "2\n\nError: a tool call could not be read: no name"
    assert environment.counts["unparsed_calls"] == 2


def test_a_tool_that_does_not_exist():
    environment = ToolEnvironment([add, hang])
    _, (reply,) = play(environment, turn(ToolCall("ad", {})))
    assert reply.messages[0]["content"] == "Error: there is no tool 'ad'; did you mean 'add'? (tools: add, hang)"
    assert environment.counts["tool_errors"] == 1
    _, (reply,) = play(ToolEnvironment([]), turn(ToolCall("x" * 10**6, {})))
    assert len(reply.messages[0]["content"]) < 200


def test_the_last_allowed_call_ends_the_conversation():
    environment = ToolEnvironment([add], Limits(max_tool_calls=2))
    one = ToolCall("add", {"a": 1, "b": 1})
    _, (first, second) = play(environment, turn(one), turn(one, one))
    assert not first.done
    assert second.done
    assert [result.ok for result in second.results] == [True, False]
    assert "no more than 2 calls" in second.results[1].content


def test_counts_begin_again_with_each_conversation():
    environment = ToolEnvironment([add])
    play(environment, turn(ToolCall("nothing", {})))
    assert environment.counts["tool_calls"] == 1
    play(environment)
    assert environment.counts["tool_calls"] == 0


def test_calls_share_the_time_of_a_turn():
    environment = ToolEnvironment([hang, add], Limits(turn_seconds=0.05, tool_seconds=1000))
    _, (reply,) = play(environment, turn(ToolCall("hang", {}), *[ToolCall("hang", {})] * 40))
    assert "did not finish" in reply.results[0].content
    assert not any(result.ok for result in reply.results)
    assert "took the time of this turn" in reply.results[-1].content


def test_a_tool_works_after_another_one_hung():
    environment = ToolEnvironment([hang, add], Limits(tool_seconds=0.05))
    _, (reply,) = play(environment, turn(ToolCall("hang", {})))
    assert not reply.results[0].ok
    environment = ToolEnvironment([hang, add], Limits(tool_seconds=60))
    _, (reply,) = play(environment, turn(ToolCall("add", {"a": 1, "b": 1})))
    assert reply.results[0].ok


class Till:
    """An environment in TRL's form, on a connection that only its own thread may use."""

    secret = 3

    def __init__(self):
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table entries (amount int)")

    def reset(self, item: str, **columns):
        self.database.execute("delete from entries")
        self.columns = columns
        self.done = False
        return f"Sell {item}."

    def pay(self, amount: int) -> int:
        """Pays.

        Args:
            amount: How much.
        """
        self.database.execute("insert into entries values (?)", (amount,))
        return self._total()

    async def leave(self) -> str:
        """Leaves the shop."""
        self.done = True
        return "bye"

    def _total(self) -> int:
        return self.database.execute("select sum(amount) from entries").fetchone()[0]

    def get_reward(self) -> float:
        return float(self._total() or 0)


def test_public_methods_are_tools():
    environment = MethodEnvironment(Till)

    async def run():
        opening = await environment.start({"item": "tea", "price": 3}, 0)
        replies = [
            await environment.respond(turn(ToolCall("pay", {"amount": 2}), ToolCall("pay", {"amount": "3"}))),
            await environment.respond(turn(ToolCall("leave", {}))),
        ]
        reward = await environment.reward()
        await environment.start({"item": "milk"}, 0)
        return opening, replies, reward, await environment.reward()

    opening, (paid, left), reward, again = asyncio.run(run())
    assert [schema["function"]["name"] for schema in environment.schemas] == ["leave", "pay"]
    assert opening == [{"role": "user", "content": "Sell tea."}]
    assert [result.content for result in paid.results] == ["2", "5"]
    assert not paid.done
    assert left.done
    assert (reward, again) == (5.0, 0.0)
    assert environment.instance.columns == {}


def test_a_reset_gets_only_the_columns_that_it_names():
    class Named:
        def reset(self, word, seed, other=5):
            self.given = (word, seed, other)

    environment = MethodEnvironment(Named)
    opening, _ = play(environment, row={"prompt": "p", "word": "w"}, seed=7)
    assert opening is None
    assert environment.instance.given == ("w", 7, 5)
    play(environment, row={"word": "w", "seed": 1}, seed=7)
    assert environment.instance.given == ("w", 1, 5)
    with pytest.raises(EnvironmentFailed, match=r"Named: reset needs the column 'word'.*prompt"):
        play(environment, row={"prompt": "p"})


def resetting(value):
    class Environment:
        def reset(self):
            if isinstance(value, Exception):
                raise value
            return value

        async def get_reward(self):
            return {"a": 1.0, "b": None}

    return Environment


def test_what_a_reset_may_return():
    assert play(MethodEnvironment(resetting(None)))[0] is None
    assert play(MethodEnvironment(resetting("a")))[0] == [{"role": "user", "content": "a"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert play(MethodEnvironment(resetting(messages)))[0] == messages
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert play(MethodEnvironment(resetting(parts)))[0] == [{"role": "user", "content": "ab"}]
    for wrong in (5, [1], [{"type": "image", "image": 1}], b"a", []):
        with pytest.raises(EnvironmentFailed, match="reset returned"):
            play(MethodEnvironment(resetting(wrong)))
    with pytest.raises(EnvironmentFailed, match=r"Environment: reset raised KeyError: 'a' \(test_tool_environment.py"):
        play(MethodEnvironment(resetting(KeyError("a"))))


def test_rewards_of_methods():
    async def reward(factory):
        return await MethodEnvironment(factory).reward()

    assert asyncio.run(reward(resetting(None))) == {"a": 1.0, "b": None}

    class Without:
        def reset(self): ...

    assert asyncio.run(reward(Without)) is None

    class Wrong(Without):
        def get_reward(self):
            raise ZeroDivisionError("no turns")

    with pytest.raises(EnvironmentFailed, match="get_reward raised ZeroDivisionError: no turns"):
        asyncio.run(reward(Wrong))

    class Hanging(Without):
        def get_reward(self):
            HANG.wait()

    with pytest.raises(EnvironmentFailed, match=r"get_reward did not return.*get_reward \(test_tool_env") as failure:
        asyncio.run(MethodEnvironment(Hanging, Limits(wait_seconds=0.05)).reward())
    assert failure.value.timed_out


def test_a_factory_that_fails():
    def broken():
        raise OSError("no server")

    with pytest.raises(EnvironmentFailed, match="broken: constructor raised OSError: no server"):
        MethodEnvironment(broken)
    with pytest.raises(EnvironmentFailed, match="constructor did not return"):
        MethodEnvironment(hang, Limits(wait_seconds=0.05))
    with pytest.raises(ConfigError, match="class or a function"):
        MethodEnvironment(Till())
    with pytest.raises(ConfigError, match=r"dict: it has no method reset\(\)"):
        MethodEnvironment(dict)

    class NoDocstring:
        def reset(self): ...

        def move(self, to: str): ...

    with pytest.raises(ConfigError, match="tool move has no docstring"):
        MethodEnvironment(NoDocstring)


def test_after_the_last_turn_with_calls_no_more_are_made():
    one = turn(ToolCall("add", {"a": 1, "b": 1}))
    environment = ToolEnvironment([add], Limits(max_tool_turns=2))
    _, (first, second, third) = play(environment, one, one, one)
    assert (first.done, second.done) == (False, False)
    assert (third.done, third.messages, third.results) == (True, [], ())
    assert environment.counts["tool_calls"] == 2
    assert play(environment, one)[1][0].results[0].ok  # in the next conversation it begins anew


def test_functions_are_tools_beside_the_methods():
    environment = MethodEnvironment(Till, tools=[add])
    assert [schema["function"]["name"] for schema in environment.schemas] == ["add", "leave", "pay"]
    calls = turn(ToolCall("add", {"a": 1, "b": 1}), ToolCall("pay", {"amount": 4}))
    _, (reply,) = play(environment, calls, row={"item": "tea"})
    assert [result.content for result in reply.results] == ["2", "4"]
