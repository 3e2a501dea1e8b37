"""Asynchronous rollouts: the next groups are sampled or scored while the policy learns from those that are ready.

A group is a prompt with its completions, numbered as it is drawn. A generator in this process samples in the trainer's
thread and the rewards are computed in other threads; a remote one samples in other threads, too. A step takes the first
groups that are ready. None of their tokens may be sampled by weights that are more than ``train.max_staleness`` updates
older than those that learn them; such groups are dropped and their rows are drawn again.

What timing decides (when a row is drawn, and which groups form a batch) is in ``arrivals.jsonl``. Everything else is a
function of that record, the recipe and the seed, so ``train.replay`` repeats a run bit for bit.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.config import Recipe
from groupwise.errors import CheckpointError, ConfigError
from groupwise.rewards.scorer import LOST_BATCHES
from groupwise.text import plural
from groupwise.training.rollout.background import BackgroundThreads
from groupwise.training.rollout.batch import Batch, join
from groupwise.training.rollout.collector import Draw, RolloutCollector, RolloutResult, Timer, pool_metrics
from groupwise.training.rollout.saved_groups import GroupSource, read_groups, write_groups
from groupwise.training.store.arrivals import Arrival, append_arrival, read_arrivals

STALE = "stale"  # reasons why a group is dropped
SETTINGS = "settings"  # sampled with another number of completions, or without the kept sets that the step needs
UNFINISHED = "unfinished"  # not ready when the checkpoint was saved that the run was resumed from
REASONS = (STALE, SETTINGS, UNFINISHED)
POLL = 0.1  # seconds between two looks at a request to stop


class RolloutsStopped(Exception):
    """The run was asked to stop while a step waited for its groups; the state is that of the last finished step."""


@dataclass(eq=False)
class Group:
    """A row's completions on their way: being sampled, then scored, then ready."""

    number: int
    row: int
    samples: int
    keeps_sets: bool
    version: int | None = None  # of the weights that sampled the oldest token; None until it is sampled
    result: RolloutResult | None = None
    error: BaseException | None = None

    def sampled(self, batch: Batch, default: int) -> None:
        versions = batch.versions.values
        self.version = int(versions.min()) if len(versions) else default


