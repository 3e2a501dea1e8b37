"""Where grouping runs: in this process, or in Ray workers that share the prompts of a step.

The result does not depend on it. A worker that dies is replaced and its share is done again; what still cannot be done
there is done here, so no step is lost for it. A Ray that is started here listens on the loopback address alone, reports
nothing to its makers, and ends with this process.
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
from groupwise.errors import ConfigError, GroupwiseError, InputError
from groupwise.grouping.connection import NoRayError, RayConnection, Say
from groupwise.grouping.embed import check_embedder
from groupwise.grouping.grouper import Grouped, Grouper, LocalGrouper, check_texts, join_grouped, share_texts
from groupwise.model.device import usable_cpus
from groupwise.model.source import first_line

__all__ = ["Grouper", "LocalGrouper", "RayGrouper", "SimilarityGrouperWorker", "make_grouper"]

Texts = Sequence[Sequence[str]]

MOST_BY_DEFAULT = 8
RESTARTS = 3  # of one worker in one call
PATIENCE = 180.0  # seconds for a worker's process to start; its model may then take as long as it likes to load


class SimilarityGrouperWorker(LocalGrouper):
    """The document's worker: an embedder that is loaded once, and groups. ``ray.remote`` makes an actor of it."""

    def __init__(self, model_name: str = "BAAI/bge-m3", how: GroupingSection | None = None) -> None:
        super().__init__((how or GroupingSection()).model_copy(update={"embedder": model_name}))


def make_grouper(how: GroupingSection, say: Say) -> Grouper:
    """The grouper that ``how.workers`` asks for; ``say`` gets a sentence where it is another, and on every mishap."""
    number = _wanted_workers(how)
    if not number:
        return LocalGrouper(how)
    try:
        return RayGrouper(how, number, say)
    except NoRayError as error:
        say(f"grouping.workers is {number}, but {error}: answers are grouped in this process")
        return LocalGrouper(how)


def _wanted_workers(how: GroupingSection) -> int:
    if how.workers is not None:
        return how.workers
    gpus = torch.cuda.device_count() if how.device in ("auto", "cuda") else 0
    return min(gpus, MOST_BY_DEFAULT) if gpus >= 2 and find_spec("ray") is not None else 0


class _LostError(Exception):
    """A worker is gone."""


class _NoPlaceError(_LostError):
    """A worker got no process."""


class GroupingActor:
    """What a Ray process holds: a worker that is made when it is first needed.

    So a process that finds no place can be told from a model that takes long to load, and an error in loading arrives
    as what it is, where Ray would only say that the actor died.
    """

    def __init__(self, how: GroupingSection, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)  # Ray allows one
        self._how = how
        self._worker: SimilarityGrouperWorker | None = None

    def pid(self) -> int:
        return os.getpid()

    def load(self) -> None:
        self._worker = self._worker or SimilarityGrouperWorker(self._how.embedder, self._how)

    def group(self, texts: Texts) -> Grouped:
        worker = self._worker = self._worker or SimilarityGrouperWorker(self._how.embedder, self._how)
        return worker.group(texts)


