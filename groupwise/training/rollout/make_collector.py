"""The collector of a run, from its parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupwise.config import Recipe
from groupwise.data import Order
from groupwise.generate.types import Generator
from groupwise.grouping.grouper import SimilarityGrouper
from groupwise.text import Say
from groupwise.training.components import RunComponents
from groupwise.training.display.base import Display
from groupwise.training.rollout.async_collector import AsyncCollector
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.rollout.collector import RolloutCollector


def make_collector(
    components: RunComponents,
    generator: Generator,
    order: Order,
    compute_advantages: Callable[[Batch, Recipe], GroupAdvantages],
    *,
    grouper: SimilarityGrouper | None,
    display: Display,
    say: Say,
    folder: Path,
    stopped: Callable[[], bool],
) -> RolloutCollector:
    """The collector of a run: asynchronous if ``train.max_staleness`` is above 0."""
    recipe, scorer = components.recipe, components.scorer
    settings: dict[str, Any] = {
        "prompt_column": recipe.data.prompt,
        "seed": recipe.train.seed,
        "stop": components.stop,
        "overlong": recipe.scoring.overlong_buffer > 0,
        "grouper": grouper,
        "say": say,
        "display": display,
    }
    inputs = (components.tokenizer, components.train.rows, components.train.prompts, scorer, order, compute_advantages)
    if not recipe.train.max_staleness:
        return RolloutCollector(generator, *inputs, **settings)
    return AsyncCollector(generator, *inputs, **settings, recipe=recipe, folder=folder, stopped=stopped)
