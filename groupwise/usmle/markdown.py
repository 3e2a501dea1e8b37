"""A report as a page of Markdown: tables, each with a sentence of explanation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from groupwise.text import escape_markdown, markdown_table
from groupwise.usmle.compare import LEVEL, ChangedAnswer, ExamComparison, MeasureChange
from groupwise.usmle.tables import (
    FEW,
    Difference,
    ErrorExample,
    ErrorPattern,
    ExamReport,
    GroupAccuracy,
    LetterScores,
    Proportion,
    SampledAccuracy,
    ShuffledOptions,
)

NOT_GIVEN = "not given"
NONE = "–"
MARK = " †"


def markdown(
    report: ExamReport,
    *,
    title: str,
    facts: Mapping[str, str],
    comparison: ExamComparison | None = None,
    picture: str | None = None,
) -> str:
    """The page. ``picture`` is the name of an image file beside it."""
    parts = [f"# {escape_markdown(title) or 'Evaluation'}", _facts(facts), _headline(report)]
    if picture:
        parts.append(f"![accuracy, letters and calibration]({picture})")
    if comparison:
        parts += _compared(comparison)
    parts += _by_group("By category", "category", report.by_category)
    parts += _by_group("By exam step", "step", report.by_step)
    parts += _letters(report)
    if report.shuffled:
        shuffled = f"With the options shuffled the accuracy is {interval(report.shuffled.accuracy)}."
        parts += ["## Shuffled options", f"{shuffled} {_order(report.shuffled)}"]
    if report.sampled:
        parts += _sampled(report.sampled)
    if report.letters:
        parts += _scored("The letters' probabilities", report.letters)
    if report.shuffled_letters:
        parts += _scored("The letters' probabilities, shuffled options", report.shuffled_letters)
    parts += _patterns(report)
    parts += _rules(report)
    return "\n\n".join(part for part in parts if part) + "\n"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def interval(share: Proportion) -> str:
    """``55.7 % [53.0, 58.4]``."""
    return f"{percent(share.value)} [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def points(difference: Difference) -> str:
    """``+5.1 [+2.9, +7.3]``, in percentage points."""
    return f"{_signed(difference.value)} [{_signed(difference.low)}, {_signed(difference.high)}]"


def p_value(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _signed(value: float) -> str:
    rounded = round(100 * value, 1)
    return f"{rounded:+.1f}".replace("-", "−") if rounded else "0.0"


def _facts(facts: Mapping[str, str]) -> str:
    rows = [(escape_markdown(name), escape_markdown(value)) for name, value in facts.items()]
    return markdown_table(["", ""], rows, left=(0, 1)) if rows else ""


def _headline(report: ExamReport) -> str:
    rows = [
        (
            "lenient: any form that is clear to a careful reader",
            interval(report.lenient),
            _count(report.unread_lenient, report.n),
        ),
        ("strict: the requested form", interval(report.strict), _count(report.unread_strict, report.n)),
    ]
    summary = (
        f"{report.n:,} questions, one greedy answer each. An answer without a letter counts as wrong. Guessing gives "
        f"{percent(report.chance)}. In brackets: 95 % intervals."
    )
    length = f"An answer has {report.mean_tokens:.0f} tokens on average; {percent(report.cut_off)} were cut off."
    return "\n\n".join([summary, markdown_table(["read as", "accuracy", "no answer"], rows), length])


def _count(count: int, total: int) -> str:
    return f"{count:,} ({percent(count / total)})"


def _by_group(heading: str, what: str, groups: Sequence[GroupAccuracy]) -> list[str]:
    if not groups:
        return []
    rows = [(_name(part.name, part.few), f"{part.accuracy.n:,}", interval(part.accuracy)) for part in groups]
    return [f"## {heading}", markdown_table([what, "questions", "accuracy"], rows), _few([part.few for part in groups])]


def _name(name: str | None, few: bool) -> str:
    return (NOT_GIVEN if name is None else escape_markdown(name)) + (MARK if few else "")


def _few(marks: Sequence[bool]) -> str:
    return f"†: fewer than {FEW} questions." if any(marks) else ""


def _letters(report: ExamReport) -> list[str]:
    names = [letter.letter for letter in report.confusion.letters]
    counts = markdown_table(
        ["right", *(f"answered {escape_markdown(name)}" for name in names), "none"],
        [
            (
                escape_markdown(name),
                *(
                    f"**{count:,}**" if name == answered else f"{count:,}"
                    for answered, count in zip([*names, None], row, strict=True)
                ),
            )
            for name, row in zip(names, report.confusion.counts, strict=True)
        ],
    )
    shares = markdown_table(
        ["letter", "right in", "predicted in", "accuracy where it is right"],
        [
            (
                escape_markdown(letter.letter),
                NONE if letter.right_share is None else percent(letter.right_share),
                NONE if letter.predicted_share is None else percent(letter.predicted_share),
                interval(letter.accuracy) if letter.accuracy else NONE,
            )
            for letter in report.confusion.letters
        ],
    )
    if report.confusion.bias is None:
        return ["## Letters", "Rows are right letters, columns are answers.", counts]
    bias = (
        "How often a letter is right and how often it is predicted, of the questions with an answer. Bias: "
        f"{percent(report.confusion.bias)} of the predictions would have to change for the two to match."
    )
    return ["## Letters", "Rows are right letters, columns are answers.", counts, bias, shares]


def _order(shuffled: ShuffledOptions) -> str:
    difference = shuffled.difference
    return (
        f"The difference to the original order is {points(difference)} points ({p_value(difference.p_value)}). The "
        f"same option was chosen in both orders in {interval(shuffled.consistency)} of the questions."
    )


def _sampled(sampled: SampledAccuracy) -> list[str]:
    rows = [("mean of the samples", interval(sampled.accuracy)), ("majority vote", interval(sampled.majority))]
    rows += [(f"pass@{entry.k}", interval(entry.share)) for entry in sampled.pass_at]
    explanation = (
        f"{sampled.samples} answers to each question. The majority vote takes the most frequent letter; pass@k is the "
        "probability that at least one of k answers is right."
    )
    return ["## Sampled answers", explanation, markdown_table(["", "accuracy"], rows)]


def _scored(heading: str, scored: LetterScores) -> list[str]:
    summary = (
        f"Accuracy of the likeliest letter, without a written answer: {interval(scored.accuracy)}. The right letter "
        f"has a probability of {percent(scored.right_probability)} on average."
    )
    if scored.agreement:
        summary += (
            f" The likeliest letter is that of the written answer in {interval(scored.agreement)} of the questions."
        )
    rows = [
        (f"{entry.low:.1f} to {entry.high:.1f}", f"{entry.n:,}", percent(entry.confidence), percent(entry.accuracy))
        for entry in scored.bins
        if entry.confidence is not None and entry.accuracy is not None
    ]
    calibration = (
        f"Expected calibration error: {percent(scored.calibration_error)}, the distance between the last two columns, "
        "averaged over the questions."
    )
    table = markdown_table(["probability of the likeliest letter", "questions", "mean", "accuracy"], rows)
    order = _order(scored.order) if scored.order else ""
    return [f"## {heading}", summary, order, calibration, table]


def _patterns(report: ExamReport) -> list[str]:
    if not report.patterns:
        return ["## Errors", "There are none."]
    rows = [(escape_markdown(entry.name), f"{entry.count:,}", percent(entry.share)) for entry in report.patterns]
    summary = f"{report.errors:,} answers are wrong for at least one reader. Each is counted once."
    parts = ["## Errors", summary, markdown_table(["kind", "answers", "of the errors"], rows)]
    for entry in report.patterns:
        parts += _examples(entry)
    return parts


def _examples(pattern: ErrorPattern) -> list[str]:
    def row(example: ErrorExample) -> tuple[str, ...]:
        predicted = NONE if example.predicted is None else escape_markdown(example.predicted)
        return (
            str(example.number),
            escape_markdown(example.question),
            escape_markdown(example.right),
            predicted,
            escape_markdown(example.ending),
        )

    header = ["number", "question", "right", "predicted", "end of the answer"]
    return [
        f"### {escape_markdown(pattern.name)}",
        markdown_table(header, [row(example) for example in pattern.examples], left=range(5)),
    ]


def _rules(report: ExamReport) -> list[str]:
    rows = [(escape_markdown(rule.name), f"{rule.accuracy.n:,}", interval(rule.accuracy)) for rule in report.rules]
    explanation = "The rule by which the lenient reader found its letter, or why it found none."
    return ["## Reading rules", explanation, markdown_table(["rule", "answers", "accuracy"], rows)]


def _compared(comparison: ExamComparison) -> list[str]:
    rows = [
        (
            measure.name,
            percent(measure.before),
            percent(measure.after),
            points(measure.difference),
            p_value(measure.p_value),
            "significant" if measure.real else "not significant",
        )
        for measure in comparison.measures
    ]
    table = markdown_table(["", "before", "after", "difference in points", "p-value", ""], rows)
    explanation = (
        f"The same {comparison.n:,} questions before and after, compared one by one. A difference is significant if "
        f"the exact McNemar test gives p < {LEVEL:g}; samples are compared by a permutation test."
    )
    parts = ["## Before and after", explanation, table]
    parts.append(_changes(comparison.measures))
    parts += _category_changes(comparison)
    parts += _moved("Gained", comparison.gained) + _moved("Lost", comparison.lost)
    return parts


def _changes(measures: Sequence[MeasureChange]) -> str:
    """How many questions changed from right to wrong and back."""
    rows = [
        (
            measure.name,
            f"{measure.changes.right_right:,}",
            f"{measure.changes.wrong_right:,}",
            f"{measure.changes.right_wrong:,}",
            f"{measure.changes.wrong_wrong:,}",
        )
        for measure in measures
        if measure.changes
    ]
    return markdown_table(["questions", "right both times", "gained", "lost", "wrong both times"], rows)


def _category_changes(comparison: ExamComparison) -> list[str]:
    if not comparison.by_category:
        return []
    rows = [
        (
            _name(part.name, part.few),
            f"{part.n:,}",
            percent(part.before.value),
            percent(part.after.value),
            points(part.difference),
            f"{part.gained:,}",
            f"{part.lost:,}",
        )
        for part in comparison.by_category
    ]
    header = ["category", "questions", "before", "after", "difference in points", "gained", "lost"]
    return [
        "### By category, before and after",
        "With many categories some differ by chance: one 95 % interval in twenty misses the true difference.",
        markdown_table(header, rows),
        _few([part.few for part in comparison.by_category]),
    ]


def _moved(heading: str, moved: Sequence[ChangedAnswer]) -> list[str]:
    rows = [
        (
            str(entry.number),
            escape_markdown(entry.question),
            escape_markdown(entry.right),
            NONE if entry.before is None else escape_markdown(entry.before),
            NONE if entry.after is None else escape_markdown(entry.after),
        )
        for entry in moved
    ]
    return (
        [f"### {heading}", markdown_table(["number", "question", "right", "before", "after"], rows, left=range(5))]
        if rows
        else []
    )
