"""What reaches a terminal, a pipe or a log: every text goes through `printable` here, whoever wrote it.

Nothing else in the package prints: a test looks for other places.
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from groupwise.text import encodable, printable

if TYPE_CHECKING:
    from rich.console import Console


def write_text(text: str, stream: TextIO | None = None) -> None:
    """Write a text of one or more lines to a stream (default: the standard output), and flush it."""
    stream = sys.stdout if stream is None else stream
    stream.write(encodable(printable(text), getattr(stream, "encoding", None) or "utf-8"))
    stream.flush()


def make_console(stream: TextIO | None = None, **options: Any) -> Console:
    """rich's console for texts that are shown as they are: no markup, no emoji codes, nothing that a terminal obeys."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class SafeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with status 1

        def render_str(self, text: str, **options: Any) -> Text:
            """Escape a plain text before it becomes a `Text`, which silently drops some control characters."""
            return super().render_str(printable(text), **options)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            """Escape each text, also in tables and panels: before lines are cut, so that they still fit."""
            segments = super().render(renderable, options)
            if not isinstance(renderable, (str, Text)):
                return segments
            return (Segment(safe(segment.text), segment.style, segment.control) for segment in segments)

    def safe(text: str) -> str:
        return encodable(printable(text), console.encoding)

    console = SafeConsole(file=stream or sys.stdout, markup=False, emoji=False, highlight=False, **options)
    return console


def guard_process() -> None:
    """Also escape what other libraries log and warn of, and tracebacks. For a process of ours, such as a command."""
    make_record = logging.getLogRecordFactory()

    def make_safe_record(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*arguments, **options)
        try:
            message = record.getMessage()
        except Exception:  # arguments that do not fit: logging reports it
            return record
        if (safe := printable(message)) != message:
            record.msg, record.args = safe, ()
        return record

    def format_warning(message: Warning | str, category: type[Warning], file: str, line: int, _: Any = None) -> str:
        return printable(plain_warning(message, category, file, line))

    def show_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        write_text("".join(traceback.format_exception(kind, error, trace)), sys.stderr)

    plain_warning = warnings.formatwarning
    logging.setLogRecordFactory(make_safe_record)
    warnings.formatwarning = format_warning  # type: ignore[assignment]
    sys.excepthook = show_error
