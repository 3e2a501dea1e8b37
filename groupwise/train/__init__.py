"""The training loop for language models: `Trainer` runs a recipe, or leaves the loop to you."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.train.events import Callback, Report, Result
    from groupwise.train.rollouts import read_rollouts
    from groupwise.train.trainer import Trainer

_HOMES = {
    "Callback": "events",
    "Report": "events",
    "Result": "events",
    "Trainer": "trainer",
    "read_rollouts": "rollouts",
}

__all__ = ["Callback", "Report", "Result", "Trainer", "read_rollouts"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'groupwise.train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"groupwise.train.{_HOMES[name]}"), name)
