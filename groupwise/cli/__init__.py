"""The command `groupwise`.

Each command is a function that adds a parser and sets the function that runs it. Commands import what they need when
they run, so that `groupwise --help` is fast. An error that groupwise raises becomes one line on stderr and exit status
2; an interrupted command exits with 130, as shells expect.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from groupwise import __version__
from groupwise.cli.common import Command, Commands, say_error
from groupwise.cli.control import add_control
from groupwise.cli.evaluate import add_eval
from groupwise.cli.models import add_models
from groupwise.cli.sample import add_sample
from groupwise.cli.settings import split_settings
from groupwise.cli.train import add_check, add_train
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.plugins import load_plugin, plugin_names

# To add a command, write a function like `add_models` and list it here.
COMMANDS: tuple[Callable[[Commands], None], ...] = (add_train, add_check, add_eval, add_sample, add_models, add_control)

# A package adds a command with such a function as an entry point of the group ``groupwise.commands``, under the
# command's name. These are the entry points of pyproject.toml, for a source tree that is not installed.
PLUGINS = {"usmle": "groupwise.cli.usmle:add_usmle"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process) and return the exit status."""
    _keep_freed_memory()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = argparse.Namespace()
    try:
        arguments = _parse(words)
        run: Command = arguments.run
        return run(arguments)
    except GroupwiseError as error:
        say_error(str(error))
        return 2
    except KeyboardInterrupt:
        say_error(getattr(arguments, "interrupted", "interrupted"))
        return 130


def _keep_freed_memory() -> None:
    """Let PyTorch keep freed memory for 10 s.

    PyTorch's builds for ARM allocate with mimalloc, which returns freed memory to the system after 10 ms; taking it
    again costs a tenth of a training step. The variable is read when torch is loaded.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="groupwise", description="Group-relative policy optimization (GRPO).", allow_abbrev=False
    )
    parser.set_defaults(takes_settings=False)
    parser.add_argument("--version", action="version", version=f"groupwise {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    name = words[0] if words else ""
    if name not in commands.choices:
        plugins = plugin_names("groupwise.commands", PLUGINS)
        parser.epilog = f"commands of plug-ins: {', '.join(plugins)}"
        if name in plugins:
            load_plugin("groupwise.commands", PLUGINS, name, "command")(commands)
    settings: list[tuple[str, str]] = []
    command = commands.choices.get(name)
    if command is not None and command.get_default("takes_settings"):
        words[1:], settings = split_settings(words[1:], command._option_string_actions)
    arguments, rest = parser.parse_known_args(words)
    if rest and arguments.takes_settings:
        raise ConfigError(f"{rest[0]!r} is not understood; settings are given as --section.key VALUE")
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.settings = settings
    return arguments
