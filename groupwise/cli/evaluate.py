"""`groupwise eval`: a model on a recipe's held-out rows, as a table or as the task's report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.cli.common import Commands, console, make_status, make_table, print_table, say
from groupwise.cli.train import add_with_settings, load_libraries, recipe_of
from groupwise.errors import ConfigError
from groupwise.paths import check_writable, is_file, is_folder
from groupwise.text import fixed, plural

if TYPE_CHECKING:
    from groupwise.config import Recipe
    from groupwise.evaluate import Evaluation
    from groupwise.training.display import Display


def add_eval(commands: Commands) -> None:
    examples = (
        "groupwise eval quiz --model.source runs/NAME/model",
        "groupwise eval recipe.toml --data.held_out rows.jsonl --answers answers.jsonl",
        "groupwise eval usmle --model.source FOLDER --report report --against smollm2-135m",
    )
    evaluate = add_with_settings(commands, "eval", _eval, "evaluate a model on a recipe's held-out rows", examples)
    option = evaluate.add_argument
    option("--answers", type=Path, metavar="FILE", help="write every answer and its grades as JSON lines")
    option("--report", type=Path, metavar="FOLDER", help="write the task's report there, for a task that has one")
    against = "with --report: compare with this model, or with the report in this folder"
    option("--against", metavar="MODEL", help=against)


def _eval(arguments: argparse.Namespace) -> int:
    if arguments.answers is not None:  # checked before hours of sampling
        if is_folder(arguments.answers, ConfigError):
            raise ConfigError(f"--answers {arguments.answers} is a folder; give a file")
        check_writable(arguments.answers, ConfigError)
    if arguments.against is not None and arguments.report is None:
        raise ConfigError("--against compares two reports; also give --report FOLDER for the new one")
    with make_status() as display:
        recipe = recipe_of(arguments)
        load_libraries(recipe, display, training=False)
        if arguments.report is None:
            from groupwise.training.evaluation import evaluate_recipe

            evaluation, metric = evaluate_recipe(recipe, display.say, display)
        else:
            report = _report(recipe, arguments, display)
    if arguments.report is not None:
        return _print_report(report, arguments)
    if arguments.answers is not None:  # before anything is printed, as the output may be a closed pipe
        _write_lines(arguments.answers, evaluation.answers)
    _print_metrics(evaluation, metric, recipe.model.source)
    _print_answers(arguments)
    if recipe.model.source == "tiny":
        note = "tiny has random weights; a trained model: --model.source RUN/model"
        console(stderr=True).print(note)
    return 0


def _report(recipe: Recipe, arguments: argparse.Namespace, display: Display) -> Any:
    from groupwise.tasks import find_task
    from groupwise.training.display import LineDisplay

    folder: Path = arguments.report
    if is_file(folder, ConfigError):
        raise ConfigError(f"--report {folder} is a file; give a folder")
    check_writable(folder, ConfigError)
    write_report = find_task(recipe.task).report
    if write_report is None:
        raise ConfigError(f"the task {recipe.task!r} has no report; evaluate it without --report")

    def progress(stage: str, done: int, total: int) -> None:
        display.progress(stage, done, total)
        if isinstance(display, LineDisplay) and done == total:  # no terminal: a line per finished stage
            display.say(f"{stage}, done")

    return write_report(recipe, folder, against=arguments.against, progress=progress, say=display.say)


def _print_report(report: Any, arguments: argparse.Namespace) -> int:
    if arguments.answers is not None:
        _write_lines(arguments.answers, report.answers)
    out = console()
    for part in (*report.summary, *map(str, report.files)):
        out.print(part, soft_wrap=isinstance(part, str))
    _print_answers(arguments)
    return 0


def _print_answers(arguments: argparse.Namespace) -> None:
    if arguments.answers is not None:
        say(f"answers: {arguments.answers}")


def _print_metrics(evaluation: Evaluation, metric: str | None, model: str) -> None:
    out, metrics = console(), evaluation.metrics
    graded = any(f"{name}_no_answer" in metrics for name in metrics)
    missing = ("without an answer" if graded else "not scored",) if evaluation.answers else ()
    table = make_table("metric", "value", "95 % interval", *missing, left=["metric"])
    names = [name for name in metrics if f"{name}_low" in metrics]
    for name in names:
        interval = evaluation.interval(name)
        share = metrics.get(f"{name}_no_answer" if graded else f"{name}_unscored")  # None for preference pairs
        table.add_row(
            f"{name} *" if name == metric and len(names) > 1 else name,
            fixed(interval.estimate, ".4f"),
            f"{fixed(interval.low, '.4f')} – {fixed(interval.high, '.4f')}",
            *(("" if share is None else f"{share:.1%}",) if missing else ()),
        )
    print_table(out, table)
    if metric is not None and len(names) > 1:
        out.print("* selects the best checkpoint in training (evaluate.metric)")
    if evaluation.answers:
        length, cut_off = f"{metrics['mean_length']:.1f} tokens on average", f"{metrics['truncated']:.1%} cut off"
        summary = f"{plural(len(evaluation.answers), 'answer')} by {model}: {length}, {cut_off}"
        out.print(summary)


def _write_lines(path: Path, records: Sequence[Any]) -> None:
    from groupwise.rundir import as_json, json_bytes, write_bytes

    write_bytes(path, b"".join(json_bytes(as_json(record)) + b"\n" for record in records))
