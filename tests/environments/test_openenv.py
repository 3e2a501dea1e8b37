"""Environments of OpenEnv: over clients of the same form as openenv's, and over a real one where it is installed."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from groupwise.environments import (
    AssistantTurn,
    EnvironmentFailed,
    Limits,
    OpenEnvEnvironment,
    ToolCall,
    watched,
)
from groupwise.errors import ConfigError, MissingExtraError


@dataclass
class Result:
    observation: Any
    reward: float | None = None
    done: bool = False


@dataclass
class Observation:
    text: str
    reward: float = 0.0
    done: bool = False
    metadata: dict = field(default_factory=dict)

    def model_dump(self):
        return vars(self)


class Counting:
    """An async client as openenv's: plain methods that return awaitables, and a method `sync`."""

    def __init__(self):
        self.said, self.closed = [], False

    def sync(self):
        raise AssertionError("not used")

    def reset(self, **columns):
        self.columns = columns
        return self._later(Result({"text": "say up to 3 words", "metadata": {}}))

    def step(self, action):
        self.said.append(action["message"])
        return self._later(Result({"text": f"said {len(self.said)}"}, 0.5, len(self.said) == 2))

    async def _later(self, result):
        await asyncio.sleep(0)
        return result

    async def close(self):
        self.closed = True


class Plain:
    """A client of the older form, whose methods are plain."""

    def reset(self):
        self.thread = threading.get_ident()
        return Result(Observation("begin"))

    def step(self, action):
        assert threading.get_ident() == self.thread
        return Result(Observation(f"got {action}"), reward=None, done=True)


def play(environment, *turns, row=None, seed=7):
    async def run():
        guarded = watched(environment)
        opening = await guarded.start(row or {}, seed)
        replies = [await guarded.respond(turn) for turn in turns]
        reward = await guarded.reward()
        await guarded.close()
        return opening, replies, reward

    return asyncio.run(run())


def test_a_conversation_over_an_async_client():
    client = Counting()
    environment = OpenEnvEnvironment(lambda: client, reset_columns=["word"], instructions="Speak.")
    row = {"word": "w", "other": 1}
    opening, replies, reward = play(environment, AssistantTurn("a"), AssistantTurn("b"), row=row)
    assert opening == [{"role": "user", "content": "Speak.\n\nsay up to 3 words"}]
    assert [reply.messages[0]["content"] for reply in replies] == ["said 1", "said 2"]
    assert [reply.reward for reply in replies] == [0.5, 0.5]
    assert [reply.done for reply in replies] == [False, True]
    assert reward == 1.0
    assert client.columns == {"seed": 7, "word": "w"}
    assert client.said == ["a", "b"]
    assert client.closed
    assert environment.counts["steps"] == 2


def test_a_conversation_over_a_plain_client():
    environment = OpenEnvEnvironment(Plain, action=lambda turn: turn.text.upper())
    opening, (reply,), reward = play(environment, AssistantTurn("go"))
    assert opening == [{"role": "user", "content": "begin"}]
    assert reply.messages[0]["content"] == "got GO"
    assert reply.done
    assert reward is None


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ("plain", "plain"),
        ({"a": 1, "b": "two", "done": False, "reward": 1.0}, '{"a": 1, "b": "two"}'),
        ({"only": "text", "count": None}, "text"),
        ({"number": 5}, '{"number": 5}'),
        (Observation("text of an object"), "text of an object"),
    ],
)
def test_texts_of_observations(observation, text):
    class Client(Plain):
        def reset(self):
            return Result(observation)

    assert play(OpenEnvEnvironment(Client))[0] == [{"role": "user", "content": text}]
    described = OpenEnvEnvironment(Client, describe=lambda given: f"<{given is observation}>")
    assert play(described)[0] == [{"role": "user", "content": "<True>"}]


def test_an_opening_without_text():
    class Client(Plain):
        def reset(self):
            return Result({"done": False})

    assert play(OpenEnvEnvironment(Client))[0] is None


class WithTools:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}  # noqa: RUF012

    def reset(self, seed):
        return Result({"text": "use the tools"})

    def step(self, action):
        if action == {"type": "list_tools"}:
            tools = [{"name": "echo", "description": "Echoes.", "input_schema": self.schema}]
            return Result({"tools": tools})
        if action["tool_name"] != "echo":
            return Result({"tool_name": action["tool_name"], "error": {"message": "no such tool"}}, reward=-1.0)
        parts = {"content": [{"type": "text", "text": action["arguments"]["text"]}], "is_error": False}
        return Result({"tool_name": "echo", "result": parts}, reward=0.25, done=action["arguments"]["text"] == "end")


