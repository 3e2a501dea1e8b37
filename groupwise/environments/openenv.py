"""An environment behind an OpenEnv server, over its client for WebSockets.

Each turn of the model is one step. The client is openenv's `GenericEnvClient`, whose actions and observations are
dicts, or one of an environment's own package with the same methods ``reset``, ``step`` and ``close``, plain or async.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from groupwise.environments.background import Worker, run_limited
from groupwise.environments.contract import (
    AssistantTurn,
    Environment,
    EnvironmentFailed,
    Limits,
    Message,
    Reply,
    Schema,
    ToolCall,
    ToolResult,
)
from groupwise.environments.failures import value_of
from groupwise.environments.message_text import limited_text, message_text
from groupwise.environments.toolbox import answer_messages
from groupwise.errors import ConfigError, MissingExtraError, is_installed
from groupwise.text import excerpt

NOT_SHOWN = ("done", "reward", "metadata")  # parts of an observation that are not for the model


class OpenEnvEnvironment(Environment):
    """Plays an environment of OpenEnv.

    Args:
        client: the address of a server, such as ``http://localhost:8000``, or a function that makes a client.
        action: the name of the action's field that gets the model's text, or a function from the turn to an action.
        describe: the text of an observation; by default its only text, or else its fields as JSON.
        tools: whether the server has tools: the model then calls these, and a turn without a call is its last one. The
            client must be a `GenericEnvClient`, and the schemas are known once a conversation was started.
        reset_columns: columns of the row that are passed to ``reset``, beside the seed.
        instructions: a text before the first observation.
        limits: those of a step (``turn_seconds``; ``tool_seconds`` for a call) and of a reset (``wait_seconds``).
    """

    def __init__(
        self,
        client: str | Callable[[], Any],
        *,
        action: str | Callable[[AssistantTurn], Any] = "message",
        describe: Callable[[Any], str] | None = None,
        tools: bool = False,
        reset_columns: Sequence[str] = (),
        instructions: str = "",
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._worker = Worker("groupwise-openenv")
        if isinstance(client, str):
            self._name = client
            self._client = _generic_client(client)
        elif callable(client):
            self._name = getattr(client, "__name__", type(client).__name__)
            made = self._worker.call_blocking(client, seconds=self._limits.wait_seconds)
            self._client = value_of(made, self._where("constructor"), self._limits.wait_seconds)
        else:
            raise ConfigError(f"an OpenEnv client is given by an address or a function, got {excerpt(client)}")
        for method in ("reset", "step"):
            if not callable(getattr(self._client, method, None)):
                raise ConfigError(f"environment {self._name}: its client has no method {method}()")
        self._action, self._describe = action, describe
        self._has_tools, self._reset_columns, self._instructions = tools, tuple(reset_columns), instructions
        self._schemas: tuple[Schema, ...] = ()
        self._return: float | None = None
        self._counts = {"steps": 0, "tool_calls": 0, "tool_errors": 0, "unparsed_calls": 0}

    @property
    def schemas(self) -> Sequence[Schema]:  # type: ignore[override]
        """The descriptions of the server's tools, once a conversation was started."""
        return self._schemas

    @property
    def counts(self) -> Mapping[str, float]:  # type: ignore[override]
        """Steps, tool calls, those answered by an error, and calls that could not be parsed."""
        return dict(self._counts)

    async def start(self, row: dict[str, Any], seed: int) -> list[Message] | None:
        """Reset with the seed and the row's columns."""
        self._return, self._counts = None, dict.fromkeys(self._counts, 0)
        arguments = {"seed": seed}
        for name in self._reset_columns:
            if name not in row:
                raise EnvironmentFailed(
                    f"needs the column {name!r}, which the row does not have (its columns: {', '.join(map(str, row))})",
                    self._where("reset"),
                )
            arguments[name] = row[name]
        result = await self._call("reset", self._limits.wait_seconds, **self._accepted(arguments))
        observation = await self._text(_part(result, "observation"))
        if self._has_tools:
            await self._list_tools()
        text = "\n\n".join(filter(None, (self._instructions, observation)))
        return [{"role": "user", "content": text}] if text else None

    async def respond(self, turn: AssistantTurn) -> Reply:
        """Take the step that the turn is, or those that are its calls."""
        if self._has_tools:
            return await self._answer_calls(turn)
        action = {self._action: turn.text} if isinstance(self._action, str) else await self._make_action(turn)
        result, reward, done = await self._step(action, self._limits.turn_seconds)
        text = await self._text(_part(result, "observation"))
        return Reply([{"role": "user", "content": text}], done=done, reward=reward)

    async def reward(self) -> float | dict[str, float | None] | None:
        """The sum of the rewards of all steps; None if no step had one."""
        return self._return

    async def close(self) -> None:
        """Close the connection."""
        try:
            if callable(getattr(self._client, "close", None)):
                await self._call("close", self._limits.wait_seconds)
        finally:
            self._worker.end()

    async def _answer_calls(self, turn: AssistantTurn) -> Reply:
        if turn.is_final:
            return Reply(done=True)
        done, rewards, results = False, [], []
        for call in turn.calls:
            if done:
                results.append(ToolResult(call, "Error: not run: the conversation has ended", ok=False))
                continue
            content, ok, reward, done = await self._answer_call(call)
            results.append(ToolResult(call, content, ok))
            rewards += [reward] if reward is not None else []
        self._counts["tool_calls"] += len(results)
        self._counts["tool_errors"] += sum(not result.ok for result in results)
        self._counts["unparsed_calls"] += len(turn.problems)
        done = done or self._counts["tool_calls"] >= self._limits.max_tool_calls
        messages = answer_messages(results, turn.problems, self._limits)
        return Reply(messages, done=done, reward=math.fsum(rewards) if rewards else None, results=tuple(results))

    async def _answer_call(self, call: ToolCall) -> tuple[str, bool, float | None, bool]:
        action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        result, reward, done = await self._step(action, self._limits.tool_seconds)
        observation = _part(result, "observation")
        problem = _part(observation, "error", None)
        if problem is not None:
            text = message_text(_part(problem, "message", problem), self._limits.max_reply_chars)
            return limited_text(f"Error: {text}", self._limits.max_reply_chars), False, reward, done
        answer = _part(observation, "result", None)
        content = _part(answer, "content", answer)  # the result of the MCP protocol has parts of content
        if isinstance(content, (list, tuple)) and content and all(_part(part, "text", None) for part in content):
            answer = "\n".join(str(_part(part, "text")) for part in content)
        ok = _part(answer, "is_error", False) is not True
        return message_text(answer, self._limits.max_reply_chars), ok, reward, done

    async def _list_tools(self) -> None:
        result = await self._call("step", self._limits.wait_seconds, {"type": "list_tools"})
        tools = _part(_part(result, "observation"), "tools", None)
        if not isinstance(tools, (list, tuple)):
            raise EnvironmentFailed(f"returned {excerpt(tools)}, not a list of tools", self._where("list_tools"))
        self._schemas = tuple(_schema(tool) for tool in tools)

    async def _make_action(self, turn: AssistantTurn) -> Any:
        make = self._action
        outcome = await self._worker.call(make, turn, seconds=self._limits.turn_seconds)  # type: ignore[arg-type]
        return value_of(outcome, self._where("action"), self._limits.turn_seconds)

    async def _step(self, action: Any, seconds: float) -> tuple[Any, float | None, bool]:
        result = await self._call("step", seconds, action)
        reward, done = _part(result, "reward", None), _part(result, "done", False)
        if reward is not None and (not isinstance(reward, Real) or not math.isfinite(reward)):
            raise EnvironmentFailed(f"returned the reward {excerpt(reward)}", self._where("step"))
        self._counts["steps"] += 1
        if reward is not None:
            reward = float(reward)
            self._return = (self._return or 0.0) + reward
        return result, reward, bool(done)

    def _accepted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The seed only if the client's ``reset`` takes it; columns are passed in any case."""
        parameters = inspect.signature(self._client.reset).parameters
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        if not takes_all and "seed" not in parameters and "seed" not in self._reset_columns:
            del arguments["seed"]
        return arguments

    async def _text(self, observation: Any) -> str:
        limit = self._limits.max_reply_chars
        if self._describe is None:
            return _observation_text(observation, limit)
        outcome = await self._worker.call(self._describe, observation, seconds=self._limits.turn_seconds)
        text = value_of(outcome, self._where("describe"), self._limits.turn_seconds)
        if not isinstance(text, str):
            raise EnvironmentFailed(f"gave {excerpt(text)}, which is no text", self._where("describe"))
        return limited_text(text, limit)

    async def _call(self, name: str, seconds: float, *arguments: Any, **options: Any) -> Any:
        method = getattr(self._client, name)
        # An async client of openenv has plain methods that return awaitables, and a method `sync` for the other kind.
        if inspect.iscoroutinefunction(method) or hasattr(type(self._client), "sync"):
            outcome = await run_limited(_awaited(method, arguments, options), seconds)
        else:
            outcome = await self._worker.call(lambda: method(*arguments, **options), seconds=seconds)
        return value_of(outcome, self._where(name), seconds)

    def _where(self, name: str) -> str:
        return f"environment {self._name}: {name}"


