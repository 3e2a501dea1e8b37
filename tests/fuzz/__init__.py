"""Random input at every border where something from outside comes in.

A border is named once: `tried("rows")` counts an input, and the summary of the tests prints how many each border had.
Whatever the input, the code behind the border accepts it or raises a `GroupwiseError` with one sentence. The inputs are
derived from the tests, so each run tries the same ones; `make test-all` tries many more than `make test`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import settings

from groupwise.errors import GroupwiseError

TRIED: Counter[str] = Counter()
"""Border: inputs that were tried there. The first one that fails is repeated while Hypothesis shrinks it."""


def tried(border: str) -> None:
    """Count one input."""
    TRIED[border] += 1


def many(factor: int = 5) -> Any:
    """A decorator: ``factor`` times as many examples as an ordinary property."""
    return settings(max_examples=settings().max_examples * factor)


def accepted(border: str, call: Callable[[], Any]) -> Any:
    """The result of ``call``, or None if it refused its input. Any other error is a failure of the test."""
    tried(border)
    try:
        return call()
    except GroupwiseError as error:
        message = str(error)
        assert message.strip(), "an error without a message"
        assert len(message) < 4000, f"an error of {len(message)} characters"
        return None
