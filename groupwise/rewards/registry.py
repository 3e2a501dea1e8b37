"""Rewards by name, with options: the built-in ones and the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from groupwise.errors import ConfigError, GroupwiseError, InputError, check_choice
from groupwise.redaction import resolve_secrets
from groupwise.rewards.contract import reward_error_reason
from groupwise.rewards.judge import judge
from groupwise.rewards.math_equal import math_equal
from groupwise.rewards.reward_model import reward_model
from groupwise.rewards.writing import keywords, length_band, repetition
from groupwise.text import excerpt
from groupwise.user_code import load_function, names_file

BUILTIN: dict[str, Callable[..., Callable[..., Any]]] = {
    "judge": judge,
    "reward_model": reward_model,
    "length_band": length_band,
    "repetition": repetition,
    "keywords": keywords,
    "math_equal": math_equal,
}
"""The rewards that a recipe can name without a module."""


def make_reward(function: str, options: Mapping[str, Any] | None = None, place: str = "options") -> Callable[..., Any]:
    """The reward of a recipe's entry: ``function`` is a name in `BUILTIN`, or module:function.

    A built-in function is called with the options and returns the reward. A user's function is, too, if there are
    options; without options it is the reward itself. An option ``{"env": "NAME"}`` is the value of that environment
    variable; ``place`` names the options in the error if it is not set.
    """
    options = resolve_secrets(options or {}, place)
    if function in BUILTIN:
        return _build(BUILTIN[function], function, options)
    if isinstance(function, str) and ":" not in function and not names_file(function):
        check_choice("reward", function, [*BUILTIN, "module:function", "file.py:function"], ConfigError)
    loaded = load_function(function)
    return _build(loaded, function, options) if options else loaded


def _build(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    _check_options(factory, name, options)
    try:
        reward = factory(**options)
    except (ConfigError, InputError) as error:
        raise ConfigError(f"reward {name!r}: {error}") from error
    except (GroupwiseError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too
        raise ConfigError(f"reward {name!r}: building it {reward_error_reason(error)}") from error
    if not callable(reward):
        raise ConfigError(
            f"reward {name!r} has options, so it is called with them and has to return the function that scores; it "
            f"returned {excerpt(reward)} ({type(reward).__name__})"
        )
    return reward  # type: ignore[no-any-return]


def _check_options(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` unless the factory's signature takes these options and needs no others."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return
    if "completions" in parameters:
        raise ConfigError(
            f"reward {name!r} scores completions itself, so it takes no options; leave them out, or name a function "
            "that is called with them and returns a reward"
        )
    by_keyword = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    allowed = [parameter.name for parameter in parameters.values() if parameter.kind in by_keyword]
    if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        for option in options:
            check_choice(f"option of reward {name!r}:", option, allowed, ConfigError)
    for option in allowed:
        if parameters[option].default is Parameter.empty and option not in options:
            remedy = f"add options = {{ {option} = … }} to its entry"
            raise ConfigError(f"reward {name!r} needs the option {option!r}: {remedy}")
