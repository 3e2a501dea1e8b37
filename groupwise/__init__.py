"""groupwise: a library for group-relative policy optimization (GRPO).

Submodules are imported on first use, so `import groupwise` is fast.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = (
    "algorithms", "config", "control", "core", "data", "errors", "evaluate", "generate", "grouping",
    "model", "plots", "rewards", "rundir", "stats", "tasks", "training", "usmle",
)  # fmt: skip

__all__ = ["__version__", *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"groupwise.{name}")
    raise AttributeError(f"module 'groupwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
