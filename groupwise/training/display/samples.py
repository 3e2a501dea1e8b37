"""Chooses the completions of a step that are shown while it trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from groupwise.data.rows import content_text
from groupwise.training.display.base import SampleCompletion

if TYPE_CHECKING:
    from groupwise.config import Recipe
    from groupwise.training.rollout.batch import Batch, GroupAdvantages


def samples_of_step(batch: Batch, group_advantages: GroupAdvantages, recipe: Recipe) -> list[SampleCompletion]:
    """The completions of a step that are shown, as many as the recipe says."""
    prompts = [row[recipe.data.prompt] for row in batch.rows]
    return choose_samples(prompts, batch.texts, group_advantages.rewards.tolist(), recipe.run.show_samples)


def choose_samples(
    prompts: Sequence[Any], completions: Sequence[str], rewards: Sequence[float], count: int
) -> list[SampleCompletion]:
    """``count`` completions of one group, from the best to the worst: of the group whose rewards differ most.

    Completions and rewards are listed prompt after prompt. A completion without a reward (NaN) is not chosen.
    """
    if not prompts or not count:
        return []
    size = len(completions) // len(prompts)
    groups = [
        sorted((n for n in range(start, start + size) if math.isfinite(rewards[n])), key=lambda n: -rewards[n])
        for start in range(0, len(completions), size or 1)
    ]
    ranked = max(groups, key=lambda group: rewards[group[0]] - rewards[group[-1]] if group else -1.0, default=[])
    count = min(count, len(ranked))
    chosen = [ranked[round(place * (len(ranked) - 1) / max(1, count - 1))] for place in range(count)]
    return [SampleCompletion(_text(prompts[n // size]), completions[n], float(rewards[n])) for n in chosen]


def _text(prompt: Any) -> str:
    """A prompt's text; of a list of messages, that of the last one."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt:
        prompt = prompt[-1]
    content = prompt.get("content") if isinstance(prompt, Mapping) else prompt
    return content_text(content) or ""