async def _awaited(method: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    result = method(*arguments, **options)
    return await result if inspect.isawaitable(result) else result


def _generic_client(address: str) -> Any:
    if not is_installed("openenv"):
        raise MissingExtraError("OpenEnvEnvironment", "openenv", "openenv")
    from openenv.core import GenericEnvClient

    return GenericEnvClient(base_url=address)


_REQUIRED = object()


def _part(value: Any, name: str, default: Any = _REQUIRED) -> Any:
    """A field of a dict or of an object."""
    found = value.get(name, default) if isinstance(value, Mapping) else getattr(value, name, default)
    if found is _REQUIRED:
        raise EnvironmentFailed(f"has no {name!r}: {excerpt(value)}", "the answer of an OpenEnv server")
    return found


def _observation_text(observation: Any, limit: int) -> str:
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump()
    if not isinstance(observation, Mapping):
        return message_text("" if observation is None else observation, limit)
    fields = {name: value for name, value in observation.items() if name not in NOT_SHOWN and value is not None}
    texts = [value for value in fields.values() if isinstance(value, str)]
    if len(fields) == len(texts) == 1:
        return limited_text(texts[0], limit)
    return message_text(fields, limit) if fields else ""


def _schema(tool: Any) -> Schema:
    parameters = _part(tool, "input_schema", None) or _part(tool, "inputSchema", None) or {"type": "object"}
    description = {"name": _part(tool, "name"), "description": _part(tool, "description", "") or ""}
    return {"type": "function", "function": {**description, "parameters": parameters}}
