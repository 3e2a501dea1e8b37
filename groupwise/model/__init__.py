"""Models: loading, LoRA, export, and log-probs with each prompt computed once.

Names are imported on first use, so that `groupwise models list` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.model.device import compute_dtype, free_memory, resolve_device, set_threads, usable_cpus
    from groupwise.model.export import export_model
    from groupwise.model.handle import ModelHandle, prepare
    from groupwise.model.load import load_model, load_model_and_tokenizer, load_tokenizer
    from groupwise.model.logprobs import TokenLogps, completion_logps, iter_packs, padded_logps
    from groupwise.model.lora import LoraSettings, adapter_off, add_lora, is_lora
    from groupwise.model.packing import plan_packs
    from groupwise.model.precision import MasterWeights
    from groupwise.model.weights import CATALOGUE, cached, fetch

_HOME = {
    "device": ("compute_dtype", "free_memory", "resolve_device", "set_threads", "usable_cpus"),
    "export": ("export_model",),
    "load": ("load_model", "load_model_and_tokenizer", "load_tokenizer"),
    "logprobs": ("TokenLogps", "completion_logps", "iter_packs", "padded_logps"),
    "packing": ("plan_packs",),
    "lora": ("LoraSettings", "adapter_off", "add_lora", "is_lora"),
    "precision": ("MasterWeights",),
    "handle": ("ModelHandle", "prepare"),
    "weights": ("CATALOGUE", "cached", "fetch"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "CATALOGUE",
    "LoraSettings",
    "MasterWeights",
    "ModelHandle",
    "TokenLogps",
    "adapter_off",
    "add_lora",
    "cached",
    "completion_logps",
    "compute_dtype",
    "export_model",
    "fetch",
    "free_memory",
    "is_lora",
    "iter_packs",
    "load_model",
    "load_model_and_tokenizer",
    "load_tokenizer",
    "padded_logps",
    "plan_packs",
    "prepare",
    "resolve_device",
    "set_threads",
    "usable_cpus",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"groupwise.model.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'groupwise.model' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
