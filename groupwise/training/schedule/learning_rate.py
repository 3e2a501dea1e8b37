"""Warm-up and decay of the learning rate."""

from __future__ import annotations

import math

from groupwise.errors import ConfigError, check_choice
from groupwise.training.schedule.rules import check_int, check_number

DECAYS = ("constant", "linear", "cosine")


def warmup_decay(step: int, *, warmup_steps: int, total_steps: int | None, shape: str, final: float) -> float:
    """The factor on the learning rate at ``step`` (from 0).

    Linear warm-up, (step + 1) / warmup_steps, then decay from 1 to ``final`` at ``total_steps``. "constant" stays at 1
    and needs no total.
    """
    check_choice("decay of the learning rate", shape, DECAYS, ConfigError)
    check_int("warmup_steps", warmup_steps, 0)
    check_number("the final share of the learning rate", final)
    if not 0 <= final <= 1:
        raise ConfigError(f"the final share of the learning rate must be between 0 and 1, got {final}")
    if total_steps is not None:
        check_int("total_steps", total_steps, 1)
    elif shape != "constant":
        raise ConfigError(f"a {shape} decay needs total_steps: set the run's number of steps, or use 'constant'")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if shape == "constant" or total_steps is None:
        return 1.0
    if step >= total_steps:
        return float(final)
    share = (step - warmup_steps) / (total_steps - warmup_steps)
    if shape == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return 1 + (final - 1) * share
