"""Where a run's seconds and memory went: stage by stage, in stretches of steps, and in all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.analysis.run_reader import RunReader

TIME, MEMORY = "time/", "memory/"
STAGES = ("generate", "group", "reward", "wait", "train")  # parts of a step, in its order
OTHER = "other"  # writing files, metrics, evaluating the schedule
STRETCHES = 200  # bars of a chart
RECENT = 20  # steps by which the remaining time is estimated


def step_times(reader: RunReader, stretches: int = STRETCHES) -> dict[str, Any]:
    """Seconds per step and memory by stage, as means over at most ``stretches`` stretches of steps, and totals.

    Steps whose time was not recorded are left out. ``remaining`` is an estimate by the last steps; None if the number
    of steps is not known.
    """
    rows = [row for row in reader.training_rows if _finite(row.get("step_time")) is not None]
    if not rows:
        return {"stages": [], "stretches": [], "totals": {}, "steps": 0, "seconds": 0.0, "remaining": None}
    named = [stage for stage in STAGES if any(f"{TIME}{stage}" in row for row in rows)]
    stages = [*named, OTHER]
    split = [_split(row, named) for row in rows]
    totals = {stage: sum(times[stage] for times in split) for stage in stages}
    number = min(stretches, len(rows))
    parts = []
    for index in range(number):
        part = slice(index * len(rows) // number, (index + 1) * len(rows) // number)
        parts.append(_stretch(rows[part], split[part], stages))
    seconds = sum(_finite(row["step_time"]) or 0.0 for row in rows)
    total = reader.total_steps
    recent = [_finite(row["step_time"]) or 0.0 for row in rows[-RECENT:]]
    left = None if total is None or reader.status != "running" else max(0, total - reader.step)
    return {
        "stages": stages,
        "stretches": parts,
        "totals": totals,
        "steps": len(rows),
        "seconds": seconds,
        "tokens": max((int(_finite(row.get("num_tokens")) or 0) for row in rows), default=0),
        "peak_memory": {stage: peak for stage in STAGES if (peak := _peak(rows, stage)) is not None},
        "sampler_idle": sum(_finite(row.get("time/sampler_idle")) or 0.0 for row in rows),
        "remaining": None if left is None else left * sum(recent) / len(recent),
    }


def _split(row: Mapping[str, Any], stages: Sequence[str]) -> dict[str, float]:
    """A step's seconds by stage; what no stage has is "other"."""
    times = {stage: _finite(row.get(f"{TIME}{stage}")) or 0.0 for stage in stages}
    return times | {OTHER: max(0.0, (_finite(row["step_time"]) or 0.0) - sum(times.values()))}


def _stretch(
    rows: Sequence[Mapping[str, Any]], split: Sequence[Mapping[str, float]], stages: Sequence[str]
) -> dict[str, Any]:
    speeds = [speed for row in rows if (speed := _finite(row.get("tokens_per_second"))) is not None]
    return {
        "first": rows[0]["step"],
        "last": rows[-1]["step"],
        "seconds": {stage: sum(times[stage] for times in split) / len(split) for stage in stages},
        "memory": {stage: peak for stage in STAGES if (peak := _peak(rows, stage)) is not None},
        "tokens_per_second": sum(speeds) / len(speeds) if speeds else None,
    }


def _peak(rows: Sequence[Mapping[str, Any]], stage: str) -> float | None:
    return max((size for row in rows if (size := _finite(row.get(f"{MEMORY}{stage}"))) is not None), default=None)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
