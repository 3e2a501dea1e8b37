"""The outcome of a call as its value, or as an `EnvironmentFailed` that says what happened and where."""

from __future__ import annotations

from typing import Any

from groupwise.environments.background import Outcome
from groupwise.environments.contract import EnvironmentFailed
from groupwise.errors import ConfigError, MissingExtraError, UserCodeError
from groupwise.user_code import describe_failure

NOT_OF_ONE_CONVERSATION = (ConfigError, MissingExtraError, UserCodeError)


def value_of(outcome: Outcome, where: str, seconds: float) -> Any:
    """The value of a call that had so many seconds. Errors that concern every conversation are raised as they are."""
    if outcome.hangs is not None:
        what = f"did not return within {seconds:g} s and was abandoned; it was in {outcome.hangs}"
        raise EnvironmentFailed(what, where, timed_out=True)
    if isinstance(outcome.error, (EnvironmentFailed, *NOT_OF_ONE_CONVERSATION)):
        raise outcome.error
    if outcome.error is not None:
        raise EnvironmentFailed(describe_failure(outcome.error), where) from outcome.error
    return outcome.value
