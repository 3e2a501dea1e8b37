"""Checks of arguments. None of them reads a tensor's values, so none waits for a GPU."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import MAX_TEMPERATURE, MIN_TEMPERATURE, InputError


def check_tensors(**tensors: Any) -> None:
    """All the arguments are tensors."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise InputError(f"{name} must be a tensor, got {'None' if value is None else type(value).__name__}")


def check_same_shape(**tensors: Any) -> None:
    """All the arguments are tensors of one shape."""
    check_tensors(**tensors)
    (first_name, first), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.shape != first.shape:
            raise InputError(
                f"{name} has shape {tuple(tensor.shape)} but {first_name} has {tuple(first.shape)}; they must be equal"
            )


def not_none(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def check_mask(name: str, mask: Tensor, shape: torch.Size) -> Tensor:
    """The mask as booleans: any non-zero value is true."""
    check_tensors(**{name: mask})
    if mask.shape != shape:
        raise InputError(f"{name} has shape {tuple(mask.shape)}; expected {tuple(shape)}")
    return mask if mask.dtype == torch.bool else mask != 0


def check_at_least(name: str, value: float, bound: float) -> None:
    if not is_number(value) or not value >= bound:
        raise InputError(f"{name} must be a finite number of at least {bound:g}, got {value!r}")


def check_above(name: str, value: float, bound: float) -> None:
    if not is_number(value) or not value > bound:
        raise InputError(f"{name} must be a finite number above {bound:g}, got {value!r}")


def check_temperature(value: float) -> None:
    """A temperature that the logits can be divided by without an overflow of float32."""
    if not is_number(value) or not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        limits = f"from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        raise InputError(f"temperature must be a number {limits}, got {value!r}; for lower ones sample greedily")


def check_share(name: str, value: float, interval: str) -> None:
    """A number from 0 to 1. A round bracket of ``interval``, such as "(0, 1]", excludes that end."""
    excluded = {end for end, bracket in ((0, interval[0]), (1, interval[-1])) if bracket in "()"}
    if not is_number(value) or not 0 <= value <= 1 or value in excluded:
        raise InputError(f"{name} must be in {interval}, got {value!r}")


def is_number(value: object) -> bool:
    """A finite number: not a string, not NaN, and not True."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def working(tensor: Tensor) -> Tensor:
    """The tensor in the dtype of reductions: float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
