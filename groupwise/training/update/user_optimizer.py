"""A torch optimizer, and a scheduler of its learning rate, that a user gives to the trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from groupwise.errors import CheckpointError, ConfigError
from groupwise.model.precision import MasterWeights
from groupwise.text import excerpt
from groupwise.training.update.optimizer import check_optimizer


class UserOptimizer:
    """The user's optimizer, moved from the model's parameters to their masters, and the user's scheduler, if any.

    The optimizer's groups keep their settings; without a scheduler the recipe's warm-up and decay apply to their rates.
    A checkpoint holds the settings of the groups and the scheduler's state, so that a resumed run continues with them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "lr_scheduler ReduceLROnPlateau needs a metric in every step; use a rule ([[rules]]) such as "
                'when = "reward < 0.5", then = "learning_rate * 0.5"'
            )
        if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigError("lr_scheduler is a scheduler of another optimizer than the one that is given")
        self._scheduler_state()

    def move_to(self, model: torch.nn.Module, masters: MasterWeights) -> torch.optim.Optimizer:
        """The optimizer, on the masters of the model's parameters that it was made for."""
        optimizer = self.optimizer
        check_optimizer(optimizer, masters, "the optimizer")
        master_of = dict(masters.named_parameters())
        names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
        state = dict(optimizer.state)
        optimizer.state.clear()
        for group in optimizer.param_groups:
            unknown = [parameter for parameter in group["params"] if names.get(parameter) not in master_of]
            if unknown:
                raise ConfigError(
                    f"the optimizer has {len(unknown)} parameters that the model does not train; make it of the "
                    "parameters of the model that the trainer gets (with an adapter: those of the adapter)"
                )
            group["params"] = [master_of[names[parameter]] for parameter in group["params"]]
            group.setdefault("initial_lr", group["lr"])
        for parameter, values in state.items():
            optimizer.state[master_of[names[parameter]]] = values
        return optimizer

    def step(self) -> None:
        """After a step of the run: let the scheduler change the rates."""
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def has_schedule(self) -> bool:
        return self.scheduler is not None

    def state(self) -> dict[str, Any]:
        groups = [
            {name: value for name, value in group.items() if name != "params" and _is_plain(value)}
            for group in self.optimizer.param_groups
        ]
        return {"groups": groups, "scheduler": self._scheduler_state()}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        if state is None:
            raise ConfigError("this run was started without an optimizer of its own; resume it without `optimizer`")
        groups = self.optimizer.param_groups
        if len(state["groups"]) != len(groups) or (state["scheduler"] is None) != (self.scheduler is None):
            raise ConfigError(
                f"the run was saved with {len(state['groups'])} groups of weights and "
                f"{'no' if state['scheduler'] is None else 'a'} lr_scheduler; resume it with the same optimizer and "
                "scheduler as before"
            )
        for group, saved in zip(groups, state["groups"], strict=True):
            for name, value in saved.items():
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
        if self.scheduler is not None:
            try:
                self.scheduler.load_state_dict(dict(state["scheduler"]))
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"the saved state of lr_scheduler is damaged: {excerpt(error, 200)}") from error

    def _scheduler_state(self) -> dict[str, Any] | None:
        if self.scheduler is None:
            return None
        state = dict(self.scheduler.state_dict())
        if not _is_plain(state):
            raise ConfigError(
                f"the state_dict of lr_scheduler ({type(self.scheduler).__name__}) holds more than numbers, text, "
                "lists and tables, so that a resumed run could not continue with it"
            )
        return state


def user_optimizer(optimizer: Any, scheduler: Any, model: Any) -> UserOptimizer | None:
    """The optimizer and scheduler that were given to a trainer with this ``model``; None if there is none."""
    if optimizer is None and scheduler is None:
        return None
    if optimizer is None:
        raise ConfigError("lr_scheduler is given without its optimizer; give both, or neither")
    if model is None:
        raise ConfigError("optimizer is given without the model whose parameters it holds; give the loaded model too")
    return UserOptimizer(optimizer, scheduler)


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
