"""Time and memory of each stage of a step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from groupwise.model.device import free_memory


class StepTimer:
    """Sums the seconds of each stage and records its peak memory in GiB, until `take` is called.

    On a GPU each stage is synchronized and the peak is the allocator's; on a CPU it is the resident memory of the
    process at the end of the stage. ``estimate`` is what the run should need at most, in bytes, if that is known.
    """

    def __init__(self, device: torch.device, estimate: int = 0) -> None:
        self.cuda = device.type == "cuda"
        total = torch.cuda.get_device_properties(device).total_memory if self.cuda else 0
        sizes = {"device_memory": total or free_memory(device) + resident_memory(), "memory_estimate": estimate}
        self._sizes = {name: size / 2**30 for name, size in sizes.items() if size}
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.cuda:
                torch.cuda.synchronize()
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - start
            size = torch.cuda.max_memory_allocated() if self.cuda else resident_memory()
            self._memory[stage] = max(self._memory.get(stage, 0.0), size / 2**30)

    def take(self) -> dict[str, float]:
        """The metrics ``time/<stage>``, ``memory/<stage>`` and ``step_time`` since the last call; they start over.

        ``device_memory`` is what the GPU has, or on a CPU what there was for this process; ``memory_estimate`` is what
        an update should need at most.
        """
        end = time.perf_counter()
        metrics = {f"time/{stage}": seconds for stage, seconds in self._seconds.items()}
        metrics |= {f"memory/{stage}": size for stage, size in self._memory.items() if size}
        metrics |= {**self._sizes, "step_time": end - self._start}
        self._start = end
        self._seconds.clear()
        self._memory.clear()
        return metrics


def resident_memory() -> int:
    """The resident memory of this process in bytes; 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
