"""Helpers that all commands share: adding a parser, and printing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Command = Callable[[argparse.Namespace], int]
Commands = Any  # argparse's subparsers object, which has no public type


def add(
    commands: Commands, name: str, run: Command, help_text: str, *, add_help: bool = True
) -> argparse.ArgumentParser:
    """Add the parser of a command that ``run`` executes."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text, allow_abbrev=False, add_help=add_help
    )
    parser.set_defaults(run=run)
    return parser


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    # The stream object, so that a progress bar is shown even while another package redirects sys.stderr.
    return Console(file=sys.stderr if stderr else sys.stdout)


def make_table(*columns: str, left: Collection[str]) -> Table:
    """A table without lines; the columns that are not in ``left`` hold numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def say_error(message: str) -> None:
    """Print the message as one line on stderr, without markup: it may contain what a user typed."""
    console(stderr=True).print(
        f"groupwise: {' '.join(message.split())}", style="red", markup=False, highlight=False, soft_wrap=True
    )
