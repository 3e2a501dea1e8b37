"""groupwise: a library for group-relative policy optimization (GRPO).

Submodules and the names below are imported on first use, so `import groupwise` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.config import Recipe, load_recipe, make_recipe
    from groupwise.training import Callback, RunResult, StepReport, Trainer, read_rollouts

__version__ = "0.2.0"

_SUBMODULES = (
    "algorithms", "config", "control", "conversations", "core", "data", "environments", "errors", "evaluate",
    "generate", "grouping", "model", "plots", "rewards", "rundir", "stats", "tasks", "training", "usmle",
)  # fmt: skip

_HOMES = {
    "Callback": "training", "Recipe": "config", "RunResult": "training", "StepReport": "training",
    "Trainer": "training", "load_recipe": "config", "make_recipe": "config", "read_rollouts": "training",
}  # fmt: skip

__all__ = [
    "Callback", "Recipe", "RunResult", "StepReport", "Trainer", "__version__", "algorithms", "config", "control",
    "conversations", "core", "data", "environments", "errors", "evaluate", "generate", "grouping", "load_recipe",
    "make_recipe", "model", "plots", "read_rollouts", "rewards", "rundir", "stats", "tasks", "training", "usmle",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"groupwise.{_HOMES[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"groupwise.{name}")
    raise AttributeError(f"module 'groupwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
