"""The optimizer and its scheduler as transformers' Trainer has them: two groups, a `LambdaLR`, and their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from groupwise.integrations.trl.run import TrlRun
from groupwise.text import Say
from groupwise.training.update.user_optimizer import UserOptimizer


def follow_scheduler(
    run: TrlRun,
    args: Any,
    given: tuple[torch.optim.Optimizer | None, Any],
    say: Say,
    *,
    before: Callable[[], None],
    after: Callable[[bool], None],
) -> ScheduledOptimizer:
    """Let a scheduler set the learning rates of a run, so that callbacks may change them.

    It is the one that was ``given``, or transformers' for these arguments. Checkpoints hold its state.
    """
    optimizer, scheduler = given
    if optimizer is None:
        _regroup(run.optimizer, args.weight_decay)
    if scheduler is None:
        make: Any = get_scheduler  # it has no types
        scheduler = make(
            args.lr_scheduler_type,
            optimizer=run.optimizer,
            num_warmup_steps=args.get_warmup_steps(run.total_steps),
            num_training_steps=run.total_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    part = run.user_optimizer = ScheduledOptimizer(run.optimizer, scheduler, say, before, after)
    run.checkpointer.parts = {**run.checkpointer.parts, "user_optimizer": part}
    return part


def _regroup(optimizer: torch.optim.Optimizer, weight_decay: float) -> None:
    """Change the groups to those of transformers: what weight decay applies to, and the rest."""
    groups = optimizer.param_groups
    regrouped = []
    for decays in (True, False):
        weights = [weight for group in groups if group["decays"] is decays for weight in group["params"]]
        options = {name: value for name, value in groups[0].items() if name not in ("params", "embedding", "decays")}
        regrouped.append({"params": weights, **options, "weight_decay": weight_decay if decays else 0.0})
    groups[:] = regrouped


class ScheduledOptimizer(UserOptimizer):
    """An optimizer whose rates a scheduler sets, and the events around its steps. What callbacks have changed in its
    groups is kept when the run is resumed.

    before: called before an update steps the first of its groups, with all of them in the optimizer. after: called
    after the update, before the scheduler sets the next rates, with whether the optimizer was stepped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        say: Say,
        before: Callable[[], None],
        after: Callable[[bool], None],
    ) -> None:
        super().__init__(optimizer, scheduler)
        self.groups, self.say, self._before, self._after = optimizer.param_groups, say, before, after
        self._stepped = False
        self._hook = optimizer.register_step_pre_hook(self._before_group)

    def _before_group(self, *_: Any) -> None:
        if self._stepped:
            return
        self._stepped, group = True, self.optimizer.param_groups
        self.optimizer.param_groups = self.groups
        self._before()
        self.optimizer.param_groups = group

    def step(self) -> None:
        stepped, self._stepped = self._stepped, False
        self._after(stepped)
        super().step()

    def close(self) -> None:
        self._hook.remove()

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        scheduler: Any = self.scheduler
        before = list(scheduler.base_lrs) if isinstance(scheduler, LambdaLR) else None
        super().load_state(state)
        if before is None:
            return
        if before != scheduler.base_lrs:
            self.say(
                f"learning_rate {before[0]:g} has no effect: as in TRL, the resumed run goes on with its own, "
                f"{scheduler.base_lrs[0]:g}"
            )
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
        for group, saved, rate in zip(self.groups, scheduler.get_last_lr(), rates, strict=True):
            if group["lr"] == saved:  # no callback has set it; the length of the run may be another one now
                group["lr"] = rate
        scheduler._last_lr = rates
