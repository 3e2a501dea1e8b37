"""Models: loading, LoRA, export, and log-probs with each prompt computed once.

Names are imported on first use, so that `groupwise models list` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.model.device import set_threads
    from groupwise.model.export import export_model
    from groupwise.model.handle import ModelHandle, prepare
    from groupwise.model.load import adopt_model, load_model, load_model_and_tokenizer, load_tokenizer
    from groupwise.model.logprobs import TokenLogps, completion_logps, iter_packs
    from groupwise.model.lora import LoraSettings, adapter_off
    from groupwise.model.precision import MasterWeights

__all__ = [
    "LoraSettings", "MasterWeights", "ModelHandle", "TokenLogps", "adapter_off", "adopt_model", "completion_logps",
    "export_model", "iter_packs", "load_model", "load_model_and_tokenizer", "load_tokenizer", "prepare", "set_threads",
]  # fmt: skip

_HOMES = {
    "adapter_off": "lora", "adopt_model": "load", "completion_logps": "logprobs", "export_model": "export",
    "iter_packs": "logprobs",
    "load_model": "load", "load_model_and_tokenizer": "load", "load_tokenizer": "load", "LoraSettings": "lora",
    "MasterWeights": "precision", "ModelHandle": "handle", "prepare": "handle", "set_threads": "device",
    "TokenLogps": "logprobs",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'groupwise.model' has no attribute {name!r}")
    return getattr(importlib.import_module(f"groupwise.model.{_HOMES[name]}"), name)
