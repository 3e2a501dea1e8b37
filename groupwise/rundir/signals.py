"""Ctrl-C and SIGTERM: the first asks a run to finish its step and save; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """``signal`` is the one that asked for the end, None while nobody did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """130 for Ctrl-C and 143 for SIGTERM, as shells have it; 0 if nobody asked."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Within this block the two signals only make a request. Off the main thread nothing can be caught, or is."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def asked(number: int, frame: FrameType | None) -> None:
        if request.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)
        with suppress(RuntimeError):  # Python refuses to write from here in the middle of another write to that stream
            say(f"{request.signal.name}: finishing this step and saving; Ctrl-C once more ends at once, without saving")

    before = {number: signal.signal(number, asked) for number in STOPPING}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Processes that start within this block leave Ctrl-C, which reaches a terminal's every process, to this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_with_parent() -> None:
    """Once the process that started this one is gone, be told to stop: a worker would wait for work for ever."""
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
