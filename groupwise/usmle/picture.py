"""A report as one figure: accuracy, categories, letters, calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.plots import COLOURS, new_figure, plain_label, save_figure
from groupwise.text import plural
from groupwise.usmle.compare import ExamComparison
from groupwise.usmle.tables import ExamReport, Proportion, SampledAccuracy, start_of

AFTER, BEFORE = COLOURS[0], "0.72"
DASHED: dict[str, Any] = {"color": "0.35", "linewidth": 1.2, "linestyle": (0, (4, 3))}
MAX_GROUPS = 16  # the Markdown page lists them all
NAME_LENGTH = 34

Panel = Callable[[Any, ExamReport, ExamComparison | None], None]


def draw_report(path: str | Path, report: ExamReport, *, title: str, comparison: ExamComparison | None = None) -> None:
    """Draw the report into a PNG, SVG or PDF; a comparison adds the earlier model."""
    panels: list[Panel] = [_accuracies]
    if report.by_category or report.by_step:
        panels.append(_groups)
    panels.append(_confusion)
    if report.sampled:
        panels.append(partial(_samples, sampled=report.sampled))
    panels.append(_calibration)
    if len(panels) % 2 and report.patterns:
        panels.append(_patterns)
    rows = (len(panels) + 1) // 2
    figure = new_figure(13.0, 4.8 * rows + 0.5)
    figure.suptitle(plain_label(start_of(title, 100)), fontsize=15, x=0.01, ha="left")
    for number, draw in enumerate(panels, start=1):
        draw(figure.add_subplot(rows, 2, number), report, comparison)
    save_figure(figure, path)


def _heading(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=12, pad=10)
    axes.tick_params(labelsize=10)


def _legend_above(axes: Any) -> None:
    """A legend beside the heading, where it covers no point."""
    axes.legend(frameon=False, fontsize=10, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.3)


def _bars(axes: Any, shares: Mapping[float, Proportion], colour: str, width: float, label: str) -> None:
    values, errors = _percents(shares)
    axes.bar(list(shares), values, width, color=colour, label=label)
    axes.errorbar(list(shares), values, yerr=errors, fmt="none", ecolor="0.2", elinewidth=1.2, capsize=3)
    style = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 10 if width > 0.5 else 9}
    for place, share in shares.items():
        axes.annotate(f"{100 * share.value:.1f}", (place, 100 * share.high), **style)


def _percents(shares: Mapping[float, Proportion]) -> tuple[list[float], list[list[float]]]:
    """The values, and the lengths of the error bars below and above."""
    below = [100 * (share.value - share.low) for share in shares.values()]
    above = [100 * (share.high - share.value) for share in shares.values()]
    return [100 * share.value for share in shares.values()], [below, above]


def _accuracies(axes: Any, report: ExamReport, comparison: ExamComparison | None) -> None:
    accuracies = report.accuracies()
    names, shares = list(accuracies), list(accuracies.values())
    before = comparison.before if comparison else {}
    if before:
        earlier = {place - 0.2: before[name] for place, name in enumerate(names) if name in before}
        _bars(axes, earlier, BEFORE, 0.38, "before")
        _bars(axes, {place + 0.2: share for place, share in enumerate(shares)}, AFTER, 0.38, "after")
    else:
        _bars(axes, dict(enumerate(shares)), AFTER, 0.62, "")
    axes.axhline(100 * report.chance, **DASHED, label="guessing")
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
    highest = max(share.high for share in (*shares, *before.values()))
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(0, min(118, 100 * highest * 1.3 + 4)), ylabel="accuracy, %")
    axes.legend(frameon=False, fontsize=10, ncols=3, loc="upper right")
    _heading(axes, f"Accuracy on {plural(report.n, 'question')}, 95 % intervals")


def _groups(axes: Any, report: ExamReport, comparison: ExamComparison | None) -> None:
    groups, heading = (report.by_category, "category") if report.by_category else (report.by_step, "exam step")
    shown = list(reversed(groups[:MAX_GROUPS]))
    before = {part.name: part.before for part in comparison.by_category} if comparison else {}
    earlier = {place + 0.17: before[part.name] for place, part in enumerate(shown) if part.name in before}
    shift = 0.17 if earlier else 0.0
    if earlier:
        _dots(axes, earlier, "0.6", "before")
    _dots(axes, {place - shift: part.accuracy for place, part in enumerate(shown)}, AFTER, "after" if earlier else "")
    axes.axvline(100 * report.chance, **DASHED)
    names = [f"{start_of(part.name or 'not given', NAME_LENGTH)} ({part.accuracy.n:,})" for part in shown]
    axes.set_yticks(range(len(shown)), [plain_label(name) for name in names])
    axes.set(xlim=(0, 103), ylim=(-0.7, len(shown) - 0.3), xlabel="accuracy, %")
    if earlier:
        _legend_above(axes)
    rest = f" ({MAX_GROUPS} of {len(groups)})" if len(groups) > MAX_GROUPS else ""
    _heading(axes, f"By {heading}{rest}")


def _dots(axes: Any, shares: Mapping[float, Proportion], colour: str, label: str) -> None:
    values, errors = _percents(shares)
    axes.errorbar(values, list(shares), xerr=errors, fmt="o", color=colour, markersize=6, elinewidth=1.6, label=label)


def _confusion(axes: Any, report: ExamReport, _: ExamComparison | None) -> None:
    """Each row's shares as shades, and the counts as numbers."""
    confusion = report.confusion
    names = [plain_label(letter.letter) for letter in confusion.letters]
    shades = [[count / max(sum(row), 1) for count in row] for row in confusion.counts]
    axes.imshow(shades, cmap="Blues", vmin=0, vmax=1, aspect="auto", zorder=2)
    style = {"ha": "center", "va": "center", "fontsize": 12 if len(names) <= 6 else 8, "zorder": 3}
    for row, line in enumerate(confusion.counts):
        for column, count in enumerate(line):
            colour = "white" if shades[row][column] > 0.55 else "0.1"
            axes.text(column, row, f"{count:,}", color=colour, **style)
    axes.set_xticks(range(len(names) + 1), [*names, "none"])
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="answered", ylabel="right", xlim=(-0.5, len(names) + 0.5))
    axes.tick_params(length=0)
    bias = "" if confusion.bias is None else f", bias {100 * confusion.bias:.1f} %"
    _heading(axes, f"Right and answered letters{bias}")


