"""Warns when the sampler and the trainer compute different log-probs before the first update of a batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from groupwise.config import Recipe


def mismatch_warning(metrics: Mapping[str, float], step_recipe: Recipe, dtype: torch.dtype) -> str | None:
    """A message if the mean difference is above ``train.max_logp_mismatch``; ``dtype`` is the model's."""
    mismatch = metrics.get("sampler/logp_difference_mean", 0.0)
    limit = step_recipe.train.max_logp_mismatch
    if mismatch <= limit:
        return None
    return (
        f"before the update, sampler and trainer differ by {mismatch:.3f} in a token's log-prob on average "
        f"(train.max_logp_mismatch is {limit:g}); {_likely_cause(step_recipe, dtype)}"
    )


def _likely_cause(step_recipe: Recipe, dtype: torch.dtype) -> str:
    if step_recipe.model.has_dropout:
        return "LoRA dropout is the likely cause: set model.lora.dropout = 0"
    if dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return (
            f"rounding in {name} is the likely cause: loss.importance_cap = 2.0 corrects for it, "
            "model.dtype = 'float32' avoids it"
        )
    return "the weights changed in between, or the model has layers that behave differently in training"
