"""`groupwise eval`: a model on a recipe's held-out rows, in a table, or as a report on multiple choice."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.cli.common import Commands, console
from groupwise.cli.train import add_with_settings, recipe_of
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config import Recipe
    from groupwise.evaluate import Evaluation
    from groupwise.usmle.compare import Comparison
    from groupwise.usmle.tables import ExamReport

BEFORE = "before"  # the folder, within a report's, of the report on the model that it is compared with


def add_eval(commands: Commands) -> None:
    evaluate = add_with_settings(commands, "eval", _eval, "measure a model on a recipe's held-out rows")
    evaluate.add_argument(
        "--answers", type=Path, metavar="FILE", help="write every answer with its grades, as JSON lines"
    )
    evaluate.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="multiple choice: also shuffle the options, score the letters, and write report.json, .md and .png there; "
        "with evaluate.samples above 1, so many sampled answers beside the likeliest",
    )
    evaluate.add_argument(
        "--against", metavar="MODEL", help="with --report: compare with this model, or with the report in this folder"
    )


def _eval(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments)
    if arguments.answers is not None and arguments.answers.is_dir():
        raise ConfigError(f"--answers {arguments.answers} is a folder; name a file")
    if arguments.report is not None:
        return _report(recipe, arguments)
    if arguments.against is not None:
        raise ConfigError("--against compares two reports; say with --report FOLDER where this one is to be written")
    from groupwise.training.evaluation import evaluate_recipe

    found, metric = evaluate_recipe(recipe, _say)
    _print_metrics(found, metric, recipe.model.source)
    if arguments.answers is not None:
        _write_lines(arguments.answers, found.answers)
    return 0


def _report(recipe: Recipe, arguments: argparse.Namespace) -> int:
    from groupwise.usmle.compare import compare
    from groupwise.usmle.report import REPORT, read_report, write_report

    folder: Path = arguments.report
    # Seen now, and not when an hour of answers is to be written.
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"--report {there} is a file; name a folder")
    before = None
    if arguments.against is not None:
        known = Path(arguments.against)
        if (known / REPORT).exists() or known.name == REPORT:
            before = read_report(known)
        else:
            earlier = recipe.with_settings({"model.source": arguments.against})
            before, _ = _examined(earlier)
            write_report(folder / BEFORE, before, title=_title(earlier), facts=facts_of(earlier))
    report, answers = _examined(recipe, before)
    if arguments.answers is not None:
        _write_lines(arguments.answers, [asdict(answer) for answer in answers])
    comparison = None if before is None else compare(before, report)
    written = write_report(folder, report, title=_title(recipe), facts=facts_of(recipe), comparison=comparison)
    _print_report(report, comparison)
    out = console()
    for path in written:
        out.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 0


def _examined(recipe: Recipe, like: ExamReport | None = None) -> tuple[ExamReport, Sequence[Any]]:
    from groupwise.training.evaluation import run_exam_of_recipe

    with _progress(recipe.model.source) as tell:
        return run_exam_of_recipe(recipe, tell, _say, like)


def _say(text: str) -> None:
    console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(model: str) -> Iterator[Callable[[str, int, int], None]]:
    """A line on the standard error that says what is being done; where that is a file, a line for each thing done."""
    out = console(stderr=True)
    with out.status(f"{model}: loading") as status:

        def tell(what: str, done: int, total: int) -> None:
            status.update(f"{model}: {what}, {done:,} of {total:,}")
            if not out.is_terminal and done == total:
                _say(f"{model}: {what}, done")

        yield tell


def _title(recipe: Recipe) -> str:
    return f"{recipe.model.source} on {recipe.task}"


def facts_of(recipe: Recipe) -> dict[str, str]:
    """What to know about an evaluation to do it again."""
    from groupwise.training.store.export import versions

    how, found = recipe.evaluate, versions()
    facts = {"model": recipe.model.source, "questions": _source(recipe)}
    if recipe.task == "usmle":
        facts["prompt"] = recipe.usmle.prompt
    facts["longest answer"] = f"{how.max_new_tokens or recipe.sampling.max_new_tokens} tokens"
    if how.samples > 1:
        facts["samples"] = f"{how.samples}, temperature {how.temperature or recipe.sampling.temperature:g}"
    facts["seed"] = str(recipe.train.seed)
    facts["versions"] = ", ".join(
        f"{name} {found[name]}" for name in ("groupwise", "torch", "transformers") if name in found
    )
    return facts


def _source(recipe: Recipe) -> str:
    """Where the held-out questions come from, without the folders that they lie in."""
    from groupwise.tasks.rows import listed

    data = recipe.data
    named = ", ".join(Path(each).name for each in listed(data.held_out) or listed(data.train))
    if not named:
        return "the task's own rows"
    if data.held_out_from_train:
        return f"{data.held_out_from_train} held out from {named}"
    return named if data.held_out_split is None else f"{named}, {data.held_out_split}"


def _print_report(report: ExamReport, comparison: Comparison | None) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    before = comparison.before if comparison is not None else {}
    for column in ("measure", "value", "95 % interval", *(("before",) if before else ())):
        table.add_column(column, justify="left" if column == "measure" else "right")
    for name, share in report.accuracies().items():
        cells = [name, f"{share.value:.1%}", f"{share.low:.1%} – {share.high:.1%}"]
        if before:
            cells.append(f"{before[name].value:.1%}" if name in before else "")
        table.add_row(*cells)
    out = console()
    out.print(table)
    unread = f"{report.unread_strict / report.n:.1%} strictly, {report.unread_lenient / report.n:.1%} leniently"
    out.print(
        f"{report.n:,} questions; without an answer: {unread}; {report.mean_tokens:.1f} tokens in an answer, "
        f"{report.cut_off:.1%} cut off",
        highlight=False,
        soft_wrap=True,
    )
    for measure in comparison.measures if comparison is not None else ():
        verdict = "real" if measure.real else "not to be told from chance"
        test = "McNemar" if measure.changes is not None else "permutation test"
        shown = f"{measure.name}: {measure.difference.value:+.1%}, {verdict} ({test} p = {measure.p_value:.2g})"
        out.print(shown, highlight=False)


def _print_metrics(found: Evaluation, metric: str | None, model: str) -> None:
    from rich.table import Table

    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    graded = any(f"{name}_no_answer" in found.metrics for name in found.metrics)
    none = ("without an answer" if graded else "not scored",) if found.answers else ()
    for column in ("metric", "value", "95 % interval", *none):
        table.add_column(column, justify="left" if column == "metric" else "right")
    names = [name for name in found.metrics if f"{name}_low" in found.metrics]
    for name in names:
        interval = found.interval(name)
        missing = found.metrics.get(f"{name}_no_answer" if graded else f"{name}_unscored")  # pairs always have both
        table.add_row(
            f"{name} *" if name == metric else name,
            f"{interval.estimate:.4f}",
            f"{interval.low:.4f} – {interval.high:.4f}",
            *(("" if missing is None else f"{missing:.1%}",) if found.answers else ()),
        )
    out.print(table)
    if not found.answers:
        return
    answered = len(found.answers)
    length, cut = found.metrics["mean_length"], found.metrics["truncated"]
    out.print(
        f"{answered:,} answers by {model}: {length:.1f} tokens on average, {cut:.1%} cut off",
        markup=False,
        highlight=False,
    )


def _write_lines(path: Path, records: Sequence[Any]) -> None:
    from groupwise.rundir import write_bytes

    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_bytes(path, lines.encode())
