"""What the core refuses, in one place. Nothing here reads a tensor's values, so nothing waits for a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from groupwise.errors import InputError


def shape_of(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def check_same_shape(**tensors: Tensor | None) -> None:
    """All the tensors that are given have the first one's shape."""
    (first_name, first), *rest = tensors.items()
    if first is None:
        raise InputError(f"{first_name} is missing")
    for name, tensor in rest:
        if tensor is not None and tensor.shape != first.shape:
            raise InputError(
                f"{name} has shape {shape_of(tensor)} but {first_name} has {shape_of(first)}; they must be equal"
            )


def check_at_least(name: str, value: float, bound: float) -> None:
    if not value >= bound or math.isinf(value):
        raise InputError(f"{name} must be a finite number of at least {bound:g}, got {value!r}")


def check_above(name: str, value: float, bound: float) -> None:
    if not value > bound or math.isinf(value):
        raise InputError(f"{name} must be a finite number above {bound:g}, got {value!r}")


def check_mask(name: str, mask: Tensor, shape: torch.Size) -> Tensor:
    """A mask as booleans: whatever is not zero counts as true."""
    if mask.shape != shape:
        raise InputError(f"{name} has shape {shape_of(mask)}; expected {tuple(shape)}")
    return mask if mask.dtype == torch.bool else mask != 0


def working(tensor: Tensor) -> Tensor:
    """The tensor in the type that reductions use: float32, or float64 where that was given."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
