"""What a run reports: one record after each step, and one at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.store.token_files import TokenRow


@dataclass(frozen=True)
class StepReport:
    """One step: its number (from 1), its metrics, and the batch that it was trained on."""

    step: int
    metrics: dict[str, float]
    batch: Batch
    group_advantages: GroupAdvantages
    tokens: Sequence[TokenRow] = ()
    """single tokens of some completions, in steps of which they are saved (run.save_tokens_every)"""
    masked: Mapping[int, str] = field(default_factory=dict)
    """samples that masks of the policy's log-probs have dropped in the updates, and the mask's name"""


@dataclass(frozen=True)
class RunResult:
    """The end of a run: its metrics, and where the model is."""

    steps: int
    """The number of finished steps."""
    train: dict[str, float] = field(default_factory=dict)
    """The metrics of the last step."""
    held_out: dict[str, float] = field(default_factory=dict)
    """The held-out metrics of the exported policy, the best one; empty if nothing is held out."""
    first_held_out: dict[str, float] = field(default_factory=dict)
    """The metrics of the first evaluation, by default before the first step."""
    last_held_out: dict[str, float] = field(default_factory=dict)
    """The metrics of the last evaluation."""
    best_step: int | None = None
    """The step whose policy is exported: that of the best evaluation, of equal ones the last."""
    model: Path | None = None
    """The exported model, a folder that transformers loads; None if the run was stopped."""
    folder: Path | None = None
    """The run's folder."""
    exit_status: int = 0
    """0, or that of the signal that stopped the run."""
