"""Similarity workers that are killed, between calls and in the middle of one: the result is that of this process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import ray
import torch

from groupwise.config import GroupingSection
from groupwise.grouping import workers
from groupwise.grouping.grouper import GroupingResult, LocalGrouper
from groupwise.grouping.workers import RayGrouper
from tests.weights import wordllama

WORDS = ["cats", "dogs", "purr", "bark", "stars", "galaxy", "night", "river", "mountain", "song", "voice", "silver"]
# About a second of work for each of two workers.
TEXTS = [
    [" ".join(f"{WORDS[(p * 7 + a * 3 + i * (1 + a % 3)) % 12]}{p}" for i in range(300)) for a in range(8)]
    for p in range(160)
]
FEW = TEXTS[:3]


class Told(list):
    """What has been said, without the sentence that announces the workers."""

    def __call__(self, text: str) -> None:
        if not text.startswith("creating"):
            self.append(text)


@pytest.fixture(scope="module")
def how() -> GroupingSection:
    return GroupingSection(embedder=str(wordllama()), cache=0)


@pytest.fixture(scope="module")
def expected(how) -> GroupingResult:
    torch.set_num_threads(1)
    return LocalGrouper(how).group(TEXTS)


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def grouper(how, told) -> Iterator[RayGrouper]:
    with RayGrouper(how, 2, told) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_said_before(told) -> None:
    told.clear()


def check_same(ours: GroupingResult, expected: GroupingResult) -> None:
    """The prompts of ours are the first ones of all."""
    for name in ("labels", "scores", "distances", "centres"):
        found = getattr(ours, name)
        assert torch.equal(found, getattr(expected, name)[: len(found)]), name


@contextlib.contextmanager
def meanwhile(act: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs ``act`` in a thread, and tells it when the block has ended."""
    ended = threading.Event()
    thread = threading.Thread(target=act, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def kill_at_work(pid: int) -> Callable[[threading.Event], None]:
    """Kills a worker once it has begun: when it has used a tenth of a second of its processor."""
    process = psutil.Process(pid)
    before = seconds_of(process)

    def act(ended: threading.Event) -> None:
        while not ended.is_set() and seconds_of(process) < before + 0.1:
            time.sleep(0.005)
        if not ended.is_set():
            process.kill()

    return act


def test_killed_in_the_middle_of_a_call(grouper, told, expected):
    before, (pid, other) = grouper.restarts, grouper.pids
    with meanwhile(kill_at_work(pid)):
        found = grouper.group(TEXTS)
    assert not psutil.pid_exists(pid)
    check_same(found, expected)
    assert grouper.restarts == before + 1
    assert grouper.pids[0] not in (None, pid)
    assert grouper.pids[1] == other
    assert len(told) == 1
    assert told[0].startswith("a similarity worker died (")
    assert told[0].endswith("is replaced")


def test_killed_between_calls(grouper, told, expected):
    """Both of them. One that has nothing to do in a call is replaced when it has."""
    check_same(grouper.group(FEW), expected)
    before, pids = grouper.restarts, list(grouper.pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    check_same(grouper.group(FEW[:1]), expected)
    assert grouper.restarts == before + 1
    check_same(grouper.group(FEW), expected)
    check_same(grouper.group(FEW), expected)
    assert grouper.restarts == before + 2
    assert set(grouper.pids).isdisjoint(pids)
    assert len(told) == 2


def test_killed_again_and_again(grouper, told, expected, monkeypatch):
    """The share is done here in the end, and the next call has its worker again."""
    monkeypatch.setattr(workers, "MAX_RESTARTS", 1)

    def kill_all(ended: threading.Event) -> None:
        while not ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                if (pid := grouper.pids[1]) is not None:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)

    before, survivor = grouper.restarts, grouper.pids[0]
    with meanwhile(kill_all):
        found = grouper.group(TEXTS)
    check_same(found, expected)
    assert grouper.restarts == before + 1
    assert told[-1] == "a similarity worker died 2 times: its share is grouped in this process"
    assert grouper.pids == [survivor, None]
    check_same(grouper.group(FEW), expected)
    assert grouper.restarts == before + 2
    assert None not in grouper.pids


def test_when_ray_itself_is_killed_the_run_goes_on_without_it(grouper, told, expected):
    """The last test of this module: its Ray is gone after it."""
    children = psutil.Process().children(recursive=True)
    (raylet,) = [child for child in children if child.name() == "raylet"]

    def kill(ended: threading.Event) -> None:
        kill_at_work(grouper.pids[0])(ended)
        raylet.kill()

    with meanwhile(kill):
        found = grouper.group(TEXTS)
    check_same(found, expected)
    assert told[-1] == "Ray has stopped: from now on answers are grouped in this process"
    count = len(told)
    check_same(grouper.group(FEW), expected)
    assert len(told) == count
    assert not ray.is_initialized()
    assert psutil.wait_procs(children, timeout=60)[1] == []
