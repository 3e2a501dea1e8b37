"""A run's summary as Markdown. Texts of the run, whatever they contain, stand in fences or are escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from groupwise.analysis.findings import Finding
from groupwise.analysis.summary import (
    CurveNumbers,
    HeldOutExample,
    HeldOutMetric,
    Measurement,
    PairedChange,
    QuestionCounts,
    RunSummary,
    StepSamples,
    TimeSpent,
)
from groupwise.text import code_span, escape_markdown, format_duration, markdown_table, plural, printable
from groupwise.training.monitor.question_log import STATUSES

NONE = "–"
LONGEST = {"prompt": 600, "completion": 1500}  # characters of a sample


def run_markdown(summary: RunSummary) -> str:
    """The page."""
    parts = [f"# {escape_markdown(summary.name)}", _headline(summary)]
    parts.append(
        markdown_table(["", ""], [(name, escape_markdown(text)) for name, text in summary.facts.items()], left=(0, 1))
    )
    if summary.problems:
        parts += ["## What could not be read", "\n".join(f"- {escape_markdown(text)}" for text in summary.problems)]
    parts += _findings(summary.findings)
    parts += _held_out(summary.held_out, summary.paired)
    parts += _curves(summary.curves)
    for samples in reversed(summary.samples):
        parts += _samples(samples)
    parts += _questions(summary.questions)
    parts += _time(summary.time)
    parts += _settings(summary.settings)
    return "\n\n".join(parts) + "\n"


def fenced(text: str, limit: int) -> str:
    """A text as a code block: its fence is longer than any in it, and a long one is cut in the middle."""
    shown = printable(text)
    if len(shown) > limit:
        left_out = len(shown) - limit
        shown = f"{shown[: limit * 2 // 3]}\n[… {plural(left_out, 'character')} left out …]\n{shown[-limit // 3 :]}"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence}text\n{shown}\n{fence}"


def format_number(value: float | None) -> str:
    """Four digits, thousands with commas: ``0.2383``, ``1,204``, ``1.5e-05``."""
    if value is None:
        return NONE
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def format_p_value(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def _signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _cell(text: str) -> str:
    """A text as code in a table; a bar would end the cell, even within code."""
    return code_span(text).replace("|", r"\|")


def _formatter(metric: HeldOutMetric) -> Callable[[float | None], str]:
    return _percent if metric.is_share else format_number


def _measured(measurement: Measurement | None, shown: Callable[[float | None], str]) -> str:
    """``55.7 % [53.0 %, 58.4 %]``."""
    if measurement is None:
        return NONE
    bounds = f" [{shown(measurement.low)}, {shown(measurement.high)}]" if measurement.low is not None else ""
    return f"{shown(measurement.value)}{bounds}"


def _headline(summary: RunSummary) -> str:
    """What was trained, and the main metric before and after, in two sentences."""
    model, task, algorithm = (code_span(summary.facts.get(name, "unknown")) for name in ("model", "task", "algorithm"))
    of = f" of {summary.total_steps:,}" if summary.total_steps else ""
    state = {"finished": "", "running": " so far"}.get(summary.status, f"; the run is {summary.status}")
    text = f"{model} after {summary.step:,}{of} steps of {algorithm} on the task {task}{state}."
    if summary.held_out:
        main = summary.held_out[0]
        shown = _formatter(main)
        text += f" {escape_markdown(main.name)} on held-out rows: {_measured(main.first, shown)}"
        if main.last.step != main.first.step:
            text += f" after step {main.first.step}, {_measured(main.last, shown)} after step {main.last.step}"
            text += f" ({format_p_value(summary.paired.p_value)})" if summary.paired else ""
        text += "."
    if summary.findings:
        errors = sum(finding.severity == "error" for finding in summary.findings)
        kinds = [plural(errors, "error")] * bool(errors)
        kinds += [plural(len(summary.findings) - errors, "warning")] * (errors < len(summary.findings))
        text += f" Findings: {' and '.join(kinds)}."
    return text


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["## Findings", "None: no check of `groupwise doctor` found anything."]
    parts = ["## Findings"]
    for finding in findings:
        first, last = finding.steps
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        parts += [
            f"### {escape_markdown(finding.title)} ({finding.severity}, {where})",
            escape_markdown(finding.message),
        ]
        if finding.evidence:
            rows = [
                (_cell(name), escape_markdown(value) if isinstance(value, str) else format_number(value))
                for name, value in finding.evidence.items()
            ]
            parts.append(markdown_table(["evidence", "value"], rows))
        if finding.remedy:
            parts.append(f"What to change: {escape_markdown(finding.remedy)}")
    return parts


def _held_out(metrics: Sequence[HeldOutMetric], paired: PairedChange | None) -> list[str]:
    if not metrics:
        return []
    header = ["held out", "first evaluation", "last evaluation"]
    has_best = any(metric.best is not None and metric.best.step != metric.last.step for metric in metrics)
    rows = []
    for metric in metrics:
        shown = _formatter(metric)
        cells = [f"{_measured(one, shown)} (step {one.step:,})" for one in (metric.first, metric.last)]
        if has_best:
            cells.append(f"{_measured(metric.best, shown)} (step {metric.best.step:,})" if metric.best else NONE)
        rows.append([escape_markdown(metric.name), *cells])
    table = markdown_table([*header, *(["exported model"] if has_best else [])], rows)
    return ["## Before and after", table, "In brackets: 95 % confidence intervals.", *_paired(paired)]


def _paired(paired: PairedChange | None) -> list[str]:
    if paired is None:
        return []
    same = paired.questions - paired.gained - paired.lost
    change, low, high = map(_signed, (paired.difference.estimate, paired.difference.low, paired.difference.high))
    parts = [
        f"The same {paired.questions:,} questions after step {paired.first_step} and after step {paired.last_step}: "
        f"{paired.gained:,} better, {paired.lost:,} worse, {same:,} as before. "
        f"{escape_markdown(paired.metric)} changed by {change} [{low}, {high}]; "
        f"{paired.test} gives {format_p_value(paired.p_value)}."
    ]
    for heading, examples in (("Learnt", paired.gained_examples), ("Lost", paired.lost_examples)):
        for example in examples:
            parts += _changed(heading, example)
    return parts


def _changed(heading: str, example: HeldOutExample) -> list[str]:
    return [
        f"### {heading}: held-out row {example.row}",
        fenced(example.prompt, LONGEST["prompt"]),
        "Before:",
        fenced(example.before, LONGEST["completion"]),
        "After:",
        fenced(example.after, LONGEST["completion"]),
    ]


def _curves(curves: Sequence[CurveNumbers]) -> list[str]:
    if not curves:
        return []
    rows = [
        (
            _cell(curve.name),
            format_number(curve.start),
            format_number(curve.end),
            *(f"{format_number(value)} (step {step:,})" for step, value in (curve.lowest, curve.highest)),
        )
        for curve in curves
    ]
    return [
        "## Curves",
        markdown_table(["metric", "at the start", "at the end", "lowest", "highest"], rows),
        "At the start and at the end: means over the first and the last tenth of the steps.",
    ]


def _samples(samples: StepSamples) -> list[str]:
    parts = [f"## Samples of step {samples.step:,}"]
    for heading, rows in (("Highest reward", samples.best), ("Lowest reward", samples.worst)):
        for row in rows:
            parts += _sample(heading, row)
    return parts


def _sample(heading: str, row: dict[str, Any]) -> list[str]:
    parts = [f"{name.removeprefix('reward/')} {format_number(row[name])}" for name in row if name.startswith("reward/")]
    functions = f" ({', '.join(map(escape_markdown, parts))})" if len(parts) > 1 else ""
    facts = [f"reward {format_number(row['reward'])}{functions}"]
    if row.get("advantage") is not None:
        facts.append(f"advantage {_signed(row['advantage'], 2)}")
    if row.get("stop_reason") == "length":
        facts.append("cut off")
    place = f"prompt {row.get('prompt_number')}, sample {row.get('sample')}"
    return [
        f"### {heading}: {place}",
        ", ".join(facts),
        fenced(str(row.get("prompt") or ""), LONGEST["prompt"]),
        "Completion:",
        fenced(str(row.get("completion") or ""), LONGEST["completion"]),
    ]


def _questions(questions: QuestionCounts | None) -> list[str]:
    if questions is None:
        return []
    rows = [(STATUSES[status], f"{count:,}") for status, count in questions.counts.items()]
    parts = ["## Training questions", markdown_table(["status", "questions"], rows)]
    for status, numbers in (("learnt", questions.learnt), ("forgotten", questions.forgotten)):
        if numbers:
            more = ", …" if questions.counts[status] > len(numbers) else ""
            parts.append(f"Rows that were {status}: {', '.join(map(str, numbers))}{more}.")
    return parts


def _time(time: TimeSpent | None) -> list[str]:
    if time is None:
        return []
    rows = [
        (escape_markdown(stage), format_duration(spent), _percent(spent / time.seconds))
        for stage, spent in time.stages.items()
    ]
    memory = f"; the peak memory is {time.memory:.2f} GiB" if time.memory is not None else ""
    sampled = f", {plural(time.tokens, 'token')} sampled" if time.tokens else ""
    text = f"{format_duration(time.seconds)} in steps{sampled}{memory}."
    return ["## Time", text, *([markdown_table(["stage", "time", "share"], rows)] if rows else [])]


def _settings(settings: Sequence[tuple[str, Any, Any]]) -> list[str]:
    if not settings:
        return []
    rows = [(_cell(name), _setting(value), _setting(default)) for name, default, value in settings]
    return [
        "## Settings that differ from the defaults",
        markdown_table(["setting", "value", "default"], rows, left=range(3)),
    ]


def _setting(value: Any) -> str:
    return _cell("none" if value is None else str(value).lower() if isinstance(value, bool) else str(value))
