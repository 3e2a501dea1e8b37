"""What the commands share: how a parser is added, and where they print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Run = Callable[[argparse.Namespace], int]
Commands = Any  # argparse's object to which parsers are added; it has no public type


def add(actions: Commands, name: str, run: Run, help_text: str, *, add_help: bool = True) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=help_text, description=help_text, allow_abbrev=False, add_help=add_help
    )
    parser.set_defaults(run=run)
    return parser


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    # The stream itself, not its name: a bar must go on while another package's output is caught.
    return Console(file=sys.stderr if stderr else sys.stdout)


def say_error(message: str) -> None:
    """One line, whatever is in the message; no markup, for it may hold what a user typed."""
    console(stderr=True).print(
        f"groupwise: {' '.join(message.split())}", style="red", markup=False, highlight=False, soft_wrap=True
    )
