"""An environment given as a class whose methods are tools, as TRL's ``environment_factory`` takes it.

``reset(**row)`` begins a conversation; it may return a text for the model or messages. All other public methods are
tools, and ``get_reward()``, if there is one, gives the reward. Differences to TRL: a ``reset`` without ``**kwargs``
gets only the columns that it names, and one that names ``seed`` gets the seed of the row's group if there is no such
column; an attribute ``done`` that is True ends the conversation after the calls of a turn; a result that is no text is
shown as JSON, and an error as a sentence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from groupwise.environments.background import Worker, run_limited
from groupwise.environments.contract import EnvironmentFailed, Limits, Message
from groupwise.environments.failures import value_of
from groupwise.environments.tool_environment import ToolboxEnvironment
from groupwise.environments.toolbox import Toolbox
from groupwise.environments.tools import Tool, make_tools
from groupwise.errors import ConfigError
from groupwise.text import excerpt

NOT_TOOLS = ("reset", "get_reward")


class MethodEnvironment(ToolboxEnvironment):
    """Wraps an object with the methods described above; ``factory`` makes it, and may be its class.

    ``tools`` are functions that the model may call beside the methods.

    TRL's form has no method for closing, so the object is left to Python. The plain methods, and the factory, are
    called in one thread, which is another one only after a call that hangs.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        limits: Limits | None = None,
        tools: Iterable[Callable[..., Any] | Tool] = (),
    ) -> None:
        if not callable(factory):
            raise ConfigError(f"an environment factory must be a class or a function, got {excerpt(factory)}")
        self._limits = limits or Limits()
        self._name = getattr(factory, "__name__", type(factory).__name__)
        self._worker = Worker(f"groupwise-{self._name}")
        made = self._worker.call_blocking(factory, seconds=self._limits.wait_seconds)
        self._instance: Any = value_of(made, self._where("constructor"), self._limits.wait_seconds)
        kind = type(self._instance)
        self._name = kind.__name__
        if not callable(getattr(kind, "reset", None)):
            raise ConfigError(f"environment {self._name}: it has no method reset(), which begins a conversation")
        # Functions of the class: to look them up on the instance would evaluate its properties.
        names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
        methods = [getattr(self._instance, name) for name in names if name not in NOT_TOOLS]
        self._toolbox = Toolbox(make_tools([*tools, *methods]), self._limits, self._worker)

    @property
    def instance(self) -> Any:
        """The object, for reward functions that look at it."""
        return self._instance

    async def start(self, row: dict[str, Any], seed: int) -> list[Message] | None:
        """Call ``reset`` with the row's columns."""
        self._toolbox.reset()
        arguments = self._choose_arguments(row, seed)
        observation = await self._call("reset", self._limits.wait_seconds, **arguments)
        return self._opening(observation)

    async def reward(self) -> float | dict[str, float | None] | None:
        """What ``get_reward`` returns; None without one."""
        if not callable(getattr(type(self._instance), "get_reward", None)):
            return None
        return await self._call("get_reward", self._limits.wait_seconds)  # type: ignore[no-any-return]

    @property
    def _is_done(self) -> bool:
        return getattr(self._instance, "done", False) is True or super()._is_done

    async def _call(self, name: str, seconds: float, **arguments: Any) -> Any:
        method = getattr(self._instance, name)
        if inspect.iscoroutinefunction(method):
            outcome = await run_limited(method(**arguments), seconds)
        else:
            outcome = await self._worker.call(lambda: method(**arguments), seconds=seconds)
        return value_of(outcome, self._where(name), seconds)

    def _where(self, name: str) -> str:
        return f"environment {self._name}: {name}"

    def _choose_arguments(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        parameters = inspect.signature(self._instance.reset).parameters
        columns = {"seed": seed, **row} if "seed" in parameters else dict(row)
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        for name, parameter in parameters.items():
            is_needed = parameter.default is parameter.empty and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            )
            if is_needed and name not in columns:
                raise EnvironmentFailed(
                    f"needs the column {name!r}, which the row does not have (its columns: {', '.join(columns)})",
                    self._where("reset"),
                )
        return columns if takes_all else {name: value for name, value in columns.items() if name in parameters}

    def _opening(self, observation: Any) -> list[Message] | None:
        if observation is None:
            return None
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        parts = list(observation) if isinstance(observation, (list, tuple)) else [observation]
        if parts and all(isinstance(part, Mapping) for part in parts):
            if all("role" in part for part in parts):
                return [dict(part) for part in parts]
            if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
                return [{"role": "user", "content": "".join(part["text"] for part in parts)}]
        raise EnvironmentFailed(
            f"returned {excerpt(observation)}; it may return a text, messages, parts of the type 'text', or None",
            self._where("reset"),
        )
