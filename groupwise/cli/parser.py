"""The parser of the command line. What it refuses becomes one line that says what to type."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from groupwise.errors import ConfigError, did_you_mean
from groupwise.terminal import write_text

MISSING = "the following arguments are required: "  # how argparse begins this message
SIMILAR = 0.75  # of difflib: two options share at least their dashes
FORMS: dict[Any, str] = {"+": "{} …", "*": "[{} …]", "?": "[{}]", argparse.PARSER: "{} …"}  # positionals, by nargs


class Parser(argparse.ArgumentParser):
    """A parser that raises a `ConfigError` instead of printing its usage and exiting."""

    examples: Sequence[str] = ()
    suggest_action: Callable[[str], str] | None = None
    suggest_option: Callable[[str], str] | None = None
    """The end of the sentence about an unknown action or option, or "" for the nearest one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", int, _integer)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        if message.startswith(MISSING):
            raise ConfigError(self._missing(message.removeprefix(MISSING).split(", ")))
        argument, colon, reason = message.removeprefix("argument ").partition(": ")
        if not message.startswith("argument ") or not colon:
            raise ConfigError(f"{message} (see `{self.prog} --help`)")
        option = argument.split("/")[-1]  # the long form of -n/--samples
        if reason.startswith("must be "):  # of the functions below
            raise ConfigError(f"{option} {reason}")
        reason = {"expected one argument": "needs a value"}.get(reason, reason)
        raise ConfigError(f"{option} {reason} (see `{self.prog} --help`)")

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """Raise the error for words that are left over."""
        word = words[0].partition("=")[0]
        if not word.startswith("-"):
            raise ConfigError(f"{' '.join(words)!r} is not expected; usage: {self.short_usage()}")
        near = self.suggest_option(word) if self.suggest_option else ""
        near = near or did_you_mean(word, self.long_options(), SIMILAR)
        raise ConfigError(f"`{self.prog}` has no option {word}{near or f' (see `{self.prog} --help`)'}")

    def long_options(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]

    def short_usage(self) -> str:
        """The command with its positional arguments on one line."""
        if self.usage is not None:
            return self.usage
        positional = [action for action in self._actions if not action.option_strings]
        words = [FORMS.get(action.nargs, "{}").format(action.metavar or action.dest) for action in positional]
        has_options = any(action.dest != "help" for action in self._actions if action.option_strings)
        return " ".join([self.prog, *words, *(["[options]"] if has_options else [])])

    def _missing(self, names: Sequence[str]) -> str:
        actions = self.actions()
        if actions:
            example = self.examples[0] if self.examples else next(iter(actions.values())).short_usage()
            return f"`{self.prog}` needs {_or(list(actions))}, as in: {example}"
        usage = f"{self.short_usage()}{f', as in: {self.examples[0]}' if self.examples else ''}"
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing; usage: {usage}"

    def actions(self) -> dict[str, Parser]:
        """The parsers of the actions below this one, such as ``show`` of `groupwise recipes`."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print without hiding a closed pipe, as argparse does."""
        if message:
            write_text(message, file or sys.stderr)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = list(map(str, action.choices))
        if isinstance(action, argparse._SubParsersAction):
            near = (self.suggest_action(value) if self.suggest_action else "") or did_you_mean(value, names)
            raise ConfigError(f"there is no `{self.prog} {value}`{near} (there are: {', '.join(names)})")
        raise argparse.ArgumentError(action, f"must be {_or(names)}, got {value!r}{did_you_mean(value, names)}")


def integer_of_at_least(least: int) -> Callable[[str], int]:
    """The type of an option that takes an integer of at least ``least``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text}")
        return number

    return parse


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _or(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
