"""The on-policy self-check: sampler and trainer compute the same log-probs, or somebody is told why they may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from groupwise.config import Recipe

if TYPE_CHECKING:
    from groupwise.training.components import RunComponents


def mismatch_warning(metrics: Mapping[str, float], now: Recipe, components: RunComponents) -> str | None:
    """A sentence if, before the update, the two differed by more than ``train.max_logp_mismatch``; None if all is well."""
    mismatch = metrics.get("sampler/logp_difference_mean", 0.0)
    if mismatch <= now.train.max_logp_mismatch:
        return None
    return (
        f"before the update, sampler and trainer differ by {mismatch:.3f} in a token's log-prob on average "
        f"(train.max_logp_mismatch is {now.train.max_logp_mismatch:g}); {_likely_cause(components)}"
    )


def has_dropout(recipe: Recipe) -> bool:
    """Whether the same tokens get other log-probs from one pass to the next."""
    return recipe.model.lora is not None and recipe.model.lora.dropout > 0


def _likely_cause(components: RunComponents) -> str:
    if has_dropout(components.recipe):
        return "the adapter's dropout is the likely cause: set model.lora.dropout = 0"
    if components.handle.dtype in (torch.bfloat16, torch.float16):
        name = str(components.handle.dtype).removeprefix("torch.")
        return (
            f"rounding in {name} is the likely cause: loss.importance_cap = 2.0 corrects for it, model.dtype = "
            "'float32' avoids it"
        )
    return "something changed the weights in between, or the model has layers that act differently in training"
