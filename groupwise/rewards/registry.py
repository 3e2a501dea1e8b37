"""Rewards that are made from options: those that come with groupwise, by their short names, and the user's own."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from groupwise.errors import ConfigError, GroupwiseError, InputError, check_choice
from groupwise.rewards.contract import reward_error_reason
from groupwise.rewards.judge import judge
from groupwise.rewards.load import load_function
from groupwise.rewards.math_equal import math_equal
from groupwise.rewards.reward_model import reward_model
from groupwise.rewards.text import excerpt
from groupwise.rewards.writing import keywords, length_band, repetition

BUILTIN: dict[str, Callable[..., Callable[..., Any]]] = {
    "judge": judge,
    "reward_model": reward_model,
    "length_band": length_band,
    "repetition": repetition,
    "keywords": keywords,
    "math_equal": math_equal,
}
"""The rewards that a recipe can name without a module: put one here to add it."""


def make_reward(function: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The reward that an entry of a recipe asks for: ``function`` as a short name of `BUILTIN` or as module:function.

    A short name is called with the options and returns the reward. So is a function of the user's, if there are
    options; without any it is the reward itself.
    """
    if function in BUILTIN:
        return _made(BUILTIN[function], function, options or {})
    if isinstance(function, str) and ":" not in function:
        check_choice("reward", function, [*BUILTIN, "module:function", "file.py:function"], ConfigError)
    loaded = load_function(function)
    return _made(loaded, function, options) if options else loaded


def _made(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    _check_options(factory, name, options)
    try:
        reward = factory(**options)
    except (ConfigError, InputError) as error:
        raise ConfigError(f"reward {name!r}: {error}") from error
    except GroupwiseError:
        raise
    except Exception as error:
        raise ConfigError(f"reward {name!r}: making it {reward_error_reason(error)}") from error
    if not callable(reward):
        raise ConfigError(
            f"reward {name!r} has options, so it is called with them and has to return the function that scores; it "
            f"returned {excerpt(reward)} ({type(reward).__name__})"
        )
    made: Callable[..., Any] = reward
    return made


def _check_options(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` unless the factory's signature takes these options and needs no others."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin that does not tell; its own error has to do
        return
    if "completions" in parameters:
        raise ConfigError(
            f"reward {name!r} scores completions itself, so it takes no options; leave them out, or name a function "
            "that is called with them and returns a reward"
        )
    named = [
        each.name
        for each in parameters.values()
        if each.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for given in options:
        if given not in named and not takes_all:
            nearest = difflib.get_close_matches(str(given), named, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            allowed = ", ".join(map(repr, named)) or "none"
            raise ConfigError(f"reward {name!r} has no option {given!r}{hint} (allowed: {allowed})")
    for each in named:
        if parameters[each].default is inspect.Parameter.empty and each not in options:
            raise ConfigError(f"reward {name!r} needs the option {each!r}: add options = {{ {each} = … }} to its entry")
