"""`groupwise eval --report` for this task: the exam of a recipe's model, written as a report and summed up."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from groupwise.config import Recipe, with_settings
from groupwise.generate.registry import make_generator
from groupwise.paths import kind_of
from groupwise.rundir import package_versions
from groupwise.seeds import derive_seed
from groupwise.tasks import TaskReport, find_task
from groupwise.tasks.rows import listed
from groupwise.text import Say, plural
from groupwise.training.components import load_components
from groupwise.training.extras import check_extras
from groupwise.usmle.compare import ExamComparison, compare
from groupwise.usmle.exam import ExamProgress, ModelUnderTest, run_exam
from groupwise.usmle.records import ModelAnswer
from groupwise.usmle.report import REPORT, read_report, write_report
from groupwise.usmle.tables import ExamReport

BEFORE = "before"  # folder, within a report's, of the report on the model that it is compared with


def report_on_model(
    recipe: Recipe,
    folder: Path,
    *,
    against: str | None,
    progress: ExamProgress,
    say: Say,
) -> TaskReport:
    """Run the exam and write its report; ``against`` is a model, or a folder with an earlier report."""
    before = None
    if against is not None:
        path = Path(against)
        if kind_of(path / REPORT) is not None or path.name == REPORT:
            before = read_report(path)
        else:
            earlier = with_settings(recipe, {"model.source": against})
            before, _ = exam_of_recipe(earlier, progress, say)
            write_report(folder / BEFORE, before, facts=facts_of(earlier), title=f"{against} on {recipe.task}")
    report, answers = exam_of_recipe(recipe, progress, say, before)
    comparison = None if before is None else compare(before, report)
    title = f"{recipe.model.source} on {recipe.task}"
    files = write_report(folder, report, title=title, facts=facts_of(recipe), comparison=comparison)
    return TaskReport(files, _summary(report, comparison), [asdict(answer) for answer in answers])


def exam_of_recipe(
    recipe: Recipe,
    progress: ExamProgress = lambda stage, done, total: None,
    say: Say = lambda text: None,
    like: ExamReport | None = None,
) -> tuple[ExamReport, list[ModelAnswer]]:
    """Load a recipe's model and held-out questions, and run the exam."""
    check_extras(recipe, training=False)
    components = load_components(recipe, say=say, training=False)
    with closing(make_generator(recipe, components.handle)) as generator:
        generator.update_weights(0)
        model = ModelUnderTest(components.handle, generator, components.tokenizer, components.builder, components.stop)
        return run_exam(
            model,
            components.held_out.rows,
            form=_prompt_form(recipe),
            max_new_tokens=recipe.evaluate.max_new_tokens or recipe.sampling.max_new_tokens,
            samples=recipe.evaluate.samples,
            temperature=recipe.evaluate.temperature or recipe.sampling.temperature,
            seed=derive_seed("evaluation", recipe.train.seed),
            like=like,
            progress=lambda stage, done, total: progress(f"{recipe.model.source}: {stage}", done, total),
        )


def facts_of(recipe: Recipe) -> dict[str, str]:
    """What is needed to repeat an evaluation."""
    settings = recipe.evaluate
    facts = {
        "model": recipe.model.source,
        "questions": _source(recipe),
        "prompt": _prompt_form(recipe),
        "longest answer": plural(settings.max_new_tokens or recipe.sampling.max_new_tokens, "token"),
    }
    if settings.samples > 1:
        temperature = settings.temperature or recipe.sampling.temperature
        facts["samples"] = f"{settings.samples}, temperature {temperature:g}"
    facts["seed"] = str(recipe.train.seed)
    versions = package_versions(("torch", "transformers"))
    names = ("groupwise", "torch", "transformers")
    return facts | {"versions": ", ".join(f"{name} {versions[name]}" for name in names if name in versions)}


def _prompt_form(recipe: Recipe) -> str:
    form: str = find_task(recipe.task).read_options(recipe).prompt
    return form


def _source(recipe: Recipe) -> str:
    """The files or data sets of the held-out questions, without their folders."""
    data = recipe.data
    named = ", ".join(Path(source).name for source in listed(data.held_out) or listed(data.train))
    if not named:
        return "the task's own rows"
    if data.held_out_from_train:
        return f"{data.held_out_from_train} held out from {named}"
    return named if data.held_out_split is None else f"{named}, {data.held_out_split}"


def _summary(report: ExamReport, comparison: ExamComparison | None) -> list[Any]:
    """The accuracies as a table, and sentences on the answers and on each change."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    before = comparison.before if comparison is not None else {}
    for column in ("measure", "value", "95 % interval", *(["before"] if before else [])):
        table.add_column(column, justify="left" if column == "measure" else "right")
    for name, share in report.accuracies().items():
        earlier = [f"{before[name].value:.1%}"] if name in before else []
        table.add_row(name, f"{share.value:.1%}", f"{share.low:.1%} – {share.high:.1%}", *earlier)
    unread = f"{report.unread_strict / report.n:.1%} strictly, {report.unread_lenient / report.n:.1%} leniently"
    lines = [
        f"{plural(report.n, 'question')}; without an answer: {unread}; {report.mean_tokens:.1f} tokens per answer, "
        f"{report.cut_off:.1%} cut off"
    ]
    for measure in comparison.measures if comparison is not None else ():
        verdict = "significant" if measure.real else "not significant"
        test = "McNemar" if measure.changes is not None else "permutation test"
        lines.append(f"{measure.name}: {measure.difference.value:+.1%}, {verdict} ({test} p = {measure.p_value:.2g})")
    return [table, *lines]
