"""An event loop in a thread of its own, for environments that answer while the generator works."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

PATIENCE = 1.0  # seconds to wait for all answers of a round before those that are there go on


class EventLoop:
    """Runs awaitables, each with a label, and hands out what is ready.

    Everything that answers within ``PATIENCE`` is handed out together, so that rounds of quick environments are the
    same in every run.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._labels: dict[asyncio.Future[Any], Any] = {}
        self._thread = threading.Thread(target=self._run, name="groupwise-episodes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def advance(self, started: Iterable[tuple[Any, Awaitable[Any]]]) -> list[tuple[Any, Any]]:
        """Start these, and return the labels and results of those that are ready; empty if nothing is running."""
        future = asyncio.run_coroutine_threadsafe(self._advance(list(started)), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _advance(self, started: Sequence[tuple[Any, Awaitable[Any]]]) -> list[tuple[Any, Any]]:
        for label, awaitable in started:
            self._labels[asyncio.ensure_future(awaitable)] = label
        if not self._labels:
            return []
        done, _ = await asyncio.wait(self._labels, timeout=PATIENCE)
        if not done:
            done, _ = await asyncio.wait(self._labels, return_when=asyncio.FIRST_COMPLETED)
        ready = [task for task in self._labels if task in done]  # in the order in which they were started
        return [(self._labels.pop(task), task.result()) for task in ready]

    def cancel(self) -> None:
        """Cancel what is still running."""

        def cancel() -> None:
            for task in self._labels:
                task.cancel()
            self._labels.clear()

        self._loop.call_soon_threadsafe(cancel)

    def close(self) -> None:
        """Cancel what is still running, and end the thread."""
        if self._loop.is_closed():
            return

        def stop() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_soon(self._loop.stop)

        self._loop.call_soon_threadsafe(stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()
