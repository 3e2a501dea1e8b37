"""What a run shows while it trains: a panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from typing import TextIO

from groupwise.terminal import make_console
from groupwise.training.display.base import Display, RunFacts
from groupwise.training.display.lines import LineDisplay

__all__ = ["Display", "LineDisplay", "RunFacts", "make_display"]


def make_display(stream: TextIO | None = None, *, activities: bool = True) -> Display:
    """The display that suits ``stream`` (default: the standard output).

    ``activities``: False to leave out what the run is doing where it would need a line each.
    """
    from groupwise.training.display.live import LiveDisplay

    stream = sys.stdout if stream is None else stream
    console = make_console(stream)
    # FORCE_COLOR makes rich treat a pipe as a terminal, and would fill a log file with redrawn panels.
    if stream.isatty() and console.is_terminal and console.is_interactive and not console.options.ascii_only:
        return LiveDisplay(console)
    return LineDisplay(stream, activities=activities)
