"""Similarity workers that are killed, between calls and during one: the result is the same as in this process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from groupwise.config import GroupingSection
from groupwise.errors import ConfigError
from groupwise.grouping import workers
from groupwise.grouping.grouper import GroupingResult, LocalGrouper
from groupwise.grouping.workers import RayGrouper
from tests.weights import wordllama

pytestmark = pytest.mark.slow

WORDS = ["cats", "dogs", "purr", "bark", "stars", "galaxy", "night", "river", "mountain", "song", "voice", "silver"]
TEXTS = [
    [" ".join(f"{WORDS[(p * 7 + a * 3 + i * (1 + a % 3)) % 12]}{p}" for i in range(30)) for a in range(8)]
    for p in range(6)
]
FIRST, LAST = 0, len(TEXTS) - 1  # prompts of the first and of the second worker


class BlockingTexts(list):
    """The texts of a prompt. The worker that receives them writes ``working-PID`` and waits while ``block`` exists."""

    def __init__(self, texts: list[str], folder: Path) -> None:
        super().__init__(texts)
        self.folder = folder

    def __reduce__(self):
        return receive, (list(self), str(self.folder))


def receive(texts: list[str], folder: str) -> list[str]:
    block = os.path.join(folder, "block")
    if os.path.exists(block):
        open(os.path.join(folder, f"working-{os.getpid()}"), "w").close()
    while os.path.exists(block):
        time.sleep(0.01)
    return texts


class Messages(list):
    """All messages except the one about creating the workers."""

    def __call__(self, text: str) -> None:
        if not text.startswith("creating"):
            self.append(text)


@pytest.fixture(scope="module")
def settings() -> GroupingSection:
    return GroupingSection(embedder=str(wordllama()), cache=0)


@pytest.fixture(scope="module")
def expected(settings) -> GroupingResult:
    torch.set_num_threads(1)
    return LocalGrouper(settings).group(TEXTS)


@pytest.fixture(scope="module")
def all_messages() -> Messages:
    return Messages()


@pytest.fixture(scope="module")
def ray_processes() -> Callable[[], list[psutil.Process]]:
    """The processes that were started since: other tests may have left theirs, such as the one of chat templates."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    return lambda: [child for child in psutil.Process().children(recursive=True) if child.pid not in before]


@pytest.fixture(scope="module")
def grouper(settings, all_messages, ray_processes) -> Iterator[RayGrouper]:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this module
    with RayGrouper(settings, 2, all_messages, answer_timeout=4.0) as grouper:
        yield grouper
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def messages(all_messages) -> Messages:
    all_messages.clear()
    return all_messages


def check_same(ours: GroupingResult, expected: GroupingResult) -> None:
    """Our prompts are the first ones of the expected result."""
    for name in ("labels", "scores", "distances", "centres"):
        values = getattr(ours, name)
        assert torch.equal(values, getattr(expected, name)[: len(values)]), name


