"""The errors that groupwise raises.

Each class also inherits from a standard exception, so ``except ValueError`` works as usual. A message says what is
wrong, what is allowed and, if there is one, the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GroupwiseError(Exception):
    """Base class: ``except GroupwiseError`` catches every error of groupwise."""


class InputError(GroupwiseError, ValueError):
    """An argument of a function has an invalid value or shape."""


class ConfigError(GroupwiseError, ValueError):
    """A recipe or an override is invalid."""


class DataError(GroupwiseError, ValueError):
    """A row or a data file is invalid."""


class RewardError(GroupwiseError, RuntimeError):
    """A reward function failed or returned an invalid value."""


class CheckpointError(GroupwiseError, RuntimeError):
    """A saved file is missing, damaged or could not be written."""


class RunDirError(GroupwiseError, RuntimeError):
    """A run folder is in use by another process, not empty, or not a run folder."""


class ControlError(GroupwiseError, RuntimeError):
    """A control environment is invalid or failed."""


class MissingExtraError(GroupwiseError, ImportError):
    """A feature needs an optional package that is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(f"{feature} needs the package {package!r}; install it with: pip install 'groupwise[{extra}]'")
        self._arguments = (feature, package, extra)

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        """Pickle by the constructor's arguments, so that a worker process can raise it."""
        return type(self), self._arguments


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """The end of a sentence that suggests the nearest allowed name; empty if none is near."""
    nearest = difflib.get_close_matches(name, list(allowed), n=1) if isinstance(name, str) else []
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def check_integer(name: str, value: object, least: int, error: type[GroupwiseError] = InputError) -> int:
    """The value, or an error if it is not an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise error(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def check_choice(what: str, value: object, allowed: Iterable[str], error: type[GroupwiseError] = InputError) -> None:
    """Raise ``error`` unless ``value`` is one of ``allowed``; the message suggests the nearest one."""
    names = list(allowed)
    if not isinstance(value, str) or value not in names:
        listed = ", ".join(map(repr, names))
        raise error(f"unknown {what} {value!r}{did_you_mean(value, names)} (allowed: {listed})")
