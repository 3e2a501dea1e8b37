"""How a reward function is called: with which arguments, where it runs, and for how long.

A synchronous function runs in a thread of its own, an asynchronous one on an event loop in a background thread; both
are daemons, so a function that hangs cannot keep the process alive. No signals are used: the time limit also works
where the caller is not the main thread. What no thread can interrupt is a single call into C that keeps the
interpreter's lock, such as a regular expression that explodes.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

POSITIONS = ("prompts", "completions")  # what the first two arguments mean where a signature has no names for them
GRACE = 1.0  # seconds that a cancelled coroutine has to clean up, and a loop to show that it is alive


@dataclass(frozen=True)
class Binding:
    """Which of the arguments that exist a function is given, and which it asks for in vain."""

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A call that is ready to be made; ``finish`` turns its result into a finished value within the same time."""

    function: Callable[[], Any]
    finish: Callable[[Any], Any]


@dataclass(frozen=True)
class Outcome:
    """How a call ended: with a value, with an exception, or not in time (``late`` says what became of it)."""

    value: Any = None
    error: BaseException | None = None
    late: str | None = None
    seconds: float = 0.0


def bind(function: Callable[..., Any], names: Collection[str]) -> Binding:
    """Which of ``names`` the function is given: all of them if it takes ``**kwargs``, else those its signature names.

    A parameter that is positional only may be called anything: the first two are the prompts and the completions. So
    is it with ``*args`` alone, and with a builtin that does not tell its signature.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return Binding(positional=POSITIONS)
    if [parameter.kind for parameter in parameters] == [inspect.Parameter.VAR_POSITIONAL]:
        return Binding(positional=POSITIONS)
    own = {parameter.name for parameter in parameters}
    positional: list[str] = []
    keywords: list[str] = []
    missing: list[str] = []
    takes_all = False
    for place, parameter in enumerate(parameters):
        name = parameter.name
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            if name not in names and place < len(POSITIONS) and POSITIONS[place] not in own:
                name = POSITIONS[place]
            if name in names and len(positional) == place:  # nothing before it was left out
                positional.append(name)
            elif parameter.default is inspect.Parameter.empty:
                missing.append(name)
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            if name in names:
                keywords.append(name)
            elif parameter.default is inspect.Parameter.empty:
                missing.append(name)
    if takes_all:
        keywords = [name for name in names if name not in positional]
    return Binding(tuple(positional), tuple(keywords), tuple(missing))


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a ``functools.partial`` wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine: an ``async def``, also as a method, in a partial or as ``__call__``."""
    function = innermost(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def run_sync(call: Call, timeout: float | None) -> Outcome:
    """Make the call, in a thread of its own if there is a limit, else right here.

    A plain function that gives something to await, such as a lambda around an ``async def``, is awaited.
    """

    def work() -> Any:
        result = call.function()
        return result if inspect.isawaitable(result) else call.finish(result)

    outcome = _caught(work) if timeout is None else _in_thread(work, timeout)
    if isinstance(outcome.error, KeyboardInterrupt):
        raise outcome.error
    if inspect.isawaitable(outcome.value):
        started = Call(lambda: outcome.value, call.finish)
        return run_async([started], timeout)[0]
    return outcome


def run_async(calls: Sequence[Call], timeout: float | None) -> list[Outcome]:
    """Make the calls at once on the background loop; each is cancelled when its time is over."""
    outcomes: list[Outcome | None] = [None] * len(calls)

    async def one(number: int, call: Call) -> None:
        outcomes[number] = await _limited(call, timeout)

    async def everything() -> None:
        await asyncio.gather(*(one(number, call) for number, call in enumerate(calls)))

    background = _background()
    future = asyncio.run_coroutine_threadsafe(everything(), background.loop)
    late = None
    try:
        future.result(None if timeout is None else timeout + 2 * GRACE)
    except TimeoutError:  # not even the cancelling came through
        background.left_behind = True
        future.cancel()
        late = (
            f"did not return within {timeout:g} s and blocked the event loop, or another async reward did; the loop "
            "is left behind (await what takes long, or write a plain function)"
        )
    except BaseException:
        future.cancel()
        raise
    ended = [outcome or Outcome(late=late, seconds=timeout or 0.0) for outcome in outcomes]
    for outcome in ended:
        if isinstance(outcome.error, KeyboardInterrupt):
            raise outcome.error
    return ended


async def _limited(call: Call, timeout: float | None) -> Outcome:
    async def work() -> Outcome:
        # Every exception becomes a value: a SystemExit let through would end the loop, which is not the function's.
        start = time.perf_counter()
        try:
            return Outcome(call.finish(await call.function()), seconds=time.perf_counter() - start)
        except BaseException as error:
            return Outcome(error=error, seconds=time.perf_counter() - start)

    task = asyncio.ensure_future(work())
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:  # the caller was interrupted
        task.cancel()
        raise
    if done:
        return task.result()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=GRACE)
    fate = "it was cancelled" if done else "it does not let itself be cancelled and is left behind"
    return Outcome(late=f"did not return within {timeout:g} s; {fate}", seconds=timeout or 0.0)


def _caught(work: Callable[[], Any]) -> Outcome:
    start = time.perf_counter()
    try:
        return Outcome(work(), seconds=time.perf_counter() - start)
    except BaseException as error:
        return Outcome(error=error, seconds=time.perf_counter() - start)


def _in_thread(work: Callable[[], Any], timeout: float) -> Outcome:
    box: list[Outcome] = []
    context = contextvars.copy_context()
    thread = threading.Thread(
        target=lambda: box.append(context.run(_caught, work)), name="groupwise-reward", daemon=True
    )
    thread.start()
    thread.join(timeout)
    if box:
        return box[0]
    return Outcome(
        late=f"did not return within {timeout:g} s; its thread is left behind and may go on until the process ends",
        seconds=timeout,
    )


@dataclass
class _Background:
    """The event loop of the async rewards. It lasts as long as the process, since clients are bound to their loop."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    left_behind: bool = False

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.loop.run_forever, name="groupwise-async-rewards", daemon=True)
        self.thread.start()

    def usable(self) -> bool:
        return not self.left_behind and self.thread.is_alive()  # which it is not in a forked process


_current: _Background | None = None
_lock = threading.Lock()


def _background() -> _Background:
    global _current
    with _lock:
        if _current is None or not _current.usable():
            _current = _Background()
        return _current
