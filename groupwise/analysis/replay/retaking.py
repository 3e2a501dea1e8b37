"""One step of a run taken again from a checkpoint: as it was, and with something changed.

The trainer is resumed from the nearest earlier checkpoint, in a folder of its own, and runs on to the step before with
the run's settings. From there the step is taken twice. On a CPU a resumed run has the bits of the run that never
stopped, so the first of the two is the recorded step, which is checked, and the second differs by the change alone.

The run is only read: its small files are copied, the files of the checkpoint are linked, and its lock is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.analysis.replay.changes import (
    apply_settings,
    changes_of,
    check_settings,
    split_algorithm,
)
from groupwise.analysis.replay.difference import find_difference
from groupwise.analysis.replay.retaken import (
    RetakenStep,
    TakenStep,
    compare_metrics,
    compare_samples,
    compare_weights,
)
from groupwise.analysis.replay.start import copy_run, find_start, workspace
from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.step_settings import run_recipe, step_recipes
from groupwise.config import Recipe, with_settings
from groupwise.distributed.launch import is_rank
from groupwise.errors import ConfigError, GroupwiseError, InputError
from groupwise.model.device import resolve_device
from groupwise.rundir import package_versions
from groupwise.rundir.run import MARKER
from groupwise.tasks import Task
from groupwise.text import Say, plural
from groupwise.training.display.base import Display
from groupwise.training.inputs import check_training_inputs, load_inputs, make_schedule
from groupwise.training.results import StepReport
from groupwise.training.store.checkpoint import checkpoint_name, read_state
from groupwise.training.store.run_folder import PACKAGES
from groupwise.training.trainer import Trainer
from groupwise.training.update.objective import needs_reference

UNCHANGED, CHANGED = "unchanged", "changed"
# What a replay does not do: it writes nowhere else, and keeps the checkpoints that it needs.
QUIET = {
    "run.wandb": None,
    "run.push_to_hub": None,
    "run.tensorboard": False,
    "run.plot": False,
    "run.show_samples": 0,
    "run.checkpoint_every": 0,
    "run.keep_checkpoints": 1_000_000,
    "evaluate.patience": None,
}
Progress = Callable[[str], None]


class StepTrainer(Trainer):
    """The run's trainer, from which one step is taken."""

    changes: Mapping[str, Any] = {}  # these hold in this step, whatever its schedule says
    weights_before: Mapping[str, Tensor] = {}
    is_taken = False

    def step_recipe(self) -> Recipe:
        return apply_settings(super().step_recipe(), self.changes)

    def take(self, changes: Mapping[str, Any]) -> TakenStep | None:
        """Take the next step; None if the run is at its end."""
        self.changes, self.is_taken = changes, True
        for report in self.steps():
            return TakenStep(dict(self.weights_before), self._weights(), report)
        return None

    def _step(self) -> StepReport:
        if self.is_taken:
            self.weights_before = self._weights()
        return super()._step()

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.to("cpu", copy=True) for name, weight in self.masters.state_dict().items()}


def retake(
    run: str | Path,
    step: int,
    settings: Mapping[str, Any] | None = None,
    *,
    algorithm: str | None = None,
    keep: str | Path | None = None,
    from_start: bool = False,
    allow_changed: bool = False,
    task: Task | None = None,
    rewards: Sequence[Any] = (),
    model: Callable[[], Any] | None = None,
    tokenizer: Any = None,
    progress: Progress = lambda text: None,
    say: Say = lambda text: None,
) -> RetakenStep:
    """Take a step of a run again, from the nearest earlier checkpoint: unchanged, and with other settings.

    settings: dotted names and values. A value holds for this step even if the schedule sets another one.
    keep: a new folder for the two replayed runs, ``unchanged`` and ``changed``.
    from_start: without an earlier checkpoint, begin at the start of the run.
    allow_changed: go on if the rows, the model or the source files are not those that the run was started with.
    task, rewards, model, tokenizer: what the run was given in Python, as to `Trainer`; ``model`` is a function that
        loads it, as the two replays train one each.
    """
    if is_rank():
        raise ConfigError("a step is replayed in one process; start `groupwise replay` without torchrun")
    reader, settings = RunReader(Path(run)), dict(settings or {})
    check_settings(settings, rescored=False)
    own = run_recipe(reader, step)
    if own.train.steps == 0:
        raise ConfigError(f"{reader.path} is supervised fine-tuning alone (train.steps is 0): it has no step to replay")
    start = find_start(reader, step, from_start=from_start)
    preset, not_applied = split_algorithm(own, algorithm, rescored=False)
    changes = {**preset, **settings}
    _check_change(own, changes, start, task, rewards)
    scheduled = step_recipes(reader, [step], make_schedule)[step]
    arrivals, notes = _replay_arrivals(reader, own, start)
    given = {"task": task, "rewards": rewards, "tokenizer": tokenizer}
    with workspace(keep) as folder, _threads_restored(), _run_named(folder, reader.path):
        place = folder / UNCHANGED
        copy_run(reader, place, start)
        replay = _Replay(place, given, model, allow_changed, keep is not None, progress, say)
        for last in [*_boundaries(reader, start, step), step - 1]:
            if last > (start or 0):
                replay.run_to(last, _quiet(run_recipe(reader, last), arrivals))
        taken = replay.take(step, _quiet(own, arrivals))
        other = None
        if changes:
            copy_run(RunReader(place), folder / CHANGED, step - 1 or start)
            replay = _Replay(folder / CHANGED, given, model, True, keep is not None, progress, say)
            other = replay.take(step, _quiet(apply_settings(own, changes), arrivals), changes)
        recorded = next((row for row in reader.training_rows if row["step"] == step), None)
        reproduced = None
        if recorded is not None:
            reproduced = find_difference(reader, place, first=(start or 0) + 1, last=step)
            reproduced = replace(reproduced, other="the replay", settings=[])  # run.… differ, on purpose
        weights = [] if other is None else compare_weights(taken.before, taken.after, other.after)
        return RetakenStep(
            run=str(reader.path),
            step=step,
            checkpoint=start or 0,
            reproduced=reproduced,
            changed=[change for change in changes_of(scheduled, changes) if change.before != change.after],
            not_applied=not_applied,
            metrics=compare_metrics(recorded, taken, other),
            weights=weights[1:],
            total_weights=weights[0] if weights else None,
            samples=None if other is None else compare_samples(taken.report.batch, other.report.batch),
            notes=[*notes, *_exactness(reader, own)],
            folder=str(folder) if keep is not None else None,
        )


