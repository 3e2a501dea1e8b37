"""Warm-up and decay of the learning rate."""

from __future__ import annotations

import math


def warmup_decay(step: int, *, warmup_steps: int, total_steps: int, shape: str, final: float) -> float:
    """The factor on the learning rate at ``step`` (from 0).

    Linear warm-up, (step + 1) / warmup_steps, then decay from 1 to ``final`` at ``total_steps``; "constant" stays at 1.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if shape == "constant":
        return 1.0
    if step >= total_steps:
        return float(final)
    share = (step - warmup_steps) / (total_steps - warmup_steps)
    if shape == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return 1 + (final - 1) * share