def _samples(axes: Any, report: ExamReport, _: ExamComparison | None, sampled: SampledAccuracy) -> None:
    numbers, shares = [entry.k for entry in sampled.pass_at], [entry.share for entry in sampled.pass_at]
    low, value, high = ([100 * getattr(share, bound) for share in shares] for bound in ("low", "value", "high"))
    axes.fill_between(numbers, low, high, color=AFTER, alpha=0.18, linewidth=0)
    axes.plot(numbers, value, "o-", color=AFTER, linewidth=2, label="pass@k: at least one is right")
    axes.axhline(100 * sampled.majority.value, color=COLOURS[1], linewidth=1.8, label="majority vote")
    axes.axhline(100 * report.chance, **DASHED, label="guessing once")
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()
    axes.set(xlim=(numbers[0] * 0.9, numbers[-1] * 1.1), ylim=(0, 102), xlabel="answers, k", ylabel="%")
    axes.legend(frameon=False, fontsize=10, loc="best")
    _heading(axes, f"{plural(sampled.samples, 'answer')} to each question")


def _calibration(axes: Any, report: ExamReport, _: ExamComparison | None) -> None:
    scored = report.letters
    bins = [entry for entry in scored.bins if entry.n]
    total = sum(entry.n for entry in bins)
    confidence = [100 * (entry.confidence or 0) for entry in bins]
    accuracy = [100 * (entry.accuracy or 0) for entry in bins]
    sizes = [20 + 600 * entry.n / total for entry in bins]
    axes.plot([0, 100], [0, 100], **DASHED, label="perfect calibration")
    axes.plot(confidence, accuracy, color=AFTER, linewidth=1.5)
    axes.scatter(confidence, accuracy, sizes, color=AFTER, alpha=0.75, zorder=3)
    axes.set(xlim=(0, 104), ylim=(0, 104), ylabel="accuracy, %")
    axes.set_xlabel("probability of the likeliest letter, % (larger dots: more questions)")
    _legend_above(axes)
    _heading(axes, f"Calibration, expected error {100 * scored.calibration_error:.1f} %")


def _patterns(axes: Any, report: ExamReport, _: ExamComparison | None) -> None:
    shown = list(reversed(report.patterns))
    bars = axes.barh(range(len(shown)), [100 * entry.share for entry in shown], 0.6, color=COLOURS[1])
    axes.bar_label(bars, [f"{entry.count:,}" for entry in shown], padding=4, fontsize=10)
    axes.set_yticks(range(len(shown)), [plain_label(entry.name) for entry in shown])
    axes.set(xlim=(0, max(112 * entry.share for entry in shown)), xlabel="of the errors, %")
    _heading(axes, f"Kinds of the {report.errors:,} errors")
