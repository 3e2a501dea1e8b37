"""What a step that was taken again shows: beside the recorded one, and with the change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.analysis.replay.changes import SettingChange
from groupwise.analysis.replay.difference import RunDifference, first_character, same_value
from groupwise.training.monitor.timing_names import is_timing
from groupwise.training.results import StepReport
from groupwise.training.rollout.batch import Batch


class WeightChange(NamedTuple):
    """How an update of weights differs with the change. NaN if the unchanged update is 0."""

    name: str
    update: float  # norm of the unchanged update
    changed_update: float  # norm of the update with the change
    difference: float  # norm of their difference, relative to that of the unchanged update
    cosine: float  # between the two updates


class MetricChange(NamedTuple):
    """A metric of the step: as recorded, taken again, and with the change; None where there is none."""

    name: str
    recorded: Any
    unchanged: Any
    changed: Any


@dataclass(frozen=True)
class SampledChange:
    """How the completions differ with the change."""

    samples: int
    different: int
    prompt_number: int | None = None  # of the first one that differs
    sample: int | None = None
    token: int | None = None  # at which it parts
    unchanged: str = ""  # its text
    changed: str = ""
    prompt: str = ""
    resampled: bool = False  # other rows, or another number of samples: they cannot be compared one by one


@dataclass(frozen=True)
class RetakenStep:
    """A step of a run, taken again from a checkpoint."""

    run: str
    step: int
    checkpoint: int  # the step of the checkpoint; 0 is the start of the run
    reproduced: RunDifference | None  # the replay beside the recorded run; None if the step is not recorded
    changed: list[SettingChange]
    not_applied: list[SettingChange]  # settings of the preset that cannot be changed between two steps
    metrics: list[MetricChange]  # those that the change changed; without a change those that were not reproduced
    weights: list[WeightChange]  # by parameter, the largest difference first
    total_weights: WeightChange | None  # None without a change
    samples: SampledChange | None
    notes: list[str] = field(default_factory=list)
    folder: str | None = None  # where the replays are kept


class TakenStep(NamedTuple):
    """A step that was taken: the trained weights before and after it, and its report."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    report: StepReport


def compare_weights(
    before: Mapping[str, Tensor], unchanged: Mapping[str, Tensor], changed: Mapping[str, Tensor]
) -> list[WeightChange]:
    """All weights together, then by parameter, the largest difference first."""
    sums: list[tuple[str, Tensor]] = []  # squared norms of both updates and of their difference, and their product
    for name, start in before.items():
        one, other = (weights[name].double() - start.double() for weights in (unchanged, changed))
        sums.append((name, torch.stack([(one * one).sum(), (other * other).sum(), ((other - one) ** 2).sum(),
                                        (one * other).sum()])))  # fmt: skip
    changes = [_weight_change(name, values) for name, values in sums]
    changes.sort(key=lambda change: -math.inf if math.isnan(change.difference) else -change.difference)
    return [_weight_change("all weights", torch.stack([values for _, values in sums]).sum(0)), *changes]


def _weight_change(name: str, sums: Tensor) -> WeightChange:
    one, other, difference, product = sums.tolist()
    sizes = math.sqrt(one), math.sqrt(other)
    return WeightChange(
        name,
        *sizes,
        math.sqrt(difference) / sizes[0] if one else (math.nan if difference else 0.0),
        max(-1.0, min(1.0, product / (sizes[0] * sizes[1]))) if one and other else math.nan,
    )


def compare_metrics(
    recorded: Mapping[str, Any] | None, taken: TakenStep, other: TakenStep | None
) -> list[MetricChange]:
    """The metrics that the change changed; without a change, those that are not as recorded."""
    metrics = [dict(recorded or {}), taken.report.metrics, None if other is None else other.report.metrics]
    if other is None and recorded is None:
        return []
    compared = (metrics[1], metrics[2]) if other is not None else (metrics[0], metrics[1])
    names = dict.fromkeys(name for part in compared if part is not None for name in part)
    changes = []
    for name in names:
        one, two = (None if part is None else part.get(name) for part in compared)
        if name != "step" and not is_timing(name) and not same_value(one, two):
            changes.append(MetricChange(name, *(None if part is None else part.get(name) for part in metrics)))
    return changes


def compare_samples(one: Batch, other: Batch) -> SampledChange:
    if one.row_numbers != other.row_numbers or one.samples != other.samples:
        return SampledChange(len(other), len(other), resampled=True)
    different = [place for place, ids in enumerate(one.ids) if not torch.equal(ids, other.ids[place])]
    if not different:
        return SampledChange(len(one), 0)
    place = different[0]
    prompt, sample = divmod(place, one.samples)
    return SampledChange(
        len(one),
        len(different),
        prompt,
        sample,
        first_character(one.ids[place].tolist(), other.ids[place].tolist()),
        one.texts[place],
        other.texts[place],
        one.prompts[prompt].text,
    )
