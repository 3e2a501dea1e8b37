"""A run on one page: what was trained, held-out metrics before and after, curves in numbers, samples, time, findings.

`groupwise report` writes it as Markdown, and the page shows it first. Files that cannot be read are left out and named
in ``problems``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard, TypeVar

from groupwise.analysis.findings import Finding, diagnose
from groupwise.analysis.run_reader import RunReader
from groupwise.config import Recipe
from groupwise.errors import CheckpointError
from groupwise.rundir.files import read_object
from groupwise.stats import Interval, mcnemar, mean, paired_test
from groupwise.training.monitor.descriptions import describe_metric
from groupwise.training.monitor.question_log import QUESTIONS, STATUSES
from groupwise.training.store import EVAL_PREFIX
from groupwise.training.store.run_folder import differences

Result = TypeVar("Result")

SAMPLES = 3  # best and worst ones of a step
LISTED = 20  # rows that were learnt, or forgotten
CHANGED = 3  # held-out questions of each kind
SAMPLE_COLUMNS = (
    "step",
    "prompt_number",
    "row",
    "sample",
    "prompt",
    "completion",
    "reward",
    "advantage",
    "stop_reason",
)
# The curves that one looks at first. ``{grade}`` stands for the main held-out metric, if training measures it too.
MAIN_CURVES = (
    "reward", "{grade}", "completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std", "kl",
    "entropy", "grad_norm", "loss", "sft/loss", "preference/accuracy", "preference/margin", "preference/loss",
)  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """A held-out metric after a step; the interval is missing for metrics that have none."""

    step: int
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class HeldOutMetric:
    """A metric at the first evaluation, at the last one and at that of the exported model. A share is from 0 to 1."""

    name: str
    is_share: bool
    first: Measurement
    last: Measurement
    best: Measurement | None


@dataclass(frozen=True)
class HeldOutExample:
    """A held-out question with its answers at the first and the last evaluation."""

    row: int
    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class PairedChange:
    """The same held-out questions at two evaluations: how many improved, and the p-value of the paired test."""

    metric: str
    first_step: int
    last_step: int
    questions: int
    gained: int
    lost: int
    difference: Interval
    p_value: float
    test: str
    gained_examples: list[HeldOutExample]
    lost_examples: list[HeldOutExample]


@dataclass(frozen=True)
class CurveNumbers:
    """A curve in numbers: its mean over the first and the last tenth of the steps, its lowest and highest value."""

    name: str
    meaning: str
    start: float
    end: float
    lowest: tuple[int, float]  # step and value
    highest: tuple[int, float]


@dataclass(frozen=True)
class StepSamples:
    """Samples of a step, of different prompts: the highest rewards and the lowest ones."""

    step: int
    best: list[dict[str, Any]]
    worst: list[dict[str, Any]]


@dataclass(frozen=True)
class QuestionCounts:
    """Training questions by status (`STATUSES`), and the rows of some that were learnt or forgotten."""

    counts: dict[str, int]
    learnt: list[int]
    forgotten: list[int]


@dataclass(frozen=True)
class TimeSpent:
    """Seconds in all and by stage, over the recorded steps; tokens that were sampled; peak memory in GiB."""

    seconds: float
    stages: dict[str, float]
    tokens: int
    memory: float | None


@dataclass(frozen=True)
class RunSummary:
    """All of it. ``facts`` are what was trained, by name; ``settings`` are name, default and value."""

    name: str
    status: str
    step: int
    total_steps: int | None
    facts: dict[str, str]
    settings: list[tuple[str, Any, Any]]
    held_out: list[HeldOutMetric]
    paired: PairedChange | None
    curves: list[CurveNumbers]
    samples: list[StepSamples]
    questions: QuestionCounts | None
    time: TimeSpent | None
    findings: list[Finding]
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The summary as JSON."""
        return asdict(self)


def summarize(reader: RunReader) -> RunSummary:
    """The summary of a run, finished or not."""
    problems: list[str] = []

    def attempt(read: Callable[..., Result], *arguments: Any) -> Result | None:
        try:
            return read(*arguments)
        except CheckpointError as error:  # damaged, or deleted in between
            problems.append(str(error))
            return None

    paired = attempt(paired_change, reader)
    samples = [attempt(step_samples, reader, step) for step in _first_and_last(reader)]
    return RunSummary(
        name=reader.name,
        status=reader.status,
        step=reader.step,
        total_steps=reader.total_steps,
        facts=_facts(reader),
        settings=differences(Recipe().recorded(), reader.recipe) if reader.recipe else [],
        held_out=held_out_metrics(reader),
        paired=paired,
        curves=curve_numbers(reader),
        samples=[entry for entry in samples if entry is not None],
        questions=question_counts(reader),
        time=time_spent(reader),
        findings=diagnose(reader),
        problems=[*reader.problems, *problems],
    )


