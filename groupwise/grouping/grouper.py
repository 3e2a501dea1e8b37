"""Groupers: from the answers to each prompt to clusters of similar answers."""

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
class GroupingResult:
    """Clusters of the G answers to each of P prompts, and statistics, on the CPU."""

    labels: Tensor  # (P, G, L-1) int64, coarse to fine: the prompt's clusters, then clusters within them
    scores: Tensor  # (P,) float64 silhouettes
    distances: Tensor  # (P,) float64 mean cosine distance between two answers
    centres: Tensor  # (P, D) float64 mean of the unit vectors
    positions: Tensor  # (P, G, 2) float64 places on a map of the prompt's answers

    def take(self, prompts: Sequence[int]) -> GroupingResult:
        """The results of these prompts."""
        return GroupingResult(*(getattr(self, field.name)[list(prompts)] for field in fields(self)))


class SimilarityGrouper(ABC):
    """Groups similar answers. Close it after use, or use it in a ``with`` statement."""

    restarts = 0  # workers that died and were replaced

    @abstractmethod
    def group(self, texts: Sequence[Sequence[str]]) -> GroupingResult:
        """Group the answers to each prompt; every prompt has the same number of answers."""

    @abstractmethod
    def close(self) -> None:
        """Free all resources. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalGrouper(SimilarityGrouper):
    """Groups in this process."""

    def __init__(self, settings: GroupingSection) -> None:
        self.settings = settings
        log.info("loading %s", settings.embedder)
        self.embedder: Embedder | None = load_embedder(
            settings.embedder,
            device=settings.device,
            dtype=settings.dtype,
            batch_size=settings.batch_size,
            cache=settings.cache,
        )

    def group(self, texts: Sequence[Sequence[str]]) -> GroupingResult:
        if self.embedder is None:
            raise InputError("this grouper is closed; create a new one")
        return group_texts(self.embedder, texts, self.settings)

    def close(self) -> None:
        self.embedder = None


def group_texts(embedder: Embedder, texts: Sequence[Sequence[str]], settings: GroupingSection) -> GroupingResult:
    """Embed the answers to each prompt and cluster them.

    Only the part of an answer after ``settings.text_after`` is embedded. The mean distance of a single answer is 0; a
    zero vector adds nothing to the centre.
    """
    prompts, size = check_texts(texts)
    results = [result_text(text, settings.text_after) for answers in texts for text in answers]
    embeddings = embedder.encode(results).view(prompts, size, -1).double()
    labels, scores = nested_groups(
        embeddings,
        levels=settings.levels,
        method=settings.method,
        max_groups=settings.max_groups,
        min_silhouette=settings.min_silhouette,
        threshold=settings.threshold,
        min_samples=settings.min_samples,
    )
    lengths = embeddings.norm(dim=-1, keepdim=True)
    directions = embeddings / torch.where(lengths > 0, lengths, 1.0)
    return GroupingResult(
        labels, scores, _mean_distances(embeddings), directions.mean(dim=1), map_positions(directions)
    )


def map_positions(directions: Tensor) -> Tensor:
    """The answers to each prompt ``(P, G, D)`` on a map ``(P, G, 2)``: their two principal components.

    Of each axis the coordinate that is largest in size is positive, so that the map has no arbitrary sign.
    """
    centred = directions - directions.mean(dim=1, keepdim=True)
    values, vectors = torch.linalg.eigh(centred @ centred.transpose(1, 2))  # ascending
    positions = (vectors * values.clamp(min=0.0).sqrt()[:, None]).flip(-1)[..., :2]
    positions = torch.nn.functional.pad(positions, (0, 2 - positions.shape[-1]))  # a single answer has one axis
    largest = positions.gather(1, positions.abs().argmax(dim=1, keepdim=True))
    return torch.where(largest < 0, -positions, positions)


def share_texts(texts: Sequence[Sequence[str]], number: int) -> list[Sequence[Sequence[str]]]:
    """The prompts in order, split into at most ``number`` non-empty shares of nearly equal size."""
    small, larger = divmod(len(texts), number)
    ends = [small * share + min(share, larger) for share in range(number + 1)]
    return [texts[start:end] for start, end in itertools.pairwise(ends) if end > start]


def join_results(parts: Sequence[GroupingResult]) -> GroupingResult:
    """The results of all parts, concatenated."""
    if not parts:
        raise InputError("there are no results to join")
    return GroupingResult(
        *(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(GroupingResult))
    )


def check_texts(texts: Sequence[Sequence[str]]) -> tuple[int, int]:
    """The numbers of prompts and of answers per prompt; an error unless every prompt has the same number."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise InputError(f"texts must be one list of answers for each of at least one prompt, got {texts!r:.80}")
    for number, answers in enumerate(texts):
        if isinstance(answers, str) or not isinstance(answers, Sequence) or not answers:
            raise InputError(f"texts[{number}] must be a list of at least one answer, got {answers!r:.80}")
        if not all(isinstance(text, str) for text in answers):
            raise InputError(f"texts[{number}] must be a list of texts, got {answers!r:.80}")
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
