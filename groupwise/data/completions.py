"""Sampled token ids as texts. The generation engine has no tokenizer, so they are decoded here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class SampledIds(Protocol):
    """The part of a generator's rollout that is decoded."""

    @property
    def ids(self) -> Tensor: ...  # (B, T), padded

    @property
    def lengths(self) -> Tensor: ...  # (B,)


class DecodedCompletions(NamedTuple):
    """Sampled completions, prompt after prompt."""

    ids: list[list[int]]
    texts: list[str]
    lengths: list[int]  # in tokens


def decode_completions(tokenizer: Any, rollout: SampledIds) -> DecodedCompletions:
    """The completions of a rollout without padding, and their texts without special tokens."""
    lengths = rollout.lengths.tolist()
    ids = [row[:length] for row, length in zip(rollout.ids.tolist(), lengths, strict=True)]
    return DecodedCompletions(ids, tokenizer.batch_decode(ids, skip_special_tokens=True), lengths)
