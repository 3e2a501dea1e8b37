"""Threads for what a run waits for: rewards, and completions that are sampled elsewhere."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

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
        """Forget the jobs that have not begun. Those that run are not waited for."""
        with self._lock:
            self._closed = True
            with suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()
            for _ in self._threads:
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
