"""`groupwise report`: a run, or a comparison of control runs, as one HTML file and as Markdown."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from groupwise.cli.common import Commands, add, say
from groupwise.cli.control import control_report, is_control_folder
from groupwise.errors import ConfigError, RunDirError
from groupwise.paths import FOLDER, check_writable, kind_of, show_path, user_path
from groupwise.rundir import write_bytes

MEGABYTE = 1_000_000


def add_report(commands: Commands) -> None:
    summary = "write a run, or a comparison of control runs, as one HTML file to send to someone, and as Markdown"
    examples = (
        "groupwise report runs/20261118-095439-quiz",
        "groupwise report runs/20261118-095439-quiz --out quiz.html --markdown quiz.md --open",
        "groupwise report runs/comparison",
    )
    report = add(commands, "report", _report, summary, examples=examples)
    report.add_argument(
        "folder", metavar="RUN", help="the folder of a run, or of `groupwise control compare` or `train`"
    )
    report.add_argument("--out", type=Path, metavar="FILE", help="the HTML file (default: report.html in RUN)")
    report.add_argument("--markdown", type=Path, metavar="FILE", help="also write a summary as Markdown to this file")
    help_text = "most megabytes of the HTML file; what does not fit is left out (default: %(default)s)"
    report.add_argument("--max-size", type=float, default=8.0, metavar="MB", help=help_text)
    report.add_argument("--force", action="store_true", help="replace existing files")
    report.add_argument("--open", action="store_true", help="open the HTML file in a browser")


def _report(arguments: argparse.Namespace) -> int:
    folder = user_path(arguments.folder)
    if kind_of(folder, RunDirError) != FOLDER:
        what = "does not exist" if kind_of(folder, RunDirError) is None else "is not a folder"
        raise RunDirError(f"{show_path(folder)} {what}; give the folder of a run, such as one below runs/")
    out = user_path(arguments.out or folder / "report.html")
    markdown = None if arguments.markdown is None else user_path(arguments.markdown)
    if not arguments.max_size >= 2:
        raise ConfigError(f"--max-size must be at least 2, for the page itself has 1.3 MB; got {arguments.max_size:g}")
    for path in (out, markdown):
        if path is not None:
            _check_target(path, force=arguments.force or path == folder / "report.html")
    if markdown is not None and os.path.abspath(markdown) == os.path.abspath(out):
        raise ConfigError(f"--out and --markdown name the same file, {show_path(out)}; give two names")
    make = control_report if is_control_folder(folder) else _run_report
    content, text, left_out = make(folder, round(arguments.max_size * MEGABYTE), markdown)
    data = content.encode("utf-8", "backslashreplace")  # a lone surrogate becomes a JSON escape
    write_bytes(out, data)
    say(f"{show_path(out)} is the report, {len(data) / MEGABYTE:.1f} MB; it needs no server and no network")
    if left_out:
        say(f"left out: {'; '.join(left_out)}. `groupwise view {show_path(folder)}` shows everything")
    if markdown is not None:
        write_bytes(markdown, text.encode("utf-8", "replace"))
        say(f"{show_path(markdown)} is the summary in Markdown")
    if arguments.open:
        import webbrowser

        webbrowser.open(out.absolute().as_uri())
    return 0


def _run_report(folder: Path, limit: int, markdown: Path | None) -> tuple[str, str, list[str]]:
    from groupwise.analysis.run_reader import RunReader
    from groupwise.analysis.summary import summarize
    from groupwise.viewer.markdown import run_markdown
    from groupwise.viewer.report import run_report

    reader = RunReader(folder)  # an error if it holds no run, where a folder with runs in it would have several
    report = run_report(folder, limit=limit)
    return report.html, run_markdown(summarize(reader)) if markdown else "", report.left_out


def _check_target(path: Path, *, force: bool) -> None:
    """Raise an error if a file cannot be written, or would be replaced."""
    kind = kind_of(path, ConfigError)
    if kind == FOLDER:
        raise ConfigError(f"{show_path(path)} is a folder; name a file in it")
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{show_path(path)} exists already; add --force to replace it, or name another file")
    check_writable(path, ConfigError)
