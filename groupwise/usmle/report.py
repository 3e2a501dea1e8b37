"""A report as files: report.json for programs, report.md and report.png for readers, each whole or not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import CheckpointError, InputError, MissingExtraError
from groupwise.rundir import read_json, write_bytes, write_json
from groupwise.usmle.compare import Comparison
from groupwise.usmle.markdown import markdown
from groupwise.usmle.picture import draw_report
from groupwise.usmle.tables import ExamReport
from groupwise.usmle.text import clean

REPORT, PAGE, PICTURE, COMPARISON = "report.json", "report.md", "report.png", "comparison.json"


def write_report(
    folder: str | Path,
    report: ExamReport,
    *,
    title: str,
    facts: Mapping[str, str],
    comparison: Comparison | None = None,
) -> list[Path]:
    """Write the report into a folder, in place of one that is there; the paths of its files.

    facts: what to know about the evaluation (the model, the data, …), shown at the top. The picture is left out where
    matplotlib is not installed.
    """
    folder = Path(folder)
    if comparison is not None and comparison.fingerprint != report.fingerprint:
        raise InputError("the comparison is about other questions than the report; compare this report")
    named = {"title": clean(title), "facts": {clean(name): clean(value) for name, value in facts.items()}}
    write_bytes(folder / REPORT, _lines(named | report.to_json()).encode())
    written = [folder / REPORT]
    if comparison is not None:
        write_json(folder / COMPARISON, comparison.to_json())
        written.append(folder / COMPARISON)
    try:
        draw_report(folder / PICTURE, report, title=title, comparison=comparison)
        picture = PICTURE
        written.append(folder / PICTURE)
    except MissingExtraError:
        picture = None
    page = markdown(report, title=title, facts=facts, comparison=comparison, picture=picture)
    write_bytes(folder / PAGE, page.encode())
    written.append(folder / PAGE)
    for name in (PICTURE, COMPARISON):
        if folder / name not in written:
            _remove(folder / name)
    return written


def read_report(path: str | Path) -> ExamReport:
    """The report in a folder or a file."""
    path = Path(path)
    file = path / REPORT if path.is_dir() else path
    if not file.exists():
        raise CheckpointError(
            f"there is no report at {file}; name the folder that an evaluation has written, or its {REPORT}"
        )
    return ExamReport.from_json(read_json(file), str(file))


def _lines(value: Mapping[str, Any]) -> str:
    """JSON with a table to a line, and a row to a line in tables that are lists: short, yet fit for a diff."""

    def text(entry: Any) -> str:
        return json.dumps(entry, ensure_ascii=False, allow_nan=False)

    def block(entry: Any) -> str:
        if isinstance(entry, list) and entry:
            return "[\n" + ",\n".join(f"    {text(row)}" for row in entry) + "\n  ]"
        return text(entry)

    return "{\n" + ",\n".join(f"  {text(name)}: {block(entry)}" for name, entry in value.items()) + "\n}\n"


def _remove(path: Path) -> None:
    """An earlier report's file must not stand beside a new report as if it belonged to it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path} is in the way and cannot be removed: {error.strerror}") from error
