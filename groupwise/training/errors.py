"""Running out of memory in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from groupwise.errors import GroupwiseError, is_out_of_memory

SMALLEST_BUDGET = 64  # tokens of a pack; smaller packs save no memory

_Result = TypeVar("_Result")


class OutOfMemoryError(GroupwiseError, RuntimeError):
    """A single sample, or the optimizer's state, does not fit in memory."""


def retry_with_less_memory(
    compute: Callable[[], _Result],
    *,
    can_shrink: Callable[[], bool] = lambda: False,
    shrink: Callable[[], None] = lambda: None,
    too_large: Callable[[], str] | None = None,
) -> _Result:
    """``compute()``; if memory runs out, again after each ``shrink()``, for as long as ``can_shrink()`` is true.

    After that an `OutOfMemoryError` with the message ``too_large()`` is raised, or without one the original error.
    """
    while True:
        try:
            return compute()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if not can_shrink():
                if too_large is None:
                    raise
                raise OutOfMemoryError(too_large()) from error
        # Outside the except block: the error's traceback keeps the memory of the failed pass.
        shrink()


def halve_budget(token_budget: int) -> int:
    """The next smaller token budget."""
    return max(SMALLEST_BUDGET, token_budget // 2)
