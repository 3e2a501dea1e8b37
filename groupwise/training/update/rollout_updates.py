"""The updates of a rollout: μ passes over its mini-batches, all of them in one step, or one in each step.

With ``train.update_per_step`` a step is one update, as in TRL, and a rollout is used in the next
``train.iterations × train.mini_batches`` steps. A checkpoint between them holds the mini-batches with the log-probs
that were computed before the first update, so that a resumed run makes the same updates. What a schedule changes,
except for [optimizer], applies from the next rollout on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from groupwise.config import Recipe
from groupwise.seeds import derive_seed
from groupwise.training.display.base import Display
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.update.minibatch import DatasetPairs, MiniBatch, split_minibatches
from groupwise.training.update.result import UpdateResult
from groupwise.training.update.saved_minibatches import read_minibatches, totals_of, write_minibatches
from groupwise.training.update.updater import Updater

OPTIMIZER = "optimizer."


class RolloutUpdates:
    """Makes the updates of one rollout after another.

    driven: the settings that the run's schedule changes. compiles: the first update compiles the model.
    """

    def __init__(
        self,
        updater: Updater,
        recipe: Recipe,
        display: Display,
        *,
        driven: Collection[str] = (),
        compiles: bool = False,
    ) -> None:
        self.updater, self.display, self.driven, self.compiles = updater, display, driven, compiles
        self.seed, self.one_per_step = recipe.train.seed, recipe.train.update_per_step
        self.minibatches: list[MiniBatch] = []
        self._iterations, self._made = 1, 0  # made: updates of this rollout, those without a learning signal included
        self._rollouts: int | None = None  # begun so far; None: as many as steps are finished
        self._values: dict[str, Any] = {}  # of the driven settings, when the rollout was sampled
        self._totals: list[dict[str, Any]] = []  # of the mini-batches that a checkpoint's file must hold

    @property
    def left(self) -> int:
        """The updates of the last rollout that are still to be made."""
        return self._iterations * len(self.minibatches) - self._made

    def rollout_number(self, step: int) -> int:
        """The number of the next rollout (from 0), for its random numbers. ``step``: finished steps."""
        return step if not self.one_per_step or self._rollouts is None else self._rollouts

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """These values of a schedule; those of the rollout where it is still in use, but for the optimizer's."""
        if not self.left:
            return dict(values)
        return {
            name: value if name.startswith(OPTIMIZER) else self._values.get(name, value)
            for name, value in values.items()
        }

    def undo_point(self) -> Callable[[], None]:
        """A function that returns to this moment, while the weights have not moved."""
        before = list(self.minibatches), self._iterations, self._made, self._rollouts, self._values

        def undo() -> None:
            self.minibatches, self._iterations, self._made, self._rollouts, self._values = before

        return undo

    def begin(
        self,
        batch: Batch,
        group_advantages: GroupAdvantages,
        pairs: DatasetPairs,
        step_recipe: Recipe,
        number: int,
    ) -> None:
        """Divide rollout ``number`` into mini-batches, and compute what must be known before their first update."""
        seed = derive_seed("mini-batches", self.seed, number)
        self.minibatches = split_minibatches(batch, group_advantages, step_recipe, pairs, seed)
        self._iterations, self._made = step_recipe.train.iterations, 0
        self._values = {name: step_recipe.get(name) for name in self.driven}
        self._rollouts = number + 1
        self.display.stage(f"computing log-probs{self._compiling}")
        self._seed_dropout(0, -1)  # these log-probs have dropout too, and a resumed run must draw the same
        for minibatch in self.minibatches:
            self.updater.precompute_logps(minibatch, step_recipe, old=self.left > 1)

    def run(self, step_recipe: Recipe, *, log_term_gradients: bool = False) -> list[UpdateResult]:
        """The updates of one step. A mini-batch without a learning signal is skipped, but where a step is one update,
        the optimizer is stepped with a gradient of 0, as in TRL: momentum and weight decay still act."""
        results: list[UpdateResult] = []
        for _ in range(min(self.left, 1) if self.one_per_step else self.left):
            minibatch, iteration, before = self.next, self._made // len(self.minibatches), self._updates_before
            self._made += 1
            self._show()
            if minibatch.empty and not self.one_per_step:
                continue
            self._seed_dropout(before, iteration)
            check = not before and not minibatch.empty
            results.append(
                self.updater.update(minibatch, step_recipe, check=check, log_term_gradients=log_term_gradients)
            )
        self.compiles = False
        if not self.left:
            self.discard()
        return results

    def discard(self) -> None:
        """Leave out the updates that are left of this rollout."""
        self.minibatches, self._made = [], 0

    @property
    def next(self) -> MiniBatch:
        """The mini-batch of the next update."""
        return self.minibatches[self._made % len(self.minibatches)]

    @property
    def _updates_before(self) -> int:
        """The updates of this rollout so far whose mini-batch had a learning signal."""
        passes, rest = divmod(self._made, len(self.minibatches))
        signal = [not minibatch.empty for minibatch in self.minibatches]
        return passes * sum(signal) + sum(signal[:rest])

    @property
    def _compiling(self) -> str:
        return " (the first step compiles the model)" if self.compiles else ""

    def _show(self) -> None:
        count = self._iterations * len(self.minibatches)
        number = "" if count == 1 else f", mini-batch {self._made} of {count}"
        activity = f"updating{number}{self._compiling}"

        def progress(done: int, total: int) -> None:
            self.display.progress(activity, done, total, "completions", estimated=False)

        self.display.stage(activity)
        self.updater.progress = progress

    def _seed_dropout(self, update: int, iteration: int) -> None:
        if self.updater.dropout:
            torch.manual_seed(derive_seed("dropout", self.seed, (self._rollouts or 1) - 1, update, iteration))

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint has to remember besides the mini-batches; None if each step has its own rollout."""
        if not self.one_per_step:
            return None
        return {
            "rollouts": self._rollouts,
            "iterations": self._iterations,
            "made": self._made,
            "values": self._values if self.left else {},
            "totals": totals_of(self.minibatches),
        }

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state` gave; None: a run whose steps were rollouts."""
        self.minibatches, self._totals = [], []
        if state is not None:
            self._rollouts, self._iterations, self._made = state["rollouts"], state["iterations"], state["made"]
            self._values, self._totals = dict(state["values"]), list(state["totals"])

    def write_files(self, folder: Path) -> None:
        """Write the mini-batches of a rollout that is still in use into a checkpoint's folder."""
        if self.left:
            write_minibatches(folder, self.minibatches)

    def read_files(self, folder: Path) -> None:
        """Restore the mini-batches, after `load_state`."""
        if self._totals:
            self.minibatches = read_minibatches(folder, self._totals)
