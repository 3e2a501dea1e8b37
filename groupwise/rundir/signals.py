"""Ctrl-C, SIGTERM and SIGHUP ask a run to finish its step and save; a second Ctrl-C ends it at once.

A signal that was ignored when the process started stays ignored: SIGHUP under nohup, SIGINT in a background job.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import parent_process
from types import FrameType
from typing import Any

from groupwise.text import Say

STOPPING = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class StopRequest:
    """``signal`` is the signal that asked to stop, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop; in a run of several, the others may not know it yet."""
        return bool(self)

    def agree(self) -> bool:
        """Whether to stop; a run of several processes decides it here."""
        return bool(self)

    @property
    def exit_status(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, as in shells; 0 without a request."""
        return 0 if self.signal is None else 128 + self.signal

    def broken_pipe(self) -> None:
        """Nobody reads the output any more, as after `| head`: stop as a process does that SIGPIPE ends."""
        self.signal = self.signal or signal.SIGPIPE


class SignalInterrupt(KeyboardInterrupt):
    """SIGTERM or SIGHUP outside of a block that saves: the command ends, as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stop_on_signals(say: Say) -> Iterator[StopRequest]:
    """Within this block the signals only set the request. Outside the main thread this does nothing."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)
        with suppress(RuntimeError, OSError):  # it came in the middle of a write to the same stream, or that is gone
            say(f"{request.signal.name}: finishing this step and saving; Ctrl-C again stops without saving")

    with _handled_by(handle, *_not_ignored()):
        yield request


def interrupt_on_signals() -> AbstractContextManager[None]:
    """Within this block SIGTERM and SIGHUP raise a `SignalInterrupt`, so that open files are closed or removed."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise SignalInterrupt(number)

    return _handled_by(handle, *(number for number in _not_ignored() if number != signal.SIGINT))


def _not_ignored() -> list[signal.Signals]:
    return [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]


def interrupts_ignored() -> AbstractContextManager[None]:
    """Processes that are started within this block ignore Ctrl-C, which a terminal sends to all of them."""
    return _handled_by(signal.SIG_IGN, signal.SIGINT)


@contextmanager
def _handled_by(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # other threads cannot set handlers
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def end_with_parent() -> None:
    """Send this process SIGTERM once its parent has ended: a worker would otherwise wait for work for ever."""

    def watch() -> None:
        if parent := parent_process():
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
