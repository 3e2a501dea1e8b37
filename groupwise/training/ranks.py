"""A run of several processes: connecting them, going on after torchrun has restarted them, and stopping together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from groupwise.config import Recipe
from groupwise.distributed.launch import restarts
from groupwise.distributed.ranks import Ranks, connect
from groupwise.errors import RankError
from groupwise.model.device import resolve_device
from groupwise.rundir.run import holds_run
from groupwise.rundir.signals import StopRequest
from groupwise.training.store.run_folder import checkpoints_in

FOLDER = "folder"  # of the run, remembered for a restart


def start_ranks(recipe: Recipe) -> Ranks:
    """Connect the processes that torchrun started; on a machine with several GPUs each has its own."""
    if "RANK" not in os.environ:
        return Ranks()
    if recipe.model.device in ("auto", "cuda") and (gpus := torch.cuda.device_count()):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    return connect(resolve_device(recipe.model.device), recipe.train.timeout)


def restarted_folder(ranks: Ranks, chosen: str | Path | None) -> Path | None:
    """The folder of the run to go on with, if torchrun has restarted these processes because one of them failed."""
    if not restarts():
        return None
    folder = ranks.recall(FOLDER) or chosen
    return Path(folder) if folder is not None and holds_run(Path(folder)) else None


@contextmanager
def checkpoint_named(folder: Path) -> Iterator[None]:
    """Add to the error about a lost or failed rank from which checkpoint the run can be resumed."""
    try:
        yield
    except RankError as error:
        saved = list(checkpoints_in(folder).values())
        rest = f"the run in {folder} is saved up to {saved[-1].name}; go on with --resume" if saved else ""
        rest = rest or f"nothing of the run in {folder} is saved yet"
        raise RankError(f"{error}; {rest}", main_is_lost=error.main_is_lost) from error


class AgreedStop(StopRequest):
    """A request to stop that all ranks see at the same time, when they call `agree`; a signal may reach only one."""

    def __init__(self, own: StopRequest, ranks: Ranks) -> None:
        super().__init__()
        self.own, self.ranks = own, ranks

    @property
    def requested(self) -> bool:
        return self.own.signal is not None

    def agree(self) -> bool:
        number = max(self.ranks.gather(int(self.own.signal or 0)))
        if number and self.signal is None:
            self.signal = signal.Signals(number)
        return self.signal is not None

    def broken_pipe(self) -> None:
        self.own.broken_pipe()
