"""Sampled token ids as texts. The generation engine has no tokenizer, so they are decoded here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class DecodedCompletions(NamedTuple):
    """Sampled completions, prompt after prompt."""

    ids: list[list[int]]
    texts: list[str]
    lengths: list[int]  # in tokens


def decode_completions(tokenizer: Any, ids: Tensor, lengths: Tensor) -> DecodedCompletions:
    """Completions from a rollout's ids (B, T) and lengths (B,): without padding, texts without special tokens."""
    numbers = lengths.tolist()
    rows = [row[:length] for row, length in zip(ids.tolist(), numbers, strict=True)]
    keys = [tuple(row) for row in rows]
    different = list(dict.fromkeys(keys))  # short answers repeat
    texts = tokenizer.batch_decode([list(key) for key in different], skip_special_tokens=True)
    text_of = dict(zip(different, texts, strict=True))
    return DecodedCompletions(rows, [text_of[key] for key in keys], numbers)
