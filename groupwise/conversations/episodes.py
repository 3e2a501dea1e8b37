"""An episode: one conversation of the model with an environment, from the prompt to its reward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.core.filters import KeptSets
from groupwise.core.sequences import TokenSequence, join_segments
from groupwise.environments import AssistantTurn, Limits, Message
from groupwise.errors import check_integer

OUTCOMES = ("done", "turn_limit", "token_limit", "failed")


class SampledTokens(NamedTuple):
    """What the generator returned for one turn of ``t`` tokens."""

    ids: Tensor  # (t,)
    logps: Tensor  # (t,)
    filtered_logps: Tensor  # (t,)
    versions: Tensor  # (t,)
    kept: KeptSets | None
    stop_reason: str


@dataclass
class EpisodeTurn:
    """A sampled turn, and what the environment answered."""

    sampled: SampledTokens
    said: AssistantTurn
    state: Hashable = None  # the environment's before the turn, if it tells
    messages: list[Message] = field(default_factory=list)  # shown to the model before its next turn
    given: list[int] = field(default_factory=list)  # as tokens
    reward: float | None = None
    calls: int = 0
    failed_calls: int = 0


@dataclass
class Episode:
    """``opening`` are the tokens that follow the prompt of its group, if conversations of a group start differently."""

    prompt: list[int]
    turns: list[EpisodeTurn] = field(default_factory=list)
    opening: list[int] = field(default_factory=list)
    outcome: str | None = None  # of OUTCOMES; None while it goes on
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)  # by name, if the environment has several
    counts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None  # why the environment failed
    attempts: int = 1
    environment: Any = None  # it was held with this one, which is in no other conversation until all are done
    greeting: list[Message] = field(default_factory=list)  # what the environment said before the first turn

    @property
    def context(self) -> list[int]:
        """All tokens so far."""
        return [*self.prompt, *self.opening, *self.completion]

    @property
    def completion(self) -> list[int]:
        """The tokens of all turns, and those that were given between them."""
        return [token for turn in self.turns for token in (*turn.sampled.ids.tolist(), *turn.given)]

    @property
    def length(self) -> int:
        """The number of all tokens so far."""
        turns = sum(len(turn.sampled.ids) + len(turn.given) for turn in self.turns)
        return len(self.prompt) + len(self.opening) + turns

    @property
    def sequence(self) -> TokenSequence:
        """The tokens after the prompt of its group."""
        segments: list[tuple[list[int] | Tensor, bool]] = [(self.opening, False)]
        for turn in self.turns:
            segments += [(turn.sampled.ids, True), (turn.given, False)]
        return join_segments(segments)

    @property
    def text(self) -> str:
        """What the model said in all turns, a line or more for each, without its thinking and its calls."""
        return "\n".join(turn.said.text for turn in self.turns)

    @property
    def messages(self) -> list[Message]:
        """All messages after the prompt."""
        messages: list[Message] = []
        for turn in self.turns:
            said: Message = {"role": "assistant", "content": turn.said.text}
            if turn.said.calls:
                said["tool_calls"] = [
                    {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in turn.said.calls
                ]
            messages += [said, *turn.messages]
        return messages

    @property
    def stop_reason(self) -> str:
        """Why the conversation ended, in the generator's words: "length" at a limit or after a failure."""
        return self.turns[-1].sampled.stop_reason if self.outcome == "done" else "length"

    def joined(self, name: str) -> Tensor:
        """A field of `SampledTokens` for the sampled tokens of all turns, ``(t,)``."""
        parts: list[Tensor] = [getattr(turn.sampled, name) for turn in self.turns]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)

    @property
    def kept(self) -> list[KeptSets]:
        """The token sets of all turns, in order."""
        return [turn.sampled.kept for turn in self.turns if turn.sampled.kept is not None]


def state_numbers(episodes: Sequence[Episode]) -> list[list[int | None]]:
    """A number for the state before each turn, the same for equal states of these episodes; None if it is unknown."""
    numbers: dict[Hashable, int] = {}
    return [
        [None if turn.state is None else numbers.setdefault(turn.state, len(numbers)) for turn in episode.turns]
        for episode in episodes
    ]


@dataclass(frozen=True)
class EpisodeLimits:
    """When a conversation ends, whatever its environment says.

    max_tokens: sampled and given, after the prompt. context_length: with the prompt; None if the model has no limit.
    """

    max_turns: int = 10
    max_tokens: int | None = None
    context_length: int | None = None
    retries: int = 1
    environment: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_integer("max_turns", self.max_turns, 1)
        check_integer("retries", self.retries, 0)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)

    def room(self, episode: Episode) -> int:
        """How many tokens may still follow."""
        used = episode.length
        rooms = [] if self.context_length is None else [self.context_length - used]
        if self.max_tokens is not None:
            rooms.append(self.max_tokens - (used - len(episode.prompt)))
        return min(rooms, default=2**31)
