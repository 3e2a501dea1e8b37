"""The recipe of `make train` with several seeds: held-out accuracy and time.

Usage::

    python benchmarks/quiz_seeds.py                  # five seeds, one after the other
    python benchmarks/quiz_seeds.py --seeds 3 --keep runs/seeds
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trials import RECIPES

from groupwise.plots import plot_curves
from groupwise.rundir import metric_column, read_metrics

GOAL = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side; each uses one core")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, with a plot of all curves")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.at_once) as pool:
        root = args.keep or Path(temporary)
        print(f"{'seed':>4}{'before':>9}{'after':>9}{'90 % after':>12}{'training':>10}{'in all':>9}", flush=True)
        curves = list(pool.map(lambda seed: train(seed, root / f"seed-{seed}"), range(args.seeds)))
        last = [accuracy[-1] for _, accuracy in curves]
        there = sum(value >= GOAL for value in last)
        print(f"{there} of {len(last)} seeds end at {GOAL:.0%} or more; lowest {min(last):.1%}")
        if args.keep:
            picture = args.keep / "seeds.png"
            plot_curves(
                picture,
                {"held-out accuracy": (curves[0][0], [accuracy for _, accuracy in curves])},
                title="the quiz, over seeds",
                y_label="right on held-out questions",
                goal=GOAL,
            )
            print(f"picture: {picture}")


def train(seed: int, folder: Path) -> tuple[list[int], list[float]]:
    """One run in a separate process: the steps of its evaluations and their accuracy."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "groupwise", "train", str(RECIPES / "quiz.toml"), "--train.seed", str(seed)]
    done = subprocess.run([*command, "--run.folder", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    wall = time.perf_counter() - start
    rows = read_metrics(folder / "metrics.jsonl")
    steps, accuracy = metric_column(rows, "eval/accuracy")
    seconds = sum(metric_column(rows, "step_time")[1])
    reached = next((step for step, value in zip(steps, accuracy, strict=True) if value >= GOAL), None)
    when = f"step {reached}" if reached is not None else "never"
    print(f"{seed:4}{accuracy[0]:9.1%}{accuracy[-1]:9.1%}{when:>12}{seconds:9.0f}s{wall:8.0f}s", flush=True)
    return steps, accuracy


if __name__ == "__main__":
    main()
