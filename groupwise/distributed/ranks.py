"""The processes of a run ("ranks"): who they are and what they exchange.

Every rank holds the complete batch, and only expensive work is divided, so all that is exchanged per step are tokens,
rewards, gradients and weights. `Ranks` is the run's only use of `torch.distributed`: one rank alone needs none of it.

A divided piece of work stands in a `with ranks.stage(…)` block, what it gave is exchanged after it. An error in the
block is raised on all ranks, with the number of the one that it happened on, so that they can save together before they
end; if memory ran out on one, all raise that, so that all can repeat the work with less. A rank that is dead or late
ends the others with its number and where it was.
"""

from __future__ import annotations

import datetime
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from groupwise.distributed.message import decode, encode
from groupwise.distributed.split import split_by_cost
from groupwise.errors import ConfigError, GroupwiseError, RankError, check_integer, is_out_of_memory
from groupwise.text import error_reason, format_duration

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # as torchrun sets them
TIMEOUT = 1800.0
OUT_OF_MEMORY = "memory ran out"
LOST = ("Connection closed", "Connection reset", "Broken pipe", "timed out", "Timed out")  # what gloo and NCCL say

_Result = TypeVar("_Result")


class Ranks:
    """This process among the others. ``Ranks()`` is a run of one process, in which nothing is exchanged."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._store: Any = None
        self._control: Any = None  # for messages, on the CPU
        self._tensors: Any = None  # for gradients and weights, on the device
        self._limit = datetime.timedelta(seconds=TIMEOUT)
        self._stage, self._notes, self._is_owner = "starting", 0, True

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's files and talks to the user."""
        return self.rank == 0

    @contextmanager
    def stage(self, name: str, *, exchanges: bool = False) -> Iterator[None]:
        """A piece of work that all ranks do at the same time; it ends when all have done it.

        The block itself must not exchange anything: a rank that fails in it would leave the others waiting there.
        exchanges: it does, as a pass of a sharded model does; then a rank that fails ends at once, and so do others.
        """
        self._stage = name
        if self.size == 1:
            yield
            return
        self._note(name)
        failure: Exception | None = None
        try:
            yield
        except RankError:
            raise  # the others are known to be gone or late
        except Exception as error:
            if exchanges:
                self._end(name, error)
            failure = error
        self._note(f"waiting after {name}")
        report, reason = b"", ""
        if failure is not None:
            reason = OUT_OF_MEMORY if is_out_of_memory(failure) else _reason(failure)
            report = encode([reason, isinstance(failure, GroupwiseError)])
        reports = {rank: decode(data) for rank, data in enumerate(self._exchange(report)) if data}
        on_all_ranks = all(is_known for _, is_known in reports.values())
        if failure is not None and reason != OUT_OF_MEMORY:
            if isinstance(failure, GroupwiseError):
                failure.on_all_ranks = on_all_ranks
            raise failure
        failure = None  # its traceback holds the memory that is to be freed
        for rank, (reason, _) in reports.items():
            if reason != OUT_OF_MEMORY:
                reported = RankError(f"rank {rank} failed while {name}: {reason}")
                reported.on_all_ranks = on_all_ranks
                raise reported
        for rank in reports:
            raise torch.OutOfMemoryError(f"memory ran out on rank {rank} while {name}")

    def on_main(self, name: str, work: Callable[[], _Result]) -> _Result | None:
        """``work()`` on rank 0, as a stage that the others wait for; None on these."""
        with self.stage(name):
            return work() if self.is_main else None

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

    def divide(
        self,
        name: str,
        costs: Sequence[float],
        work: Callable[[list[int]], Iterable[_Result]],
        *,
        exchanges: bool = False,
    ) -> list[_Result]:
        """One value for each item, in order; each rank computes those of its share of the items in a stage.

        ``work`` gets the numbers of some items and returns their values, which must fit in a message. If it exchanges
        something (see `stage`), it is called on all ranks, even with no items.
        """
        if self.size == 1:
            return list(work(list(range(len(costs))))) if costs else []
        shares = split_by_cost(costs, self.size)
        own = shares[self.rank]
        with self.stage(name, exchanges=exchanges):
            values = list(work(own)) if own or exchanges else []
        results: dict[int, _Result] = {}
        for share, part in zip(shares, self.gather(values), strict=True):
            results |= dict(zip(share, part, strict=True))
        return [results[number] for number in range(len(costs))]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add up each tensor over all ranks, in place."""
        if self.size == 1:
            return
        from torch import distributed

        for tensor in tensors:
            sent = self._to_wire(tensor)
            with self._collective():
                distributed.all_reduce(sent, group=self._tensors)
            if sent is not tensor:
                tensor.copy_(sent)

    def sum_part(self, tensor: Tensor) -> Tensor:
        """This rank's part of the sum over all ranks of a flat tensor, whose length is a multiple of their number."""
        sent = self._to_wire(tensor)
        part = sent.new_empty(len(sent) // self.size)
        with self._collective():
            _named("reduce_scatter_single", "reduce_scatter_tensor")(part, sent, group=self._tensors)
        return part.to(tensor.device)

    def join_parts(self, part: Tensor) -> Tensor:
        """The flat tensors of all ranks, which have the same length, one after the other."""
        sent = self._to_wire(part)
        joined = sent.new_empty(self.size * len(sent))
        with self._collective():
            _named("all_gather_single", "all_gather_into_tensor")(joined, sent, group=self._tensors)
        return joined.to(part.device)

    def remember(self, key: str, value: str) -> None:
        """Keep a value for the processes that torchrun starts if one of these fails."""
        if (store := self._lasting_store()) is not None and self.is_main:
            store.set(f"groupwise/{key}", value)

    def recall(self, key: str) -> str | None:
        """A value that the processes before these kept; None if there is none."""
        store = self._lasting_store()
        if store is None or not store.check([f"groupwise/{key}"]):
            return None
        return str(store.get(f"groupwise/{key}").decode())

    def _lasting_store(self) -> Any:
        """The store of torchrun's agent, without the prefix of this attempt."""
        store: Any = self._store if _agent_has_store() else None
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return store

    def mesh(self, device: torch.device) -> Any:
        """All ranks in a row, as `torch.distributed.tensor` wants them: a DeviceMesh."""
        from torch import distributed
        from torch.distributed.device_mesh import DeviceMesh

        group = self._tensors
        if group is self._control and device.type == "cuda":  # torch 2.11 ends in a segmentation fault
            raise ConfigError(
                'model.sharding "weights" needs a GPU for each process, but these processes share one; start as many '
                'processes as there are GPUs, or set model.sharding to "optimizer"'
            )
        if group is self._control:  # messages after a failed pass must not be taken for weights
            group = distributed.new_group(backend="gloo", timeout=self._limit)
        return DeviceMesh.from_group(group, device.type)

    def close(self) -> None:
        """Leave the group; with an error on one rank the others notice it."""
        if self.size > 1 and self._is_owner:
            from torch import distributed

            with suppress(RuntimeError, ValueError):
                distributed.destroy_process_group()
        self.size = 1

    def _to_wire(self, tensor: Tensor) -> Tensor:
        """The tensor where its collectives take place: gloo, for two ranks on one GPU, does not have all on CUDA."""
        return tensor.cpu() if self._tensors is self._control else tensor

    def _exchange(self, data: bytes) -> list[bytes]:
        """The bytes of each rank."""
        all_gather = _named("all_gather_single", "all_gather_into_tensor")
        lengths = torch.zeros(self.size, dtype=torch.int64)
        with self._collective():
            all_gather(lengths, torch.tensor([len(data)]), group=self._control)
            width = int(lengths.max())
            if not width:
                return [b""] * self.size
            sent = torch.zeros(width, dtype=torch.uint8)
            sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else sent[:0]
            received = torch.empty(self.size * width, dtype=torch.uint8)
            all_gather(received, sent, group=self._control)
        rows = received.view(self.size, width)
        return [rows[rank, : int(length)].numpy().tobytes() for rank, length in enumerate(lengths)]

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Turn what a collective raises if a rank is dead or late into a sentence."""
        try:
            yield
        except RuntimeError as error:
            late = self._late()
            where = f"while {self._stage} (rank {self.rank})"
            lost = f"no answer {where}; last seen: {', '.join(late.values())}. It is dead or hangs"
            reason = lost if late else f"another rank died or hangs {where}"
            detail = re.sub(r"\[/\S+\] ", "", error_reason(error)).partition(". ")[0]  # without gloo's source file
            raise RankError(f"{reason} ({detail})", main_is_lost=not late or 0 in late) from error

    def _end(self, name: str, error: Exception) -> None:
        """Raise an error of a stage that exchanges something: this rank's own, or that of the rank that failed first.

        The others are stuck in an exchange with a rank that has failed, and get an error when its process ends.
        """
        failed = {}
        for rank in range(self.size):
            with suppress(RuntimeError):
                if self._store.check([f"groupwise/failed/{rank}"]):
                    failed[rank] = self._store.get(f"groupwise/failed/{rank}").decode()
        for rank, reason in failed.items():
            raise RankError(f"rank {rank} failed while {name}: {reason}") from error
        if any(text in str(error) for text in LOST):
            with self._collective():
                raise error
        if is_out_of_memory(error):  # it cannot be repeated: the others are in the middle of it
            advice = "lower train.token_budget, or divide the weights among more processes"
            error = RankError(f"memory ran out on rank {self.rank} while {name}; {advice}")
        with suppress(RuntimeError):
            self._store.set(f"groupwise/failed/{self.rank}", _reason(error))
        raise error

    def _note(self, stage: str) -> None:
        """Let the other ranks see what this one does, for the case that it dies or hangs."""
        self._notes += 1  # the same on all ranks that have come as far
        with suppress(RuntimeError):
            self._store.set(f"groupwise/{self.rank}", f"{self._notes} {time.time()} {stage}")

    def _late(self) -> dict[int, str]:
        """The ranks that have not come as far as this one, and where they were last."""
        late = {}
        for rank in range(self.size):
            with suppress(RuntimeError, ValueError):
                if self._store.check([f"groupwise/{rank}"]):
                    notes, when, stage = self._store.get(f"groupwise/{rank}").decode().split(" ", 2)
                    if int(notes) < self._notes:
                        late[rank] = f"rank {rank} ({stage}, {format_duration(time.time() - float(when))} ago)"
        return late


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
    ranks._limit = limit
    with ranks._collective():
        ranks._is_owner = not distributed.is_initialized()  # a script may train several times
        if ranks._is_owner:
            ranks._store = _attempt(_store(rank, size, limit))
            distributed.init_process_group("gloo", store=ranks._store, rank=rank, world_size=size, timeout=limit)
        else:
            ranks._store = distributed.distributed_c10d._get_default_store()
        ranks._control = ranks._tensors = distributed.new_group(backend="gloo", timeout=limit)
    places = ranks.gather(f"{socket.gethostname()} {device}")
    if device.type == "cuda" and len(set(places)) == size:  # NCCL refuses two ranks on one device
        with ranks._collective():
            ranks._tensors = distributed.new_group(backend="nccl", timeout=limit)
    return ranks


def _store(rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """The store of torchrun's agent, or one that rank 0 has."""
    from torch import distributed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and not _agent_has_store()
    stores: Any = distributed
    return stores.TCPStore(host, port, size, is_master=serves, timeout=timeout, multi_tenant=True)


def _attempt(store: Any) -> Any:
    """The store without what the processes before a restart have written to it, such as where they can be reached."""
    from torch import distributed

    stores: Any = distributed
    return stores.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _agent_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _named(name: str, before: str) -> Any:
    """A collective of torch by its name in 2.13, or by the one it had before."""
    from torch import distributed

    return getattr(distributed, name, None) or getattr(distributed, before)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