def held_out_metrics(reader: RunReader) -> list[HeldOutMetric]:
    """The metrics of the evaluations, the main one first."""
    rows = [row for row in reader.evaluations if len(row) > 1]
    if not rows:
        return []
    best_step = _best_step(reader)
    parts = ("_low", "_high", "_no_answer", "_unscored")
    present = [name.removeprefix(EVAL_PREFIX) for row in rows for name in row if name.startswith(EVAL_PREFIX)]
    names = [name for name in dict.fromkeys(present) if not name.endswith(parts[:2])]
    names.sort(key=lambda name: (name != reader.metric, f"{name}_low" not in present))
    metrics = []
    for name in names:
        measured = [m for row in rows if (m := _measurement(row, name)) is not None]
        if measured:
            best = next((m for m in reversed(measured) if m.step == best_step), None)
            is_share = f"{name}_no_answer" in present or name.endswith(("accuracy", *parts[2:], "truncated"))
            metrics.append(HeldOutMetric(name, is_share, measured[0], measured[-1], best))
    return metrics


def _measurement(row: Mapping[str, Any], name: str) -> Measurement | None:
    value, low, high = (row.get(f"{EVAL_PREFIX}{name}{part}") for part in ("", "_low", "_high"))
    if not _is_number(value):
        return None
    bounds = (low, high) if _is_number(low) and _is_number(high) else (None, None)
    return Measurement(row["step"], value, *bounds)


def _best_step(reader: RunReader) -> int | None:
    """The step of the model that was, or would be, exported."""
    try:
        step = read_object(reader.path / "best.json").get("step")
    except CheckpointError:
        return None
    return step if isinstance(step, int) else None


def paired_change(reader: RunReader) -> PairedChange | None:
    """The held-out answers of the first evaluation against those of the last; None if they were not recorded.

    A question's score is the share of its samples that are right, or their mean reward without a grade. If every score
    is 0 or 1 the test is McNemar's, else a sign-flip test.
    """
    steps = reader.evaluation_steps
    if len(steps) < 2 or (grade := reader.grade) is None:
        return None
    first, last = (_by_row(reader.evaluation_answers(step), grade) for step in (steps[0], steps[-1]))
    rows = [row for row in first if row in last]
    if not rows:
        return None
    before, after = ([scores[row][0] for row in rows] for scores in (first, last))
    gained = [row for row, one, other in zip(rows, before, after, strict=True) if other > one]
    lost = [row for row, one, other in zip(rows, before, after, strict=True) if other < one]
    paired = paired_test(after, before)
    is_binary = {*before, *after} <= {0.0, 1.0}
    examples = [
        [HeldOutExample(row, first[row][1], first[row][2], last[row][2]) for row in changed[:CHANGED]]
        for changed in (gained, lost)
    ]
    return PairedChange(
        grade,
        steps[0],
        steps[-1],
        questions=len(rows),
        gained=len(gained),
        lost=len(lost),
        difference=paired.difference,
        p_value=mcnemar(len(gained), len(lost)) if is_binary else paired.p_value,
        test="McNemar's test" if is_binary else "a sign-flip test",
        gained_examples=examples[0],
        lost_examples=examples[1],
    )


def _by_row(answers: Sequence[Mapping[str, Any]], metric: str) -> dict[int, tuple[float, str, str]]:
    """The score, the prompt and the first completion of each question. An answer that was not found is wrong."""
    scores: dict[int, list[float]] = {}
    texts: dict[int, tuple[str, str]] = {}
    grade = f"grade/{metric}"
    for answer in answers:
        row, score = answer.get("row"), answer.get("reward")
        if grade in answer:
            score = float(bool(answer[grade]))
        if isinstance(row, int) and _is_number(score):
            scores.setdefault(row, []).append(float(score))
            texts.setdefault(row, (str(answer.get("prompt") or ""), str(answer.get("completion") or "")))
    return {row: (mean(values), *texts[row]) for row, values in scores.items()}


