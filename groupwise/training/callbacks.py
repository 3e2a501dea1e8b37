"""What a run tells: a report after each step, a result at the end, and callbacks at the points between."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.training.rollout.batch import Batch, GroupAdvantages

if TYPE_CHECKING:
    from groupwise.evaluate import Evaluation
    from groupwise.training.trainer import Trainer


class Callback:
    """Derive from this and override what you want to see; everything of the trainer may be looked at."""

    def on_start(self, trainer: Trainer) -> None: ...
    def on_rollout(self, trainer: Trainer, batch: Batch, group_advantages: GroupAdvantages) -> None: ...
    def on_step(self, trainer: Trainer, report: StepReport) -> None: ...
    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None: ...
    def on_checkpoint(self, trainer: Trainer, folder: Path) -> None: ...
    def on_end(self, trainer: Trainer, result: RunResult) -> None: ...


@dataclass(frozen=True)
class StepReport:
    """One step: its number (from 1), its metrics, and the batch that it learned from."""

    step: int
    metrics: dict[str, float]
    batch: Batch
    group_advantages: GroupAdvantages


@dataclass(frozen=True)
class RunResult:
    """How a run ended: the held-out metric before and after, where the model is, and who stopped it, if anybody."""

    step: int
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    best_step: int | None = None
    model: Path | None = None
    folder: Path | None = None
    exit_status: int = 0
