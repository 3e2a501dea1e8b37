"""The training loop for language models: `Trainer` runs a recipe, or leaves the loop to you."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.training.results import RunResult, StepReport
    from groupwise.training.store.rollout_files import read_rollouts
    from groupwise.training.trainer import Callback, Trainer

_HOMES = {
    "Callback": "trainer",
    "StepReport": "results",
    "RunResult": "results",
    "Trainer": "trainer",
    "read_rollouts": "store.rollout_files",
}

__all__ = ["Callback", "RunResult", "StepReport", "Trainer", "read_rollouts"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'groupwise.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"groupwise.training.{_HOMES[name]}"), name)
