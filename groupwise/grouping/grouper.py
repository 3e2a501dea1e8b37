"""Answers to prompts go in; which of them are alike, and how different they are, comes out."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from groupwise.config import GroupingSection
from groupwise.errors import InputError
from groupwise.grouping.cluster import cosine_distances, nested_groups
from groupwise.grouping.embed import Embedder, load_embedder
from groupwise.grouping.text import result_text

log = logging.getLogger("groupwise")


@dataclass(frozen=True)
class Grouped:
    """What is known of the G answers to each of P prompts, on the CPU."""

    labels: Tensor  # (P, G, L-1) int64, coarse to fine: the prompt's clusters, then clusters within them
    scores: Tensor  # (P,) float64 silhouettes
    distances: Tensor  # (P,) float64 mean cosine distance between two answers
    centres: Tensor  # (P, D) float64 mean of the unit vectors

    def take(self, prompts: Sequence[int]) -> Grouped:
        """The same of these prompts alone."""
        return Grouped(*(getattr(self, field.name)[list(prompts)] for field in fields(self)))


class Grouper(ABC):
    """Finds the answers that are alike, wherever it does so. It is closed after use, or where its ``with`` ends."""

    restarts = 0  # workers that died and were replaced

    @abstractmethod
    def group(self, texts: Sequence[Sequence[str]]) -> Grouped:
        """Group the answers to each prompt, of which every prompt has the same number."""

    @abstractmethod
    def close(self) -> None:
        """Give back what was taken; nothing happens the second time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalGrouper(Grouper):
    """Groups in this process, with an embedder that is loaded once."""

    def __init__(self, how: GroupingSection) -> None:
        self.how = how
        log.info("loading %s", how.embedder)
        self.embedder: Embedder | None = load_embedder(
            how.embedder, device=how.device, dtype=how.dtype, batch_size=how.batch_size, cache=how.cache
        )

    def group(self, texts: Sequence[Sequence[str]]) -> Grouped:
        if self.embedder is None:
            raise InputError("this grouper is closed; make another one")
        return group_texts(self.embedder, texts, self.how)

    def close(self) -> None:
        self.embedder = None


def group_texts(embedder: Embedder, texts: Sequence[Sequence[str]], how: GroupingSection) -> Grouped:
    """Embed the answers to each prompt and put those into clusters that are alike.

    Only the result of an answer counts, as ``how.text_after`` says. A single answer has nothing to differ from, so its
    distance is 0; an embedding of zeros has no direction and adds nothing to the centre.
    """
    prompts, size = check_texts(texts)
    results = [result_text(text, how.text_after) for answers in texts for text in answers]
    embeddings = embedder.encode(results).view(prompts, size, -1).double()
    labels, scores = nested_groups(
        embeddings,
        levels=how.levels,
        method=how.method,
        max_groups=how.max_groups,
        min_silhouette=how.min_silhouette,
        threshold=how.threshold,
        min_samples=how.min_samples,
    )
    lengths = embeddings.norm(dim=-1, keepdim=True)
    directions = embeddings / torch.where(lengths > 0, lengths, 1.0)
    return Grouped(labels, scores, _mean_distances(embeddings), directions.mean(dim=1))


def share_texts(texts: Sequence[Sequence[str]], number: int) -> list[Sequence[Sequence[str]]]:
    """The prompts in order, cut into ``number`` shares as even as can be, or into one for each where they are few."""
    small, larger = divmod(len(texts), number)
    ends = [small * share + min(share, larger) for share in range(number + 1)]
    return [texts[start:end] for start, end in itertools.pairwise(ends) if end > start]


def join_grouped(parts: Sequence[Grouped]) -> Grouped:
    """The prompts of all parts, one part after the other."""
    if not parts:
        raise InputError("there is nothing to join: no part was given")
    return Grouped(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Grouped)))


def check_texts(texts: Sequence[Sequence[str]]) -> tuple[int, int]:
    """How many prompts there are and how many answers each has, which must be the same number."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise InputError(f"texts must be one list of answers for each of at least one prompt, got {_shown(texts)}")
    for number, answers in enumerate(texts):
        if isinstance(answers, str) or not isinstance(answers, Sequence) or not answers:
            raise InputError(f"texts[{number}] must be a list of at least one answer, got {_shown(answers)}")
        for place, text in enumerate(answers):
            if not isinstance(text, str):
                raise InputError(f"texts[{number}][{place}] must be a text, got {_shown(text)}")
        if len(answers) != len(texts[0]):
            raise InputError(
                f"texts[{number}] has {len(answers)} answers and texts[0] has {len(texts[0])}; every prompt needs "
                "the same number"
            )
    return len(texts), len(texts[0])


def _mean_distances(embeddings: Tensor) -> Tensor:
    prompts, size, _ = embeddings.shape
    if size == 1:
        return torch.zeros(prompts, dtype=torch.float64)
    row, column = torch.triu_indices(size, size, offset=1)
    return cosine_distances(embeddings)[:, row, column].mean(dim=1)


def _shown(value: object) -> str:
    return "none" if isinstance(value, Sequence) and not value else f"{type(value).__name__} {str(value)[:40]!r}"
