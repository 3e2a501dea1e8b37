"""A `MultiTurnEnv` of the library verifiers (0.1) as an environment.

groupwise samples the turns; of verifiers the environment's own methods are used: ``setup_state``, ``is_completed``,
``env_response``, ``add_trajectory_step``, ``cleanup``, and its rubric. Rows are those of ``env.get_dataset()``, which
have a prompt. From version 0.2 on verifiers has no such environments.

A rubric of verifiers takes the error of a reward function for a reward of 0 and logs it: look at its log.
"""

from __future__ import annotations

import copy
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from groupwise.environments.contract import AssistantTurn, Environment, EnvironmentFailed, Message, Reply, Schema
from groupwise.errors import ConfigError, MissingExtraError, is_installed
from groupwise.text import excerpt

METHODS = ("setup_state", "is_completed", "env_response", "add_trajectory_step", "cleanup")


class VerifiersEnvironment(Environment):
    """One conversation with an environment of verifiers; the environment itself may serve many at the same time."""

    def __init__(self, environment: Any) -> None:
        if not is_installed("verifiers"):
            raise MissingExtraError("VerifiersEnvironment", "verifiers", "verifiers")
        self._name = type(environment).__name__
        if missing := [name for name in METHODS if not callable(getattr(environment, name, None))]:
            raise ConfigError(
                f"environment {self._name}: it is no MultiTurnEnv of verifiers 0.1, as it has no {', '.join(missing)}"
            )
        if getattr(environment, "requires_group_rollouts", False):
            raise ConfigError(
                f"environment {self._name}: its rubric compares the conversations of a group, which is not possible "
                "here; give it a rubric that scores each conversation by itself"
            )
        self._env = environment
        self._state: Any = None
        self._messages: list[Any] = []
        self._counts: dict[str, float] = {}

    @property
    def schemas(self) -> Sequence[Schema]:  # type: ignore[override]
        """The descriptions of the environment's tools."""
        names = ("name", "description", "parameters")
        tools = getattr(self._env, "tool_defs", None) or ()
        return tuple({"type": "function", "function": {name: _part(tool, name) for name in names}} for tool in tools)

    @property
    def counts(self) -> Mapping[str, float]:  # type: ignore[override]
        """The metrics of the rubric, after the reward, and the calls that could not be parsed."""
        return dict(self._counts)

    async def start(self, row: dict[str, Any], seed: int) -> list[Message] | None:
        """Make the state of a rollout, as verifiers does; the row's prompt is all that the conversation starts with."""
        from verifiers.types import RolloutTiming, State

        self._counts = {"unparsed_calls": 0}
        data = copy.deepcopy(dict(row))
        if "prompt" not in data:
            columns = ", ".join(map(str, row))
            raise EnvironmentFailed(f"needs a row with a prompt (its columns: {columns})", self._where("start"))
        if isinstance(data["prompt"], str):
            data["prompt"] = [{"role": "user", "content": data["prompt"]}]
        if isinstance(data.get("info"), str):
            data["info"] = json.loads(data["info"])
        state = State(input=data)
        state["prompt"] = _messages(data["prompt"])
        facts: dict[str, Any] = {"task": data.get("task", data), "client": None, "model": "", "sampling_args": None}
        facts |= {"is_completed": False, "is_truncated": False, "completion": None, "trajectory": []}
        facts |= {"tool_defs": list(getattr(self._env, "tool_defs", None) or []), "trajectory_id": uuid.uuid4().hex}
        facts |= {"reward": None, "metrics": None, "error": None, "final_env_response": None, "timing": RolloutTiming()}
        for name, value in facts.items():
            state[name] = value
        await self._env.setup_state(state)
        self._state = state
        self._messages = list(state["prompt"])
        return None

    async def respond(self, turn: AssistantTurn) -> Reply:
        """Add the turn to the trajectory and answer it, unless one of the environment's conditions ends it."""
        said = [_assistant_message(turn)]
        if turn.problems:  # verifiers has no turn of that kind: the model is told, and no call is made
            self._counts["unparsed_calls"] += len(turn.problems)
            lines = [f"Error: a tool call could not be read: {problem}" for problem in turn.problems]
            lines += ["No call of this turn was made."] if turn.calls else []
            answer: Message = {"role": "user", "content": "\n".join(lines)}
            self._messages += [_assistant_message(AssistantTurn(turn.text)), *_messages([answer])]
            return Reply([answer])
        step: dict[str, Any] = {"prompt": list(self._messages), "completion": said, "response": None, "tokens": None}
        step |= {"reward": None, "advantage": None, "is_truncated": False, "extras": {}}
        step["trajectory_id"] = self._state["trajectory_id"]
        await self._env.add_trajectory_step(self._state, step)
        self._messages += said
        reward = None if step["reward"] is None else float(step["reward"])
        if await self._env.is_completed(self._state):
            return Reply(done=True, reward=reward)
        response = await self._env.env_response(list(self._messages), self._state)
        messages = _messages(response)
        self._messages += messages
        done = self._state.get("final_env_response") is not None
        return Reply([self._plain(message) for message in messages], done=done, reward=reward)

    async def reward(self) -> float | dict[str, float | None] | None:
        """The reward that the rubric gives the state; its metrics become counts."""
        await self._clean()
        await self._env.rubric.score_rollout(self._state)
        for name, value in (self._state["metrics"] or {}).items():
            if isinstance(value, Real) and math.isfinite(value):
                self._counts[str(name)] = float(value)
        await self._env.rubric.cleanup(self._state)
        return self._state["reward"]  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Clean up the state if that was not done before the reward."""
        if self._state is not None:
            await self._clean()

    async def _clean(self) -> None:
        if not self._state.get("groupwise_cleaned"):
            self._state["groupwise_cleaned"] = True
            await self._env.cleanup(self._state)

    def _plain(self, message: Any) -> Message:
        """A message of verifiers as a dict with a text."""
        content = _part(message, "content")
        if isinstance(content, (list, tuple)):
            texts = [_part(part, "text") for part in content if _part(part, "type") == "text"]
            if len(texts) < len(content):
                what = f"returned {excerpt(content)}; only parts of the type 'text' are possible"
                raise EnvironmentFailed(what, self._where("env_response"))
            content = "".join(texts)
        number = {"tool_call_id": _part(message, "tool_call_id")} if _part(message, "tool_call_id") else {}
        return {"role": _part(message, "role"), "content": content, **number}

    def _where(self, name: str) -> str:
        return f"environment {self._name}: {name}"


def _assistant_message(turn: AssistantTurn) -> Any:
    from verifiers.types import AssistantMessage
    from verifiers.types import ToolCall as VerifiersCall

    calls = [
        VerifiersCall(id=call.id or f"call_{number}", name=call.name, arguments=json.dumps(call.arguments))
        for number, call in enumerate(turn.calls)
    ]
    return AssistantMessage(content=turn.text, reasoning_content=turn.thinking, tool_calls=calls or None)


def _messages(value: Any) -> list[Any]:
    from verifiers.utils.message_utils import normalize_messages

    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return list(normalize_messages(value))


def _part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
