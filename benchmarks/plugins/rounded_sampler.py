"""A generator that samples with rounded weights, as servers with quantised weights do: its log-probs are others than
the trainer's. `corrections.py` puts this folder on the path, where its entry point is found."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.distributed.ranks import Ranks
from groupwise.generate.engine import Engine
from groupwise.model.handle import ModelHandle

LEVELS = 2  # on each side of 0, so five values


class RoundedSampler(Engine):
    def __init__(self, model: Any, max_num_seqs: int | None) -> None:
        super().__init__(deepcopy(model).requires_grad_(False), max_num_seqs=max_num_seqs)
        self.source = model
        self.update_weights(0)

    @torch.no_grad()
    def update_weights(self, version: int) -> None:
        for mine, current in zip(self.handle.model.parameters(), self.source.parameters(), strict=True):
            mine.copy_(rounded(current) if current.dim() == 2 else current)
        super().update_weights(version)


def rounded(weights: Tensor) -> Tensor:
    """Each row on a grid of 2 · LEVELS + 1 values, the outermost of which is its largest weight."""
    step = weights.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LEVELS
    return (weights / step).round() * step


def make(recipe: Recipe, handle: ModelHandle, ranks: Ranks) -> RoundedSampler:
    return RoundedSampler(handle.model, recipe.sampling.max_num_seqs)
