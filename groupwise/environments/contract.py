"""What an environment is: the other side of a conversation of several turns.

A conversation starts with the row's prompt and the messages of `Environment.start`. Then the model speaks
(`AssistantTurn`) and the environment replies (`Reply`), in turns, until a reply is ``done``. Everything here is text:
an environment knows no tokens, no chat template and no model, and special tokens in its messages are plain characters.

One environment serves one conversation at a time. It may be started again after the conversation has ended.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Protocol

from groupwise.errors import GroupwiseError, InputError, check_integer
from groupwise.text import excerpt

Message = dict[str, Any]
"""``{"role": …, "content": text}``; a message of a tool also has its "name" and the "tool_call_id" of its call."""

Schema = dict[str, Any]
"""The description of a tool, as chat templates take it: ``{"type": "function", "function": {"name": …, …}}``."""

REPLY_ROLES = ("tool", "user")
OPENING_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote, parsed. ``id`` is the model's own, or empty if its format has none."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True)
class AssistantTurn:
    """What the model said in one turn.

    ``text`` is what it wrote outside of calls and of its thinking. ``problems`` has a sentence for each call that could
    not be parsed; an environment repeats them to the model, and never takes such a turn for a final answer.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    thinking: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether the model called no tool and did not try to."""
        return not self.calls and not self.problems


@dataclass(frozen=True)
class ToolResult:
    """The answer to a call. ``ok`` is false if the call was wrong, failed or took too long; ``content`` says how."""

    call: ToolCall
    content: str
    ok: bool = True
    seconds: float = 0.0


@dataclass(frozen=True)
class Reply:
    """What an environment answers to a turn.

    ``messages`` have the role "tool" or "user". With ``done`` the conversation ends, and the messages are not shown to
    the model. ``reward`` is for this turn alone, None if turns have no rewards.
    """

    messages: list[Message] = field(default_factory=list)
    done: bool = False
    reward: float | None = None
    results: tuple[ToolResult, ...] = ()


class Environment(Protocol):
    """An environment; a class may inherit from this one for the defaults, or just have these methods.

    ``schemas`` describe the tools that the model may call; some are known only after `start`. ``counts`` are facts
    about the conversation so far, such as the number of calls that failed; they become metrics.
    """

    schemas: Sequence[Schema] = ()
    counts: Mapping[str, float] = MappingProxyType({})

    async def start(self, row: dict[str, Any], seed: int) -> list[Message] | None:
        """Begin a conversation about a row of the data; return the messages that follow its prompt, None without any.

        The conversations of one group have the same row and ``seed``, so they start in the same state.
        """
        ...

    async def respond(self, turn: AssistantTurn) -> Reply:
        """Answer a turn of the model."""
        ...

    async def reward(self) -> float | dict[str, float | None] | None:
        """The reward of the conversation, or several by name; None leaves it to the reward functions."""
        return None

    async def close(self) -> None:
        """Free what the environment holds. It is called once per environment, also after a failure."""

    def state_key(self) -> Hashable:
        """What is equal for equal states, so that turns at the same state can be compared; None if unknown."""
        return None


EnvironmentFactory = Callable[[], Environment]
"""Makes an environment; each conversation that is held at the same time needs one of its own."""


class EnvironmentFailed(GroupwiseError, RuntimeError):
    """An environment raised an error, gave an invalid reply or took too long: ``what`` happened, and ``where``.

    ``timed_out``: it took too long; its code was abandoned and may still be running.
    """

    def __init__(self, what: str, where: str, *, timed_out: bool = False) -> None:
        super().__init__(f"{where} {what}")
        self.what, self.where, self.timed_out = what, where, timed_out

    def __reduce__(self) -> tuple[Callable[..., EnvironmentFailed], tuple[str, str, bool]]:
        """Pickle by the constructor's arguments, so that a worker process can raise it."""
        return _failed, (self.what, self.where, self.timed_out)


def _failed(what: str, where: str, timed_out: bool) -> EnvironmentFailed:
    return EnvironmentFailed(what, where, timed_out=timed_out)


@dataclass(frozen=True)
class Limits:
    """How much time and text an environment and its tools may take."""

    turn_seconds: float = 60.0
    """Of one reply, with all of its tool calls."""
    tool_seconds: float = 20.0
    """Of one tool call. One that takes longer is abandoned, and the model is told so."""
    max_reply_chars: int = 20_000
    """Of one message; a longer one loses its middle."""
    max_tool_calls: int = 50
    """In a conversation; the turn that reaches it is the last one."""
    max_tool_turns: int | None = None
    """Turns whose calls are answered. The turn after them is the last one, and its calls are not made."""
    wait_seconds: float = 120.0
    """Of start, of reward and of close, which may load data or wait for a server."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type == "int":
                check_integer(entry.name, value, 100 if entry.name == "max_reply_chars" else 1)
            elif entry.type == "int | None":
                if value is not None:
                    check_integer(entry.name, value, 0)
            elif not _is_seconds(value):
                raise InputError(f"{entry.name} must be a number of seconds above 0, got {excerpt(value)}")


def _is_seconds(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 < value <= threading.TIMEOUT_MAX  # type: ignore[arg-type, operator]


def with_opening(prompt: Sequence[Message], opening: Sequence[Message] | None) -> list[Message]:
    """The messages of the row's prompt, followed by those of `Environment.start`.

    A system message of the environment comes first. Two neighbouring messages of the user become one, as most chat
    templates want it; their texts are joined as they are, as in TRL.
    """
    opening = list(opening or ())
    system = [message for message in opening if message["role"] == "system"]
    joined: list[Message] = []
    for message in (*system, *prompt, *(message for message in opening if message["role"] != "system")):
        if joined and message["role"] == joined[-1]["role"] == "user":
            joined[-1] = {**joined[-1], "content": joined[-1]["content"] + message["content"]}
        else:
            joined.append(dict(message))
    if sum(message["role"] == "system" for message in joined) > 1:
        raise InputError("the row's prompt and the environment both have a system message; keep one of them")
    return joined
