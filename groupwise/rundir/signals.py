"""Ctrl-C and SIGTERM ask a run to finish its step and save; a second Ctrl-C ends it at once."""

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


class StopRequest:
    """``signal`` is the signal that asked to stop, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM, as in shells; 0 without a request."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def stop_on_signals(say: Say) -> Iterator[StopRequest]:
    """Within this block the two signals only set the request. Outside the main thread this does nothing."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)
        with suppress(RuntimeError):  # the signal came in the middle of a write to the same stream
            say(f"{request.signal.name}: finishing this step and saving; Ctrl-C again stops without saving")

    with _handled_by(handle, signal.SIGINT, signal.SIGTERM):
        yield request


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
