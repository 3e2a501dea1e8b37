"""Environments that answer calls of tools, and the one that consists of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from groupwise.environments.background import Worker
from groupwise.environments.contract import AssistantTurn, Environment, Limits, Message, Reply, Schema
from groupwise.environments.toolbox import Toolbox
from groupwise.environments.tools import Tool, make_tools


class ToolboxEnvironment(Environment):
    """Answers the calls of the model from a toolbox; a turn without a call is its final answer."""

    _worker: Worker
    _toolbox: Toolbox

    @property
    def schemas(self) -> Sequence[Schema]:  # type: ignore[override]
        """The descriptions of the tools."""
        return self._toolbox.schemas

    @property
    def counts(self) -> Mapping[str, float]:  # type: ignore[override]
        """The tool calls of the conversation, those answered by an error, those that could not be parsed, seconds."""
        return dict(self._toolbox.counts)

    async def respond(self, turn: AssistantTurn) -> Reply:
        """Answer the calls of the turn."""
        if self._toolbox.ends_with(turn):
            return Reply(done=True)
        messages, results = await self._toolbox.answer(turn)
        return Reply(messages, done=self._is_done, results=results)

    async def close(self) -> None:
        """End the thread of the tools."""
        self._worker.end()

    @property
    def _is_done(self) -> bool:
        """Whether the conversation ends after these calls."""
        return self._toolbox.is_used_up


class ToolEnvironment(ToolboxEnvironment):
    """Tools given as functions.

    The conversation also ends after ``limits.max_tool_calls``. Its reward is left to the reward functions. The tools
    are shared by all environments that get the same functions, so they should keep no state of a conversation;
    `MethodEnvironment` is for tools that do.
    """

    def __init__(self, tools: Iterable[Callable[..., Any] | Tool], limits: Limits | None = None) -> None:
        self._worker = Worker("groupwise-tools")
        self._toolbox = Toolbox(make_tools(tools), limits or Limits(), self._worker)

    async def start(self, row: dict[str, Any], seed: int) -> list[Message] | None:
        """Begin a conversation; the row's prompt is all that it starts with."""
        self._toolbox.reset()
        return None
