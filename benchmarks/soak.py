"""A long run, to see that nothing grows: memory, open files, threads, child processes, Python objects, saved state.

It trains the tiny model on a generated file of rows, with evaluations, rollouts, checkpoints that are pruned, and the
log of questions, and looks at its own process every few steps. The exit status is 1 if something grows.

Usage::

    python benchmarks/soak.py                                  # 2,000 steps on 100,000 rows
    python benchmarks/soak.py --grouping similarity            # with clusters of similar completions
    python benchmarks/soak.py --steps 60 --rows 500 --every 5  # a short one
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from groupwise.rundir import write_json
from groupwise.training.display import Display
from groupwise.training.results import StepReport
from groupwise.training.trainer import Callback, Trainer

MEMORY_LIMIT = 2.0  # MiB per 1,000 steps: the log of questions takes 0.1 of them
OBJECTS_LIMIT = 1.0  # Python objects per step
STATE_LIMIT = 60  # bytes of state.json per question of a step: its number and its share of right answers
KEPT = 2  # checkpoints, besides the best one
Z = 1.96  # of a 95 % interval


def reward(completions: Sequence[str], **columns: Any) -> list[float]:
    """Differs for most completions, so that every step has a learning signal."""
    return [sum(ord(letter) % 3 for letter in text) / max(1, len(text)) for text in completions]


class Watch(Callback):
    """Records the state of this process, and of the run's files, every few steps."""

    def __init__(self, every: int, samples: list[dict[str, float]]) -> None:
        self.every, self.samples = every, samples
        self.process, self.began = psutil.Process(), time.perf_counter()

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % self.every:
            return
        folder = trainer.run_dir.path
        gc.collect()
        sample = {
            "step": report.step,
            "seconds": time.perf_counter() - self.began,
            "memory": self.process.memory_info().rss / 2**20,
            "files": self.process.num_fds(),
            "threads": self.process.num_threads(),
            "children": len(self.process.children(recursive=True)),
            "objects": len(gc.get_objects()),
            "checkpoints": len(list(folder.glob("checkpoint-*"))),
            "state": max((path.stat().st_size for path in folder.glob("checkpoint-*/state.json")), default=0),
            "questions": _size(folder / "questions.jsonl"),
            "metrics": _size(folder / "metrics.jsonl"),
        }
        self.samples.append(sample)
        if len(self.samples) % 10 == 1:
            print(format_sample(sample), flush=True)


def soak(folder: Path, *, steps: int, rows: int, every: int, grouping: str) -> list[dict[str, float]]:
    """Train in ``folder``; what was seen every few steps."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Say number {number}: "}) + "\n" for number in range(rows)))
    samples: list[dict[str, float]] = []
    trainer = Trainer.from_rows(
        str(data),
        reward,
        algorithm="similarity_group_grpo" if grouping == "similarity" else "dapo",
        model={"source": "tiny", "threads": 1, "gradient_checkpointing": False},
        callbacks=[Watch(every, samples)],
        display=Display(),
        folder=folder / "run",
        data={"held_out_from_train": 8, "chat": False},
        sampling={"samples_per_prompt": 4, "max_new_tokens": 6},
        grouping={"embedder": "wordllama"} if grouping == "similarity" else {},
        train={"steps": steps, "batch_size": 4, "accumulation": 1},
        evaluate={"every": 2 * every},
        optimizer={"learning_rate": 1e-4},
        ramps={"sampling.temperature": {"from": 1.0, "to": 0.8, "steps": steps}},
        run={"checkpoint_every": every, "keep_checkpoints": KEPT},
    )
    trainer.run()
    return samples


def slope(samples: Sequence[dict[str, float]], name: str) -> tuple[float, float]:
    """The growth of a quantity per step by least squares, and half the width of its 95 % interval."""
    steps = np.array([sample["step"] for sample in samples])
    values = np.array([sample[name] for sample in samples])
    away = steps - steps.mean()
    growth = float(away @ values / (away @ away))
    residual = values - values.mean() - growth * away
    error = np.sqrt(residual @ residual / max(1, len(steps) - 2) / (away @ away))
    return growth, Z * float(error)


def verdicts(samples: Sequence[dict[str, float]], prompts: int = 4) -> list[tuple[str, bool, str]]:
    """What must not grow over the second half of the run: a name, whether it holds, and the figures."""
    second = samples[len(samples) // 2 :]
    memory, memory_error = slope(second, "memory")
    objects, objects_error = slope(second, "objects")
    state, _ = slope(second, "state")
    results = [
        (
            "memory",
            1000 * (memory - memory_error) <= MEMORY_LIMIT,
            f"{1000 * memory:+.2f} ± {1000 * memory_error:.2f} MiB per 1,000 steps, of {second[-1]['memory']:.0f} MiB",
        ),
        (
            "Python objects",
            objects - objects_error <= OBJECTS_LIMIT,
            f"{objects:+.3f} ± {objects_error:.3f} per step, of {second[-1]['objects']:,.0f}",
        ),
        (
            "state.json",
            state <= STATE_LIMIT * prompts,
            f"{state:+.1f} bytes per step, {second[-1]['state']:,.0f} bytes at the end ({prompts} questions per step)",
        ),
    ]
    most = int(max(sample["checkpoints"] for sample in second))
    results.append(("checkpoints", most <= KEPT + 1, f"at most {most}: the last {KEPT}, and the best"))
    for name in ("files", "threads", "children"):
        seen = sorted({int(sample[name]) for sample in second})
        results.append((name, len(seen) == 1, f"always {seen[0]}" if len(seen) == 1 else f"{seen[0]} to {seen[-1]}"))
    return results


def format_sample(sample: dict[str, float]) -> str:
    numbers = ("step", "seconds", "memory", "files", "threads", "children", "objects", "checkpoints", "state")
    return "".join(f"{sample[name]:12,.0f}" for name in numbers)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=20, help="steps between two looks and between checkpoints")
    parser.add_argument("--grouping", choices=("prompt", "similarity"), default="prompt")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    args = parser.parse_args()
    if args.steps < 10 * args.every:
        parser.error("--steps must be at least ten times --every")
    print("".join(f"{name:>12}" for name in ("step", "seconds", "memory MiB", "files", "threads", "children", "objects",
                                            "checkpoints", "state bytes")), flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        samples = soak(Path(folder), steps=args.steps, rows=args.rows, every=args.every, grouping=args.grouping)
    results = verdicts(samples)
    print(format_sample(samples[-1]))
    for name, holds, figures in results:
        print(f"{'flat ' if holds else 'GROWS'}  {name}: {figures}")
    if args.out:
        write_json(args.out, {"samples": samples, "verdicts": results})
    return int(not all(holds for _, holds, _ in results))


if __name__ == "__main__":
    sys.exit(main())
