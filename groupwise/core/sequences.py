"""The tokens of a conversation: some were sampled, the others were given by the environment between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
        return self.ids[: int(self.places[-1])]


def join_segments(segments: Sequence[tuple[Sequence[int] | Tensor, bool]]) -> TokenSequence:
    """The sequence of these segments: token ids, and whether they were sampled."""
    ids = [torch.as_tensor(ids, dtype=torch.long) for ids, _ in segments]
    sampled = [torch.full((len(part),), was_sampled) for part, (_, was_sampled) in zip(ids, segments, strict=True)]
    empty = torch.zeros(0, dtype=torch.long)
    return TokenSequence(torch.cat([empty, *ids]), torch.cat([empty.bool(), *sampled]))
