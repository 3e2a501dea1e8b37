"""Grouping in Ray workers that share the prompts of a step, or in this process.

The result is the same. A worker that dies is replaced and its share is repeated; if that fails too, the share is
grouped in this process, so that no step is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from groupwise.config import GroupingSection
from groupwise.distributed.ranks import Ranks
from groupwise.errors import ConfigError, GroupwiseError, InputError
from groupwise.grouping.connection import NoRayError, RayConnection
from groupwise.grouping.embed import check_embedder
from groupwise.grouping.grouper import (
    GroupingResult,
    LocalGrouper,
    SimilarityGrouper,
    check_texts,
    join_results,
    share_texts,
)
from groupwise.grouping.sharded import ShardedGrouper
from groupwise.model.device import set_threads, usable_cpus
from groupwise.model.source import first_line
from groupwise.text import Say

__all__ = ["LocalGrouper", "RayGrouper", "SimilarityGrouper", "SimilarityGrouperWorker", "make_grouper"]

Texts = Sequence[Sequence[str]]

# The lines by which a user of verl recognises that similarity groups are active.
CREATING = "[RayPPOTrainer] Creating {} similarity grouper workers..."
LOADING = "[SimilarityGrouperWorker] Loading model: {}"
MAX_DEFAULT_WORKERS = 8
MAX_RESTARTS = 3  # of one worker in one call
START_TIMEOUT = 180.0  # seconds for a worker's process to start; loading its model has no limit
ANSWER_TIMEOUT = 60.0  # seconds for a worker that is busy to say that it is alive


class SimilarityGrouperWorker(LocalGrouper):
    """A worker with an embedder of its own; use it with ``ray.remote``."""

    def __init__(self, model_name: str = "BAAI/bge-m3", settings: GroupingSection | None = None) -> None:
        super().__init__((settings or GroupingSection()).model_copy(update={"embedder": model_name}))


def make_grouper(settings: GroupingSection, say: Say, ranks: Ranks | None = None) -> SimilarityGrouper:
    """The grouper for ``settings.workers``; ``say`` is told if Ray is not available, and about workers that fail.

    With several ranks, these share the prompts, unless there are workers, which only rank 0 uses.
    """
    if ranks is not None and ranks.size > 1:
        if not settings.workers:
            return ShardedGrouper(LocalGrouper(settings), ranks, on_main_only=False)
        return ShardedGrouper(make_grouper(settings, say) if ranks.is_main else None, ranks, on_main_only=True)
    number = _worker_count(settings)
    if not number:
        return LocalGrouper(settings)
    try:
        return RayGrouper(settings, number, say)
    except NoRayError as error:
        say(f"grouping.workers is {number}, but {error}: answers are grouped in this process")
        return LocalGrouper(settings)


def _worker_count(settings: GroupingSection) -> int:
    if settings.workers is not None:
        return settings.workers
    gpus = torch.cuda.device_count() if settings.device in ("auto", "cuda") else 0
    return min(gpus, MAX_DEFAULT_WORKERS) if gpus >= 2 and find_spec("ray") is not None else 0


class _WorkerLostError(Exception):
    """A worker died."""


class _NotScheduledError(_WorkerLostError):
    """Ray started no process for a worker."""


class GroupingActor:
    """The Ray actor; it creates its worker on first use.

    Thus a process that Ray cannot place differs from a model that loads slowly, and an error in loading arrives as it
    is rather than as the death of the actor.
    """

    def __init__(self, settings: GroupingSection, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)  # Ray sets it to 1
        set_threads()
        self._settings = settings
        self._worker: SimilarityGrouperWorker | None = None

    def pid(self) -> int:
        return os.getpid()

    def load(self) -> None:
        self._worker = self._worker or SimilarityGrouperWorker(self._settings.embedder, self._settings)

    def group(self, texts: Texts) -> GroupingResult:
        worker = self._worker = self._worker or SimilarityGrouperWorker(self._settings.embedder, self._settings)
        return worker.group(texts)


class RayGrouper(SimilarityGrouper):
    """Groups in ``workers`` Ray actors, each with its own embedder.

    It uses the Ray that this process is connected to, that of ``settings.ray_address``, or a local instance that ends
    with this object. ``restarts`` counts the workers that were replaced, ``pids`` are the processes of the present
    ones. A worker without a process after ``start_timeout`` seconds is given up. Its work has no time limit, but while
    it works it must answer within ``answer_timeout`` seconds that it is alive: a process that hangs is replaced.

    Create it in a thread that outlives it: on Linux, Ray's processes end with the thread that started them.
    """

    def __init__(
        self,
        settings: GroupingSection,
        workers: int,
        say: Say,
        *,
        start_timeout: float = START_TIMEOUT,
        answer_timeout: float = ANSWER_TIMEOUT,
    ) -> None:
        check_embedder(settings.embedder)
        self.restarts = 0
        self.pids: list[int | None] = [None] * workers
        self._actors: list[Any] = [None] * workers
        self.settings, self._say = settings, say
        self._start_timeout, self._answer_timeout = start_timeout, answer_timeout
        self._local: LocalGrouper | None = None
        self._given_up = self._closed = False
        self._connection = RayConnection()
        atexit.register(self.close)
        try:
            self._connection.open(settings, workers, say)
            self._make_actor = self.actor_factory(workers)
            say(CREATING.format(workers))
            say(LOADING.format(settings.embedder))
            self._first_start()
        except BaseException:
            self.close()
            raise

    def group(self, texts: Texts) -> GroupingResult:
        if self._closed:
            raise InputError("this grouper is closed; create a new one")
        check_texts(texts)
        shares = dict(enumerate(share_texts(texts, len(self._actors))))
        parts: dict[int, GroupingResult] = {}
        for _ in range(1 + MAX_RESTARTS):
            if self._given_up or len(parts) == len(shares):
                break
            parts |= self._attempt({number: share for number, share in shares.items() if number not in parts})
        missing = shares.keys() - parts.keys()
        if missing and not self._given_up:
            self._say(f"a similarity worker died {1 + MAX_RESTARTS} times: its share is grouped in this process")
        if missing:
            local = self._local = self._local or LocalGrouper(self.settings)
            parts |= {number: local.group(shares[number]) for number in missing}
        return join_results([parts[number] for number in shares])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._end_ray()
            self._local = None

    def actor_factory(self, workers: int) -> Callable[[], Any]:
        """A function that creates actors, without reserved CPUs and with a share of a GPU that leaves one for each."""
        gpus = 0.0 if self.settings.device == "cpu" else self._connection.gpus()
        part = math.floor(1e4 / math.ceil(workers / gpus)) / 1e4 if gpus >= 1 else 0.0
        # Ray chooses the device: a worker sees only its own.
        device = "cuda" if self.settings.device.startswith("cuda") else self.settings.device
        settings = self.settings.model_copy(update={"device": device})
        threads = max(1, usable_cpus() // workers) if self._connection.started else None
        actor = self._connection.ray.remote(GroupingActor).options(
            num_cpus=0,
            num_gpus=part,
            max_restarts=0,
            max_concurrency=2,  # one call works, another answers that the process is alive
        )
        return lambda: actor.remote(settings, threads)

    def _first_start(self) -> None:
        """Start all workers and load their models."""
        try:
            self._start(range(len(self._actors)))
            for actor, call in [(actor, actor.load.remote()) for actor in self._actors]:
                self._result(call, actor=actor)
        except _WorkerLostError as error:
            if not self._connection.is_alive():
                raise NoRayError("Ray stopped right after it was started") from error
            raise ConfigError(
                f"{len(self._actors)} similarity workers could not be started on Ray: {error}; lower grouping.workers, "
                "or set it to 0 to group in this process"
            ) from error

    def _start(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._actors[number] = self._make_actor()
        deadline = time.monotonic() + self._start_timeout
        for number in numbers:
            self.pids[number] = self._result(self._actors[number].pid.remote(), deadline)

    def _attempt(self, shares: Mapping[int, Texts]) -> dict[int, GroupingResult]:
        """Replace dead workers and group the shares; the results of workers that die are missing."""
        calls, parts = {}, {}
        for number, share in shares.items():
            with self._handle_loss(number):
                self._check_ray()
                if self._actors[number] is None:
                    self.restarts += 1
                    self._start([number])
                calls[number] = self._actors[number].group.remote(share)
            if self._given_up:
                return {}
        for number, call in calls.items():
            with self._handle_loss(number):
                parts[number] = self._result(call, actor=self._actors[number])
            if self._given_up:  # Ray was ended: asking for another result would start it again
                break
        return parts

    @contextlib.contextmanager
    def _handle_loss(self, number: int) -> Iterator[None]:
        """Handle the loss of a worker: remove it, or stop using Ray if it is gone or has no room."""
        try:
            yield
        except _NotScheduledError as error:
            self._give_up(error)
        except _WorkerLostError as error:
            self._kill(number)
            self._say(f"a similarity worker died ({error}) and is replaced")

    def _result(self, call: Any, deadline: float = math.inf, actor: Any = None) -> Any:
        """The result of a call to a worker, or the error that it raised. ``actor``: also check that it answers."""
        from ray.exceptions import RayError, RayTaskError

        ray, pause = self._connection.ray, min(5.0, self._answer_timeout / 2)
        ping, asked_at = None, 0.0
        try:
            while not ray.wait([call], timeout=max(0.0, min(pause, deadline - time.monotonic())))[0]:
                now = time.monotonic()
                if now >= deadline:
                    raise _NotScheduledError(f"Ray started no worker within {self._start_timeout:g} seconds")
                self._check_ray()  # if Ray is gone, the call would wait forever
                if actor is not None and (ping is None or ray.wait([ping], timeout=0)[0]):
                    ping, asked_at = actor.pid.remote(), now
                elif ping is not None and now - asked_at >= self._answer_timeout:
                    raise _WorkerLostError(f"it did not answer for {self._answer_timeout:g} seconds")
            return ray.get(call)
        except RayTaskError as error:
            raise error.cause from (None if isinstance(error.cause, GroupwiseError) else error)
        except RayError as error:
            raise _WorkerLostError(first_line(error)) from error

    def _check_ray(self) -> None:
        if not self._connection.is_alive():
            raise _NotScheduledError("Ray has stopped")

    def _give_up(self, reason: Exception) -> None:
        if not self._given_up:
            self._given_up = True
            self._say(f"{reason}: from now on answers are grouped in this process")
            self._end_ray()

    def _end_ray(self) -> None:
        for number in range(len(self._actors)):
            self._kill(number)
        self._connection.close()

    def _kill(self, number: int) -> None:
        actor, self._actors[number], self.pids[number] = self._actors[number], None, None
        if actor is not None and self._connection.is_alive():
            with contextlib.suppress(Exception):  # already dead
                self._connection.ray.kill(actor)
