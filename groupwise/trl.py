"""A drop-in for TRL: ``from groupwise.trl import GRPOConfig, GRPOTrainer``. See docs/trl.md.

Where TRL is installed, its other names can be imported from here too, so that a line such as
``from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser`` only needs another module. They are TRL's own.
"""

from typing import Any

from groupwise.errors import check_installed, is_installed

check_installed(("groupwise.trl", package, "trl") for package in ("accelerate", "datasets"))

from groupwise.integrations.trl.config import GRPOConfig  # noqa: E402 - after the check, which names the extra
from groupwise.integrations.trl.trainer import GRPOTrainer  # noqa: E402

__all__ = ["GRPOConfig", "GRPOTrainer"]


def __getattr__(name: str) -> Any:
    """Another name of TRL."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not is_installed("trl"):
        # Not an AttributeError, which `from groupwise.trl import …` would replace by a message of its own.
        raise ImportError(
            f"groupwise.trl has GRPOConfig and GRPOTrainer; {name} is one of TRL's own, which is not installed "
            "(`pip install trl`)"
        )
    import trl

    if not hasattr(trl, name):
        raise AttributeError(f"neither groupwise.trl nor trl has {name}")
    return getattr(trl, name)
