"""A conversation as tokens: a prompt, then what was sampled and what was given, in order.

Sampled tokens are the model's own and may be trained on. Given tokens are everything else after the prompt: a tool's
output, an environment's text, and what the chat template writes between two turns. They are context only. A
conversation is only ever appended to, so the tokens of a turn stay those that were sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from groupwise.errors import InputError


@dataclass(frozen=True)
class SampledTurn:
    """Tokens of one call of the generator, with the token that ended it, and their log-probs if they are known."""

    ids: tuple[int, ...]
    logps: tuple[float, ...] | None = None
    kind: Literal["sampled"] = field(default="sampled", init=False)

    def __post_init__(self) -> None:
        if self.logps is not None and len(self.logps) != len(self.ids):
            raise InputError(f"a sampled turn of {len(self.ids)} tokens has {len(self.logps)} log-probs")


@dataclass(frozen=True)
class GivenTokens:
    """Tokens that the model did not sample: never in the loss."""

    ids: tuple[int, ...]
    kind: Literal["given"] = field(default="given", init=False)


Segment = SampledTurn | GivenTokens


class Conversation:
    """The prompt and the segments after it.

    ``T`` counts the tokens after the prompt: `completion_ids`, `completion_mask` and `logps` have this length.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise InputError("a conversation needs a prompt of at least one token")
        self._prompt_ids = tuple(prompt_ids)
        self._segments: list[Segment] = []

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self._prompt_ids

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def turns(self) -> tuple[SampledTurn, ...]:
        """The sampled turns, in order."""
        return tuple(segment for segment in self._segments if isinstance(segment, SampledTurn))

    @property
    def ids(self) -> list[int]:
        """All tokens: what the model is shown when it is to sample the next turn."""
        return [*self._prompt_ids, *self.completion_ids]

    @property
    def completion_ids(self) -> list[int]:
        return [token for segment in self._segments for token in segment.ids]  # (T,)

    @property
    def completion_mask(self) -> list[bool]:
        """True for sampled tokens, ``(T,)``."""
        return [segment.kind == "sampled" for segment in self._segments for _ in segment.ids]

    @property
    def logps(self) -> list[float]:
        """The sampler's log-prob of each token, ``(T,)``; NaN for given tokens and where it is not known."""
        logps: list[float] = []
        for segment in self._segments:
            known = segment.logps if isinstance(segment, SampledTurn) else None
            logps += (math.nan,) * len(segment.ids) if known is None else known
        return logps

    def __len__(self) -> int:
        return len(self._prompt_ids) + sum(len(segment.ids) for segment in self._segments)

    def add_sampled(self, ids: Sequence[int], logps: Sequence[float] | None = None) -> SampledTurn:
        """Append a turn as it was sampled. Two turns need given tokens between them."""
        if not ids:
            raise InputError("a sampled turn needs at least one token")
        if self._segments and isinstance(self._segments[-1], SampledTurn):
            raise InputError("a sampled turn follows another; append what the template puts between them first")
        turn = SampledTurn(tuple(ids), None if logps is None else tuple(logps))
        self._segments.append(turn)
        return turn

    def add_given(self, ids: Sequence[int]) -> GivenTokens:
        """Append tokens that are context only."""
        given = GivenTokens(tuple(ids))
        if given.ids:
            self._segments.append(given)
        return given
