"""How long a run and its phases are, in steps: epochs and shares of the run are resolved before the first step.

An epoch of a phase has rows / batch steps, by the batch of that phase, or as many times its updates if a step is one
update (``train.update_per_step``); prompts that are resampled do not count. Ends of
phases are rounded together, not one by one: phases of 0.5 and 1.5 epochs take as many steps as one of 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from groupwise.config import Recipe
from groupwise.errors import ConfigError
from groupwise.text import plural
from groupwise.training.schedule.rules import Phase

BATCH = ("train.batch_size", "train.accumulation")  # their product is the number of prompts in a step
UPDATES = ("train.iterations", "train.mini_batches")  # their product is the number of updates of a batch

EpochsInSteps = Callable[[float, Mapping[str, float]], float]
"""A number of epochs in steps, not rounded, with the settings that a phase changes."""


@dataclass(frozen=True)
class RunLength:
    """The number of steps of a run, and its phases in steps or tokens.

    steps: None if the run ends with its phases and one of them is counted in tokens.
    """

    steps: int | None
    phases: tuple[Phase, ...]

    @property
    def unreached(self) -> tuple[str, ...]:
        """The names of phases that begin after the run's last step."""
        begin = 0
        for number, phase in enumerate(self.phases):
            if self.steps is not None and begin >= self.steps:
                return tuple(phase.name for phase in self.phases[number:])
            if phase.steps is None:
                break  # it lasts to the end, or for as many steps as its tokens take
            begin += phase.steps
        return ()


def run_length(recipe: Recipe, phases: Sequence[Phase], rows: int, *, samples: bool) -> RunLength:
    """The length of a run over ``rows``: prompts, or pairs if nothing is sampled.

    It is train.steps if that is set; else the sum of the phases if each has its own length; else train.epochs.
    """
    train = recipe.train
    counted_in_tokens = [phase.name for phase in phases if phase.tokens is not None]
    if counted_in_tokens and not samples:
        raise ConfigError(
            f"phase {counted_in_tokens[0]!r} is counted in sampled tokens, but this run samples nothing; "
            "count it in steps or epochs"
        )

    def epochs_in_steps(epochs: float, changes: Mapping[str, float]) -> float:
        batch: float = recipe.preference.batch_size
        if samples:
            batch = changes.get(BATCH[0], train.batch_size) * changes.get(BATCH[1], train.accumulation)
        if not train.update_per_step:
            return rows * epochs / batch
        updates = changes.get(UPDATES[0], train.iterations) * changes.get(UPDATES[1], train.mini_batches)
        return rows * epochs / batch * updates

    if recipe.ends_with_phases:
        resolved = _in_steps(phases, epochs_in_steps, 0)
        total = None if counted_in_tokens else sum(phase.steps or 0 for phase in resolved)
        return RunLength(total, resolved)
    steps = train.steps
    if steps is None:
        each = train.steps_per_rollout
        steps = max(1, round(epochs_in_steps(train.epochs or 1.0, {}) / each)) * each
    resolved = _in_steps(phases, epochs_in_steps, steps)
    if train.steps is None:
        _check_room(resolved, steps, f"train.epochs {train.epochs:g}")
    return RunLength(steps, resolved)


def _in_steps(phases: Sequence[Phase], epochs_in_steps: EpochsInSteps, total: int) -> tuple[Phase, ...]:
    """The phases with epochs and shares as steps, at least one each."""
    resolved: list[Phase] = []
    end, exact = 0, 0.0  # of the last phase, rounded and not
    for phase in phases:
        begin = end
        if phase.tokens is not None:
            end, exact = 0, 0.0  # it ends at a step that is not known yet, from which the next phases are counted
        elif phase.steps is not None:
            end, exact = end + phase.steps, exact + phase.steps
        elif phase.epochs is not None or phase.share is not None:
            exact += (phase.share or 0.0) * total
            exact += 0.0 if phase.epochs is None else epochs_in_steps(phase.epochs, phase.set)
            end = max(begin + 1, round(exact))
            phase = replace(phase, steps=end - begin, epochs=None, share=None)
        resolved.append(phase)
    return tuple(resolved)


def _check_room(phases: Sequence[Phase], steps: int, setting: str) -> None:
    """Raise an error if the phases do not fit into the run."""
    end = 0
    for phase in phases:
        if phase.tokens is not None:
            return  # when it ends is not known
        needed = end + (1 if phase.steps is None else phase.steps)
        if needed > steps:
            raise ConfigError(
                f"there is no room for phase {phase.name!r}: with it the phases take {plural(needed, 'step')} or more, "
                f"and the run has {steps:,} ({setting}); shorten the phases, count them as a share of the run, or give "
                "every phase its own length in steps, epochs or tokens, so that the run ends with the last one"
            )
        end = needed
