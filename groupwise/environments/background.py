"""Calling other people's code with a time limit, without ever waiting for it at the end of the process.

Plain functions are called in a daemon thread (`Worker`), coroutines run on an event loop in one (`background_loop`).
What takes too long is abandoned: a coroutine is cancelled, a thread is left behind, as Python cannot stop it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import queue
import sys
import sysconfig
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import UserCodeError

MOST_ABANDONED = 100  # threads that hang at the same time
GRACE = 1.0  # seconds in which a loop that is not blocked runs a callback

_abandoned: list[threading.Thread] = []
_lock = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """What a call returned, or what it raised, or that it took too long: ``hangs`` says where it was then."""

    value: Any = None
    error: BaseException | None = None
    hangs: str | None = None

    @property
    def is_value(self) -> bool:
        """Whether the call returned."""
        return self.error is None and self.hangs is None


_Job = tuple[contextvars.Context, Callable[[], Any], Callable[[Outcome], None]]


class Worker:
    """A thread that calls one function at a time, always the same thread while none hangs.

    So objects that belong to a thread, such as a connection to SQLite, can be used by one call after another.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._owner = os.getpid()
        self._end: Callable[[], Any] = lambda: None

    async def call(
        self, function: Callable[..., Any], *arguments: Any, seconds: float | None, await_value: bool = True
    ) -> Outcome:
        """Call a plain function; if it returns an awaitable, that is awaited here unless ``await_value`` is false.

        ``seconds``: None if there is no limit.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        future: asyncio.Future[Outcome] = loop.create_future()

        def deliver(outcome: Outcome) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_set_once, future, outcome)

        self._put(lambda: function(*arguments), deliver)
        try:
            done, _ = await asyncio.wait({future}, timeout=seconds)
        except asyncio.CancelledError:
            self._abandon()
            raise
        if not done:
            return Outcome(hangs=self._abandon())
        outcome = future.result()
        if await_value and inspect.isawaitable(outcome.value):
            left = None if seconds is None else max(0.0, seconds - (loop.time() - start))
            return await run_limited(outcome.value, left)
        return outcome

    def call_blocking(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> Outcome:
        """Call a plain function and wait for it in this thread."""
        future: Future[Outcome] = Future()
        self._put(lambda: function(*arguments), future.set_result)
        try:
            return future.result(seconds)
        except TimeoutError:
            return Outcome(hangs=self._abandon())

    def place(self) -> str:
        """Where the call is now."""
        return "a thread that has ended" if self._thread is None else place_of(self._thread)

    def end(self) -> None:
        """Let the thread end. A later call starts another one."""
        self._end()
        self._thread = None

    def _put(self, function: Callable[[], Any], deliver: Callable[[Outcome], None]) -> None:
        if self._thread is None or not self._thread.is_alive() or self._owner != os.getpid():
            self._start()
        self._jobs.put((contextvars.copy_context(), function, deliver))

    def _start(self) -> None:
        with _lock:
            _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
            if len(_abandoned) >= MOST_ABANDONED:
                raise UserCodeError(
                    f"{len(_abandoned)} calls of environments and tools hang, each in a thread of its own; the last is "
                    f"in {place_of(_abandoned[-1])}. Make that code give up by itself, for example by a timeout"
                )
        jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs, self._owner = jobs, os.getpid()
        self._thread = threading.Thread(target=_work, args=(jobs,), name=self._name, daemon=True)
        self._end = weakref.finalize(self, jobs.put, None)
        self._thread.start()

    def _abandon(self) -> str:
        """Leave the thread behind; it ends when its call does. Return where it is."""
        place, thread = self.place(), self._thread
        self.end()
        if thread is not None:
            with _lock:
                _abandoned.append(thread)
        return place


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        context, function, deliver = job
        try:
            outcome = Outcome(value=context.run(function))
        except BaseException as error:  # SystemExit, too
            outcome = Outcome(error=error)
        deliver(outcome)
        del job, context, function, deliver, outcome  # an idle thread keeps nothing alive


def _set_once(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


async def run_limited(awaitable: Awaitable[Any], seconds: float | None) -> Outcome:
    """Await, and cancel at the limit, without waiting for code that ignores that."""
    task = asyncio.ensure_future(_outcome_of(awaitable))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        place = _waiting_place(task.get_coro())
        task.cancel()
    return task.result() if done else Outcome(hangs=place)


async def _outcome_of(awaitable: Awaitable[Any]) -> Outcome:
    try:
        return Outcome(value=await awaitable)
    except BaseException as error:  # a SystemExit would end the event loop
        return Outcome(error=error)


class BackgroundLoop:
    """An event loop in a daemon thread. ``is_blocked`` is set once a coroutine on it was seen to block it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.is_blocked = False
        self.owner = os.getpid()
        self.thread = threading.Thread(target=self._run, name="groupwise-environments", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float | None) -> Outcome:
        """Run a coroutine on this loop; wait for it on the caller's, without a limit if ``seconds`` is None."""
        future = asyncio.run_coroutine_threadsafe(_outcome_of(coroutine), self.loop)
        waiting = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=seconds)
        except asyncio.CancelledError:
            future.cancel()
            raise
        if done and not waiting.cancelled():
            return waiting.result()
        place = await self.place(coroutine)
        future.cancel()
        with suppress(asyncio.CancelledError):
            waiting.cancel()
        return Outcome(hangs=place)

    async def place(self, coroutine: Coroutine[Any, Any, Any]) -> str:
        """Where the coroutine waits, or where the loop is blocked by one that does not."""
        answered = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(answered), GRACE)
            return _waiting_place(coroutine)
        self.is_blocked = True
        place = place_of(self.thread)
        return f"{place}, which blocks the event loop of all environments (make it a plain function, or await there)"


