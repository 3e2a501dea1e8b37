"""The results of replays as sentences and tables, for a terminal and for Markdown, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from groupwise.analysis.replay.changes import SettingChange
from groupwise.analysis.replay.difference import SHOWN_METRICS, RunDifference
from groupwise.analysis.replay.rescored import BeforeAfter, Rescoring, StepChange
from groupwise.analysis.replay.retaken import RetakenStep
from groupwise.text import escape_markdown, markdown_table, one_line, plural

UNCHANGED = "unchanged"
SHOWN_STEPS = 20
SHOWN_WEIGHTS = 10
SHOWN_TEXT = 60  # characters of a completion in a table
SHOWN_DIFFERENCES = 20


class ReplayTable(NamedTuple):
    """A table; the columns in ``left`` hold texts."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)


Page = Iterator[str | ReplayTable]


def as_markdown(page: Page) -> str:
    """The page as Markdown: a heading, paragraphs and tables."""
    parts: list[str] = []
    for part in page:
        if isinstance(part, str):
            parts.append(escape_markdown(part) if parts else f"# {escape_markdown(part)}")
        else:
            rows = [[escape_markdown(cell) for cell in row] for row in part.rows]
            parts.append(markdown_table([escape_markdown(name) for name in part.header], rows, left=part.left))
    return "\n\n".join(parts) + "\n"


