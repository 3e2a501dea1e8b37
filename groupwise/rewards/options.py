"""Checks of the options that built-in rewards take."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from groupwise.errors import ConfigError
from groupwise.text import excerpt


def is_finite_number(value: object) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def check_number(name: str, value: Any, least: float) -> float:
    if not is_finite_number(value) or value < least:
        raise ConfigError(f"{name} must be a number of at least {least:g}, got {excerpt(value)}")
    return float(value)


def check_share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"{name} must be a share above 0 and up to 1, got {excerpt(value)}")


def check_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name} must be a text, got {excerpt(value)}")
    return value


def check_after(after: object) -> None:
    if after is not None and not isinstance(after, str):
        raise ConfigError(f"after must be the text that an answer follows, or '' for none, got {excerpt(after)}")
