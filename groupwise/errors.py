"""Every error that groupwise raises on purpose.

Each class is also a standard exception, so ``except ValueError`` written by somebody who has never heard of groupwise
still works. A message says what was given, what is allowed and, where there is one, the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GroupwiseError(Exception):
    """The base of them all: ``except GroupwiseError`` catches whatever groupwise refuses."""


class InputError(GroupwiseError, ValueError):
    """An argument of a function has an impossible value or shape."""


class ConfigError(GroupwiseError, ValueError):
    """A recipe or an override cannot be used."""


class DataError(GroupwiseError, ValueError):
    """A row or a file of data cannot be used."""


class RewardError(GroupwiseError, RuntimeError):
    """A reward function broke its contract."""


class CheckpointError(GroupwiseError, RuntimeError):
    """A saved file is missing, damaged or could not be written."""


class RunDirError(GroupwiseError, RuntimeError):
    """A run folder cannot be used: in use by another process, not empty, or not a run folder."""


class ControlError(GroupwiseError, RuntimeError):
    """A control environment cannot be used, or failed on the way."""


class MissingExtraError(GroupwiseError, ImportError):
    """A feature needs an optional package that is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(f"{feature} needs the package {package!r}; install it with: pip install 'groupwise[{extra}]'")
        self._told = (feature, package, extra)

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        """An error that is raised in another process comes back by being made again."""
        return type(self), self._told


def check_choice(what: str, given: object, allowed: Iterable[str], error: type[GroupwiseError] = InputError) -> None:
    """Raise ``error`` unless ``given`` is one of ``allowed``; the message names the nearest neighbour."""
    names = list(allowed)
    if isinstance(given, str) and given in names:
        return
    nearest = difflib.get_close_matches(given, names, n=1) if isinstance(given, str) else []
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise error(f"unknown {what} {given!r}{hint} (allowed: {', '.join(map(repr, names))})")
