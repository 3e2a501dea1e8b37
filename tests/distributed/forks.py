"""Runs of several ranks, forked from one process that has imported everything: starting Python takes seconds.

The process that forks must not have computed anything with torch, whose threads do not survive a fork. So tests call
these functions in a process of its own, with `drive`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from groupwise.errors import GroupwiseError
from tests.distributed.processes import free_port, run


class Ended(NamedTuple):
    """How a rank ended: its exit status, or minus the number of a signal; what it returned; and its error."""

    status: int
    value: Any
    error: str


def drive(function: str, *arguments: Any) -> Any:
    """``module:function`` in a new process, which may fork ranks."""
    return run(function, 1, *arguments, RANK="", WORLD_SIZE="1")[0]


def fork_ranks(size: int, work: Callable[[], Any], watch: Callable[[list[int]], None] | None = None) -> list[Ended]:
    """``work()`` in each of ``size`` ranks. ``watch`` gets their process ids and may wait, or end them."""
    port, children = str(free_port()), []
    sys.stdout.flush()
    for rank in range(size):
        read, write = os.pipe()
        process = os.fork()
        if not process:
            os.close(read)
            _become(rank, size, port, work, write)
        os.close(write)
        children.append((process, read))
    if watch is not None:
        watch([process for process, _ in children])
    ended = []
    for process, read in children:
        with os.fdopen(read) as file:
            text = file.read()
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        value, error = json.loads(text) if text else (None, "")
        ended.append(Ended(status, value, error))
    return ended


def _become(rank: int, size: int, port: str, work: Callable[[], Any], write: int) -> None:
    import torch

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    status, result = 0, (None, "")
    try:
        result = (work(), "")
    except GroupwiseError as error:
        status, result = 2, (None, f"{type(error).__name__}: {error}")
    except BaseException:
        status, result = 1, (None, traceback.format_exc())
    with os.fdopen(write, "w") as file:
        file.write(json.dumps(result))
    os._exit(status)


def values(ended: list[Ended]) -> list[Any]:
    """What the ranks returned; the first error is an error."""
    for rank, end in enumerate(ended):
        assert end.status == 0, f"rank {rank} of {len(ended)}: {end.error}"
    return [end.value for end in ended]
