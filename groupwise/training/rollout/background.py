"""Threads for what a run waits for: rewards, and completions that are sampled elsewhere."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

GRACE = 2.0  # seconds

Job = Callable[[], None]


class BackgroundThreads:
    """Runs jobs in up to ``size`` threads, in the order in which they are added.

    The threads are daemons: a reward that hangs does not keep the process alive, as one of a ThreadPoolExecutor would.
    """

    def __init__(self, size: int, name: str) -> None:
        self.size, self.name = size, name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock, self._closed = threading.Lock(), False

    def add(self, job: Job) -> None:
        """Run a job, which must not raise an error, as soon as a thread is free."""
        with self._lock:
            if self._closed:
                return
            self._jobs.put(job)
            if len(self._threads) < self.size:
                self._threads.append(threading.Thread(target=self._work, name=self.name, daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        """Forget the jobs that have not begun, and give those that run a moment to end.

        A thread that ends while the interpreter is torn down may abort the process.
        """
        with self._lock:
            self._closed = True
            with suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()
            for _ in self._threads:
                self._jobs.put(None)
        deadline = time.monotonic() + GRACE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
