"""Grouping that is divided among the ranks of a run; the clusters of a prompt do not depend on other prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from groupwise.distributed.ranks import Ranks
from groupwise.grouping.grouper import GroupingResult, SimilarityGrouper


class ShardedGrouper(SimilarityGrouper):
    """All ranks call it with all answers and get the result of all. ``inner`` is None on ranks that do not group."""

    def __init__(self, inner: SimilarityGrouper | None, ranks: Ranks, *, on_main_only: bool) -> None:
        self.inner, self.ranks, self.on_main_only = inner, ranks, on_main_only

    def group(self, texts: Sequence[Sequence[str]]) -> GroupingResult:
        def work(prompts: list[int]) -> list[list[Tensor]]:
            if self.inner is None:
                return []
            result = self.inner.group([texts[prompt] for prompt in prompts])
            return [list(row) for row in zip(*(getattr(result, field.name) for field in fields(result)), strict=True)]

        stage, everything = "clustering similar completions", list(range(len(texts)))
        if self.on_main_only:
            rows = self.ranks.from_main(self.ranks.on_main(stage, lambda: work(everything)))
        else:
            rows = self.ranks.divide(stage, [sum(map(len, answers)) for answers in texts], work)
        return GroupingResult(*(torch.stack(column) for column in zip(*rows, strict=True)))

    @property
    def restarts(self) -> int:  # type: ignore[override]
        return 0 if self.inner is None else self.inner.restarts

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()
