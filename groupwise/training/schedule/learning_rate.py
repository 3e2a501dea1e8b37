"""Warm-up and decay of the learning rate."""

from __future__ import annotations

import math

from groupwise.config.sections import OptimizerSection
from groupwise.errors import ConfigError

OWN_SCHEDULES = ("constant", "linear", "cosine")  # the others are those of transformers


def learning_rate_factor(settings: OptimizerSection, step: int, total_steps: int) -> float:
    """The factor on the learning rates at ``step`` (from 0) of a run of ``total_steps``."""
    warmup, from_zero = settings.warmup_steps, settings.warmup_from_zero
    if settings.lr_schedule in OWN_SCHEDULES or (step < warmup and not from_zero):
        return warmup_decay(
            step,
            warmup_steps=warmup,
            total_steps=total_steps,
            shape=settings.lr_schedule,
            final=settings.final_lr_ratio,
            from_zero=from_zero,
        )
    return _transformers_factor(settings, step, total_steps)


def _transformers_factor(settings: OptimizerSection, step: int, total_steps: int) -> float:
    """The factor of transformers' schedule of that name, read from a scheduler of an optimizer without weights."""
    import torch
    from transformers import get_scheduler

    name, options = settings.lr_schedule, settings.lr_schedule_options
    try:
        optimizer = torch.optim.SGD([torch.zeros(())], lr=settings.learning_rate or 1.0)
        scheduler = get_scheduler(name, optimizer, settings.warmup_steps, total_steps, dict(options))
        return float(scheduler.lr_lambdas[0](step))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"optimizer.lr_schedule {name!r} with lr_schedule_options {options}: {error}") from error


def warmup_decay(
    step: int, *, warmup_steps: int, total_steps: int, shape: str, final: float, from_zero: bool = False
) -> float:
    """The factor on the learning rate at ``step`` (from 0).

    Linear warm-up, (step + 1) / warmup_steps or, ``from_zero``, step / warmup_steps; then decay from 1 to ``final`` at
    ``total_steps``; "constant" stays at 1.
    """
    if step < warmup_steps:
        return (step + (not from_zero)) / warmup_steps
    if shape == "constant":
        return 1.0
    if step >= total_steps:
        return float(final)
    share = (step - warmup_steps) / (total_steps - warmup_steps)
    if shape == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return 1 + (final - 1) * share
