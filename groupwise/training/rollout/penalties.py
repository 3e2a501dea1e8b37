"""Penalties on length, each one more column of the rewards, with weight 1: DAPO's soft penalty close to the length
limit (scoring.overlong_buffer), and ALP's, which grows with the prompt's success rate (scoring.length_penalty).

The length of a conversation is the number of its sampled tokens, in all turns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core import adaptive_length_penalty
from groupwise.rewards import overlong_penalty

OVERLONG, LENGTH_PENALTY = "overlong", "adaptive_length_penalty"  # their names among the rewards
PENALTIES = {OVERLONG: "scoring.overlong_buffer", LENGTH_PENALTY: "scoring.length_penalty"}  # and what turns them on
LIMITS = ("sampling.max_new_tokens", "environment.max_turns", "environment.max_tokens")
PENALTY_SETTINGS = {
    OVERLONG: (PENALTIES[OVERLONG], "scoring.overlong_weight", *LIMITS),
    LENGTH_PENALTY: (PENALTIES[LENGTH_PENALTY], "scoring.success_threshold", *LIMITS),
}


def penalty_names(recipe: Recipe, driven: Collection[str] = ()) -> list[str]:
    """The penalties of a step, or with the ``driven`` settings of its schedule, of a run."""
    return [name for name, setting in PENALTIES.items() if recipe.get(setting) or setting in driven]


def length_limit(step_recipe: Recipe, *, conversations: bool) -> int:
    """The most tokens that can be sampled of a completion, or in all turns of a conversation."""
    limit, settings = step_recipe.sampling.max_new_tokens, step_recipe.environment
    if not conversations:
        return limit
    limit *= settings.max_turns
    return limit if settings.max_tokens is None else min(limit, settings.max_tokens)


def penalty_columns(
    names: Sequence[str],
    rewards: Tensor,
    lengths: Sequence[int],
    prompts: Sequence[int],
    step_recipe: Recipe,
    *,
    conversations: bool = False,
) -> Tensor:
    """The values ``(n, len(names))`` of these penalties.

    rewards: ``(n,)``, the weighted sums without penalties, which say who succeeds; NaN without a reward.
    prompts: the prompt of each completion.
    """
    limit = length_limit(step_recipe, conversations=conversations)
    columns: dict[str, Callable[[], Tensor]] = {
        OVERLONG: lambda: _overlong(lengths, limit, step_recipe),
        LENGTH_PENALTY: lambda: _length_penalty(rewards, lengths, prompts, limit, step_recipe),
    }
    if not names or not len(rewards):
        return torch.zeros(len(rewards), len(names), dtype=torch.float64)
    return torch.stack([columns[name]() for name in names], dim=1)


def _overlong(lengths: Sequence[int], limit: int, step_recipe: Recipe) -> Tensor:
    buffer, weight = min(step_recipe.scoring.overlong_buffer, limit), step_recipe.scoring.overlong_weight
    return torch.tensor([weight * overlong_penalty(length, limit, buffer) for length in lengths], dtype=torch.float64)


def _length_penalty(
    rewards: Tensor, lengths: Sequence[int], prompts: Sequence[int], limit: int, step_recipe: Recipe
) -> Tensor:
    """NaN for a completion without a reward, which would otherwise be scored by its length alone."""
    penalty = adaptive_length_penalty(
        rewards,
        torch.tensor(list(lengths)),
        list(prompts),
        max_length=limit,
        threshold=step_recipe.scoring.success_threshold,
    )
    return step_recipe.scoring.length_penalty * penalty