_loops: list[BackgroundLoop] = []


def background_loop() -> BackgroundLoop:
    """The event loop of environments. If it is blocked, another one takes its place for what starts later."""
    with _lock:
        if not _loops or _loops[0].is_blocked or _loops[0].owner != os.getpid():
            _loops[:] = [BackgroundLoop()]
        return _loops[0]


class LongCall:
    """A call of a function, plain or async, that goes on until it ends by itself or is given up.

    A plain function runs in a thread of its own, an async one on the event loop of environments. The result of ``task``
    is an `Outcome`.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, name: str) -> None:
        self._worker, self._loop = Worker(name), background_loop()
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self.task = asyncio.ensure_future(self._run(function, arguments))

    async def _run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Outcome:
        if inspect.iscoroutinefunction(function):
            self._coroutine = awaited(function, *arguments)
        else:
            outcome = await self._worker.call(function, *arguments, seconds=None, await_value=False)
            self._worker.end()
            if not inspect.isawaitable(outcome.value):
                return outcome
            self._coroutine = await_value(outcome.value)
        return await self._loop.run(self._coroutine, None)

    async def give_up(self) -> str:
        """Cancel it, or leave its thread behind; return where it was."""
        place = self._worker.place() if self._coroutine is None else await self._loop.place(self._coroutine)
        self.task.cancel()
        return place


async def awaited(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Call an async function, and await it, as one coroutine: also a wrong argument is its error."""
    return await function(*arguments)


async def await_value(awaitable: Awaitable[Any]) -> Any:
    """Any awaitable as a coroutine."""
    return await awaitable


def place_of(thread: threading.Thread) -> str:
    """The line of the user's code, or else of any code, at which a thread is now: ``respond (maze.py, line 12)``."""
    frame = sys._current_frames().get(thread.ident or 0)
    return _describe(traceback.StackSummary.extract(traceback.walk_stack(frame))[::-1]) if frame else "a thread"


def _waiting_place(coroutine: Any) -> str:
    """The line of the user's code at which a coroutine waits for another one, or for the loop."""
    entries: list[traceback.FrameSummary] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        entries += traceback.extract_stack(frame, limit=1)
        coroutine = coroutine.cr_await
    return _describe(entries)


def _describe(entries: list[traceback.FrameSummary]) -> str:
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parent), "<frozen")
    users = [entry for entry in entries if not entry.filename.startswith(library)] or entries
    if not users:
        return "an await"
    return f"{users[-1].name} ({Path(users[-1].filename).name}, line {users[-1].lineno})"
