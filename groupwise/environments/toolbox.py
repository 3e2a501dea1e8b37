"""The calls of a turn, answered one after another by tools, and counted."""

from __future__ import annotations

import time
from collections.abc import Sequence

from groupwise.environments.background import Worker
from groupwise.environments.contract import AssistantTurn, Limits, Message, Schema, ToolCall, ToolResult
from groupwise.environments.message_text import limited_text
from groupwise.environments.tools import Tool, failed
from groupwise.errors import did_you_mean
from groupwise.text import excerpt

COUNTS = ("tool_calls", "tool_errors", "unparsed_calls", "tool_seconds")


class Toolbox:
    """Tools with their limits and counts.

    ``counts``: calls, the ones among them that were answered by an error, calls that could not be parsed, and seconds.
    """

    def __init__(self, tools: Sequence[Tool], limits: Limits, worker: Worker) -> None:
        self.limits, self.worker = limits, worker
        self._tools = {tool.name: tool for tool in tools}
        self.counts: dict[str, float] = {}
        self.turns = 0  # answered in this conversation
        self.reset()

    def reset(self) -> None:
        """Begin a conversation: no call was made yet."""
        self.counts, self.turns = dict.fromkeys(COUNTS, 0), 0

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """The descriptions of the tools."""
        return tuple(tool.schema for tool in self._tools.values())

    @property
    def is_used_up(self) -> bool:
        """Whether the conversation has made as many calls as it may."""
        return self.counts["tool_calls"] >= self.limits.max_tool_calls

    def ends_with(self, turn: AssistantTurn) -> bool:
        """Whether a turn is the last one, which gets no answer."""
        return turn.is_final or self.turns == self.limits.max_tool_turns

    async def answer(self, turn: AssistantTurn) -> tuple[list[Message], tuple[ToolResult, ...]]:
        """The messages that answer a turn's calls, in their order, and what could not be parsed, and the results."""
        self.turns += 1
        end = time.monotonic() + self.limits.turn_seconds
        results = tuple([await self._answer(call, end - time.monotonic()) for call in turn.calls])
        self.counts["unparsed_calls"] += len(turn.problems)
        return answer_messages(results, turn.problems, self.limits), results

    async def _answer(self, call: ToolCall, seconds: float) -> ToolResult:
        if self.is_used_up:
            result = failed(call, f"not run: no more than {self.limits.max_tool_calls} calls are allowed", self.limits)
        elif seconds <= 0:
            result = failed(call, "not run: the calls before it took the time of this turn", self.limits)
        elif call.name not in self._tools:
            listed = f"{did_you_mean(call.name, self._tools)} (tools: {', '.join(self._tools) or 'none'})"
            result = failed(call, f"there is no tool {excerpt(call.name)}{listed}", self.limits)
        else:
            # A little less than the turn has left, so that the model hears of it before the turn itself ends.
            result = await self._tools[call.name].call(call, self.worker, self.limits, 0.9 * seconds)
        self.counts["tool_calls"] += 1
        self.counts["tool_errors"] += not result.ok
        self.counts["tool_seconds"] += result.seconds
        return result


def answer_messages(results: Sequence[ToolResult], problems: Sequence[str], limits: Limits) -> list[Message]:
    """The messages that show the model the results of its calls, and which calls could not be parsed."""
    messages = [tool_message(result) for result in results]
    lines = [f"Error: a tool call could not be read: {problem}" for problem in problems]
    if lines and messages:  # in the last of them: some templates allow no other message beside those of tools
        lines = [messages[-1]["content"], "", *lines]
        messages[-1]["content"] = limited_text("\n".join(lines), limits.max_reply_chars)
    elif lines:
        messages.append({"role": "user", "content": limited_text("\n".join(lines), limits.max_reply_chars)})
    return messages


def tool_message(result: ToolResult) -> Message:
    """The message that shows a result to the model."""
    name = {"name": result.call.name} if isinstance(result.call.name, str) and result.call.name else {}
    number = {"tool_call_id": result.call.id} if result.call.id else {}
    return {"role": "tool", "content": result.content, **name, **number}