def _replay_arrivals(reader: RunReader, recipe: Recipe, start: int | None) -> tuple[dict[str, Any], list[str]]:
    """The setting by which an asynchronous run is repeated, or a note that it cannot be from this checkpoint."""
    if not recipe.train.max_staleness:
        return {}, []
    rollouts = {} if start is None else read_state(reader.path / checkpoint_name(start)).get("rollouts") or {}
    if not (rollouts.get("unfinished") or rollouts.get("lost")):
        return {"train.replay": str(reader.path)}, []
    return {}, [
        f"the rollouts are asynchronous, and groups were not scored yet when {checkpoint_name(start or 0)} was saved: "
        "the replay may learn from other groups than the run"
    ]


def _exactness(reader: RunReader, recipe: Recipe) -> list[str]:
    """Why the replay may differ from the run in the last digits."""
    notes = []
    versions = package_versions(PACKAGES)
    changed = [name for name in versions if reader.versions.get(name, versions[name]) != versions[name]]
    if changed:
        shown = ", ".join(f"{name} {reader.versions[name]} then and {versions[name]} now" for name in changed)
        notes.append(f"the run had other versions: {shown}")
    device = resolve_device(recipe.model.device).type
    if device != "cpu":
        notes.append(f"on {device} sums may differ in the last digits from one time to the next; a CPU is exact")
    if recipe.model.sharding == "weights":
        notes.append("a run of several processes adds up in another order than this one process")
    return notes


def _check_change(own: Recipe, changes: Mapping[str, Any], start: int | None, task: Any, rewards: Any) -> None:
    """Find what is wrong with the change before the steps up to it are run."""
    changed = apply_settings(own, changes)
    inputs = load_inputs(changed, task=task, rewards=rewards)
    check_training_inputs(changed, inputs)
    if needs_reference(changed, inputs.driven) and not needs_reference(own, inputs.driven) and start is not None:
        name = next((name for name in changes if name.startswith(("loss.kl", "preference", "masks"))), "the change")
        raise ConfigError(
            f"{name} needs a reference policy, and the run has none, so its checkpoints hold none; replay it with "
            "--from-start, or start a run that has one (loss.kl_coef above 0)"
        )


def _boundaries(reader: RunReader, start: int | None, step: int) -> list[int]:
    """The steps after which the run was resumed with other settings, between the checkpoint and the step."""
    steps = {entry["step"] for entry in reader.changes}
    return sorted(number for number in steps if (start or 0) < number < step - 1)


def _quiet(recipe: Recipe, arrivals: Mapping[str, Any]) -> Recipe:
    return with_settings(recipe, {**QUIET, **arrivals, "run.folder": None})


@contextmanager
def _threads_restored() -> Iterator[None]:
    """A resumed run sets the number of threads that it was started with."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _run_named(folder: Path, run: Path) -> Iterator[None]:
    """Let errors name the run instead of its copy."""
    try:
        yield
    except GroupwiseError as error:
        for name in (UNCHANGED, CHANGED):
            path = str(folder / name)
            error.args = tuple(part.replace(path, str(run)) if isinstance(part, str) else part for part in error.args)
        raise


class _Replay:
    """A run that is continued in its folder, by one trainer after the other."""

    def __init__(
        self,
        folder: Path,
        given: Mapping[str, Any],
        model: Callable[[], Any] | None,
        allow_changed: bool,
        saves: bool,
        progress: Progress,
        say: Say,
    ) -> None:
        self.folder, self.given, self.model, self.allow_changed = folder, given, model, allow_changed
        self.saves, self.progress, self.say = saves, progress, say

    def run_to(self, last: int, recipe: Recipe) -> None:
        """Run on to a step, and save it."""
        with self._trainer(recipe) as trainer:
            if trainer.total_steps < last:
                raise InputError(f"the run ends after {plural(trainer.total_steps, 'step')}; choose one of them")
            for report in trainer.steps():
                self.progress(f"step {report.step} of {last}")
                if report.step == last:
                    break
            trainer.save()

    def take(self, step: int, recipe: Recipe, changes: Mapping[str, Any] | None = None) -> TakenStep:
        self.progress(f"taking step {step} again{' with the change' if changes else ''}")
        trainer = self._trainer(recipe)
        with trainer:
            taken = trainer.take(changes or {})
            if taken is not None and self.saves:
                trainer.save()
        if taken is None:
            raise InputError(f"the run ends before step {step}; choose an earlier one")
        return taken

    def _trainer(self, recipe: Recipe) -> StepTrainer:
        return StepTrainer(
            recipe,
            **self.given,
            model=None if self.model is None else self.model(),
            display=_Notices(self.say),
            folder=self.folder,
            resume=(self.folder / MARKER).exists(),
            allow_changed=self.allow_changed,
        )


class _Notices(Display):
    """Shows nothing but the trainer's notices."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say

    def say(self, text: str) -> None:
        self._say(text)
