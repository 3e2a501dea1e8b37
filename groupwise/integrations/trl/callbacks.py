"""transformers' callbacks in a run: their handler, and their state in checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, integrations
from transformers.trainer import DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler, ExportableState, PrinterCallback

from groupwise.errors import ConfigError
from groupwise.integrations.trl.logs import MetricAverages
from groupwise.integrations.trl.run import Epoch
from groupwise.rundir import from_json, write_bytes
from groupwise.rundir.files import as_json
from groupwise.text import excerpt
from groupwise.training.store.checkpoint import POLICY

TRAINER_STATE = "trainer_state.json"
SAVED_AS = "trl"  # the name of this part in a checkpoint's state


def make_handler(
    args: Any, callbacks: Any, model: Any, processing_class: Any, optimizer: Any = None, lr_scheduler: Any = None
) -> Any:
    """transformers' own callbacks, those of ``args.report_to``, and the user's, in the order of its Trainer."""
    given = list(callbacks or ())
    for callback in given:
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise ConfigError(
                f"callbacks has {excerpt(callback)}; a callback is a transformers.TrainerCallback (those of "
                "groupwise.Trainer have other methods)"
            )
    reporting: Any = integrations  # it has no types, nor has the handler
    make: Any = CallbackHandler
    everything = [*DEFAULT_CALLBACKS, *reporting.get_reporting_integration_callbacks(args.report_to), *given]
    handler = make(everything, model, processing_class, optimizer, lr_scheduler)
    handler.add_callback(PrinterCallback if args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
    return handler


def new_state(handler: Any, control: TrainerControl, is_main: bool) -> TrainerState:
    """The state before training."""
    parts: list[Any] = [part for part in (*handler.callbacks, control) if isinstance(part, ExportableState)]
    return TrainerState(is_local_process_zero=is_main, is_world_process_zero=is_main, stateful_callbacks=parts)


@dataclass(frozen=True)
class RowBatches:
    """Rows as callbacks ask for them: ``train_dataloader.dataset``, and the micro-batches of an epoch as its length.

    The rows are in memory, and no batches are read from it.
    """

    dataset: Any
    batch_size: int  # completions
    batches: int

    def __len__(self) -> int:
        return self.batches


class SavedCallbacks:
    """The `TrainerState` and the state of callbacks as a part of a run's checkpoints.

    The checkpoint's folder also gets what transformers' own has at its top: ``trainer_state.json``, and the model or
    adapter with its tokenizer, as links to the files in ``policy/``.
    """

    def __init__(
        self,
        handler: Any,
        control: TrainerControl,
        averages: MetricAverages,
        epoch: Epoch,
        *,
        restore_callbacks: bool,
    ) -> None:
        self.handler, self.control, self.averages, self.epoch = handler, control, averages, epoch
        self.skips_epoch = False  # a callback ended the epoch after the update that the run was resumed from
        self.restore_callbacks = restore_callbacks
        self.trainer_state = new_state(handler, control, is_main=True)

    def state(self) -> dict[str, Any]:
        return {
            "trainer_state": self._trainer_state(),
            "averages": self.averages.state(),
            "epoch": self.epoch.state(),
            "skips_epoch": self.control.should_epoch_stop,
        }

    def _trainer_state(self) -> dict[str, Any]:
        state: Any = self.trainer_state
        state.stateful_callbacks = self._callback_states()
        return asdict(state)

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        if state is None:
            raise ConfigError(
                "this checkpoint was not written by GRPOTrainer; continue its run with `groupwise train --resume`"
            )
        loaded: Any = TrainerState(**_with_numbers(state["trainer_state"]))
        self.averages.load_state(state["averages"])
        self.epoch.load_state(state["epoch"])
        self.skips_epoch = state["skips_epoch"]
        for name in ("is_local_process_zero", "is_world_process_zero"):  # of this process, not of the one that saved
            setattr(loaded, name, getattr(self.trainer_state, name))
        if loaded.best_model_checkpoint is not None and not os.path.isdir(loaded.best_model_checkpoint):
            loaded = replace(loaded, best_model_checkpoint=None)
        vars(self.trainer_state).update(vars(loaded))
        if self.restore_callbacks:
            self._restore(loaded.stateful_callbacks or {})

    def write_files(self, folder: Path) -> None:
        # As transformers writes it: NaN and infinities are numbers.
        content = json.dumps(_with_numbers(as_json(self._trainer_state())), indent=2, sort_keys=True)
        write_bytes(folder / TRAINER_STATE, f"{content}\n".encode())
        for path in sorted((folder / POLICY).iterdir()):
            if path.is_file() and not path.name.startswith("manifest"):
                with suppress(FileExistsError):
                    _link(path, folder / path.name)

    def read_files(self, folder: Path) -> None:
        """Everything is in the state."""

    def _callback_states(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for part in (*self.handler.callbacks, self.control):
            if isinstance(part, ExportableState):
                name, value = type(part).__name__, json.loads(json.dumps(part.state()))
                before = states.get(name)
                states[name] = value if before is None else [*(before if isinstance(before, list) else [before]), value]
        return states

    def _restore(self, states: Mapping[str, Any]) -> None:
        """Give each callback the attributes that it had, as ``restore_callback_states_from_checkpoint`` asks for."""
        for name, saved in states.items():
            entries: Sequence[Any] = saved if isinstance(saved, list) else [saved]
            parts = [part for part in (*self.handler.callbacks, self.control) if type(part).__name__ == name]
            for part, entry in zip(parts, entries, strict=False):
                for attribute, value in {**entry.get("args", {}), **entry.get("attributes", {})}.items():
                    setattr(part, attribute, value)


def _with_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """A `TrainerState` that was saved as JSON, with NaN and infinities as numbers."""
    return {**from_json(state), "log_history": [from_json(entry) for entry in state["log_history"]]}


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        if not target.exists():
            shutil.copy2(source, target)
