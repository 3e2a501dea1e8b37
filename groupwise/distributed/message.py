"""Values as bytes: tensors, numbers, texts, and lists and tables of them.

Nothing is pickled, so a message can hold data but no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from groupwise.errors import InputError

TENSOR = "__tensor__"


def encode(value: Any) -> bytes:
    """A value as bytes; tuples become lists, and tensors are moved to the CPU."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}

    def replaced(part: Any) -> Any:
        if isinstance(part, Tensor):
            name = str(len(tensors))
            tensors[name] = part.detach().cpu().contiguous().clone()  # two names may share memory
            return {TENSOR: name}
        if isinstance(part, Mapping):
            if not all(isinstance(key, str) for key in part):
                raise InputError(f"a message's keys must be texts, got {sorted(map(repr, part))[:3]}")
            return {key: replaced(entry) for key, entry in part.items()}
        if isinstance(part, (list, tuple)):
            return [replaced(entry) for entry in part]
        if part is None or isinstance(part, (str, int, float)):
            return part
        raise InputError(f"a message holds tensors, numbers, texts, lists and tables, not {type(part).__name__}")

    text = json.dumps(replaced(value)).encode("ascii")
    return len(text).to_bytes(8, "little") + text + (save(tensors) if tensors else b"")


def decode(data: bytes) -> Any:
    """The value of `encode`'s bytes."""
    from safetensors.torch import load

    end = 8 + int.from_bytes(data[:8], "little")
    tensors = load(data[end:]) if len(data) > end else {}

    def restored(part: Any) -> Any:
        if isinstance(part, dict):
            if part.keys() == {TENSOR}:
                return tensors[part[TENSOR]]
            return {key: restored(entry) for key, entry in part.items()}
        return [restored(entry) for entry in part] if isinstance(part, list) else part

    return restored(json.loads(data[8:end]))
