"""Two runs side by side, to their first difference: settings, inputs and versions, then step by step what was sampled
and what was measured.

In a step the completions come before the metrics, as in training: a metric that differs after equal completions points
at the update. Times and memory are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.analysis.run_reader import RunReader
from groupwise.errors import CheckpointError
from groupwise.redaction import without_secrets
from groupwise.training.store.run_folder import differences

AROUND = 2  # steps before and after the first difference
SHOWN_METRICS = 8
# Columns of rollouts in the order in which a step computes them; others come after these.
ORDER = ("row", "prompt", "completion", "completion_tokens", "stop_reason", "reward/", "reward", "group", "advantage")
# First what is sampled, then what follows from it; a difference in an earlier one explains those after it.
USUAL = ("reward", "loss", "grad_norm", "kl", "entropy", "learning_rate")
# Metrics that repeat a setting: they are shown, but the first difference is where the setting has an effect.
REPEATED_SETTINGS = ("learning_rate", "temperature", "samples_per_prompt", "kl_coef", "preference/weight")


@dataclass(frozen=True)
class SampleDifference:
    """The first sample of a step that differs, and where."""

    prompt_number: int
    sample: int
    column: str
    one: Any
    other: Any
    prompt: str
    character: int | None = None  # of the completion, from 0, if the completions differ
    token: int | None = None  # the same in tokens, where both runs have recorded them
    samples: int = 1  # that differ in this step
    of: int = 1


@dataclass(frozen=True)
class MetricDifference:
    """A metric that differs in the first step that does."""

    name: str
    one: Any
    other: Any


@dataclass(frozen=True)
class RunDifference:
    """Two runs, as far as both go."""

    one: str
    other: str
    settings: list[tuple[str, Any, Any]]
    inputs: list[tuple[str, Any, Any]]
    versions: list[tuple[str, Any, Any]]
    steps: int  # that were compared
    last: tuple[int, int]  # the last step of each run
    step: int | None  # the first that differs; None if all are equal
    is_evaluation: bool = False
    sample: SampleDifference | None = None
    metrics: list[MetricDifference] = field(default_factory=list)
    around: list[tuple[int, dict[str, tuple[Any, Any]]]] = field(default_factory=list)  # steps, and both values
    only_in_one: list[str] = field(default_factory=list)  # metrics, with the run that has them
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return self.step is None


def find_difference(
    one: str | Path | RunReader,
    other: str | Path | RunReader,
    *,
    tolerance: float = 0.0,
    first: int = 0,
    last: int | None = None,
) -> RunDifference:
    """Compare two runs step by step, to the first difference.

    tolerance: numbers that differ by at most this, relative to the larger one (to 1 below 1), are equal.
    first, last: compare only these steps.
    """
    readers = [run if isinstance(run, RunReader) else RunReader(Path(run)) for run in (one, other)]
    a, b = readers
    rows = [{(row["step"], _is_evaluation(row)): row for row in reader.rows} for reader in readers]
    ends = (a.step, b.step)
    end = min(ends) if last is None else min(*ends, last)
    keys = sorted(key for key in rows[0].keys() & rows[1].keys() if first <= key[0] <= end)
    recorded = set(a.rollout_steps) & set(b.rollout_steps)
    facts: dict[str, Any] = {
        "one": str(a.path),
        "other": str(b.path),
        "settings": [(name, *map(without_secrets, values)) for name, *values in differences(a.recipe, b.recipe)],
        "inputs": differences(a.inputs, b.inputs),
        "versions": differences(a.versions, b.versions),
        "steps": len({step for step, is_evaluation in keys if not is_evaluation}),
        "last": ends,
    }
    notes: list[str] = []
    only: dict[str, None] = {}
    for key in keys:
        step, is_evaluation = key
        sample = None
        if step in recorded and not is_evaluation:
            try:
                sample = _first_sample(a, b, step, tolerance)
            except CheckpointError as error:
                notes.append(f"step {step}: {error}")
        elif step in set(a.rollout_steps) ^ set(b.rollout_steps) and not is_evaluation:
            notes += [] if notes else [f"only one of the runs has the rollouts of step {step}"]
        metrics = _metrics(rows[0][key], rows[1][key], tolerance)
        for name in sorted(_names(rows[0][key]) ^ _names(rows[1][key])):
            only[f"{name} ({(a if name in rows[0][key] else b).path.name})"] = None
        if sample is not None or any(metric.name not in REPEATED_SETTINGS for metric in metrics):
            return RunDifference(
                **facts,
                step=step,
                is_evaluation=is_evaluation,
                sample=sample,
                metrics=metrics,
                around=_around(rows, step, is_evaluation, metrics),
                only_in_one=list(only),
                notes=notes,
            )
    missing = sorted({key[0] for key in rows[0].keys() ^ rows[1].keys() if first <= key[0] <= end})
    if missing:
        notes.append(f"only one of the runs has metrics of step {missing[0]}, and of {len(missing) - 1} more")
    return RunDifference(**facts, step=None, only_in_one=list(only), notes=notes)


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return len(row) > 1 and all(name == "step" or name.startswith("eval/") for name in row)


def _names(row: Mapping[str, Any]) -> set[str]:
    from groupwise.training.monitor.timing_names import is_timing

    return {name for name in row if name != "step" and not is_timing(name)}


def _metrics(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> list[MetricDifference]:
    """The metrics that both rows have and that differ, the usual ones first."""
    shared = [name for name in one if name in _names(one) & _names(other)]
    shared.sort(key=lambda name: USUAL.index(name) if name in USUAL else len(USUAL))
    return [
        MetricDifference(name, one[name], other[name])
        for name in shared
        if not same_value(one[name], other[name], tolerance)
    ]


def same_value(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Whether two recorded values are equal; NaN is equal to NaN."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return one == other or abs(one - other) <= tolerance * max(1.0, abs(one), abs(other))
    return bool(one == other)


def _first_sample(a: RunReader, b: RunReader, step: int, tolerance: float) -> SampleDifference | None:
    """The first sample of a step that differs, by the column that is computed first; None if all are equal."""
    ours, theirs = ({(row["prompt_number"], row["sample"]): row for row in run.rollouts(step)} for run in (a, b))
    if ours.keys() != theirs.keys():
        key = min(ours.keys() ^ theirs.keys())
        there = ["there" if key in rows else "missing" for rows in (ours, theirs)]
        prompt = str((ours.get(key) or theirs[key]).get("prompt", ""))
        number = len(ours.keys() ^ theirs.keys())
        every = len(ours.keys() | theirs.keys())
        return SampleDifference(key[0], key[1], "the sample", there[0], there[1], prompt, samples=number, of=every)
    columns = sorted(_columns(ours) & _columns(theirs), key=_place)
    for column in columns:
        keys = [key for key in ours if not same_value(ours[key].get(column), theirs[key].get(column), tolerance)]
        if not keys:
            continue
        key = min(keys)
        one, other = ours[key].get(column), theirs[key].get(column)
        parts = column == "completion" and isinstance(one, str) and isinstance(other, str)
        return SampleDifference(
            key[0],
            key[1],
            column,
            one,
            other,
            str(ours[key].get("prompt", "")),
            character=first_character(str(one), str(other)) if parts else None,
            token=_first_token(a, b, step, key) if parts else None,
            samples=len(keys),
            of=len(ours),
        )
    return None


def _columns(rows: Mapping[Any, Mapping[str, Any]]) -> set[str]:
    return set(next(iter(rows.values()), {})) - {"step"}


def _place(column: str) -> tuple[int, str]:
    name = "reward/" if column.startswith("reward/") else column
    return (ORDER.index(name) if name in ORDER else len(ORDER)), column


def first_character(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The first place at which two texts, or two lists of tokens, differ."""
    places = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(places, min(len(one), len(other)))


def _first_token(a: RunReader, b: RunReader, step: int, key: tuple[int, int]) -> int | None:
    """The token at which two completions part, if both runs have recorded their tokens."""
    if step not in a.token_steps or step not in b.token_steps:
        return None
    found = [row.ids for run in (a, b) for row in run.tokens(step) if (row.prompt_number, row.sample) == key]
    return first_character(*found) if len(found) == 2 else None


def _around(
    rows: Sequence[Mapping[tuple[int, bool], Mapping[str, Any]]],
    step: int,
    is_evaluation: bool,
    metrics: Sequence[MetricDifference],
) -> list[tuple[int, dict[str, tuple[Any, Any]]]]:
    """Both values of the metrics that differ first, a few steps before and after."""
    names = [metric.name for metric in metrics[:3]]
    both = sorted(key[0] for key in rows[0].keys() & rows[1].keys() if key[1] == is_evaluation)
    if not names or step not in both:
        return []
    place = both.index(step)
    around = both[max(0, place - AROUND) : place + AROUND + 1]
    return [
        (
            near,
            {name: (rows[0][near, is_evaluation].get(name), rows[1][near, is_evaluation].get(name)) for name in names},
        )
        for near in around
    ]
