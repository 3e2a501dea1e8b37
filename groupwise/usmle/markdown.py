"""A report as a page of Markdown: tables, each with a sentence of explanation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple

from groupwise.text import escape_markdown, markdown_table, plural
from groupwise.usmle import tables
from groupwise.usmle.compare import LEVEL, CategoryChange, ChangedAnswer, ExamComparison
from groupwise.usmle.tables import Difference, ExamReport, Proportion

NONE = "–"


def markdown(
    report: ExamReport,
    *,
    title: str,
    facts: Mapping[str, str],
    comparison: ExamComparison | None = None,
    picture: str | None = None,
) -> str:
    """The page. ``picture`` is the name of an image file beside it."""
    parts = [f"# {escape_markdown(title) or 'Evaluation'}"]
    if facts:
        parts.append(markdown_table(["", ""], [_cells(*fact) for fact in facts.items()], left=(0, 1)))
    parts += _headline(report)
    if picture:
        parts.append(f"![accuracy, letters and calibration]({picture})")
    if comparison:
        parts += _compared(comparison)
    parts += _by_group("By category", "category", report.by_category)
    parts += _by_group("By exam step", "step", report.by_step)
    parts += _letters(report.confusion)
    shuffled = f"With the options shuffled the accuracy is {interval(report.shuffled.accuracy)}."
    parts += ["## Shuffled options", f"{shuffled} {_order(report.shuffled)}"]
    if report.sampled:
        parts += _sampled(report.sampled)
    parts += _scored("The letters' probabilities", report.letters)
    parts += _scored("The letters' probabilities, shuffled options", report.shuffled_letters)
    parts += _scored("The letters' probabilities, averaged over all orders", report.averaged_letters)
    parts += _errors(report)
    rules = [(*_cells(rule.name, rule.accuracy.n), interval(rule.accuracy)) for rule in report.rules]
    parts += ["## Reading rules", "The rule by which the lenient reader found its letter, or why it found none."]
    parts.append(markdown_table(["rule", "answers", "accuracy"], rules))
    return "\n\n".join(part for part in parts if part) + "\n"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def interval(share: Proportion | None) -> str:
    """``55.7 % [53.0, 58.4]``."""
    return f"{percent(share.value)} [{100 * share.low:.1f}, {100 * share.high:.1f}]" if share else NONE


def points(difference: Difference) -> str:
    """``+5.1 [+2.9, +7.3]``, in percentage points."""
    return f"{_signed(difference.value)} [{_signed(difference.low)}, {_signed(difference.high)}]"


def p_value(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _signed(value: float) -> str:
    rounded = round(100 * value, 1)
    return f"{rounded:+.1f}".replace("-", "−") if rounded else "0.0"


def _cells(*values: str | int | None) -> list[str]:
    """Texts, escaped, and counts as cells of a table."""
    return [NONE if v is None else escape_markdown(v) if isinstance(v, str) else f"{v:,}" for v in values]


def _headline(report: ExamReport) -> list[str]:
    lenient, strict = (
        f"{count:,} ({percent(count / report.n)})" for count in (report.unread_lenient, report.unread_strict)
    )
    rows = [
        ("lenient: any form that is clear to a careful reader", interval(report.lenient), lenient),
        ("strict: the requested form", interval(report.strict), strict),
    ]
    summary = (
        f"{plural(report.n, 'question')}, one greedy answer each. An answer without a letter counts as wrong. "
        f"Guessing gives {percent(report.chance)}. In brackets: 95 % intervals."
    )
    length = f"An answer has {report.mean_tokens:.0f} tokens on average; {percent(report.cut_off)} were cut off."
    return [summary, markdown_table(["read as", "accuracy", "no answer"], rows), length]


def _by_group(heading: str, what: str, groups: Sequence[tables.GroupAccuracy]) -> list[str]:
    if not groups:
        return []
    rows = [(_name(part), *_cells(part.accuracy.n), interval(part.accuracy)) for part in groups]
    return [f"## {heading}", markdown_table([what, "questions", "accuracy"], rows), _few(groups)]


def _name(part: tables.GroupAccuracy | CategoryChange) -> str:
    return escape_markdown("not given" if part.name is None else part.name) + (" †" if part.few else "")


def _few(parts: Iterable[tables.GroupAccuracy | CategoryChange]) -> str:
    return f"†: fewer than {tables.FEW} questions." if any(part.few for part in parts) else ""


def _letters(confusion: tables.Confusion) -> list[str]:
    names = _cells(*(letter.letter for letter in confusion.letters))
    rows = []
    for place, (name, counts) in enumerate(zip(names, confusion.counts, strict=True)):
        cells = _cells(*counts)
        cells[place] = f"**{cells[place]}**"
        rows.append((name, *cells))
    table = markdown_table(["right", *(f"answered {name}" for name in names), "none"], rows)
    parts = ["## Letters", "Rows are right letters, columns are answers.", table]
    if confusion.bias is None:
        return parts
    bias = (
        "How often a letter is right and how often it is predicted, of the questions with an answer. Bias: "
        f"{percent(confusion.bias)} of the predictions would have to change for the two to match."
    )
    shares = [
        (name, percent(letter.right_share), percent(letter.predicted_share), interval(letter.accuracy))
        for name, letter in zip(names, confusion.letters, strict=True)
    ]
    header = ["letter", "right in", "predicted in", "accuracy where it is right"]
    return [*parts, bias, markdown_table(header, shares)]


def _order(shuffled: tables.ShuffledOptions) -> str:
    difference = shuffled.difference
    return (
        f"The difference to the original order is {points(difference)} points ({p_value(difference.p_value)}). The "
        f"same option was chosen in both orders in {interval(shuffled.consistency)} of the questions."
    )


def _sampled(sampled: tables.SampledAccuracy) -> list[str]:
    rows = [("mean of the samples", interval(sampled.accuracy)), ("majority vote", interval(sampled.majority))]
    rows += [(f"pass@{entry.k}", interval(entry.share)) for entry in sampled.pass_at]
    explanation = (
        f"{plural(sampled.samples, 'answer')} to each question. The majority vote takes the most frequent letter; "
        "pass@k is the probability that at least one of k answers is right."
    )
    return ["## Sampled answers", explanation, markdown_table(["", "accuracy"], rows)]


def _scored(heading: str, scored: tables.LetterScores) -> list[str]:
    summary = (
        f"Accuracy of the likeliest letter, without a written answer: {interval(scored.accuracy)}. The right letter "
        f"has a probability of {percent(scored.right_probability)} on average. The likeliest letter is that of the "
        f"written answer in {interval(scored.agreement)} of the questions."
    )
    rows = [
        (f"{entry.low:.1f} to {entry.high:.1f}", *_cells(entry.n), percent(entry.confidence), percent(entry.accuracy))
        for entry in scored.bins
        if entry.n
    ]
    calibration = (
        f"Expected calibration error: {percent(scored.calibration_error)}, the distance between the last two columns, "
        "averaged over the questions."
    )
    table = markdown_table(["probability of the likeliest letter", "questions", "mean", "accuracy"], rows)
    order = _order(scored.order) if scored.order else ""
    return [f"## {heading}", summary, order, calibration, table]


def _errors(report: ExamReport) -> list[str]:
    if not report.patterns:
        return ["## Errors", "There are none."]
    rows = [(*_cells(entry.name, entry.count), percent(entry.share)) for entry in report.patterns]
    summary = f"{report.errors:,} answers are wrong for at least one reader. Each is counted once."
    parts = ["## Errors", summary, markdown_table(["kind", "answers", "of the errors"], rows)]
    for entry in report.patterns:
        parts += _examples(escape_markdown(entry.name), ("predicted", "end of the answer"), entry.examples)
    return parts


def _examples(
    heading: str, columns: tuple[str, str], examples: Sequence[tables.ErrorExample] | Sequence[ChangedAnswer]
) -> list[str]:
    """A table of questions; the two kinds of examples have the same first three fields."""
    if not examples:
        return []
    rows = [[str(number), *_cells(*texts)] for number, *texts in map(astuple, examples)]
    return [f"### {heading}", markdown_table(["number", "question", "right", *columns], rows, left=range(5))]


def _change(before: float, after: float, difference: Difference) -> list[str]:
    return [percent(before), percent(after), points(difference)]


def _compared(comparison: ExamComparison) -> list[str]:
    explanation = (
        f"The same {comparison.n:,} questions before and after, compared one by one. A difference is significant if "
        f"the exact McNemar test gives p < {LEVEL:g}; samples are compared by a permutation test."
    )
    measures = []
    for measure in comparison.measures:
        change = _change(measure.before, measure.after, measure.difference)
        verdict = "significant" if measure.real else "not significant"
        measures.append((measure.name, *change, p_value(measure.p_value), verdict))
    changes = [
        _cells(measure.name, counts.right_right, counts.wrong_right, counts.right_wrong, counts.wrong_wrong)
        for measure in comparison.measures
        if (counts := measure.changes)
    ]
    categories = []
    for part in comparison.by_category:
        change = _change(part.before.value, part.after.value, part.difference)
        categories.append((_name(part), *_cells(part.n), *change, *_cells(part.gained, part.lost)))
    parts = [
        "## Before and after",
        explanation,
        markdown_table(["", "before", "after", "difference in points", "p-value", ""], measures),
        markdown_table(["questions", "right both times", "gained", "lost", "wrong both times"], changes),
    ]
    if categories:
        header = ["category", "questions", "before", "after", "difference in points", "gained", "lost"]
        parts += [
            "### By category, before and after",
            "With many categories some differ by chance: one 95 % interval in twenty misses the true difference.",
            markdown_table(header, categories),
            _few(comparison.by_category),
        ]
    parts += _examples("Gained", ("before", "after"), comparison.gained)
    return parts + _examples("Lost", ("before", "after"), comparison.lost)
