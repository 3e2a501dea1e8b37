"""Calling other people's code with a limit: threads, coroutines, and what is left behind."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref

import pytest

from groupwise.environments import background
from groupwise.environments.background import BackgroundLoop, LongCall, Worker, run_limited
from groupwise.errors import UserCodeError

PATIENCE = 600.0  # seconds, where no limit is meant to be reached


def call(worker, function, *arguments, seconds=PATIENCE):
    return asyncio.run(worker.call(function, *arguments, seconds=seconds))


def test_a_worker_calls_in_one_thread_with_the_context_of_the_caller():
    variable = contextvars.ContextVar("variable")
    variable.set("caller's")
    worker = Worker("test")
    first = call(worker, lambda: (threading.get_ident(), threading.current_thread().daemon, variable.get()))
    second = worker.call_blocking(threading.get_ident, seconds=PATIENCE)
    assert first.value == (second.value, True, "caller's")
    assert second.value != threading.get_ident()
    worker.end()
    assert call(worker, lambda a, b: a + b, 1, 2).value == 3


def test_a_worker_that_hangs_goes_on_in_another_thread():
    release = threading.Event()
    worker = Worker("test")
    first = call(worker, threading.get_ident).value

    def hang():
        release.wait()

    for outcome in (call(worker, hang, seconds=0.05), worker.call_blocking(hang, seconds=0.05)):
        assert not outcome.is_value
        assert "hang (test_background.py, line" in outcome.hangs
    assert call(worker, threading.get_ident).value != first
    release.set()


def test_a_late_result_is_not_taken_for_another_one():
    release = threading.Event()
    worker = Worker("test")

    def late():
        release.wait()
        return "late"

    async def run():
        assert (await worker.call(late, seconds=0.05)).hangs
        release.set()
        return [(await worker.call(lambda number=number: number, seconds=PATIENCE)).value for number in range(50)]

    assert asyncio.run(run()) == list(range(50))


def test_a_worker_that_nobody_has_ends_its_thread():
    worker = Worker("test")
    thread = worker.call_blocking(threading.current_thread, seconds=PATIENCE).value
    del worker
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_an_idle_worker_keeps_no_result_alive():
    class Large:
        pass

    worker = Worker("test")
    gone = threading.Event()
    result = worker.call_blocking(Large, seconds=PATIENCE).value
    weakref.finalize(result, gone.set)
    del result
    worker.call_blocking(lambda: None, seconds=PATIENCE)
    gc.collect()
    assert gone.is_set()


def test_too_many_hanging_calls_are_an_error_that_names_one(monkeypatch):
    monkeypatch.setattr(background, "MOST_ABANDONED", 2)
    monkeypatch.setattr(background, "_abandoned", [])
    release = threading.Event()

    def hang():
        release.wait()

    for _ in range(2):
        call(Worker("test"), hang, seconds=0.01)
    with pytest.raises(UserCodeError, match=r"2 calls .* hang.*hang \(test_background.py"):
        call(Worker("test"), hang)
    release.set()
    for thread in list(background._abandoned):
        thread.join(PATIENCE)
    assert call(Worker("test"), lambda: 1).value == 1


def test_errors_are_outcomes():
    async def fails(error):
        raise error

    for error in (ValueError("a"), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()):
        assert call(Worker("test"), lambda error=error: (_ for _ in ()).throw(error)).error is error
        assert asyncio.run(run_limited(fails(error), PATIENCE)).error is error


def test_a_coroutine_is_cancelled_at_its_limit():
    ended = threading.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def run():
        outcome = await run_limited(hang(), 0.01)
        while not ended.is_set():
            await asyncio.sleep(0)
        return outcome

    assert "hang (test_background.py" in asyncio.run(run()).hangs


def test_a_loop_that_is_not_blocked_is_not_said_to_be(monkeypatch):
    monkeypatch.setattr(background, "GRACE", PATIENCE)
    loop = BackgroundLoop()

    async def run():
        assert (await loop.run(asyncio.sleep(0, "value"), PATIENCE)).value == "value"
        return await loop.run(wait_for_ever(), 0.01)

    place = asyncio.run(run()).hangs
    assert "wait_for_ever (test_background.py" in place
    assert "blocks" not in place


async def wait_for_ever():
    await asyncio.Event().wait()


class Doubles:
    async def __call__(self, number):
        await asyncio.sleep(0)
        return 2 * number


async def doubled(number):
    return await Doubles()(number)


@pytest.mark.parametrize("function", [doubled, Doubles(), lambda number: 2 * number, lambda number: doubled(number)])
def test_a_long_call_ends_by_itself(function):
    async def run(*arguments):
        return await LongCall(function, *arguments, name="test").task

    assert asyncio.run(run(21)).value == 42
    assert isinstance(asyncio.run(run(1, 2)).error, TypeError)


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_long_call_is_given_up(kind):
    release, started = threading.Event(), threading.Event()

    async def hang():
        started.set()
        await asyncio.sleep(PATIENCE)

    def hang_in_thread():
        started.set()
        release.wait()

    async def run():
        call = LongCall(hang if kind == "async" else hang_in_thread, name="test")
        while not started.is_set():
            await asyncio.sleep(0.01)
        place = await call.give_up()
        await asyncio.wait({call.task})
        assert call.task.cancelled()
        return place

    assert "(test_background.py, line" in asyncio.run(run())
    release.set()
