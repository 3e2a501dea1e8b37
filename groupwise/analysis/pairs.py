"""The preference pairs of a step, and the words in which two answers differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import Match, SequenceMatcher
from typing import Any

MAX_WORDS = 2000  # of a text whose differences are found; comparing takes quadratic time

Segment = tuple[str, bool]  # a part of a text, and whether the other text lacks it


@dataclass(frozen=True)
class RolloutPair:
    """Two samples of one prompt, the rows of a rollout file, and the difference of their rewards."""

    chosen: Mapping[str, Any]
    rejected: Mapping[str, Any]
    margin: float


def pairs_of(rows: Sequence[Mapping[str, Any]], reward: str | None = None) -> list[RolloutPair]:
    """The pairs among a step's rollouts, in order of their prompts.

    The files record each sample's role. Training pairs the best chosen sample of a group with its worst rejected one,
    the second best with the second worst, and so on; ``reward`` is the function that ranked them, if not the sum.
    """
    column = f"reward/{reward}" if reward else "reward"
    roles: dict[tuple[int, int], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if row.get("pair") in ("chosen", "rejected") and row.get(column) is not None:
            group = roles.setdefault((row["prompt_number"], row["group"]), {"chosen": [], "rejected": []})
            group[row["pair"]].append(row)
    pairs = []
    for group in roles.values():
        best = sorted(group["chosen"], key=lambda row: (-row[column], row["sample"]))
        worst = sorted(group["rejected"], key=lambda row: (row[column], -row["sample"]))
        # A damaged or foreign file may have more samples of one role; those are in no pair.
        pairs += [RolloutPair(good, bad, good[column] - bad[column]) for good, bad in zip(best, worst, strict=False)]
    return pairs


def word_differences(one: str, other: str) -> tuple[list[Segment], list[Segment]]:
    """Both texts cut into parts that they share and parts that differ. Joined, the parts are the texts.

    Words are compared without the white space after them. A single word between two differences does not count as
    shared.
    """
    words: list[list[str]] = [re.findall(r"(?:\w+|[^\w\s])\s*|\s+", text) for text in (one, other)]
    if max(map(len, words)) > MAX_WORDS:
        differ = one != other
        return [(one, differ)] if one else [], [(other, differ)] if other else []
    keys = [[word.strip() for word in side] for side in words]
    blocks = SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    ends = (len(words[0]), len(words[1]))
    shared = [block for block in blocks if block.size > 1 or (block.size and _at_an_end(block, ends))]
    segments: tuple[list[Segment], list[Segment]] = ([], [])
    for side in (0, 1):
        done = 0
        for block in shared:
            start = block[side]
            _add(segments[side], words[side][done:start], True)
            _add(segments[side], words[side][start : start + block.size], False)
            done = start + block.size
        _add(segments[side], words[side][done:], True)
    return segments


def _at_an_end(block: Match, ends: tuple[int, int]) -> bool:
    """Whether both texts begin with it, or end with it."""
    return (block.a == 0 and block.b == 0) or (block.a + block.size, block.b + block.size) == ends


def _add(segments: list[Segment], words: Sequence[str], differs: bool) -> None:
    if words:
        segments.append(("".join(words), differs))
