"""A run of several processes: connecting them, going on after torchrun has restarted them, and stopping together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from groupwise.config import Recipe
from groupwise.distributed.launch import restarts
from groupwise.distributed.ranks import Ranks, connect
from groupwise.model.device import resolve_device
from groupwise.rundir.run import holds_run
from groupwise.rundir.signals import StopRequest

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


class AgreedStop(StopRequest):
    """A request to stop that all ranks see at the same time, when they call `agree`; a signal may reach only one."""

    def __init__(self, own: StopRequest, ranks: Ranks) -> None:
        super().__init__()
        self.own, self.ranks = own, ranks

    def agree(self) -> bool:
        number = max(self.ranks.gather(int(self.own.signal or 0)))
        if number and self.signal is None:
            self.signal = signal.Signals(number)
        return self.signal is not None

    def broken_pipe(self) -> None:
        self.own.broken_pipe()
