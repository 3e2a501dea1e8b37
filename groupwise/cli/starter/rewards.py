"""The reward of recipe.toml. Change it, or add functions and name them in further [[rewards]] of the recipe."""

from __future__ import annotations

from typing import Any


def allowed_characters(completions: list[str], characters: list[str], **columns: Any) -> list[float]:
    """The share of a completion's characters that its row allows: one number per completion, higher is better.

    A reward function gets lists of equal length, with one entry per completion: ``completions`` are the sampled texts,
    ``prompts`` their prompts, and every column of rows.jsonl has an argument of its name, here ``characters``.
    ``**columns`` takes those that are not used. A completion can have no score: return None for it.
    """
    return [
        sum(character in allowed for character in completion) / max(1, len(completion))
        for completion, allowed in zip(completions, characters, strict=True)
    ]
