"""The processes of a run ("ranks"): who they are and what they exchange.

Every rank holds the complete batch, and only expensive work is divided, so all that is exchanged per step are tokens,
rewards, gradients and weights. `Ranks` is the run's only use of `torch.distributed`: one rank alone needs none of it.

A divided piece of work stands in a `with ranks.stage(…)` block. An error in it is raised on all ranks, with the number
of the one that it happened on; a rank that is dead or late ends the others with its number and where it was.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from groupwise.distributed.message import decode, encode
from groupwise.errors import ConfigError, RankError, check_integer
from groupwise.text import error_reason, format_duration

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # as torchrun sets them
TIMEOUT = 1800.0


class Ranks:
    """This process among the others. ``Ranks()`` is a run of one process, in which nothing is exchanged."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._store: Any = None
        self._control: Any = None  # for messages, on the CPU
        self._tensors: Any = None  # for gradients and weights, on the device
        self._stage, self._timeout = "starting", TIMEOUT

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's files and talks to the user."""
        return self.rank == 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A piece of work that all ranks do at the same time; it ends when all have done it."""
        self._stage = name
        if self.size == 1:
            yield
            return
        self._note(name)
        failure: BaseException | None = None
        try:
            yield
        except RankError:
            raise  # the others are known to be gone or late
        except Exception as error:
            failure = error
        reasons = self._exchange(b"" if failure is None else _reason(failure).encode())
        if failure is not None:
            raise failure
        failed = {rank: reason.decode() for rank, reason in enumerate(reasons) if reason}
        for rank, reason in failed.items():
            raise RankError(f"rank {rank} failed while {name}: {reason}")

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank; see `message` for what it may hold."""
        if self.size == 1:
            return [value]
        return [decode(data) for data in self._exchange(encode(value))]

    def from_main(self, value: Any = None) -> Any:
        """The value of rank 0."""
        return self.gather(value if self.is_main else None)[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        return any(self.gather(flag))

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add up each tensor over all ranks, in place."""
        if self.size == 1 or not tensors:
            return
        from torch import distributed

        with self._collective():
            for tensor in tensors:
                distributed.all_reduce(tensor, group=self._tensors)

    def mesh(self, device: torch.device) -> Any:
        """All ranks in a row, as `torch.distributed.tensor` wants them: a DeviceMesh."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self._tensors, device.type)

    def close(self) -> None:
        if self.size > 1:
            from torch import distributed

            with suppress(RuntimeError, ValueError):
                distributed.destroy_process_group()
            self.size = 1

    def _exchange(self, data: bytes) -> list[bytes]:
        """The bytes of each rank."""
        from torch import distributed

        lengths = torch.zeros(self.size, dtype=torch.int64)
        with self._collective():
            distributed.all_gather_into_tensor(lengths, torch.tensor([len(data)]), group=self._control)
            width = int(lengths.max())
            if not width:
                return [b""] * self.size
            sent = torch.zeros(width, dtype=torch.uint8)
            sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else sent[:0]
            received = torch.empty(self.size * width, dtype=torch.uint8)
            distributed.all_gather_into_tensor(received, sent, group=self._control)
        rows = received.view(self.size, width)
        return [rows[rank, : int(length)].numpy().tobytes() for rank, length in enumerate(lengths)]

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Turn what a collective raises if a rank is dead or late into a sentence."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(f"{self._missing()} ({error_reason(error)})") from error

    def _note(self, stage: str) -> None:
        """Let the other ranks see what this one does, for the case that it dies or hangs."""
        with suppress(RuntimeError):
            self._store.set(f"groupwise/{self.rank}", f"{time.time()} {stage}")

    def _missing(self) -> str:
        """Which ranks have not reached this stage, and where they were last."""
        late = []
        for rank in range(self.size):
            with suppress(RuntimeError, ValueError):
                if rank != self.rank and self._store.check([f"groupwise/{rank}"]):
                    when, _, stage = self._store.get(f"groupwise/{rank}").decode().partition(" ")
                    if stage != self._stage:
                        late.append(f"rank {rank} ({stage}, {format_duration(time.time() - float(when))} ago)")
        where = f"while {self._stage} (rank {self.rank})"
        if late:
            return f"no answer {where}; last seen: {', '.join(late)}. It is dead or hangs"
        return f"another rank died or hangs {where}"


def connect(device: torch.device, timeout: float = TIMEOUT) -> Ranks:
    """This process's place in the run that torchrun started; a run of one process if it did not."""
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        return Ranks()
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise ConfigError(f"RANK is set, but {', '.join(missing)} not; start several processes with torchrun")
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise ConfigError(
            f"RANK and WORLD_SIZE must be integers; start several processes with torchrun ({error})"
        ) from None
    check_integer("WORLD_SIZE", size, 1)
    from torch import distributed

    limit = datetime.timedelta(seconds=timeout)
    ranks = Ranks(rank, size)
    ranks._timeout = timeout
    with ranks._collective():
        distributed.init_process_group("gloo", timeout=limit)
        ranks._store = distributed.distributed_c10d._get_default_store()
        ranks._control = ranks._tensors = distributed.group.WORLD
        if device.type == "cuda" and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", size)):
            ranks._tensors = distributed.new_group(backend="nccl", timeout=limit)  # it refuses two ranks on one device
    return ranks


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
