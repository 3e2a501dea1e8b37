"""The conversations of a `GRPOTrainer` with ``tools`` and ``environment_factory``, as TRL shows them to rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from groupwise.config import Recipe
from groupwise.conversations import Episode
from groupwise.data import where_of
from groupwise.environments import Message, MethodEnvironment, ToolEnvironment, make_tools, with_opening
from groupwise.errors import ArgumentTypeError, ConfigError, UserCodeError
from groupwise.tasks.base import TaskRow
from groupwise.text import excerpt
from groupwise.training.environments import RunEnvironment, limits_of
from groupwise.training.rollout.batch import Batch
from groupwise.training.rollout.episodes import ConversationFacts, ConversationSampler
from groupwise.user_code import guarded


def conversation_settings(args: Any) -> dict[str, Any]:
    """The settings of conversations: all of them end by ``max_completion_length``, or by the number of turns.

    TRL has no limits of time and of the length of a message.
    """
    seconds = dict.fromkeys(("tool_seconds", "turn_seconds", "wait_seconds"), float(args.ddp_timeout))
    most = {"max_tool_calls": 2**31 - 1, "max_reply_chars": 2**31 - 1}
    if args.max_tool_calling_iterations is None:
        most["max_turns"] = args.max_completion_length  # each turn has a token
    settings = {"max_tokens": args.max_completion_length, **most, **seconds}
    return {f"environment.{name}": value for name, value in settings.items()}


def check_conversation_arguments(tools: Any, factory: Any, rollout_func: Any) -> None:
    """Refuse arguments that do not go together, or of a kind that is not supported."""
    if rollout_func is not None and (tools or factory is not None):
        raise ConfigError(
            "rollout_func cannot be combined with tools or environment_factory: it holds the conversations itself"
        )
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise ArgumentTypeError(f"tools is a {type(tools).__name__}; give a list of functions")
    if isinstance(factory, Mapping):
        raise ConfigError(
            "environment_factory: a dict of several environments is not supported; give one class whose reset() "
            "chooses by a column of the row"
        )
    if factory is not None and not callable(factory):
        raise ArgumentTypeError(
            f"environment_factory is {excerpt(factory)}; give a class, or a function that makes an environment"
        )


def check_prompts_of_tools(rows: Sequence[TaskRow], name: str) -> None:
    """Raise an error for a prompt that is a text: only a chat template tells the model of its tools."""
    for number, row in enumerate(rows):
        if isinstance(row["prompt"], str):
            raise ConfigError(
                f"{name}: {where_of(row, number)} has a text as its prompt, but tools and environments need messages; "
                "write [{'role': 'user', 'content': ...}]"
            )


def make_environment(tools: Sequence[Any], factory: Callable[[], Any] | None, recipe: Recipe) -> RunEnvironment:
    """What makes the environments of a run with tools, with an environment whose methods are tools, or with both."""
    limits = replace(limits_of(recipe), max_tool_turns=recipe.environment.max_turns - 1)
    functions = make_tools(tools)
    if factory is None:
        make: Callable[[], Any] = partial(ToolEnvironment, functions, limits)
        return RunEnvironment(make, False, (), ToolConversations)
    make = partial(MethodEnvironment, factory, limits, functions)
    return RunEnvironment(make, False, ("environments", "environment_reward"), ToolConversations)


def environment_reward(factory: Callable[[], Any] | None) -> EnvironmentReward | None:
    """The reward that an environment gives by ``get_reward``; None if it has no such method."""
    if factory is None:
        return None
    kind = factory if isinstance(factory, type) else type(guarded(factory, "environment_factory")())
    return EnvironmentReward(kind.__name__) if callable(getattr(kind, "get_reward", None)) else None


class EnvironmentReward:
    """What ``get_reward`` of the environments returned, under the name of their class."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, environment_reward: Sequence[float | None], **_: Any) -> list[float | None]:
        return list(environment_reward)


def shown_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages up to the last turn: what follows it was not shown to the model."""
    last = max((place for place, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    return list(messages[: last + 1])


class ToolConversations(ConversationSampler):
    """Conversations with tools and environments. A failed environment ends the run, as in TRL: batches have a fixed
    size."""

    def hold(self, *arguments: Any) -> list[list[Episode]]:
        groups = super().hold(*arguments)
        failure = next((episode.failure for members in groups for episode in members if episode.failure), None)
        if failure is not None:
            raise UserCodeError(f"an environment failed, and again after a fresh start: {failure}")
        return groups

    def finish_batch(self, batch: Batch, episodes: Sequence[Episode]) -> Batch:
        """As in TRL, a conversation is truncated if its last turn is."""
        return replace(batch, stop_reasons=[episode.turns[-1].sampled.stop_reason for episode in episodes])

    def facts_of(self, row: TaskRow, episode: Episode) -> ConversationFacts:
        """The completion with the messages and tokens of tools, the prompt with what ``reset`` returned."""
        columns: dict[str, Any] = {}
        if isinstance(episode.environment, MethodEnvironment):
            columns = {"environments": episode.environment.instance, "environment_reward": episode.reward}
        if episode.greeting:
            columns[self.column] = with_opening(self.builder.messages(row[self.column]), episode.greeting)
        return ConversationFacts(shown_messages(episode.messages), episode.completion, columns)
