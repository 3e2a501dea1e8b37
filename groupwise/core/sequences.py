"""The tokens of a conversation: some were sampled, the others were given by the environment between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from groupwise.core.ragged import Ragged, RaggedGroups, Rows
from groupwise.errors import InputError


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """What follows a prompt. Given tokens are context only: they are in no loss and in no denominator."""

    ids: Tensor  # (n,) int64
    sampled: Tensor  # (n,) bool

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.sampled.shape != self.ids.shape or self.sampled.dtype != torch.bool:
            raise InputError(
                "a sequence needs token ids (n,) and a mask (n,) of booleans, got "
                f"{tuple(self.ids.shape)} and {self.sampled.dtype} {tuple(self.sampled.shape)}"
            )
        if not bool(self.sampled.any()):
            raise InputError("a sequence has no sampled token; leave it out")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def completion(self) -> Tensor:
        """The sampled tokens."""
        return self.ids[self.sampled]

    @property
    def places(self) -> Tensor:
        """Where the sampled tokens are among all tokens."""
        return self.sampled.nonzero().squeeze(1)

    @property
    def context(self) -> Tensor:
        """The tokens that have to be computed: those before the last sampled one."""
        return self.to_last_sampled[:-1]

    @property
    def to_last_sampled(self) -> Tensor:
        """Without what was given after the last sampled token."""
        return self.ids[: int(self.places[-1]) + 1]


def join_segments(segments: Sequence[tuple[Sequence[int] | Tensor, bool]]) -> TokenSequence:
    """The sequence of these segments: token ids, and whether they were sampled."""
    ids = [torch.as_tensor(ids, dtype=torch.long) for ids, _ in segments]
    sampled = [torch.full((len(part),), was_sampled) for part, (_, was_sampled) in zip(ids, segments, strict=True)]
    empty = torch.zeros(0, dtype=torch.long)
    return TokenSequence(torch.cat([empty, *ids]), torch.cat([empty.bool(), *sampled]))


class Turns:
    """The token sequences of ``n`` samples: all their ids after the prompt, and which of these were sampled."""

    def __init__(self, ids: Ragged, sampled: Ragged) -> None:
        if ids.sizes != sampled.sizes or sampled.values.dtype != torch.bool:
            raise InputError("the ids and the masks of conversations must have the same lengths")
        self.ids, self.sampled = ids, sampled

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence]) -> Turns:
        ids, sampled = Ragged.of([one.ids for one in sequences]), Ragged.of([one.sampled for one in sequences])
        return cls(ids, Ragged(sampled.values.bool(), sampled.lengths))

    @classmethod
    def join(cls, parts: Sequence[Turns]) -> Turns:
        return cls(Ragged.join([part.ids for part in parts]), Ragged.join([part.sampled for part in parts]))

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[TokenSequence]:
        return (TokenSequence(ids, sampled) for ids, sampled in zip(self.ids, self.sampled, strict=True))

    @property
    def completions(self) -> Ragged:
        """The sampled tokens of each sample."""
        counts = torch.zeros(len(self), dtype=torch.long)
        rows = torch.arange(len(self)).repeat_interleave(self.ids.lengths)
        counts.index_add_(0, rows, self.sampled.values.long())
        return Ragged(self.ids.values[self.sampled.values], counts)

    def take(self, samples: Rows) -> Turns:
        """These samples, in this order."""
        return Turns(self.ids.take(samples), self.sampled.take(samples))


class TurnGroups(RaggedGroups):
    """The sampled tokens of conversations by group, as of completions, with the tokens that were given between them.

    ``longest`` and ``totals`` count the given tokens, too: they say what has to be computed.
    """

    def __init__(self, turns: Turns, sizes: Tensor | Sequence[int]) -> None:
        super().__init__(turns.completions, sizes)
        self.turns = turns

    @property
    def sequences(self) -> list[list[TokenSequence]]:
        """The conversations of each group."""
        every = list(self.turns)
        ends = [0, *accumulate(self.sizes.tolist())]
        return [every[first:last] for first, last in pairwise(ends)]

    @property
    def totals(self) -> Tensor:
        return self.sum(self.turns.ids.lengths)

    @property
    def longest(self) -> Tensor:
        return RaggedGroups(self.turns.ids, self.sizes).longest

    def choose(self, rows: Rows, sizes: Tensor | Sequence[int]) -> TurnGroups:
        return TurnGroups(self.turns.take(rows), sizes)
