"""Watching an environment: limits of time and text, and a clear error for whatever it does wrong.

Environments are other people's code. A watched one runs on an event loop in a background thread, so that one which
blocks, hangs or ends in an error is an `EnvironmentFailed` for its own conversation and delays neither the others nor
the end of the process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from typing import Any

from groupwise.environments.background import BackgroundLoop, Worker, await_value, awaited, background_loop
from groupwise.environments.contract import (
    OPENING_ROLES,
    REPLY_ROLES,
    AssistantTurn,
    Environment,
    EnvironmentFailed,
    Limits,
    Message,
    Reply,
    Schema,
    ToolResult,
)
from groupwise.environments.failures import value_of
from groupwise.environments.message_text import limited_text
from groupwise.errors import ConfigError
from groupwise.text import excerpt

KEYS = {"role", "content", "name", "tool_call_id"}
LONGEST_NAME = 200  # characters of a tool's name or of the id of a call
METHODS = ("start", "respond", "reward", "close")


class WatchedEnvironment(Environment):
    """An environment whose calls are limited and whose answers are checked; `watched` makes it.

    Its methods raise `EnvironmentFailed` if the environment does not keep the contract. After a call that took too long
    it is not called again, except to be closed, as the abandoned call may still be running.
    """

    def __init__(self, environment: Any, limits: Limits) -> None:
        self.environment = environment
        self.limits = limits
        self.name = type(environment).__name__
        for method in METHODS[:2]:
            if not callable(getattr(environment, method, None)):
                raise ConfigError(f"environment {self.name}: it has no method {method}(); see groupwise.environments")
        self._worker = Worker(f"groupwise-{self.name}")
        self._loop: BackgroundLoop | None = None
        self._abandoned: str | None = None
        self._state_key: Hashable = None
        self._schemas: tuple[Schema, ...] | None = None

    @property
    def schemas(self) -> Sequence[Schema]:  # type: ignore[override]
        """The descriptions of the tools, checked."""
        schemas = getattr(self.environment, "schemas", ())
        if not isinstance(schemas, (list, tuple)):
            raise self._failed("schemas", f"is {excerpt(schemas)}, not a list of tool descriptions")
        for schema in schemas:
            function = schema.get("function") if isinstance(schema, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name:
                what = f"has {excerpt(schema)}; a description is {{'type': 'function', 'function': {{'name': …}}}}"
                raise self._failed("schemas", what)
        return tuple(schemas)

    @property
    def counts(self) -> Mapping[str, float]:  # type: ignore[override]
        """The facts that the environment counted, checked."""
        counts = getattr(self.environment, "counts", {})
        if not isinstance(counts, Mapping):
            raise self._failed("counts", f"is {excerpt(counts)}, not a dict of numbers")
        for name, value in counts.items():
            if not isinstance(name, str) or not _is_finite(value):
                raise self._failed("counts", f"has {excerpt(name)}: {excerpt(value)}; it must be a dict of numbers")
        return {name: float(value) for name, value in counts.items()}

    def state_key(self) -> Hashable:
        """The key of the state after the last call; None if the environment has none."""
        return self._state_key

    async def start(self, row: dict[str, Any], seed: int) -> list[Message] | None:
        """Begin a conversation; return the environment's messages, checked."""
        self._loop = background_loop()
        messages = await self._call("start", self.limits.wait_seconds, row, seed)
        await self._read_state("start")
        return None if messages is None else self._messages("start", messages, OPENING_ROLES)

    async def respond(self, turn: AssistantTurn) -> Reply:
        """The reply to a turn, checked."""
        reply = await self._call("respond", self.limits.turn_seconds, turn)
        if not isinstance(reply, Reply):
            raise self._failed("respond", f"returned {excerpt(reply)}, not a Reply")
        messages = self._messages("respond", reply.messages, REPLY_ROLES)
        if not isinstance(reply.done, bool):
            raise self._failed("respond", f"returned done = {excerpt(reply.done)}, which must be True or False")
        if reply.reward is not None and not _is_finite(reply.reward):
            raise self._failed("respond", f"returned the reward {excerpt(reply.reward)}; it is a number or None")
        if not reply.done and not messages:
            raise self._failed("respond", "returned no message, though the conversation goes on; set done, or say why")
        if not isinstance(reply.results, tuple) or not all(isinstance(entry, ToolResult) for entry in reply.results):
            raise self._failed("respond", f"returned results = {excerpt(reply.results)}, not a tuple of ToolResult")
        await self._read_state("respond")
        reward = None if reply.reward is None else float(reply.reward)
        return replace(reply, messages=messages, reward=reward)

    async def reward(self) -> float | dict[str, float | None] | None:
        """The reward, checked."""
        if not callable(getattr(self.environment, "reward", None)):
            return None
        return checked_reward(await self._call("reward", self.limits.wait_seconds), self._where("reward"))

    async def close(self) -> None:
        """Close the environment, also after a failure. A failure here is raised, too."""
        try:
            if callable(getattr(self.environment, "close", None)):
                self._abandoned = None
                await self._call("close", self.limits.wait_seconds)
        finally:
            self._worker.end()

    async def _call(self, name: str, seconds: float, *arguments: Any) -> Any:
        if self._abandoned is not None:
            raise self._failed(name, f"was not called, as {self._abandoned} was abandoned and may still be running")
        method = getattr(self.environment, name)
        if self._loop is None:
            self._loop = background_loop()
        if inspect.iscoroutinefunction(method):
            outcome = await self._loop.run(awaited(method, *arguments), seconds)
        else:  # it may return an awaitable, which belongs on the loop
            outcome = await self._worker.call(method, *arguments, seconds=seconds, await_value=False)
            if inspect.isawaitable(outcome.value):
                outcome = await self._loop.run(await_value(outcome.value), seconds)
        if outcome.hangs is not None:
            self._abandoned = f"{name}()"
        return value_of(outcome, self._where(name), seconds)

    async def _read_state(self, name: str) -> None:
        """Read the state's key in time, as it may be computed."""
        kind = type(self.environment)
        if getattr(kind, "state_key", Environment.state_key) is Environment.state_key:
            return
        outcome = await self._worker.call(self.environment.state_key, seconds=self.limits.turn_seconds)
        key = value_of(outcome, self._where("state_key"), self.limits.turn_seconds)
        try:
            hash(key)
        except TypeError:
            raise self._failed("state_key", f"returned {excerpt(key)}, which is not hashable") from None
        self._state_key = key

    def _messages(self, name: str, messages: Any, roles: Sequence[str]) -> list[Message]:
        """The messages of the environment, checked, with limited and harmless texts."""
        if not isinstance(messages, (list, tuple)):
            raise self._failed(name, f"returned {excerpt(messages)}, not a list of messages")
        return [self._message(name, message, roles) for message in messages]

    def _message(self, name: str, message: Any, roles: Sequence[str]) -> Message:
        if not isinstance(message, Mapping):
            raise self._failed(name, f"returned the message {excerpt(message)}, not a dict with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in roles:
            listed = " or ".join(map(repr, roles))
            raise self._failed(name, f"returned a message with the role {excerpt(role)}; its role must be {listed}")
        if not isinstance(content, str):
            what = f"returned a message with the content {excerpt(content)} ({type(content).__name__}), not a text"
            raise self._failed(name, what)
        if unknown := set(message) - KEYS:
            what = f"returned a message with {excerpt(min(unknown, key=str))} (allowed: {', '.join(sorted(KEYS))})"
            raise self._failed(name, what)
        safe: Message = {"role": role, "content": limited_text(content, self.limits.max_reply_chars)}
        for key in ("name", "tool_call_id"):
            if (value := message.get(key)) is not None:
                if not isinstance(value, str):
                    raise self._failed(name, f"returned a message whose {key} is {excerpt(value)}, not a text")
                safe[key] = limited_text(value, LONGEST_NAME)
        return safe

    def _where(self, name: str) -> str:
        return f"environment {self.name}: {name}"

    def _failed(self, name: str, what: str) -> EnvironmentFailed:
        return EnvironmentFailed(what, self._where(name))


def watched(environment: Any, limits: Limits | None = None) -> WatchedEnvironment:
    """The environment with its calls limited and its answers checked. Its methods may be plain or async."""
    if isinstance(environment, WatchedEnvironment):
        return environment
    return WatchedEnvironment(environment, limits or Limits())


def checked_reward(reward: Any, where: str) -> float | dict[str, float | None] | None:
    """What ``where`` returned as the reward of a conversation, as plain numbers."""
    if reward is None or _is_finite(reward):
        return None if reward is None else float(reward)
    if not isinstance(reward, Mapping) or not all(
        isinstance(name, str) and (value is None or _is_finite(value)) for name, value in reward.items()
    ):
        what = f"returned {excerpt(reward)}; it may be a finite number, a dict of them by name, or None"
        raise EnvironmentFailed(what, where)
    return {name: None if value is None else float(value) for name, value in reward.items()}


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    with suppress(OverflowError):  # a huge integer
        return math.isfinite(float(value))
    return False
