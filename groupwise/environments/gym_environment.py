"""A Gymnasium environment whose observations and actions are texts, as an environment of a conversation.

Each turn of the model is one step. A turn in which no action is found changes nothing: the model is told which actions
there are. The reward of a step is the reward of its turn, and their sum is the reward of the conversation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from numbers import Real
from typing import Any

from groupwise.environments.background import Worker
from groupwise.environments.contract import AssistantTurn, Environment, EnvironmentFailed, Limits, Message, Reply
from groupwise.environments.failures import value_of
from groupwise.environments.message_text import limited_text
from groupwise.errors import ConfigError, MissingExtraError, is_installed
from groupwise.text import excerpt

MOST_LISTED = 30  # names of actions in a message to the model
NO_ACTION = object()


class GymEnvironment(Environment):
    """Plays a Gymnasium environment.

    Args:
        environment: a function that makes it, or the name that ``gymnasium.make`` takes.
        describe: the text of an observation. It is not needed if observations are texts.
        actions: the names of the actions of a Discrete space, in its order; by default their numbers. The model names
            one of them: its answer is the name, or has one of the names in it and no other.
        parse_action: finds the action in the model's answer instead; None if there is none.
        instructions: a text before the first observation.
        limits: those of a step (``turn_seconds``) and of a reset (``wait_seconds``).
    """

    def __init__(
        self,
        environment: Callable[[], Any] | str,
        *,
        describe: Callable[[Any], str] | None = None,
        actions: Sequence[str] | None = None,
        parse_action: Callable[[str], Any] | None = None,
        instructions: str = "",
        limits: Limits | None = None,
    ) -> None:
        if not is_installed("gymnasium"):
            raise MissingExtraError("GymEnvironment", "gymnasium", "control")
        import gymnasium
        from gymnasium.spaces import Discrete, Text

        if isinstance(environment, str):
            name, make = environment, lambda: gymnasium.make(environment)
        elif callable(environment):
            name, make = getattr(environment, "__name__", type(environment).__name__), environment
        else:
            raise ConfigError(f"a Gymnasium environment is given by its name or a function, got {excerpt(environment)}")
        self._where = f"environment {name}"
        self._limits = limits or Limits()
        self._worker = Worker(f"groupwise-{name}")
        made = self._worker.call_blocking(make, seconds=self._limits.wait_seconds)
        self._env: Any = value_of(made, f"{self._where}: constructor", self._limits.wait_seconds)
        space = self._env.action_space
        if describe is None and not isinstance(self._env.observation_space, Text):
            kind = type(self._env.observation_space).__name__
            raise ConfigError(f"{self._where}: its observations are no texts but of the space {kind}; set describe")
        if parse_action is None and not isinstance(space, (Discrete, Text)):
            raise ConfigError(
                f"{self._where}: its actions are of the space {type(space).__name__}, not Discrete or Text; set "
                "parse_action, a function from the model's answer to an action"
            )
        self._describe = describe
        self._parse = parse_action
        self._numbers: dict[str, int] = {}
        if isinstance(space, Discrete):
            self._numbers = self._name_actions(actions, int(space.start), int(space.n))
        elif actions is not None:
            raise ConfigError(f"{self._where}: actions are named only in a Discrete space; leave `actions` out")
        self._instructions = instructions
        self._observation = ""
        self._return = 0.0
        self._counts = {"steps": 0, "invalid_actions": 0, "truncated": 0}

    def _name_actions(self, names: Sequence[str] | None, first: int, number: int) -> dict[str, int]:
        names = [str(first + place) for place in range(number)] if names is None else list(names)
        if len(names) != number or len({name.lower() for name in names}) != number:
            raise ConfigError(f"{self._where}: `actions` must be {number} different names, got {excerpt(names)}")
        return {name: first + place for place, name in enumerate(names)}

    @property
    def counts(self) -> Mapping[str, float]:  # type: ignore[override]
        """Steps, turns without a valid action, and 1 if the environment's own limit of steps ended the conversation."""
        return dict(self._counts)

    def state_key(self) -> Hashable:
        """The observation: what the model sees is the state that it is in."""
        return self._observation

    async def start(self, row: dict[str, Any], seed: int) -> list[Message] | None:
        """Reset with the seed, and with the row's column ``options`` if it has one."""
        self._return, self._counts = 0.0, dict.fromkeys(self._counts, 0)
        options = row.get("options")
        result = await self._call("reset", lambda: self._env.reset(seed=seed, options=options))
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvironmentFailed(f"returned {excerpt(result)}, not (observation, info)", f"{self._where}: reset")
        observation = await self._text(result[0])
        return [{"role": "user", "content": "\n\n".join(filter(None, (self._instructions, observation)))}]

    async def respond(self, turn: AssistantTurn) -> Reply:
        """Take the step that the turn names."""
        action = await self._action(turn.text)
        if action is NO_ACTION:
            self._counts["invalid_actions"] += 1
            return Reply([{"role": "user", "content": limited_text(self._help(), self._limits.max_reply_chars)}])
        result = await self._call("step", lambda: self._env.step(action))
        if not isinstance(result, tuple) or len(result) != 5:
            what = f"returned {excerpt(result)}, not (observation, reward, terminated, truncated, info)"
            raise EnvironmentFailed(what, f"{self._where}: step")
        observation, reward, terminated, truncated, _ = result
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise EnvironmentFailed(f"returned the reward {excerpt(reward)}", f"{self._where}: step")
        self._counts["steps"] += 1
        self._counts["truncated"] = int(bool(truncated) and not terminated)
        self._return += float(reward)
        message = {"role": "user", "content": await self._text(observation)}
        return Reply([message], done=bool(terminated or truncated), reward=float(reward))

    async def reward(self) -> float | dict[str, float | None] | None:
        """The sum of the rewards of all steps."""
        return self._return

    async def close(self) -> None:
        """Close the Gymnasium environment."""
        try:
            await self._call("close", self._env.close)
        finally:
            self._worker.end()

    async def _action(self, text: str) -> Any:
        if self._parse is not None:
            parse = self._parse
            action = await self._call("parse_action", lambda: parse(text))
            if action is None:
                return NO_ACTION
        elif self._numbers:
            action = self._named(text)
        else:
            action = text.strip()
        is_valid = action is not NO_ACTION and await self._call(
            "contains", lambda: self._env.action_space.contains(action)
        )
        return action if is_valid else NO_ACTION

    def _named(self, text: str) -> Any:
        """The action whose name is the answer, or the only one whose name is in it."""
        numbers = {name.lower(): number for name, number in self._numbers.items()}
        answer = text.strip().strip(".!\"'`*").lower()
        if answer in numbers:
            return numbers[answer]
        found = {name for name in numbers if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text.lower())}
        longest = {name for name in found if not any(name != other and name in other for other in found)}
        return numbers[longest.pop()] if len(longest) == 1 else NO_ACTION

    def _help(self) -> str:
        if not self._numbers:
            return "Error: this is no valid action here."
        names = [*list(self._numbers)[:MOST_LISTED], *(["…"] if len(self._numbers) > MOST_LISTED else [])]
        return f"Error: answer with one action, and with no other one beside it: {', '.join(names)}"

    async def _text(self, observation: Any) -> str:
        describe = self._describe
        text = observation if describe is None else await self._call("describe", lambda: describe(observation))
        if not isinstance(text, str):
            name = "its observation" if describe is None else "describe"
            raise EnvironmentFailed(f"gave {excerpt(text)}, which is no text", f"{self._where}: {name}")
        self._observation = limited_text(text, self._limits.max_reply_chars)
        return self._observation

    async def _call(self, name: str, function: Callable[[], Any]) -> Any:
        seconds = self._limits.wait_seconds if name in ("reset", "close") else self._limits.turn_seconds
        return value_of(await self._worker.call(function, seconds=seconds), f"{self._where}: {name}", seconds)