class AsyncCollector(RolloutCollector):
    """Collects batches from groups that are sampled up to ``train.max_staleness`` steps ahead.

    folder: of the run, for its record. stopped: whether the run was asked to stop. Other arguments as its base's.
    """

    asynchronous = True

    def __init__(
        self, *arguments: Any, recipe: Recipe, folder: Path, stopped: Callable[[], bool] = lambda: False, **more: Any
    ) -> None:
        super().__init__(*arguments, **more)
        self.max_staleness, self.folder, self.stopped = recipe.train.max_staleness, folder, stopped
        self._recorded = {} if recipe.train.replay is None else read_arrivals(recipe.train.replay)
        self._last_recorded = max(self._recorded, default=(0, 0))
        if self._recorded and self.generator.remote:
            raise ConfigError(
                "train.replay repeats a run bit for bit, which only a generator in this process can do; "
                f"sampling.generator {recipe.sampling.generator!r} samples elsewhere"
            )
        self._groups: list[Group] = []  # drawn and neither taken nor dropped, by number
        self._redraw: list[int] = []  # rows of dropped groups
        self._lost: list[int] = []  # groups that were not ready in the checkpoint; their rows are in `_redraw`
        self._next_number = self._draws = 0
        self._steps_ahead = 1  # steps whose groups are drawn before they are needed
        self._lines: list[Arrival] = []  # of this step
        self._expected: list[int] = []  # the groups that a checkpoint's files must hold
        self._saved: tuple[dict[str, Any], dict[int, RolloutResult]] | None = None  # the state for a checkpoint
        self._changed = threading.Condition()  # guards the groups' results and the counts of sampling
        self._tokenizer_lock = threading.Lock()
        self._sampling_groups, self._idle, self._idle_since = 0, 0.0, time.perf_counter()
        self._background = copy.copy(self.scorer)  # evaluations announce their calls; these do not
        if self._background is not None:
            self._background.on_call = None
            self._background.lost_limit = LOST_BATCHES * recipe.train.prompts_per_step  # groups, not batches
        self._scoring = BackgroundThreads(recipe.scoring.concurrency, "groupwise-scoring")
        at_once = max(1, self.generator.max_num_seqs // recipe.sampling.samples_per_prompt)
        self._sampling_threads = BackgroundThreads(at_once, "groupwise-sampling")

    def close(self) -> None:
        """End the threads. What they still compute is not used."""
        self._sampling_threads.close()
        self._scoring.close()

    def undo_point(self) -> Callable[[], None]:
        undo_order, saved = super().undo_point(), self._saved
        before = list(self._groups), list(self._redraw), list(self._lost), self._next_number

        def undo() -> None:
            undo_order()
            self._groups, self._redraw, self._lost, self._next_number = before
            self._saved = saved

        return undo

    def collect(self, step: int, step_recipe: Recipe, trainer_state: Any, timer: Timer) -> RolloutResult:
        """The batch of a step. If it cannot be collected, everything is as before the call."""
        undo = self.undo_point()
        self._draws, self._lines = 0, []
        try:
            result = super().collect(step, step_recipe, trainer_state, timer)
            for line in self._lines:
                append_arrival(self.folder, line)
        except BaseException:
            undo()
            raise
        self._saved = None
        result.queue = self._metrics(step, result.batch)
        return result

    def _round(
        self, step: int, number: int, prompt_count: int, step_recipe: Recipe, trainer_state: Any, timer: Timer
    ) -> RolloutResult:
        settings = Draw(step, 0, [], step_recipe, trainer_state)
        line = Arrival(step=step + 1, round=number, dropped=[(group, UNFINISHED) for group in self._lost])
        self._lines.append(line)
        recorded = self._recorded.get((step + 1, number))
        if recorded is not None:
            taken = self._repeat(recorded, line, settings, timer)
        else:
            if (step + 1, number) < self._last_recorded:
                raise ConfigError(
                    f"train.replay has no round {number} of step {step + 1}: its run had other settings; repeat a run "
                    "with the recipe and the data that it had"
                )
            taken = self._take_ready(prompt_count, line, settings, timer)
        self._lost = []
        self._groups = [group for group in self._groups if group not in taken]
        results = [group.result for group in taken if group.result is not None]
        line.taken = [group.number for group in taken]
        line.versions = [_versions(result.batch) for result in results]
        return _joined(results)

    def _take_ready(self, count: int, line: Arrival, settings: Draw, timer: Timer) -> list[Group]:
        """The first ``count`` groups that are ready, after drawing the rows of the next steps."""
        per_step = settings.recipe.train.prompts_per_step
        if not line.round and self._steps_ahead > 1 and len(self._ready()) >= count + per_step:
            self._steps_ahead -= 1  # groups of the next step were ready, too: fewer hide the time of the rewards
        while True:
            with self._changed:  # no group becomes ready in between
                for group, reason in self._unusable(settings):
                    self._drop(group, reason, line)
                ready = self._ready()
            if rows := self._rows_to_draw(count, len(ready), settings):
                self._draw(rows, line, settings, timer)
            elif len(ready) >= count:
                return ready[:count]
            else:
                self._wait(lambda: len(self._ready()), len(ready), count, timer)

    def _repeat(self, recorded: Arrival, line: Arrival, settings: Draw, timer: Timer) -> list[Group]:
        """Drop, draw and take what the record says."""
        for number, reason in recorded.dropped:
            if number not in self._lost:
                self._drop(self._find(number, recorded), reason, line)
        for draw in recorded.drawn:
            self._draw(len(draw), line, settings, timer, expected=draw)
        taken = [self._find(number, recorded) for number in recorded.taken]

        def ready() -> int:
            self._ready()  # raises an error that a group has met
            return sum(group.result is not None for group in taken)

        while (done := ready()) < len(taken):
            self._wait(ready, done, len(taken), timer)
        return taken

    def _find(self, number: int, recorded: Arrival) -> Group:
        for group in self._groups:
            if group.number == number:
                return group
        raise ConfigError(
            f"train.replay: group {number} of step {recorded.step} does not exist in this run; repeat a run with the "
            "recipe and the data that it had"
        )

    def _unusable(self, settings: Draw) -> list[tuple[Group, str]]:
        """The groups that this step and later ones cannot learn from. One that is still sampled is looked at later."""
        unusable = []
        for group in self._groups:
            if group.version is not None and settings.step - group.version > self.max_staleness:
                unusable.append((group, STALE))
            elif (group.samples, group.keeps_sets) != (settings.samples, settings.recipe.masks.keep_sampling_mask):
                unusable.append((group, SETTINGS))
        return unusable

    def _drop(self, group: Group, reason: str, line: Arrival) -> None:
        self._groups.remove(group)
        self._redraw.append(group.row)
        line.dropped.append((group.number, reason))

    def _ready(self) -> list[Group]:
        """The groups that can be taken, by number; an error that one of them has met is raised."""
        with self._changed:
            for group in self._groups:
                if group.error is not None:
                    raise group.error
            return [group for group in self._groups if group.result is not None]

    def _rows_to_draw(self, count: int, ready: int, settings: Draw) -> int:
        """How many rows to draw now: those that this step lacks, and those of later steps.

        Groups of ``max_staleness`` later steps may wait, so that the last of them is learned before it is stale. Fewer
        do if that is enough for no step to wait; what is learned is then newer.
        """
        per_step, waiting = settings.recipe.train.prompts_per_step, len(self._groups)
        later_steps = min(self.max_staleness, max(0, int(settings.trainer_state.max_steps) - settings.step - 1))
        if self.generator.remote:
            return max(0, count + per_step * later_steps - waiting)
        room = count + per_step * min(self._steps_ahead, later_steps) - waiting
        if room < per_step and waiting >= count > ready and self._steps_ahead < later_steps:
            self._steps_ahead += 1  # rather than wait
            room += per_step
        if room >= per_step:  # a full batch: sampling a few prompts takes about as long
            return max(per_step, count - waiting)
        return max(0, count - waiting)

    def _draw(
        self,
        count: int,
        line: Arrival,
        settings: Draw,
        timer: Timer,
        expected: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Draw rows and have them sampled and scored."""
        again, self._redraw = self._redraw[:count], self._redraw[count:]
        rows = again + (self.order.take(count - len(again)) if count > len(again) else [])
        form = (settings.samples, settings.recipe.masks.keep_sampling_mask)
        groups = [Group(self._next_number + place, row, *form) for place, row in enumerate(rows)]
        numbers = [(group.number, group.row) for group in groups]
        if expected is not None and numbers != list(expected):
            raise ConfigError(
                f"train.replay: step {line.step} draws other rows than the recorded run ({numbers[:3]} instead of "
                f"{list(expected)[:3]}); repeat a run with the recipe, the seed and the data that it had"
            )
        draw = Draw(settings.step, self._draws, rows, settings.recipe, settings.trainer_state)
        self._draws += 1
        self._next_number += len(rows)
        line.drawn.append(numbers)
        if self.generator.remote:
            for place, group in enumerate(groups):
                self._sampling_threads.add(partial(self._sample_group, group, draw, place))
        else:
            batch = self._sample(draw, timer)
            for place, group in enumerate(groups):
                part = batch.take([place])
                group.sampled(part, self.generator.version)
                self._scoring.add(partial(self._score_group, group, part, draw))
        self._groups += groups

    def _sample_group(self, group: Group, draw: Draw, place: int) -> None:
        """In a thread: sample a group with a remote generator, then have it scored."""
        version = self.generator.version
        self._count_sampling(1)
        try:
            prompt = self.prompts[group.row]
            sampling = self._sampling(draw)
            rollout = self.generator.generate([prompt.ids], draw.samples, sampling, stop=self.stop, keys=[place])
            with self._tokenizer_lock:  # the embedder of the grouper has a tokenizer, too
                batch = self._cluster(self._unscored([group.row], draw.samples, rollout), draw, place)
            with self._changed:
                group.sampled(batch, version)
            self._scoring.add(partial(self._score_group, group, batch, draw))
        except BaseException as error:
            self._finish(group, error=error)
        finally:
            self._count_sampling(-1)

    def _score_group(self, group: Group, batch: Batch, draw: Draw) -> None:
        """In a thread: score a group."""
        try:
            self._finish(group, result=self._score(batch, draw, self._background))
        except BaseException as error:
            self._finish(group, error=error)

    def _finish(self, group: Group, result: RolloutResult | None = None, error: BaseException | None = None) -> None:
        with self._changed:
            group.result, group.error = result, error
            self._changed.notify_all()

    def _count_sampling(self, change: int) -> None:
        with self._changed:
            if not self._sampling_groups:
                self._idle += time.perf_counter() - self._idle_since
            self._sampling_groups += change
            self._idle_since = time.perf_counter()

    def _wait(self, ready: Callable[[], int], done: int, count: int, timer: Timer) -> None:
        """Wait until more than ``done`` groups are ready."""
        activity = "waiting for completions and rewards" if self.generator.remote else "waiting for rewards"
        self.display.progress(activity, done, count, "groups", estimated=False)
        with timer("wait"), self._changed:
            while ready() <= done:
                if self.stopped():
                    raise RolloutsStopped
                self._changed.wait(POLL)

    def _metrics(self, step: int, batch: Batch) -> dict[str, float]:
        versions = batch.versions.values.double()
        dropped = [reason for line in self._lines for _, reason in line.dropped]
        metrics = {
            "async/staleness_mean": float((step - versions).mean()) if len(versions) else 0.0,
            "async/staleness_max": float((step - versions).max()) if len(versions) else 0.0,
            "async/groups_waiting": float(len(self._groups)),
            **{f"async/dropped_{reason}": float(dropped.count(reason)) for reason in REASONS},
        }
        if self.generator.remote:
            self._count_sampling(0)
            metrics["time/sampler_idle"], self._idle = self._idle, 0.0
        return metrics

    def state(self) -> dict[str, Any]:
        """The groups that wait, for a checkpoint: the same for each save between two steps."""
        return self._snapshot()[0]

    def write_files(self, folder: Path) -> None:
        """Write the groups of `state` that are ready into a checkpoint's folder."""
        write_groups(folder, self._snapshot()[1])

    def _snapshot(self) -> tuple[dict[str, Any], dict[int, RolloutResult]]:
        if self._saved is None:
            with self._changed:
                ready = {group.number: group.result for group in self._groups if group.result is not None}
            unfinished = [[group.number, group.row] for group in self._groups if group.number not in ready]
            numbers = {"next_number": self._next_number, "redraw": list(self._redraw), "lost": list(self._lost)}
            self._saved = {**numbers, "ready": list(ready), "unfinished": unfinished}, ready
        return self._saved

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` gave; None: a run that was not asynchronous before."""
        state = state or {"next_number": 0, "redraw": [], "lost": [], "ready": [], "unfinished": []}
        rows = [*state["redraw"], *(row for _, row in state["unfinished"])]
        if any(row >= len(self.rows) for row in rows):
            raise CheckpointError(
                f"the saved groups have rows beyond the {plural(len(self.rows), 'row')} that there are"
            )
        self._groups, self._saved, self._redraw = [], None, rows
        self._next_number = state["next_number"]
        self._lost = [*state["lost"], *(number for number, _ in state["unfinished"])]
        self._expected = list(state["ready"])

    def read_files(self, folder: Path) -> None:
        """Restore the groups that were ready, after `load_state`."""
        if not self._expected:
            return
        source = GroupSource(self.rows, self.prompts, self.tokenizer, len(self.names))
        results = read_groups(folder, source)
        if list(results) != self._expected:
            raise CheckpointError(f"{folder} is damaged: it has other groups than its state names")
        for number, result in results.items():
            batch = result.batch
            group = Group(number, batch.row_numbers[0], batch.samples, batch.kept is not None, result=result)
            group.sampled(batch, 0)
            self._groups.append(group)


def _versions(batch: Batch) -> tuple[int, int]:
    versions = batch.versions.values
    return (int(versions.min()), int(versions.max())) if len(versions) else (0, 0)


def _joined(results: Sequence[RolloutResult]) -> RolloutResult:
    """One result of several groups, as if they had been sampled and scored together."""
    total = results[0]
    metrics = total.metrics
    for count, result in enumerate(results[1:], start=1):
        metrics = pool_metrics(metrics, count, result.metrics, 1)
    return RolloutResult(
        join([result.batch for result in results]) if len(results) > 1 else total.batch,
        tokens=sum(result.tokens for result in results),
        prompts=len(results),
        failures=[failure for result in results for failure in result.failures],
        metrics=metrics,
        skipped=sum(result.skipped for result in results),
    )
