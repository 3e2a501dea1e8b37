"""Which metrics are about time and memory. Without torch: commands that only read a run use it."""

from __future__ import annotations

TIMINGS = ("step_time", "tokens_per_second", "device_memory", "memory_estimate")


def is_timing(name: str) -> bool:
    """Whether a metric is about time or memory, which differ from run to run."""
    return name.startswith(("time/", "memory/")) or name in TIMINGS
