"""`groupwise eval`: a model on a recipe's held-out rows, as a table or as the task's report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.cli.common import Commands, console, make_table
from groupwise.cli.train import add_with_settings, recipe_of
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config import Recipe
    from groupwise.evaluate import Evaluation


def add_eval(commands: Commands) -> None:
    evaluate = add_with_settings(commands, "eval", _eval, "evaluate a model on a recipe's held-out rows")
    option = evaluate.add_argument
    option("--answers", type=Path, metavar="FILE", help="write every answer and its grades as JSON lines")
    option("--report", type=Path, metavar="FOLDER", help="write the task's report there, for a task that has one")
    against = "with --report: compare with this model, or with the report in this folder"
    option("--against", metavar="MODEL", help=against)


def _eval(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments)
    if arguments.answers is not None and arguments.answers.is_dir():
        raise ConfigError(f"--answers {arguments.answers} is a folder; give a file")
    if arguments.report is not None:
        return _report(recipe, arguments)
    if arguments.against is not None:
        raise ConfigError("--against compares two reports; also give --report FOLDER for the new one")
    from groupwise.training.evaluation import evaluate_recipe

    evaluation, metric = evaluate_recipe(recipe, _say)
    _print_metrics(evaluation, metric, recipe.model.source)
    if arguments.answers is not None:
        _write_lines(arguments.answers, evaluation.answers)
    return 0


def _report(recipe: Recipe, arguments: argparse.Namespace) -> int:
    from groupwise.tasks import find_task

    folder: Path = arguments.report
    # Checked before hours of sampling.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"--report {existing} is a file; give a folder")
    write_report = find_task(recipe.task).report
    if write_report is None:
        raise ConfigError(f"the task {recipe.task!r} has no report; evaluate it without --report")
    with _progress() as progress:
        report = write_report(recipe, folder, against=arguments.against, progress=progress, say=_say)
    if arguments.answers is not None:
        _write_lines(arguments.answers, report.answers)
    out = console()
    for part in (*report.summary, *map(str, report.files)):
        out.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    return 0


def _say(text: str) -> None:
    console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A status line on stderr; if stderr is not a terminal, one line per finished stage."""
    out = console(stderr=True)
    with out.status("loading") as status:

        def progress(stage: str, done: int, total: int) -> None:
            status.update(f"{stage}, {done:,} of {total:,}")
            if not out.is_terminal and done == total:
                _say(f"{stage}, done")

        yield progress


def _print_metrics(evaluation: Evaluation, metric: str | None, model: str) -> None:
    out, metrics = console(), evaluation.metrics
    graded = any(f"{name}_no_answer" in metrics for name in metrics)
    missing = ("without an answer" if graded else "not scored",) if evaluation.answers else ()
    table = make_table("metric", "value", "95 % interval", *missing, left=["metric"])
    for name in [name for name in metrics if f"{name}_low" in metrics]:
        interval = evaluation.interval(name)
        share = metrics.get(f"{name}_no_answer" if graded else f"{name}_unscored")  # None for preference pairs
        table.add_row(
            f"{name} *" if name == metric else name,
            f"{interval.estimate:.4f}",
            f"{interval.low:.4f} – {interval.high:.4f}",
            *(("" if share is None else f"{share:.1%}",) if missing else ()),
        )
    out.print(table)
    if evaluation.answers:
        length, cut_off = f"{metrics['mean_length']:.1f} tokens on average", f"{metrics['truncated']:.1%} cut off"
        summary = f"{len(evaluation.answers):,} answers by {model}: {length}, {cut_off}"
        out.print(summary, markup=False, highlight=False)


def _write_lines(path: Path, records: Sequence[Any]) -> None:
    from groupwise.rundir import write_bytes

    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_bytes(path, lines.encode())
