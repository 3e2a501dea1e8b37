"""The command `groupwise`.

Each command is a function that adds its arguments to a parser and names the function that runs it. What a command needs
is imported when it runs, so that `groupwise --help` answers at once. Whatever groupwise refuses ends as one line on the
standard error and the exit status 2; an interrupted command ends with 130, as a shell expects.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from groupwise import __version__
from groupwise.cli.common import Commands, Run, say_error
from groupwise.cli.control import add_control
from groupwise.cli.evaluate import add_eval
from groupwise.cli.models import add_models
from groupwise.cli.sample import add_sample
from groupwise.cli.settings import split_settings
from groupwise.cli.train import add_check, add_train
from groupwise.errors import GroupwiseError

# A new command is a function like `add_models`, named here.
COMMANDS: tuple[Callable[[Commands], None], ...] = (add_train, add_check, add_eval, add_sample, add_models, add_control)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, the process's own without it; the exit status."""
    _keep_freed_memory()
    parser, commands = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    settings: list[str] = []
    command = commands.get(words[0]) if words else None
    if command is not None and command.get_default("takes_settings"):
        own, settings = split_settings(words[1:], command._option_string_actions)
        words[1:] = own
    arguments, rest = parser.parse_known_args(words)
    if rest and not arguments.takes_settings:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.settings = [*rest, *settings]
    run: Run = arguments.run
    try:
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


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and those of the commands by their names."""
    parser = argparse.ArgumentParser(
        prog="groupwise", description="Group-relative policy optimization, whole.", allow_abbrev=False
    )
    parser.set_defaults(takes_settings=False)
    parser.add_argument("--version", action="version", version=f"groupwise {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    return parser, commands.choices
