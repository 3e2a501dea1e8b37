"""What a run reports: one record after each step, and one at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from groupwise.training.rollout.batch import Batch, GroupAdvantages


@dataclass(frozen=True)
class StepReport:
    """One step: its number (from 1), its metrics, and the batch that it was trained on."""

    step: int
    metrics: dict[str, float]
    batch: Batch
    group_advantages: GroupAdvantages


@dataclass(frozen=True)
class RunResult:
    """The end of a run: held-out metrics of the first and the last evaluation, and where the model is."""

    step: int
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    best_step: int | None = None
    model: Path | None = None
    folder: Path | None = None
    exit_status: int = 0  # not 0 if a signal stopped the run