def test_tools_of_a_server():
    environment = OpenEnvEnvironment(WithTools, tools=True)
    assert environment.schemas == ()
    turns = [
        AssistantTurn("", (ToolCall("echo", {"text": "a"}, "1"), ToolCall("ech", {}))),
        AssistantTurn("", problems=("it is not JSON",)),
        AssistantTurn("", (ToolCall("echo", {"text": "end"}), ToolCall("echo", {"text": "late"}))),
    ]
    _, (first, second, third), reward = play(environment, *turns)
    assert environment.schemas == (
        {"type": "function", "function": {"name": "echo", "description": "Echoes.", "parameters": WithTools.schema}},
    )
    assert first.messages == [
        {"role": "tool", "content": "a", "name": "echo", "tool_call_id": "1"},
        {"role": "tool", "content": "Error: no such tool", "name": "ech"},
    ]
    assert first.reward == -0.75
    assert not second.done
    assert "it is not JSON" in second.messages[0]["content"]
    assert third.done
    assert [result.ok for result in third.results] == [True, False]
    assert reward == -0.5
    assert environment.counts == {"steps": 3, "tool_calls": 4, "tool_errors": 2, "unparsed_calls": 1}
    assert play(environment, AssistantTurn("done"))[1][0].done


def test_what_goes_wrong_is_named():
    class Client(Plain):
        answer: Any = None

        def step(self, action):
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    for answer, words in (
        (ConnectionError("refused"), "Client: step raised ConnectionError: refused"),
        (None, "has no 'observation': None"),
        (Result("a", reward=float("nan")), "step returned the reward nan"),
    ):
        Client.answer = answer
        with pytest.raises(EnvironmentFailed, match=words):
            play(OpenEnvEnvironment(Client), AssistantTurn("a"))
    with pytest.raises(EnvironmentFailed, match="reset needs the column 'word'"):
        play(OpenEnvEnvironment(Counting, reset_columns=["word"]))
    with pytest.raises(EnvironmentFailed, match="describe gave 5"):
        play(OpenEnvEnvironment(Plain, describe=lambda _: 5))
    Client.answer = Result({})
    with pytest.raises(EnvironmentFailed, match="list_tools returned None, not a list"):
        play(OpenEnvEnvironment(Client, tools=True))
    with pytest.raises(ConfigError, match=r"dict: its client has no method reset\(\)"):
        OpenEnvEnvironment(dict)
    with pytest.raises(ConfigError, match="address or a function"):
        OpenEnvEnvironment(Plain())


def test_a_client_that_hangs():
    class Client(Counting):
        def step(self, action):
            return asyncio.Event().wait()

    with pytest.raises(EnvironmentFailed, match="step did not return") as failure:
        play(OpenEnvEnvironment(Client, limits=Limits(turn_seconds=0.05)), AssistantTurn("a"))
    assert failure.value.timed_out


def test_an_address_needs_the_package(monkeypatch):
    monkeypatch.setattr("groupwise.environments.openenv.is_installed", lambda name: False)
    with pytest.raises(MissingExtraError, match=r"groupwise\[openenv\]"):
        OpenEnvEnvironment("http://localhost:8000")


@pytest.mark.filterwarnings("ignore")
def test_a_real_server():
    """Needs the package openenv, which the development environment does not have."""
    pytest.importorskip("openenv.core", reason="openenv is not installed")
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment as ServerEnvironment
    from openenv.core.env_server.types import Action, State
    from openenv.core.env_server.types import Observation as ServerObservation

    class Said(Action):
        message: str

    class Heard(ServerObservation):
        text: str

    class Echo(ServerEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **columns):
            return Heard(text=f"seed {seed}")

        def step(self, action, timeout_s=None, **options):
            return Heard(text=action.message[::-1], reward=float(len(action.message)), done=action.message == "end")

        @property
        def state(self):
            return State()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Echo, Said, Heard)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        environment = OpenEnvEnvironment(f"http://127.0.0.1:{port}")
        opening, replies, reward = play(environment, AssistantTurn("abc"), AssistantTurn("end"), seed=3)
    finally:
        server.should_exit = True
        thread.join(60)
    assert opening == [{"role": "user", "content": "seed 3"}]
    assert [reply.messages[0]["content"] for reply in replies] == ["cba", "dne"]
    assert [reply.done for reply in replies] == [False, True]
    assert reward == 6.0