@contextlib.contextmanager
def when_working(folder: Path, act: Callable[[int], None]) -> Iterator[None]:
    """Within this block, ``act`` is called with the pid of each worker that starts to wait in ``folder``."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            for path in folder.glob("working-*"):
                path.unlink()
                act(int(path.name.split("-")[1]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def texts_that_block(folder: Path, prompt: int) -> list[list[str]]:
    (folder / "block").touch()
    return [BlockingTexts(texts, folder) if number == prompt else texts for number, texts in enumerate(TEXTS)]


def test_killed_during_a_call(grouper, messages, expected, tmp_path):
    before, (pid, other) = grouper.restarts, grouper.pids
    killed = []

    def kill(working: int) -> None:
        (tmp_path / "block").unlink()
        killed.append(psutil.Process(working))
        os.kill(working, signal.SIGKILL)

    with when_working(tmp_path, kill):
        result = grouper.group(texts_that_block(tmp_path, FIRST))
    assert [process.pid for process in killed] == [pid]
    assert psutil.wait_procs(killed, timeout=600)[1] == []
    check_same(result, expected)
    assert grouper.restarts == before + 1
    assert grouper.pids[0] not in (None, pid)
    assert grouper.pids[1] == other
    assert len(messages) == 1
    assert messages[0].startswith("a similarity worker died (")


def test_killed_between_calls(grouper, messages, expected):
    """Both workers. One that has nothing to do in a call is replaced when it has."""
    check_same(grouper.group(TEXTS[:3]), expected)
    before, pids = grouper.restarts, list(grouper.pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    check_same(grouper.group(TEXTS[:1]), expected)
    assert grouper.restarts == before + 1
    check_same(grouper.group(TEXTS[:3]), expected)
    check_same(grouper.group(TEXTS[:3]), expected)
    assert grouper.restarts == before + 2
    assert set(grouper.pids).isdisjoint(pids)
    assert len(messages) == 2


def test_killed_again_and_again(grouper, messages, expected, monkeypatch, tmp_path):
    """The share is grouped in this process, and the next call has two workers again."""
    monkeypatch.setattr(workers, "MAX_RESTARTS", 1)
    before, survivor = grouper.restarts, grouper.pids[0]
    with when_working(tmp_path, lambda pid: os.kill(pid, signal.SIGKILL)):
        result = grouper.group(texts_that_block(tmp_path, LAST))
    check_same(result, expected)
    assert grouper.restarts == before + 1
    assert "its share is grouped in this process" in messages[-1]
    assert grouper.pids == [survivor, None]
    check_same(grouper.group(TEXTS[:3]), expected)
    assert grouper.restarts == before + 2
    assert None not in grouper.pids


def test_a_worker_that_hangs_is_replaced(grouper, messages, expected, tmp_path):
    """A stopped process neither works nor answers; its work itself has no time limit."""
    before, stopped = grouper.restarts, []

    def stop(working: int) -> None:
        (tmp_path / "block").unlink()
        stopped.append(psutil.Process(working))
        os.kill(working, signal.SIGSTOP)

    with when_working(tmp_path, stop):
        result = grouper.group(texts_that_block(tmp_path, LAST))
    check_same(result, expected)
    assert grouper.restarts == before + 1
    assert [message for message in messages if "did not answer for 4 seconds" in message] == messages != []
    assert psutil.wait_procs(stopped, timeout=600)[1] == []  # no orphan is left


def test_a_worker_that_works_for_longer_than_that_is_not_replaced(grouper, messages, expected, tmp_path):
    before, pids = grouper.restarts, list(grouper.pids)

    def release(working: int) -> None:
        time.sleep(10)
        (tmp_path / "block").unlink()

    with when_working(tmp_path, release):
        result = grouper.group(texts_that_block(tmp_path, FIRST))
    check_same(result, expected)
    assert (grouper.restarts, grouper.pids, messages) == (before, pids, [])


class Bomb(list):
    """The texts of a prompt, which end the process that receives them."""

    def __init__(self, texts: list[str], how: str, folder: Path) -> None:
        super().__init__(texts)
        self.how, self.folder = how, folder

    def __reduce__(self):
        return explode, (list(self), self.how, str(self.folder))


def explode(texts: list[str], how: str, folder: str) -> list[str]:
    try:
        os.unlink(os.path.join(folder, "armed"))
    except FileNotFoundError:
        return texts
    if how == "exit":
        os._exit(0)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(600)
    return texts


@pytest.mark.parametrize("how", ["exit", "SIGTERM"])
def test_a_worker_that_ends_while_it_reads_a_request(grouper, expected, tmp_path, how):
    (tmp_path / "armed").touch()
    before = grouper.restarts
    texts = [Bomb(texts, how, tmp_path) if number == LAST else texts for number, texts in enumerate(TEXTS)]
    check_same(grouper.group(texts), expected)
    assert grouper.restarts == before + 1
    check_same(grouper.group(TEXTS), expected)


def test_all_workers_are_killed_in_one_call(grouper, expected, tmp_path):
    before = grouper.restarts
    (tmp_path / "armed").touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "armed").touch()
    places = {FIRST: tmp_path, LAST: other}
    texts = [Bomb(entry, "SIGKILL", places[n]) if n in places else entry for n, entry in enumerate(TEXTS)]
    check_same(grouper.group(texts), expected)
    assert grouper.restarts == before + 2


def test_without_ray_grouping_continues_in_this_process(grouper, messages, expected, ray_processes, tmp_path):
    """The last test of this module: its Ray is killed."""
    import ray

    children = ray_processes()
    (raylet,) = [child for child in children if child.name() == "raylet"]

    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        raylet.kill()

    with when_working(tmp_path, kill):
        result = grouper.group(texts_that_block(tmp_path, FIRST))
    check_same(result, expected)
    assert messages[-1].startswith("Ray has stopped")
    count = len(messages)
    check_same(grouper.group(TEXTS[:3]), expected)
    assert len(messages) == count
    assert not ray.is_initialized()
    assert psutil.wait_procs(children, timeout=600)[1] == []


def test_rays_control_service_is_killed_between_steps(settings, expected, ray_processes):
    """The grouping goes on, and no process is left at the end."""
    messages = Messages()
    with RayGrouper(settings, 1, messages) as grouper:
        check_same(grouper.group(TEXTS[:2]), expected)
        children = ray_processes()
        (process,) = [child for child in children if child.name() == "gcs_server"]
        process.kill()
        process.wait()
        check_same(grouper.group(TEXTS[:2]), expected)
        assert messages[-1].startswith("Ray has stopped")
    assert psutil.wait_procs(children, timeout=600)[1] == []


@pytest.mark.parametrize("moment", ["load", "close"])
def test_killed_while_it_loads_its_model_or_before_it_is_closed(settings, expected, ray_processes, monkeypatch, moment):
    """In the first start there is a sentence; a dead worker does not prevent closing. No process is left."""
    children: list[psutil.Process] = []

    def kill(grouper: RayGrouper) -> None:
        children.extend(ray_processes())
        for pid in grouper.pids:
            os.kill(pid, signal.SIGKILL)

    if moment == "load":
        start = RayGrouper._start

        def start_and_kill(grouper: RayGrouper, numbers: range) -> None:
            start(grouper, numbers)
            kill(grouper)

        monkeypatch.setattr(RayGrouper, "_start", start_and_kill)
        with pytest.raises(ConfigError, match=r"1 similarity workers could not be started.*lower grouping\.workers"):
            RayGrouper(settings, 1, Messages())
    else:
        with RayGrouper(settings, 1, Messages()) as grouper:
            check_same(grouper.group(TEXTS[:2]), expected)
            kill(grouper)
    assert len(children) > 2
    assert psutil.wait_procs(children, timeout=600)[1] == []
