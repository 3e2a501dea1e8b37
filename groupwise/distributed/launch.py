"""Starting the processes of a run on this machine, as torchrun does; and what a process knows before it is connected.

Importing this does not load PyTorch.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from groupwise.errors import RankError

SAVING_SECONDS = 3600  # that the processes have to finish their step and to save, after a signal


def is_rank() -> bool:
    """Whether this process is one of several, which torchrun started."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def is_main_process() -> bool:
    """Whether this process talks to the user."""
    return not is_rank() or os.environ["RANK"] == "0"


def restarts() -> int:
    """How often torchrun has restarted the processes of this run because one failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) if is_rank() else 0


def reports(error: BaseException) -> bool:
    """Whether this process prints an error: rank 0 does, of what all ranks raise. If it is lost, each of the others."""
    return is_main_process() or (isinstance(error, RankError) and error.main_is_lost) or _is_alone_on_machine()


def _is_alone_on_machine() -> bool:
    """Whether this is the first process of a machine, and not connected yet: only this machine may have the error."""
    torch = sys.modules.get("torch")
    return os.environ.get("LOCAL_RANK") == "0" and (torch is None or not torch.distributed.is_initialized())


def launch(processes: int, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``python -m groupwise`` with this command in several processes of this machine; the exit status.

    The same as ``torchrun --standalone --nproc-per-node N -m groupwise …``, without torchrun's report of a process that
    fails, whose own sentence is enough. A signal is passed on to the processes.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_SECONDS))
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "groupwise", *command)
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status  # a process that a signal ended has the negative number
    except SignalException as error:
        _kill_children()  # if it was the second signal: they were still saving
        return 128 + error.sigval
    return 0


def _kill_children() -> None:
    with suppress(OSError, ValueError):  # not Linux
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
