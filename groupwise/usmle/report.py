"""A report as files: report.json for programs, report.md and report.png for readers. Each is written atomically."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from groupwise.errors import CheckpointError, InputError
from groupwise.paths import is_folder, kind_of
from groupwise.rundir import read_json, write_bytes, write_json
from groupwise.text import error_reason, one_line
from groupwise.usmle.compare import ExamComparison
from groupwise.usmle.markdown import markdown
from groupwise.usmle.picture import draw_report
from groupwise.usmle.tables import ExamReport

REPORT, PAGE, PICTURE, COMPARISON = "report.json", "report.md", "report.png", "comparison.json"


def write_report(
    folder: str | Path,
    report: ExamReport,
    *,
    title: str,
    facts: Mapping[str, str],
    comparison: ExamComparison | None = None,
) -> list[Path]:
    """Write the report into a folder, replacing an earlier one, and return the paths of its files.

    ``facts`` about the evaluation (the model, the data, …) stand at the top. There is no picture if matplotlib
    cannot be loaded.
    """
    folder = Path(folder)
    if comparison is not None and comparison.fingerprint != report.fingerprint:
        raise InputError("the comparison is about other questions than the report")
    heading = {"title": one_line(title), "facts": {one_line(name): one_line(value) for name, value in facts.items()}}
    write_json(folder / REPORT, heading | report.to_json())
    written = [folder / REPORT]
    if comparison is not None:
        write_json(folder / COMPARISON, comparison.to_json())
        written.append(folder / COMPARISON)
    try:
        draw_report(folder / PICTURE, report, title=title, comparison=comparison)
        picture = PICTURE
        written.append(folder / PICTURE)
    except ImportError:
        picture = None
    page = markdown(report, title=title, facts=facts, comparison=comparison, picture=picture)
    write_bytes(folder / PAGE, page.encode())
    written.append(folder / PAGE)
    for path in {folder / PICTURE, folder / COMPARISON}.difference(written):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path} of an earlier report cannot be removed: {error_reason(error)}") from error
    return written


def read_report(path: str | Path) -> ExamReport:
    """The report in a folder or a file."""
    path = Path(path)
    file = path / REPORT if is_folder(path, CheckpointError) else path
    if kind_of(file, CheckpointError) is None:
        raise CheckpointError(
            f"there is no report at {file}; give the folder of `groupwise eval --report`, or its {REPORT}"
        )
    return ExamReport.from_json(read_json(file), str(file))
