"""The conversations of a `GRPOTrainer` with ``tools`` and ``environment_factory``, as TRL shows them to rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from groupwise.config import Recipe
from groupwise.conversations import Episode
from groupwise.data import where_of
from groupwise.environments import (
    EnvironmentFactory,
    Message,
    MethodEnvironment,
    ToolEnvironment,
    make_tools,
    with_opening,
)
from groupwise.errors import ArgumentTypeError, ConfigError, UserCodeError
from groupwise.integrations.trl.rollout_function import BatchRolloutFunction
from groupwise.model.handle import context_length_of
from groupwise.tasks.base import TaskRow
from groupwise.text import excerpt
from groupwise.training.environments import RunEnvironment, limits_of
from groupwise.training.rollout.batch import Batch
from groupwise.training.rollout.episodes import ConversationFacts, ConversationSampler
from groupwise.user_code import guarded


@dataclass(frozen=True)
class ConversationArguments:
    """The arguments of a trainer by which completions are conversations, or are made by a function of prompts."""

    tools: Any
    factory: Any  # of environments
    rollout: Callable[[list[Any]], Any] | None

    def __post_init__(self) -> None:
        if self.rollout is not None and self.uses_tools:
            raise ConfigError(
                "rollout_func cannot be combined with tools or environment_factory: it holds the conversations itself"
            )
        if self.tools is not None and not isinstance(self.tools, (list, tuple)):
            raise ArgumentTypeError(f"tools is a {type(self.tools).__name__}; give a list of functions")
        if isinstance(self.factory, Mapping):
            raise ConfigError(
                "environment_factory: a dict of several environments is not supported; give one class whose reset() "
                "chooses by a column of the row"
            )
        if self.factory is not None and not callable(self.factory):
            raise ArgumentTypeError(
                f"environment_factory is {excerpt(self.factory)}; give a class, or a function that makes an environment"
            )

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) or self.factory is not None

    def rows_without_prompts(self, args: Any) -> list[TaskRow] | None:
        """The rows of a rollout without a data set, as TRL has them: their environments say everything."""
        if self.factory is None:
            return None
        if args.max_steps <= 0:
            raise ConfigError("without a train_dataset the length of the run is not known; set max_steps in GRPOConfig")
        prompt = [{"role": "user", "content": ""}]
        return [{"prompt": prompt} for _ in range(args.generation_batch_size // args.num_generations)]

    def check_prompts(self, rows: Sequence[TaskRow], name: str) -> None:
        """Raise an error for a text as a prompt, if there are tools: only a chat template tells the model of them."""
        for number, row in enumerate(rows if self.uses_tools else ()):
            if isinstance(row["prompt"], str):
                raise ConfigError(
                    f"{name}: {where_of(row, number)} has a text as its prompt, but tools and environments need "
                    "messages; write [{'role': 'user', 'content': ...}]"
                )

    def settings(self, args: Any) -> dict[str, Any]:
        """The settings of conversations: all of them end by ``max_completion_length``, or by the number of turns.

        TRL has no limits of time and of the length of a message.
        """
        if not self.uses_tools:
            return {}
        seconds = dict.fromkeys(("tool_seconds", "turn_seconds", "wait_seconds"), float(args.ddp_timeout))
        most = {"max_tool_calls": 2**31 - 1, "max_reply_chars": 2**31 - 1}
        if args.max_tool_calling_iterations is None:
            most["max_turns"] = args.max_completion_length  # each turn has a token
        settings = {"max_tokens": args.max_completion_length, **most, **seconds}
        return {f"environment.{name}": value for name, value in settings.items()}

    def reward(self) -> EnvironmentReward | None:
        """The reward that environments give by ``get_reward``; None if they have no such method."""
        if self.factory is None:
            return None
        is_class = isinstance(self.factory, type)
        kind = self.factory if is_class else type(guarded(self.factory, "environment_factory")())
        return EnvironmentReward(kind.__name__) if callable(getattr(kind, "get_reward", None)) else None

    def environment(self, recipe: Recipe, model: Any, end_ids: set[int]) -> RunEnvironment | None:
        """What holds the conversations of a run; None if completions are single turns."""
        if self.rollout is not None:
            vocabulary, longest = model.get_input_embeddings().num_embeddings, context_length_of(model)
            return BatchRolloutFunction(self.rollout, vocabulary, frozenset(end_ids), longest).environment
        if not self.uses_tools:
            return None
        limits = replace(limits_of(recipe), max_tool_turns=recipe.environment.max_turns - 1)
        functions = make_tools(self.tools or ())
        if self.factory is None:
            make: EnvironmentFactory = partial(ToolEnvironment, functions, limits)
        else:
            make = partial(MethodEnvironment, self.factory, limits, functions)
        columns = () if self.factory is None else ("environments", "environment_reward")
        return RunEnvironment(make, gives_reward=False, columns=columns, sampler=ToolConversations)


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
