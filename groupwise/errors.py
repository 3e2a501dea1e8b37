"""The errors that groupwise raises.

Each class also inherits from a standard exception, so ``except ValueError`` works as usual. A message says what is
wrong, what is allowed and, if there is one, the remedy.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

MAX_FLOAT32 = 3.4028234663852886e38
MAX_GRADIENT_NORM = 1e19  # Adam squares a gradient in float32
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6  # outside them float32 logits overflow, or all become equal
SIMILAR_FILE = 0.75  # of difflib: one wrong letter in four, or two swapped ones
LONGEST = 3000  # characters of a message
# Memory ran out: messages of a CPU, of MPS, and of a GPU whose memory was taken before its libraries were initialised.
MEMORY_MESSAGES = (
    "can't allocate memory",
    "MPS backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def shorten(text: str, length: int = LONGEST) -> str:
    """The text, without its middle if it is longer than ``length``."""
    return text if len(text) <= length else f"{text[: length * 2 // 3]} … {text[-length // 3 :]}"


class GroupwiseError(Exception):
    """Base class: ``except GroupwiseError`` catches every error of groupwise.

    A very long message loses its middle: it repeats what a user or a file gave, which may be of any length.
    """

    on_all_ranks = False  # whether each process of the run raises an error at this place, so that all can save together

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(shorten(part) if isinstance(part, str) else part for part in arguments))


class InputError(GroupwiseError, ValueError):
    """An argument of a function has an invalid value or shape."""


class ConfigError(GroupwiseError, ValueError):
    """A recipe or an override is invalid."""


class ArgumentTypeError(ConfigError, TypeError):
    """An argument of a constructor is of a kind that it cannot be."""


class RecipeErrors(ConfigError):
    """Several errors of a recipe, each with its source: a file, or "on the command line"."""

    def __init__(self, errors: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{source}: {sentence}" for source, sentence in errors))
        self.errors = tuple((source, shorten(sentence)) for source, sentence in errors)

    def __reduce__(self) -> tuple[type[RecipeErrors], tuple[tuple[tuple[str, str], ...]]]:
        """Pickle by the constructor's arguments."""
        return type(self), (self.errors,)

    def lines(self) -> list[str]:
        """A heading and one line per error, which names its source unless all have the same."""
        sources = {source for source, _ in self.errors}
        if len(sources) > 1:
            return [f"{len(self.errors)} errors:", *(f"{source}: {sentence}" for source, sentence in self.errors)]
        (source,) = sources
        place = source if source.startswith("on ") else f"in {source}"
        return [f"{len(self.errors)} errors {place}:", *(sentence for _, sentence in self.errors)]


class DataError(GroupwiseError, ValueError):
    """A row or a data file is invalid."""


class RewardError(GroupwiseError, RuntimeError, ValueError):
    """A reward function failed or returned an invalid value."""


class TeacherServerError(GroupwiseError, RuntimeError):
    """A teacher's server does not answer, or not with log-probs."""


class UserCodeError(GroupwiseError, RuntimeError):
    """A user's function, such as a task or a loss, failed, or tried to end the process."""


class NotFiniteError(GroupwiseError, ArithmeticError):
    """A model's logits, a loss, a gradient or a weight is NaN or infinite."""


class CheckpointError(GroupwiseError, RuntimeError):
    """A saved file is missing, damaged or could not be written."""


class RunDirError(GroupwiseError, RuntimeError):
    """A run folder is in use by another process, not empty, or not a run folder."""


class RankError(GroupwiseError, RuntimeError):
    """A process of a run of several failed, died, or does not answer.

    ``main_is_lost``: rank 0, which talks to the user, is dead or hangs.
    """

    def __init__(self, message: str, *, main_is_lost: bool = False) -> None:
        super().__init__(message)
        self.main_is_lost = main_is_lost


class ControlError(GroupwiseError, RuntimeError):
    """A control environment is invalid or failed."""


class MissingExtraError(GroupwiseError, ImportError):
    """A feature needs an optional package that is not installed; ``more`` are further such features."""

    def __init__(self, feature: str, package: str, extra: str, *more: tuple[str, str, str]) -> None:
        missing = [(feature, package, extra), *more]
        needs = "; ".join(f"{feature} needs the package {package!r}" for feature, package, _ in missing)
        extras = ",".join(dict.fromkeys(extra for *_, extra in missing))
        super().__init__(f"{needs}; install {'them' if more else 'it'} with: pip install 'groupwise[{extras}]'")
        self._arguments = (feature, package, extra, *more)

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[Any, ...]]:
        """Pickle by the constructor's arguments, so that a worker process can raise it."""
        return type(self), self._arguments


def check_installed(needs: Iterable[tuple[str, str, str]]) -> None:
    """Raise an error that names every package that is missing; ``needs`` has (feature, package, extra). Loads none."""
    missing: dict[tuple[str, str], tuple[str, str, str]] = {}  # one package of each feature and extra is enough
    for feature, package, extra in needs:
        if not is_installed(package):
            missing.setdefault((feature, extra), (feature, package, extra))
    if missing:
        first, *others = missing.values()
        raise MissingExtraError(*first, *others)


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    module = package.replace("-", "_")
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error from torch means that memory ran out. torch is not loaded for that."""
    if isinstance(error, GroupwiseError):
        return False
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return named or any(text in str(error) for text in MEMORY_MESSAGES)


def did_you_mean(name: object, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a sentence that suggests the nearest allowed name; empty if none is near (``cutoff`` of difflib)."""
    nearest = difflib.get_close_matches(name, list(allowed), n=1, cutoff=cutoff) if isinstance(name, str) else []
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def nearest_file(name: str, names: Iterable[str]) -> str | None:
    """The name that differs from ``name`` by a typo or only in its extension; None if there is none.

    Extensions are not compared: otherwise two short names with the same one would be similar.
    """

    def similarity(other: str) -> tuple[float, bool]:
        stem, other_stem = (os.path.splitext(text.lower())[0] for text in (name, other))
        same = name.lower().partition(".")[0] == other.lower().partition(".")[0] != ""
        ratio = 1.0 if same else difflib.SequenceMatcher(None, stem, other_stem).ratio()
        return ratio, os.path.splitext(name)[1] == os.path.splitext(other)[1]

    best = max(sorted(names), key=similarity, default=None)
    return best if best is not None and similarity(best)[0] >= SIMILAR_FILE else None


def check_integer(name: str, value: object, least: int, error: type[GroupwiseError] = InputError) -> int:
    """The value, or an error if it is not an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise error(f"{name} must be an integer of at least {least}, got {value!r:.200}")
    return value


def check_choice(what: str, value: object, allowed: Iterable[str], error: type[GroupwiseError] = InputError) -> None:
    """Raise ``error`` unless ``value`` is one of ``allowed``; the message suggests the nearest one."""
    names = list(allowed)
    if not isinstance(value, str) or value not in names:
        listed = ", ".join(map(repr, names))
        raise error(f"unknown {what} {value!r:.200}{did_you_mean(value, names)} (allowed: {listed})")