def as_json(value: Any) -> Any:
    """A result as plain JSON: objects for records, null for what is not a number."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        properties = [name for name, attribute in vars(type(value)).items() if isinstance(attribute, property)]
        names = [*(field.name for field in dataclasses.fields(value)), *properties]
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: as_json(getattr(value, name)) for name in value._fields}
    if isinstance(value, dict):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rescoring_page(result: Rescoring) -> Page:
    total, check = result.total, result.self_check
    steps = f"step {result.steps[0].step}" if len(result.steps) == 1 else plural(len(result.steps), "step")
    yield f"{result.run}: {plural(total.samples, 'recorded sample')} of {steps}, scored again"
    if check.passed:
        yield f"check: the recorded settings give the recorded advantages back, for {plural(check.samples, 'sample')}"
    else:
        yield (
            f"CHECK FAILED: the recorded settings do not give the recorded advantages back, for {check.different:,} of "
            f"{plural(check.samples, 'sample')} ({check.first}). A rollout file was edited, or a reward, grade, "
            "grouping or advantage function is not what the run had. Below, “before” is what is recorded"
        )
    yield from _changes(result.changed)
    if result.not_shown:
        names = ", ".join(f"{name} {_value(before)} → {_value(after)}" for name, before, after in result.not_shown)
        yield f"not shown, as it acts in sampling or in the update: {names}"
    yield from (f"note: {note}" for note in result.notes)
    if result.changed or total.sign_changes:
        share = total.sign_changes / max(1, total.samples)
        yield (
            f"{total.sign_changes:,} of {plural(total.samples, 'sample')} ({share:.1%}) change their sign; correlation "
            f"of the advantages {_number(total.correlation)}, weighted as in the loss "
            f"{_number(total.weighted_correlation)}"
        )
    yield ReplayTable(("all steps", "before", "after"), list(_totals(total)))
    if len(result.steps) > 1:
        yield from _by_step(result.steps)
    yield ReplayTable(
        ("reward", "weight before", "after", "mean", "correlation with the advantage before", "after"),
        [(reward.name, *map(_number, (*reward.weight, reward.mean, *reward.correlation))) for reward in result.rewards],
    )
    if result.reasons:
        rows = [(reason, *map(_count, counts)) for reason, counts in result.reasons.items()]
        yield ReplayTable(("no learning signal because of", "before", "after"), rows)
    if result.most_changed:
        yield "most changed:"
        yield ReplayTable(
            ("step", "prompt", "sample", "reward", "advantage", "no signal", "prompt ends", "completion"),
            [
                (
                    str(sample.step),
                    str(sample.prompt_number),
                    str(sample.sample),
                    _arrow(sample.reward),
                    _arrow(sample.advantage),
                    " → ".join(reason or "-" for reason in sample.reason) if any(sample.reason) else "",
                    _end(sample.prompt),
                    _short(sample.completion),
                )
                for sample in result.most_changed
            ],
            left=(5, 6, 7),
        )


def _changes(changes: Sequence[SettingChange]) -> Page:
    for name, before, after in changes:
        yield f"changed: {name} {_value(before)} → {_value(after)}"


def _totals(total: StepChange) -> Iterator[Sequence[str]]:
    signed = BeforeAfter(*(one + other for one, other in zip(total.reinforced, total.discouraged, strict=True)))
    yield "samples reinforced (advantage above 0)", *map(_count, total.reinforced)
    yield "samples discouraged (below 0)", *map(_count, total.discouraged)
    yield "samples without an advantage", *(_count(total.samples - number) for number in signed)
    yield "groups", *map(_count, total.groups)
    yield "groups with a learning signal", *map(_count, total.groups_with_signal)
    if any(total.pairs):
        yield "preference pairs", *map(_count, total.pairs)
    yield "tokens of what is reinforced, mean", *map(_number, total.reinforced_tokens)


def _by_step(steps: Sequence[StepChange]) -> Page:
    shown = list(steps)
    if len(steps) > SHOWN_STEPS:
        places = sorted({round(place * (len(steps) - 1) / (SHOWN_STEPS - 1)) for place in range(SHOWN_STEPS)})
        shown = [steps[place] for place in places]
        yield f"{len(shown)} of {len(steps)} steps, evenly spaced (--json has all):"
    header = ("step", "samples", "reinforced", "discouraged", "sign changes", "groups with signal", "correlation")
    yield ReplayTable(
        header,
        [
            (
                str(step.step),
                _count(step.samples),
                _arrow(step.reinforced),
                _arrow(step.discouraged),
                _count(step.sign_changes),
                _arrow(step.groups_with_signal),
                _number(step.correlation),
            )
            for step in shown
        ],
        left=(),
    )


def retaken_page(result: RetakenStep) -> Page:
    begin = f"checkpoint-{result.checkpoint}" if result.checkpoint else "the start of the run"
    yield f"{result.run}: step {result.step}, taken again from {begin}"
    reproduced = result.reproduced
    if reproduced is None:
        yield f"step {result.step} is not recorded, so there is nothing to compare the unchanged step with"
    elif reproduced.equal:
        yield (
            f"check: {plural(reproduced.steps, 'replayed step')} up to step {result.step} "
            f"{'is' if reproduced.steps == 1 else 'are'} what the run recorded, bit for bit"
        )
    else:
        yield f"NOT REPRODUCED: the replay leaves the recorded run at step {reproduced.step}"
        yield from _first_difference(reproduced)
    yield from (f"note: {note}" for note in result.notes)
    yield from _changes(result.changed)
    if result.not_applied:
        names = ", ".join(change.name for change in result.not_applied)
        yield f"not changed, as it cannot be between two steps: {names}"
    if result.total_weights is not None:
        yield from _retaken_changes(result)
    elif result.metrics:
        rows = [(name, *_values(recorded, unchanged)) for name, recorded, unchanged, _ in result.metrics]
        yield ReplayTable(("metric", "recorded", "taken again"), rows)
    if result.folder is not None:
        yield f"the replayed runs are kept in {result.folder}"


def _retaken_changes(result: RetakenStep) -> Page:
    weights, samples = result.total_weights, result.samples
    if weights is not None and not weights.update and not weights.changed_update:
        yield "weights: no update in either step (no sample has a learning signal)"
        weights = None
    elif weights is not None:
        yield (
            f"weights: the update differs by {_percent(weights.difference)} of its norm; cosine of the two updates "
            f"{_number(weights.cosine)}"
        )
    if samples is not None and samples.resampled:
        yield "samples: other prompts or another number of completions were sampled"
    elif samples is not None and not samples.different:
        yield f"samples: all {samples.samples:,} completions are the same"
    elif samples is not None:
        yield (
            f"samples: {samples.different:,} of {plural(samples.samples, 'completion')} differ; the first is sample "
            f"{samples.sample} of prompt {samples.prompt_number}, from its token {samples.token} on:"
        )
        yield ReplayTable(("", "completion"), [(UNCHANGED, _short(samples.unchanged, 200)),
                                              ("changed", _short(samples.changed, 200))], left=(0, 1))  # fmt: skip
    if not result.metrics:
        yield "metrics: none changed"
    else:
        shows_record = result.reproduced is not None and not result.reproduced.equal
        header = ("metric", *(["recorded"] if shows_record else []), UNCHANGED, "changed")
        rows = [(name, *_values(*(values if shows_record else values[1:]))) for name, *values in result.metrics]
        yield ReplayTable(header, rows)
    if weights is None:
        return
    parameters = [weights, *result.weights[:SHOWN_WEIGHTS]]
    yield ReplayTable(
        ("weights", "update", "changed", "difference", "cosine"),
        [
            (
                part.name,
                f"{part.update:.3g}",
                f"{part.changed_update:.3g}",
                _percent(part.difference),
                _number(part.cosine),
            )
            for part in parameters
        ],
    )
    if len(result.weights) > SHOWN_WEIGHTS:
        yield f"({len(result.weights) - SHOWN_WEIGHTS} more parameters differ less; --json has all)"


def difference_page(result: RunDifference) -> Page:
    yield f"{result.one} and {result.other}"
    for what, found in (("settings", result.settings), ("inputs", result.inputs), ("versions", result.versions)):
        if found:
            rows = [(name, _value(one), _value(other)) for name, one, other in found[:SHOWN_DIFFERENCES]]
            yield ReplayTable((f"{what} that differ", "first run", "second run"), rows, left=(0, 1, 2))
            if len(found) > SHOWN_DIFFERENCES:
                yield f"({len(found) - SHOWN_DIFFERENCES} more)"
        else:
            yield f"{what}: equal"
    if result.only_in_one:
        yield f"metrics of only one run, not compared: {', '.join(result.only_in_one[:SHOWN_DIFFERENCES])}"
    yield from (f"note: {note}" for note in result.notes)
    one, other = result.last
    if result.equal and not result.steps:
        yield f"there is no step that both runs have (they end at steps {one} and {other})"
    elif result.equal:
        ends = "" if one == other else f"; the runs end at steps {one} and {other}"
        yield f"equal in all {plural(result.steps, 'step')} that both have{ends}"
    else:
        yield f"first difference: {'the evaluation after ' if result.is_evaluation else ''}step {result.step}"
        yield from _first_difference(result)


def _first_difference(result: RunDifference) -> Page:
    sample = result.sample
    if sample is not None:
        place = f"prompt {sample.prompt_number}, sample {sample.sample}"
        where = "" if sample.character is None else f", from character {sample.character} on"
        where += "" if sample.token is None else f" (token {sample.token})"
        yield (
            f"{place}: {sample.column} differs{where}; {sample.samples:,} of {plural(sample.of, 'sample')} of the step "
            "do"
        )
        begin = max(0, (sample.character or 0) - 40)
        values = [str(value)[begin:] if sample.character is not None else _value(value)
                  for value in (sample.one, sample.other)]  # fmt: skip
        names = (result.one, result.other)
        rows = [
            (name, _short(f"{'…' if begin else ''}{value}", 120)) for name, value in zip(names, values, strict=True)
        ]
        yield ReplayTable(("run", sample.column), [("prompt", _short(sample.prompt, 120)), *rows], left=(0, 1))
    elif not result.is_evaluation and result.metrics:
        yield "the samples of this step are equal, or not recorded: the difference is in its update"
    if result.metrics:
        metrics = [(metric.name, *_values(metric.one, metric.other)) for metric in result.metrics[:SHOWN_METRICS]]
        yield ReplayTable((f"metric of step {result.step}", "first run", "second run"), metrics)
        if len(result.metrics) > SHOWN_METRICS:
            yield f"({len(result.metrics) - SHOWN_METRICS} more metrics differ)"
    for name in result.around[0][1] if result.around else ():
        around = [(str(step), *_values(*values[name])) for step, values in result.around]
        yield ReplayTable(("step", f"{name}, first run", "second run"), around, left=())


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    return _short(str(value))


def _values(*values: Any) -> list[str]:
    """Values side by side, with as many digits as it takes to tell them apart."""
    for digits in (6, 9, 12):
        texts = [f"{value:.{digits}g}" if isinstance(value, float) else _value(value) for value in values]
        numbers = [value for value in values if isinstance(value, float) and math.isfinite(value)]
        if len({f"{value:.{digits}g}" for value in numbers}) == len(set(numbers)):
            return texts
    return [_value(value) for value in values]


def _arrow(values: BeforeAfter) -> str:
    before, after = (f"{value:,}" if isinstance(value, int) else _number(value) for value in values)
    return before if before == after else f"{before} → {after}"


def _short(text: str, length: int = SHOWN_TEXT) -> str:
    line = one_line(text)
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _end(text: str, length: int = 30) -> str:
    line = one_line(text)
    return line if len(line) <= length else f"…{line[-length + 1 :]}"
