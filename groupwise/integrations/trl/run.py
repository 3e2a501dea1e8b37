"""The run of a `GRPOTrainer`: groupwise's own trainer, and the events of transformers' callbacks around its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.integrations.trl.datasets import is_stream
from groupwise.integrations.trl.translate import Translation
from groupwise.training.display.lines import LineDisplay
from groupwise.training.trainer import Trainer


class TrlRun(Trainer):
    """A run that is saved, evaluated and ended by transformers' callbacks, in a folder that may hold other files."""

    automatic = False
    beside_other_files = True
    state_for_rewards: Any = None
    over = False  # a callback has ended it, or its epochs

    def trainer_state(self) -> Any:
        """transformers' `TrainerState`, which reward functions may ask for."""
        return self.state_for_rewards

    def skip_epoch(self) -> None:
        """Leave out the updates that are left of a rollout, and the rows that are left of the epoch."""
        self.updates.discard()
        self.order.skip_epoch()

    def _out_of_patience(self) -> bool:
        return self.over


class Notices(LineDisplay):
    """Shows only notices: progress and metrics are shown by transformers' callbacks."""

    def start(self, *arguments: Any, **options: Any) -> None:
        super(LineDisplay, self).start(*arguments, **options)

    def step(self, *arguments: Any) -> None:
        super(LineDisplay, self).step(*arguments)

    def evaluation(self, *arguments: Any) -> None:
        super(LineDisplay, self).evaluation(*arguments)

    def stage(self, text: str) -> None:
        self._begin(text)

    def progress(self, *arguments: Any, **options: Any) -> None:
        """Not shown."""


@dataclass(frozen=True)
class RunEpochs:
    """How many updates a run and its epochs have, as transformers counts them."""

    updates: int
    per_epoch: int
    micro_batches: int  # of an epoch
    accumulation: int
    endless: bool = False  # the rows of a stream: a run has as many epochs as its updates take

    @classmethod
    def of(cls, args: Any, translation: Translation, dataset: Any, rows: int) -> RunEpochs:
        updates, accumulation = int(translation.updates or 0), args.gradient_accumulation_steps
        if is_stream(dataset):
            return cls(updates, updates, updates * accumulation, accumulation, endless=True)
        prompts = args.generation_batch_size // args.num_generations
        micro_batches = max(rows // prompts, 1) * args.num_iterations * args.steps_per_generation
        return cls(updates, math.ceil(micro_batches / accumulation), micro_batches, accumulation)

    @property
    def number(self) -> int:
        return math.ceil(self.updates / self.per_epoch)


class Epoch:
    """The epoch that a run is in, which a callback may end early (``control.should_epoch_stop``)."""

    def __init__(self, lengths: RunEpochs) -> None:
        self.lengths = lengths
        self.number, self.begun_at = 0, 0  # finished epochs, and updates before this one

    def at(self, update: int) -> float:
        """The epoch after ``update`` updates, such as 1.25."""
        done = (update - self.begun_at) * self.lengths.accumulation
        return self.number + min(done, self.lengths.micro_batches) / self.lengths.micro_batches

    def ends_at(self, update: int) -> bool:
        return update - self.begun_at >= self.lengths.per_epoch

    def begin_next(self, update: int) -> bool:
        """Begin the epoch after this one; whether the run has another one."""
        self.number, self.begun_at = self.number + 1, update
        return self.lengths.endless or self.number < self.lengths.number

    def state(self) -> dict[str, int]:
        return {"number": self.number, "begun_at": self.begun_at}

    def load_state(self, state: Mapping[str, int]) -> None:
        self.number, self.begun_at = state["number"], state["begun_at"]