def curve_numbers(reader: RunReader) -> list[CurveNumbers]:
    """The main curves that the run has."""
    names = [reader.metric if name == "{grade}" else name for name in MAIN_CURVES]
    grades = [reader.metric] if reader.metric else []
    curves = []
    for name in dict.fromkeys(filter(None, names)):
        pairs = [(step, value) for step, value in zip(*reader.column(name), strict=True) if math.isfinite(value)]
        if not pairs or all(value == 0 for _, value in pairs):
            continue
        part = max(1, len(pairs) // 10)
        start, end = (mean([value for _, value in some]) for some in (pairs[:part], pairs[-part:]))
        lowest, highest = (choose(pairs, key=lambda pair: pair[1]) for choose in (min, max))
        curves.append(CurveNumbers(name, describe_metric(name, grades) or "", start, end, lowest, highest))
    return curves


def step_samples(reader: RunReader, step: int) -> StepSamples | None:
    """The best and the worst samples of a step; None if it has no rewards."""
    rows = reader.rollouts(step)
    scored = [row for row in rows if _is_number(row.get("reward"))]
    if not scored:
        return None
    # Of equal rewards the larger advantage first: a right answer where the siblings are wrong says more.
    order = sorted(scored, key=lambda row: (row["reward"], row.get("advantage") or 0.0), reverse=True)
    return StepSamples(step, _of_different_prompts(order), _of_different_prompts(order[::-1]))


def _of_different_prompts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    chosen: dict[Any, Mapping[str, Any]] = {}
    for row in rows:
        chosen.setdefault(row.get("prompt_number"), row)
        if len(chosen) == SAMPLES:
            break
    keys = ("reward/", "grade/")
    return [
        {name: row[name] for name in row if name in SAMPLE_COLUMNS or name.startswith(keys)} for row in chosen.values()
    ]


def question_counts(reader: RunReader) -> QuestionCounts | None:
    """By questions.jsonl, which a run writes at its checkpoints; None without it."""
    rows: dict[str, list[int]] = {}
    try:
        for line in (reader.path / QUESTIONS).read_bytes().splitlines():
            record = json.loads(line)
            rows.setdefault(record["status"], []).append(record["row"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    counts = {status: len(rows[status]) for status in STATUSES if status in rows}
    learnt, forgotten = (rows.get(status, [])[:LISTED] for status in ("learnt", "forgotten"))
    return QuestionCounts(counts, learnt, forgotten) if counts else None


def _first_and_last(reader: RunReader) -> list[int]:
    steps = reader.rollout_steps
    return list(dict.fromkeys([steps[0], steps[-1]])) if steps else []


def time_spent(reader: RunReader) -> TimeSpent | None:
    rows = reader.training_rows
    seconds = sum(row["step_time"] for row in rows if _is_number(row.get("step_time")))
    if not seconds:
        return None
    stages: dict[str, float] = {}
    peaks: list[float] = []
    for row in rows:
        for name, value in row.items():
            if name.startswith("time/") and _is_number(value):
                stages[name.removeprefix("time/")] = stages.get(name.removeprefix("time/"), 0.0) + value
            if name.startswith("memory/") and _is_number(value):
                peaks.append(value)
    tokens = [row["num_tokens"] for row in rows if _is_number(row.get("num_tokens"))]
    return TimeSpent(seconds, stages, int(max(tokens, default=0)), max(peaks, default=None))


def _facts(reader: RunReader) -> dict[str, str]:
    """What was trained, on what, with what."""
    settings, inputs, versions = reader.settings, reader.inputs, reader.versions
    of = f" of {reader.total_steps:,}" if reader.total_steps else ""
    rewards = inputs.get("rewards")
    facts = {
        "model": settings.get("model.source"),
        "task": settings.get("task"),
        "algorithm": settings.get("algorithm"),
        "rewards": ", ".join(map(str, rewards)) if isinstance(rewards, list) else None,
        "training rows": _count(inputs.get("training rows")),
        "held-out rows": _count(inputs.get("held-out rows")),
        "training pairs": _count(inputs.get("training pairs")),
        "steps": f"{reader.step:,}{of}, {reader.status}",
        "started": reader.created,
        "recipe": inputs.get("recipe"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return {name: str(value) for name, value in facts.items() if value}


def _count(described: Any) -> str | None:
    """The number in a line of inputs.json such as ``16000, b40e9b1306a4134e``."""
    number = str(described).partition(",")[0]
    return f"{int(number):,}" if number.isdecimal() else None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
