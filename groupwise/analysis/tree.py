"""A group as a tree: its samples share what they begin with, up to the token where they part.

A sample is a list of pieces: its tokens where they were recorded, else its words. Each branch has the pieces that all
of its samples share, so that its mean advantage says whether the choice at its beginning paid.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from groupwise.training.store.token_files import TokenRow

# A word with the white space before it. Scripts without spaces are split by character, numbers by digit.
_CHARACTER = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff0-9"
_WORD = re.compile(rf"\s*(?:[{_CHARACTER}]|[^\s{_CHARACTER}]+)|\s+")


@dataclass(frozen=True)
class Branch:
    """What some samples of a group have in common after they parted from the others.

    A sample ends in exactly one leaf. One that stops where others go on has a leaf without text.
    """

    text: str
    start: int  # the number of pieces before it
    pieces: int  # the number of its own pieces
    samples: list[int]
    mean_advantage: float | None
    mean_reward: float | None
    children: list[Branch]

    def leaves(self) -> Iterator[Branch]:
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def split_words(text: str) -> list[str]:
    """A text as words, each with the white space before it; together they are the text."""
    return _WORD.findall(text)


def group_tree(samples: Sequence[Mapping[str, Any]], tokens: Sequence[TokenRow] = ()) -> Branch:
    """The tree of a group's rows: of tokens, if all of these rows are among ``tokens``, else of words."""
    recorded = {(row.prompt_number, row.sample): row for row in tokens}
    rows = [recorded.get((sample["prompt_number"], sample["sample"])) for sample in samples]
    pieces: list[list[tuple[Hashable, str]]]
    if all(
        row is not None and row.completion == sample["completion"] for row, sample in zip(rows, samples, strict=True)
    ):
        pieces = [list(zip(row.ids, row.texts, strict=True)) for row in rows if row is not None]
    else:
        pieces = [[(word, word) for word in split_words(sample["completion"])] for sample in samples]
    return build_tree(pieces, samples)


def build_tree(pieces: Sequence[Sequence[tuple[Hashable, str]]], samples: Sequence[Mapping[str, Any]]) -> Branch:
    """The tree of samples with these pieces, as (key, text). Pieces are the same if both are.

    Children are ordered by their mean advantage, the largest first.
    """
    return _branch(pieces, samples, range(len(samples)), 0)


def _branch(
    pieces: Sequence[Sequence[tuple[Hashable, str]]],
    samples: Sequence[Mapping[str, Any]],
    members: Sequence[int],
    start: int,
) -> Branch:
    shortest = min((len(pieces[member]) for member in members), default=start)
    end = start
    while end < shortest and all(pieces[member][end] == pieces[members[0]][end] for member in members):
        end += 1
    parts: dict[Any, list[int]] = {}  # by the next piece; None for samples that end here
    for member in members:
        parts.setdefault(pieces[member][end] if end < len(pieces[member]) else None, []).append(member)
    children = [_branch(pieces, samples, part, end) for part in parts.values()] if len(parts) > 1 else []
    children.sort(key=lambda child: -(child.mean_advantage or 0.0))
    return Branch(
        text="".join(text for _, text in pieces[members[0]][start:end]) if members else "",
        start=start,
        pieces=end - start,
        samples=[samples[member]["sample"] for member in members],
        mean_advantage=_mean(samples, members, "advantage"),
        mean_reward=_mean(samples, members, "reward"),
        children=children,
    )


def _mean(samples: Sequence[Mapping[str, Any]], members: Sequence[int], column: str) -> float | None:
    values = [value for member in members if (value := samples[member].get(column)) is not None]
    return fmean(values) if values else None
