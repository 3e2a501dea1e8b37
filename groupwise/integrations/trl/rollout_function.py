"""``rollout_func`` of a `GRPOTrainer`: rollouts that a function returns as tokens, checked and made into episodes.

The tokens of a completion with ``env_mask`` 0 are given, the others were sampled. As in TRL, rewards get the text of
all of them, and further fields of the result as columns.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from numbers import Integral, Real
from typing import Any

import torch

from groupwise.conversations import Episode, EpisodeStart
from groupwise.conversations.episodes import EpisodeTurn, SampledTokens
from groupwise.data import PromptBuilder
from groupwise.environments import AssistantTurn, Message
from groupwise.errors import UserCodeError
from groupwise.tasks.base import TaskRow
from groupwise.text import excerpt
from groupwise.training.environments import RunEnvironment
from groupwise.training.rollout.episodes import ConversationFacts, ConversationSampler

TOKEN_FIELDS = ("prompt_ids", "completion_ids", "logprobs")
MASK = "env_mask"


class InvalidRolloutError(UserCodeError, ValueError):
    """What ``rollout_func`` returned is not a rollout. TRL has a ValueError for that."""


@dataclass(frozen=True)
class BatchRolloutFunction:
    """A function of prompts, and what its tokens must fit: the vocabulary, the ends of completions, the context."""

    call: Callable[[list[Any]], Any]
    vocabulary: int
    end_ids: frozenset[int]
    context_length: int | None

    @property
    def environment(self) -> RunEnvironment:
        """It holds the conversations of a run. Rewards may ask for columns that are known only when it returns."""
        return RunEnvironment(None, gives_reward=False, columns=None, sampler=partial(FunctionConversations, self))

    def roll_out(self, prompts: Sequence[Any]) -> list[TokenRollout]:
        """A rollout for each prompt."""
        try:
            with torch.no_grad():
                output = self.call(copy.deepcopy(list(prompts)))
        except Exception as error:
            error.add_note(f"groupwise: raised by rollout_func for {len(prompts)} prompts")
            raise
        if not isinstance(output, Mapping):
            listed = ", ".join(TOKEN_FIELDS)
            raise InvalidRolloutError(f"rollout_func returned {excerpt(output)}; it must return a dict with {listed}")
        given = {name: value for name, value in output.items() if value is not None}
        if missing := [name for name in TOKEN_FIELDS if name not in given]:
            raise InvalidRolloutError(
                f"rollout_func must return keys {missing} in its output dict, each with a list for every prompt"
            )
        values = {name: _entries(name, value, len(prompts)) for name, value in given.items()}
        return [
            self._rollout(number, {name: entries[number] for name, entries in values.items()})
            for number in range(len(prompts))
        ]

    def _rollout(self, number: int, entry: dict[str, Any]) -> TokenRollout:
        where = f"rollout_func: completion {number + 1}"
        prompt, ids = (self._ids(where, name, entry.pop(name)) for name in TOKEN_FIELDS[:2])
        logps = _numbers(where, "logprobs", entry.pop("logprobs"), len(ids))
        mask = _numbers(where, MASK, entry.pop(MASK, [1] * len(ids)), len(ids))
        if set(mask) - {0, 1}:
            raise InvalidRolloutError(f"{where}: its env_mask has {excerpt(max(set(mask) - {0, 1}))}; it is 0 or 1")
        if not any(mask):
            raise InvalidRolloutError(f"{where}: its env_mask is 0 for all tokens, so nothing was sampled")
        for place, (logp, sampled) in enumerate(zip(logps, mask, strict=True)):
            if sampled and not math.isfinite(logp):
                raise InvalidRolloutError(f"{where}: the log-prob of token {place + 1} is {logp}; it must be finite")
        if self.context_length is not None and len(prompt) + len(ids) > self.context_length:
            raise InvalidRolloutError(
                f"{where}: with its prompt it has {len(prompt) + len(ids)} tokens, more than the model's window of "
                f"{self.context_length}"
            )
        return TokenRollout(prompt, ids, logps, [bool(sampled) for sampled in mask], entry)

    def _ids(self, where: str, name: str, value: Any) -> list[int]:
        ids = _as_list(value)
        if not isinstance(ids, list) or not ids:
            raise InvalidRolloutError(f"{where}: its {name} is {excerpt(value)}, not a list of token ids")
        for token in ids:
            if not isinstance(token, Integral) or not 0 <= int(token) < self.vocabulary:
                raise InvalidRolloutError(
                    f"{where}: its {name} has {excerpt(token)}; a token is an integer from 0 to {self.vocabulary - 1}"
                )
        return [int(token) for token in ids]


@dataclass(frozen=True)
class TokenRollout:
    """A prompt and a completion as tokens: their log-probs, and which of them were sampled."""

    prompt: list[int]
    ids: list[int]
    logps: list[float]
    sampled: list[bool]
    columns: dict[str, Any]  # for reward functions


@dataclass
class TokenEpisode(Episode):
    """An episode whose completion is one text, that of all its tokens."""

    ids: list[int] = field(default_factory=list)
    decoded: str = ""
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.decoded

    @property
    def messages(self) -> list[Message]:
        return [{"role": "assistant", "content": self.decoded}]


class FunctionConversations(ConversationSampler):
    """Takes the conversations of a step from a function."""

    def __init__(
        self, function: BatchRolloutFunction, sampler: None, builder: PromptBuilder, column: str, seed: int
    ) -> None:
        self.function, self.builder, self.column, self.seed = function, builder, column, seed

    def close(self) -> None:
        """There are no environments."""

    def hold(self, generator: Any, starts: Sequence[EpisodeStart], samples: int, *_: Any) -> list[list[Episode]]:
        rollouts = self.function.roll_out([start.row[self.column] for start in starts for _ in range(samples)])
        episodes: list[Episode] = [self._episode(rollout, generator.version) for rollout in rollouts]
        return [episodes[first : first + samples] for first in range(0, len(episodes), samples)]

    def facts_of(self, row: TaskRow, episode: Any) -> ConversationFacts:
        return ConversationFacts(episode.messages, episode.ids, episode.columns)

    def _episode(self, rollout: TokenRollout, version: int) -> TokenEpisode:
        decode = partial(self.builder.tokenizer.decode, skip_special_tokens=True)
        episode = TokenEpisode(rollout.prompt, outcome="done", ids=rollout.ids, decoded=decode(rollout.ids))
        episode.columns = rollout.columns
        ended = "eos" if rollout.ids[-1] in self.function.end_ids else "length"
        place = 0
        for sampled, part in groupby(rollout.sampled):
            ids = rollout.ids[place : place + len(list(part))]
            if sampled:
                logps = torch.tensor(rollout.logps[place : place + len(ids)], dtype=torch.float32)
                versions = torch.full((len(ids),), version, dtype=torch.int32)
                tokens = SampledTokens(torch.tensor(ids), logps, logps, versions, None, ended)
                episode.turns.append(EpisodeTurn(tokens, AssistantTurn(decode(ids))))
            elif episode.turns:
                episode.turns[-1].given = ids
            else:
                episode.opening = ids
            place += len(ids)
        return episode


def _entries(name: str, values: Any, count: int) -> list[Any]:
    """A value of the result for each prompt. As in TRL, a field for rewards that is no list is the same for all."""
    if not isinstance(values, list) and name not in (*TOKEN_FIELDS, MASK):
        return [values] * count
    entries = _as_list(values)
    if not isinstance(entries, list) or len(entries) != count:
        given = f"{len(entries)} entries" if isinstance(entries, list) else excerpt(values)
        raise InvalidRolloutError(
            f"rollout_func: {name} has {given} for {count} prompts; give one for each (a prompt comes once for each of "
            "its completions)"
        )
    return entries


def _numbers(where: str, name: str, value: Any, count: int) -> list[float]:
    numbers = _as_list(value)
    if not isinstance(numbers, list) or len(numbers) != count:
        given = f"{len(numbers)} numbers" if isinstance(numbers, list) else excerpt(value)
        raise InvalidRolloutError(f"{where}: its {name} has {given} for {count} tokens; give one for each")
    for number in numbers:
        if not isinstance(number, Real):
            raise InvalidRolloutError(f"{where}: its {name} has {excerpt(number)}, which is not a number")
    return [float(number) for number in numbers]


def _as_list(value: Any) -> Any:
    """Tensors, arrays and tuples as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