class RayGrouper(Grouper):
    """Groups in ``workers`` Ray actors, each with an embedder of its own.

    Ray is the one this process is connected to, that of ``how.ray_address``, or one that is started for this object
    and ends with it. ``restarts`` counts workers that were replaced, ``pids`` are the processes of those there are. A
    worker that has no process after ``patience`` seconds never gets one.

    Make it in a thread that lives as long as it does: on Linux Ray's processes end with the thread that started them.
    """

    def __init__(self, how: GroupingSection, workers: int, say: Say, *, patience: float = PATIENCE) -> None:
        check_embedder(how.embedder)
        self.restarts = 0
        self.pids: list[int | None] = [None] * workers
        self._actors: list[Any] = [None] * workers
        self.how, self._say, self._patience = how, say, patience
        self._local: LocalGrouper | None = None
        self._given_up = self._closed = False
        self._connection = RayConnection()
        atexit.register(self.close)
        try:
            self._connection.open(how, workers, say)
            self._make = self.actor_factory(workers)
            say(f"creating {workers} similarity grouper worker{'s' * (workers > 1)}: loading {how.embedder}")
            self._first_start()
        except BaseException:
            self.close()
            raise

    def group(self, texts: Texts) -> Grouped:
        if self._closed:
            raise InputError("this grouper is closed; make another one")
        check_texts(texts)
        shares = dict(enumerate(share_texts(texts, len(self._actors))))
        parts: dict[int, Grouped] = {}
        for _ in range(1 + RESTARTS):
            if self._given_up or len(parts) == len(shares):
                break
            parts |= self._attempt({number: share for number, share in shares.items() if number not in parts})
        left = shares.keys() - parts.keys()
        if left and not self._given_up:
            self._say(f"{RESTARTS} restarts of a similarity worker did not help: its share is grouped in this process")
        if left:
            here = self._local = self._local or LocalGrouper(self.how)
            parts |= {number: here.group(shares[number]) for number in left}
        return join_grouped([parts[number] for number in shares])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._end_ray()
            self._local = None

    def actor_factory(self, workers: int) -> Callable[[], Any]:
        """Makes actors that fit: without CPUs of their own, and with a share of a GPU so that all of them have one."""
        gpus = 0.0 if self.how.device == "cpu" else self._connection.gpus()
        part = math.floor(1e4 / math.ceil(workers / gpus)) / 1e4 if gpus >= 1 else 0.0
        # The device's number is Ray's to choose: a worker sees only its own.
        device = "cuda" if self.how.device.startswith("cuda") else self.how.device
        how = self.how.model_copy(update={"device": device})
        threads = max(1, usable_cpus() // workers) if self._connection.started else None
        actor = self._connection.ray.remote(GroupingActor).options(num_cpus=0, num_gpus=part, max_restarts=0)
        return lambda: actor.remote(how, threads)

    def _first_start(self) -> None:
        """Every worker has loaded its model, or the error says what to do."""
        try:
            self._start(range(len(self._actors)))
            for call in [actor.load.remote() for actor in self._actors]:
                self._answer(call)
        except _LostError as error:
            if not self._connection.lives():
                raise NoRayError("Ray did not stay") from error
            raise ConfigError(
                f"{len(self._actors)} similarity workers could not be started on Ray: {error}; lower grouping.workers, "
                "or set it to 0 to group in this process"
            ) from error

    def _start(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._actors[number] = self._make()
        until = time.monotonic() + self._patience
        for number in numbers:
            self.pids[number] = self._answer(self._actors[number].pid.remote(), until)

    def _attempt(self, shares: Mapping[int, Texts]) -> dict[int, Grouped]:
        """What the workers make of their shares, after the dead ones were replaced; those that die are left out."""
        calls, parts = {}, {}
        for number, share in shares.items():
            with self._watched(number):
                self._check_ray()
                if self._actors[number] is None:
                    self.restarts += 1
                    self._start([number])
                calls[number] = self._actors[number].group.remote(share)
            if self._given_up:
                return {}
        for number, call in calls.items():
            with self._watched(number):
                parts[number] = self._answer(call)
        return parts

    @contextlib.contextmanager
    def _watched(self, number: int) -> Iterator[None]:
        """A worker that dies meanwhile leaves its place; without Ray, or without room in it, nobody takes it."""
        try:
            yield
        except _NoPlaceError as error:
            self._give_up(error)
        except _LostError as error:
            self._kill(number)
            self._say(f"a similarity worker died ({error}); another takes its place")

    def _answer(self, call: Any, until: float = math.inf) -> Any:
        """What a worker's call returns, or the error that it raised there."""
        from ray.exceptions import RayError, RayTaskError

        ray = self._connection.ray
        try:
            while not ray.wait([call], timeout=max(0.0, min(5.0, until - time.monotonic())))[0]:
                if time.monotonic() >= until:
                    raise _NoPlaceError(f"Ray had no place for a worker within {self._patience:g} seconds")
                self._check_ray()  # without Ray nobody would say that the worker died
            return ray.get(call)
        except RayTaskError as error:
            raise error.cause from (None if isinstance(error.cause, GroupwiseError) else error)
        except RayError as error:
            raise _LostError(first_line(error)) from error

    def _check_ray(self) -> None:
        if not self._connection.lives():
            raise _NoPlaceError("Ray is gone")

    def _give_up(self, reason: Exception) -> None:
        if not self._given_up:
            self._given_up = True
            self._say(f"{reason}: from here on answers are grouped in this process")
            self._end_ray()

    def _end_ray(self) -> None:
        for number in range(len(self._actors)):
            self._kill(number)
        self._connection.close()

    def _kill(self, number: int) -> None:
        actor, self._actors[number], self.pids[number] = self._actors[number], None, None
        if actor is not None and self._connection.lives():
            with contextlib.suppress(Exception):  # it is dead already
                self._connection.ray.kill(actor)
