"""docs/reliability.md and SECURITY.md: every promise of a table names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "reliability.md", ROOT / "SECURITY.md"]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def promises(page: str) -> list[str]:
    """The rows of the tables whose last column is called "test" or "tests"."""
    rows, inside = [], False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[-1] in ("test", "tests"):
            inside = True
        elif inside and set(cells[0]) - set(":- "):
            rows.append(line)
    return rows


def names_missing(line: str) -> list[str]:
    """The tests that a row names and that do not exist; the row itself if it names none."""
    named = NAMED.findall(line)
    missing = [] if named else [f"no test: {line}"]
    for file, function in named:
        path = ROOT / file
        if not path.exists():
            missing.append(file)
        elif function:
            functions = {
                node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
            }
            if function not in functions:
                missing.append(f"{file}::{function}")
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_promise_has_its_test(page):
    rows = promises(page.read_text(encoding="utf-8"))
    assert rows
    assert [name for row in rows for name in names_missing(row)] == []


def test_a_promise_without_a_test_is_found():
    page = "| promise | test |\n|---|---|\n| a | none |\n| b | `tests/no_file.py` |\n"
    page += "| c | `tests/test_reliability.py::no_test` |\n"
    assert [name for row in promises(page) for name in names_missing(row)] == [
        "no test: | a | none |",
        "tests/no_file.py",
        "tests/test_reliability.py::no_test",
    ]
    assert promises("| a | b |\n|---|---|\n| c | d |") == []
