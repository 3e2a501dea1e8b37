"""Warns when the sampler and the trainer compute different log-probs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from groupwise.config import Recipe


def mismatch_warning(metrics: Mapping[str, float], step_recipe: Recipe, dtype: torch.dtype) -> str | None:
    """A message if sampler and trainer compute different log-probs before the first update of a batch."""
    mismatch, limit = metrics.get("sampler/logp_difference_mean", 0.0), step_recipe.train.max_logp_mismatch
    if not mismatch > limit:  # also if it is NaN: not measured
        return None
    if metrics.get("async/staleness_max"):  # older weights have sampled, so that the log-probs have to differ
        return None
    cause = "the weights changed in between, or the model has layers that behave differently in training"
    if step_recipe.model.has_dropout:
        cause = "LoRA dropout is the likely cause: set model.lora.dropout = 0"
    elif dtype in (torch.bfloat16, torch.float16):
        cause = (
            f"rounding in {str(dtype).removeprefix('torch.')} is the likely cause: loss.importance_cap = 2.0 corrects "
            "for it, model.dtype = 'float32' avoids it"
        )
    return (
        f"before the update, sampler and trainer differ by {mismatch:.3f} in a token's log-prob on average "
        f"(train.max_logp_mismatch is {limit:g}); {cause}"
    )
