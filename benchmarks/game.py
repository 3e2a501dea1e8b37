"""The text game over several seeds: games won on held-out boards before and after, with intervals.

The arm "outcome" is the recipe game: one advantage for a game, from its outcome. "turns" adds for each turn an
advantage among the turns at the same board (GiGPO, advantages.turn_weight 1).

Usage::

    python benchmarks/game.py --at-once 2                # five seeds: 38 minutes on two x86 cores
    python benchmarks/game.py --arms outcome turns       # both arms, and their difference seed by seed

With --keep the finished runs stay in a folder and are not repeated.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from trials import QUIET, add_run_arguments, folder_of, given, train

from groupwise.rundir import metric_column, read_metrics
from groupwise.stats import bootstrap_interval, paired_test
from groupwise.text import markdown_table

ARMS: dict[str, dict[str, Any]] = {"outcome": {}, "turns": {"advantages.turn_weight": 1.0}}
GOAL = 0.8


class Result(NamedTuple):
    """Of one run: shares of held-out games won, and the first evaluated step with `GOAL` of them."""

    before: float
    after: float
    reached: int | None
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["outcome"])
    parser.add_argument("--seeds", type=int, default=5)
    add_run_arguments(parser)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.at_once) as pool:
        root = args.keep or Path(temporary)
        wanted = [(arm, seed) for arm in args.arms for seed in range(args.seeds)]
        results = dict(zip(wanted, pool.map(lambda pair: run(*pair, root, given(args.set)), wanted), strict=True))
    table = [
        [arm, f"{seed}", f"{result.before:.1%}", f"{result.after:.1%}", reached(result), f"{result.seconds / 60:.1f}"]
        for (arm, seed), result in results.items()
    ]
    print(markdown_table(["arm", "seed", "before", "after", f"{GOAL:.0%} at step", "minutes in steps"], table))
    after = {arm: [results[arm, seed].after for seed in range(args.seeds)] for arm in args.arms}
    for arm, shares in after.items():
        interval = bootstrap_interval(shares)
        print(f"{arm}: {interval.estimate:.1%} [{100 * interval.low:.1f}, {100 * interval.high:.1f}], seeds resampled")
    if len(args.arms) == 2:
        first, second = args.arms
        test = paired_test(after[second], after[first])
        print(f"{second} − {first}: {100 * test.difference.estimate:+.1f} points, p = {test.p_value:.2f}")


def run(arm: str, seed: int, root: Path, changes: Mapping[str, Any]) -> Result:
    folder = folder_of(root, arm, seed)
    train("game.toml", {**QUIET, **ARMS[arm], "train.seed": seed, **changes}, folder)
    rows = read_metrics(folder / "metrics.jsonl")
    steps, won = metric_column(rows, "eval/reward")
    first = next((int(step) for step, share in zip(steps, won, strict=True) if share >= GOAL), None)
    return Result(won[0], won[-1], first, sum(metric_column(rows, "step_time")[1]))


def reached(result: Result) -> str:
    return "never" if result.reached is None else f"{result.reached}"


if __name__ == "__main__":
    main()
