"""Helpers that all commands share: adding a parser, and printing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from groupwise.cli.parser import Parser
from groupwise.errors import RecipeErrors
from groupwise.terminal import make_console, write_text
from groupwise.text import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from groupwise.training.display import Display

Command = Callable[[argparse.Namespace], int]
Commands = Any  # argparse's subparsers object, which has no public type


def add(
    commands: Commands,
    name: str,
    run: Command,
    help_text: str,
    *,
    add_help: bool = True,
    examples: Sequence[str] = (),
) -> Parser:
    """Add the parser of a command that ``run`` executes; its help ends with the examples."""
    parser: Parser = commands.add_parser(
        name,
        help=help_text,
        description=f"{help_text[0].upper()}{help_text[1:]}.",
        epilog=format_examples(examples) if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=add_help,
    )
    parser.examples = examples
    parser.set_defaults(run=run, parser=parser)
    return parser


def format_examples(examples: Sequence[str]) -> str:
    """The end of a help text."""
    return "\n".join(["examples:", *(f"  {example}" for example in examples)])


def console(*, stderr: bool = False) -> Console:
    # The stream object, so that a progress bar is shown even while another package redirects sys.stderr.
    return make_console(sys.stderr if stderr else sys.stdout)


def say(text: str) -> None:
    """Print a line of any length on the standard output."""
    console().print(text, soft_wrap=True)


def make_table(*columns: str, left: Collection[str]) -> Table:
    """A table without lines; the columns that are not in ``left`` hold numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def print_table(out: Console, table: Table) -> None:
    """Print a table without the spaces at the ends of its lines."""
    with out.capture() as capture:
        out.print(table)
    for line in capture.get().splitlines():
        out.file.write(f"{line.rstrip()}\n")


def make_status() -> Display:
    """Shows on stderr what a command is doing, if that is a terminal. Notices are printed in any case."""
    from groupwise.training.display import make_display

    return make_display(sys.stderr, activities=False)


def say_error(error: str | BaseException) -> None:
    """Print an error on stderr.

    It is one line, or for several errors of a recipe a heading and one line for each.
    """
    lines = error.lines() if isinstance(error, RecipeErrors) else [str(error)]
    first, *rest = map(one_line, lines)
    text = "\n".join([f"groupwise: {first}", *(f"  {line}" for line in rest)])
    try:
        console(stderr=True).print(text, style="red", soft_wrap=True)
    except (OSError, ImportError):  # stderr is closed, or too many files are open to load rich
        with suppress(OSError):
            write_text(f"{text}\n", sys.stderr)
