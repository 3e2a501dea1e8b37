"""What reaches a terminal: escaped texts, whatever prints them, in any encoding."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import groupwise
from groupwise.redaction import remember_secret
from groupwise.terminal import make_console, write_text

EVIL = "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202eabc\u202c\u200b [bold]x[/] :smile: \ud800"
SHOWN = r"\x1b[31mred\x1b]0;title\x07 \x9b2J \u202eabc\u202c\u200b [bold]x[/] :smile: \ud800"
PRINTS = re.compile(r"\bprint\(|sys\.(?:stdout|stderr|__\w+__)\.(?:write|buffer)|\bConsole\(|os\.write\([12],")


def ascii_stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)


def test_nothing_else_in_the_package_prints():
    package = Path(groupwise.__file__).parent
    allowed = {"terminal.py", "template_worker.py", "rewards/math_worker.py"}  # a worker's output is read by its parent
    found = {
        f"{path.relative_to(package)}:{number}"
        for path in package.rglob("*.py")
        if str(path.relative_to(package)) not in allowed
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRINTS.search(line) and ".print(" not in line
    }
    assert found == set()


def test_a_written_text_is_escaped_in_any_encoding():
    stream = io.StringIO()
    write_text(f"{EVIL}\nß · 日本\n", stream)
    assert stream.getvalue() == f"{SHOWN}\nß · 日本\n"
    limited = ascii_stream()
    write_text(f"{EVIL}\nß · 日本 ±…\n", limited)
    assert limited.buffer.getvalue().decode() == f"{SHOWN}\n\\xdf - \\u65e5\\u672c +/-...\n"


@pytest.mark.parametrize("make", [str, Text])
def test_a_console_escapes_texts_tables_and_panels(make):
    stream = io.StringIO()
    console = make_console(stream, width=120)
    table = Table(box=None)
    table.add_column(make(EVIL))
    table.add_row(make(EVIL))
    for renderable in (make(EVIL), table, Panel(make(EVIL), title=Text(EVIL))):
        console.print(renderable)
    console.rule(Text(EVIL))
    shown = stream.getvalue()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u200b\ud800-\udfff]", shown)
    assert shown.count(r"\x1b[31mred\x1b]0;title") == 6
    assert shown.count("[bold]x[/] :smile:") >= 4  # cells are cut


def test_a_console_keeps_its_own_styles_and_fits_its_width():
    stream = io.StringIO()
    console = make_console(stream, width=30, force_terminal=True, color_system="standard")
    console.print("plain", style="red")
    console.print(Panel(Text("\u202e" * 40, no_wrap=True, overflow="ellipsis")))
    first, *rest = stream.getvalue().splitlines()
    assert first == "\x1b[31mplain\x1b[0m"
    assert {len(line) for line in rest} == {30}


def test_a_console_of_another_encoding():
    stream = ascii_stream()
    make_console(stream, width=60).print("ß 日本 \ud800")
    assert stream.buffer.getvalue() == b"\\xdf \\u65e5\\u672c \\ud800\n"


def test_secrets_are_hidden():
    remember_secret("geheim-4711")
    stream = io.StringIO()
    write_text("a geheim-4711 b\n", stream)
    make_console(stream).print("c geheim-4711 d")
    assert stream.getvalue() == "a *** b\nc *** d\n"


@pytest.mark.slow
def test_a_process_escapes_logs_warnings_and_tracebacks():
    code = """
import logging, warnings
from groupwise.terminal import guard_process
guard_process()
logging.getLogger("x").warning("log %s \\x1b[31m https://me:secret@h", "\\x07")
logging.getLogger("x").warning("wrong %d", "x")
warnings.warn("warned \\x1b[31m")
raise ValueError("raised \\x1b[31m")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "\x1b" not in done.stderr
    assert "\x07" not in done.stderr
    for text in (r"log \x07 \x1b[31m https://***@h", r"UserWarning: warned \x1b[31m", r"ValueError: raised \x1b[31m"):
        assert text in done.stderr
