"""Replays: recorded rollouts under other settings, one step taken again, and two runs to their first difference.

::

    from groupwise.analysis.replay import find_difference, rescore, retake

    rescore("runs/quiz", settings={"advantages.scale": "none"}).total.sign_changes
    retake("runs/quiz", 412, settings={"loss.kl_coef": 0.1}).total_weights.cosine
    find_difference("runs/a", "runs/b").step
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {"rescore": "rescoring", "retake": "retaking", "find_difference": "difference"}

__all__ = ["find_difference", "rescore", "retake"]


def __getattr__(name: str) -> Any:
    """Load a name when it is used: PyTorch takes seconds to load, and comparing two runs does not need it."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
