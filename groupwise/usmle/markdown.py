"""A report as a page of Markdown: tables, each with a sentence that says what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from groupwise.usmle.compare import LEVEL, Comparison, Measure, Moved
from groupwise.usmle.tables import (
    FEW,
    Difference,
    Example,
    ExamReport,
    Pattern,
    SampledAccuracy,
    Scored,
    Share,
    Shuffled,
    Slice,
)
from groupwise.usmle.text import escape

NOT_GIVEN = "not given"
NONE = "–"
MARK = " †"


def markdown(
    report: ExamReport,
    *,
    title: str,
    facts: Mapping[str, str],
    comparison: Comparison | None = None,
    picture: str | None = None,
) -> str:
    """The whole page. ``picture`` is the name of a picture beside it."""
    parts = [f"# {escape(title) or 'Evaluation'}", _facts(facts), _headline(report)]
    if picture:
        parts.append(f"![accuracy, letters and calibration]({picture})")
    if comparison:
        parts += _compared(comparison)
    parts += _slices("By category", "category", report.by_category)
    parts += _slices("By exam step", "step", report.by_step)
    parts += _letters(report)
    if report.shuffled:
        shuffled = f"With the options shuffled the accuracy is {interval(report.shuffled.accuracy)}."
        parts += ["## Options in another order", f"{shuffled} {_order(report.shuffled)}"]
    if report.sampled:
        parts += _sampled(report.sampled)
    if report.letters:
        parts += _scored("The letters' probabilities", report.letters)
    if report.shuffled_letters:
        parts += _scored("The letters' probabilities, options in another order", report.shuffled_letters)
    parts += _patterns(report)
    parts += _rules(report)
    return "\n\n".join(part for part in parts if part) + "\n"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def interval(share: Share) -> str:
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


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, text: int = 1) -> str:
    """A table whose first ``text`` columns are words, to the left, and whose others are numbers, to the right."""
    lines = [header, [":--" if place < text else "--:" for place in range(len(header))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _facts(facts: Mapping[str, str]) -> str:
    rows = [(escape(name), escape(value)) for name, value in facts.items()]
    return _table(["", ""], rows, text=2) if rows else ""


def _headline(report: ExamReport) -> str:
    rows = [
        (
            "lenient: any form in which one letter is meant",
            interval(report.lenient),
            _count(report.unread_lenient, report.n),
        ),
        ("strict: the form that was asked for", interval(report.strict), _count(report.unread_strict, report.n)),
    ]
    says = (
        f"{report.n:,} questions, one answer each, the likeliest token always. An answer without a letter counts as "
        f"wrong. Guessing would give {percent(report.chance)}. In brackets: 95 % intervals."
    )
    length = f"An answer has {report.mean_tokens:.0f} tokens on average; {percent(report.cut_off)} were cut off."
    return "\n\n".join([says, _table(["read as", "accuracy", "no answer"], rows), length])


def _count(count: int, total: int) -> str:
    return f"{count:,} ({percent(count / total)})"


def _slices(heading: str, what: str, slices: Sequence[Slice]) -> list[str]:
    if not slices:
        return []
    rows = [(_name(part.name, part.few), f"{part.accuracy.n:,}", interval(part.accuracy)) for part in slices]
    return [f"## {heading}", _table([what, "questions", "accuracy"], rows), _few([part.few for part in slices])]


def _name(name: str | None, few: bool) -> str:
    return (NOT_GIVEN if name is None else escape(name)) + (MARK if few else "")


def _few(marks: Sequence[bool]) -> str:
    return f"†: fewer than {FEW} questions, which say next to nothing." if any(marks) else ""


def _letters(report: ExamReport) -> list[str]:
    names = [letter.letter for letter in report.confusion.letters]
    counts = _table(
        ["right", *(f"said {escape(name)}" for name in names), "none"],
        [
            (
                escape(name),
                *(
                    f"**{count:,}**" if name == given else f"{count:,}"
                    for given, count in zip([*names, None], row, strict=True)
                ),
            )
            for name, row in zip(names, report.confusion.counts, strict=True)
        ],
    )
    shares = _table(
        ["letter", "right in", "predicted in", "accuracy where it is right"],
        [
            (
                escape(letter.letter),
                NONE if letter.right_share is None else percent(letter.right_share),
                NONE if letter.predicted_share is None else percent(letter.predicted_share),
                interval(letter.accuracy) if letter.accuracy else NONE,
            )
            for letter in report.confusion.letters
        ],
    )
    if report.confusion.bias is None:
        return ["## Letters", "Rows are right letters, columns what was answered.", counts]
    bias = (
        "Of the questions with an answer, how often a letter is right and how often it is predicted. Bias: "
        f"{percent(report.confusion.bias)} of the predictions would have to change for the two to match."
    )
    return ["## Letters", "Rows are right letters, columns what was answered.", counts, bias, shares]


def _order(shuffled: Shuffled) -> str:
    difference = shuffled.difference
    return (
        f"Against the plain order that is {points(difference)} points ({p_value(difference.p_value)}). The same option "
        f"was chosen in both orders in {interval(shuffled.consistency)} of the questions; a model that knows the "
        "answer does not mind the order."
    )


def _sampled(sampled: SampledAccuracy) -> list[str]:
    rows = [("mean of the samples", interval(sampled.accuracy)), ("majority vote", interval(sampled.majority))]
    rows += [(f"pass@{entry.k}", interval(entry.share)) for entry in sampled.pass_at]
    says = (
        f"{sampled.samples} answers to each question. The majority vote takes the letter given most often, of "
        "equally frequent ones the first; pass@k is the chance that one of k answers at least is right."
    )
    return ["## Several answers", says, _table(["", "accuracy"], rows)]


def _scored(heading: str, scored: Scored) -> list[str]:
    says = (
        f"Taking the likeliest letter, with no answer written: {interval(scored.accuracy)}. The right letter has a "
        f"probability of {percent(scored.right_probability)} on average."
    )
    if scored.agreement:
        says += f" It is the letter of the written answer in {interval(scored.agreement)} of the questions."
    rows = [
        (f"{entry.low:.1f} to {entry.high:.1f}", f"{entry.n:,}", percent(entry.confidence), percent(entry.accuracy))
        for entry in scored.bins
        if entry.confidence is not None and entry.accuracy is not None
    ]
    calibrated = (
        f"Where the model is sure, is it right? Expected calibration error: {percent(scored.calibration_error)}, the "
        "distance between the two last columns, averaged over the questions."
    )
    table = _table(["probability of the likeliest letter", "questions", "its mean", "accuracy"], rows)
    order = _order(scored.order) if scored.order else ""
    return [f"## {heading}", says, order, calibrated, table]


def _patterns(report: ExamReport) -> list[str]:
    if not report.patterns:
        return ["## Errors", "There are none."]
    rows = [(escape(entry.name), f"{entry.count:,}", percent(entry.share)) for entry in report.patterns]
    says = f"{report.errors:,} answers are wrong in one reading or in both. Each is counted once."
    parts = ["## Errors", says, _table(["what went wrong", "answers", "of the errors"], rows)]
    for entry in report.patterns:
        parts += _examples(entry)
    return parts


def _examples(pattern: Pattern) -> list[str]:
    def row(example: Example) -> tuple[str, ...]:
        predicted = NONE if example.predicted is None else escape(example.predicted)
        return (str(example.number), escape(example.question), escape(example.right), predicted, escape(example.ending))

    header = ["number", "question", "right", "predicted", "end of the answer"]
    return [f"### {escape(pattern.name)}", _table(header, [row(example) for example in pattern.examples], text=5)]


def _rules(report: ExamReport) -> list[str]:
    rows = [(escape(rule.name), f"{rule.accuracy.n:,}", interval(rule.accuracy)) for rule in report.rules]
    says = "The rule by which the lenient reader found its letter, or why it found none."
    return ["## How answers were read", says, _table(["rule", "answers", "accuracy"], rows)]


def _compared(comparison: Comparison) -> list[str]:
    rows = [
        (
            measure.name,
            percent(measure.before),
            percent(measure.after),
            points(measure.difference),
            p_value(measure.p_value),
            "real" if measure.real else "could be chance",
        )
        for measure in comparison.measures
    ]
    table = _table(["", "before", "after", "difference in points", "p-value", ""], rows)
    says = (
        f"The same {comparison.n:,} questions before and after, compared one by one. A difference is called real if "
        f"the exact McNemar test gives p < {LEVEL:g}; samples are compared by a permutation test."
    )
    parts = ["## Before and after", says, table]
    parts.append(_changes(comparison.measures))
    parts += _category_changes(comparison)
    parts += _moved("Gained", comparison.gained) + _moved("Lost", comparison.lost)
    return parts


def _changes(measures: Sequence[Measure]) -> str:
    """How many questions went from right to wrong and back, for what is right or wrong."""
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
    return _table(["questions", "right both times", "gained", "lost", "wrong both times"], rows)


def _category_changes(comparison: Comparison) -> list[str]:
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
        "Of many categories some differ by chance alone: one interval in twenty leaves out the truth.",
        _table(header, rows),
        _few([part.few for part in comparison.by_category]),
    ]


def _moved(heading: str, moved: Sequence[Moved]) -> list[str]:
    rows = [
        (
            str(entry.number),
            escape(entry.question),
            escape(entry.right),
            NONE if entry.before is None else escape(entry.before),
            NONE if entry.after is None else escape(entry.after),
        )
        for entry in moved
    ]
    return [f"### {heading}", _table(["number", "question", "right", "before", "after"], rows, text=5)] if rows else []
