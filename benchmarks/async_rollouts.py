"""Asynchronous rollouts against synchronous ones, with a reward that takes time.

Usage::

    python benchmarks/async_rollouts.py                           # on the GPU if there is one, else on the CPU
    python benchmarks/async_rollouts.py --seconds 1 --staleness 1 2 4 --json async_rollouts.json

Two rewards are measured: ``call``, a plain function whose every call takes ``--seconds``, and ``judge``, an async one
in which each completion takes that long and at most ``--concurrency`` requests run at once, as with an endpoint. Every
completion has its full length. Each run is a process of its own, one after the other; seconds per step are the mean
over ``--repeat`` steps after the first ones (compilation, graph capture). The work of a step is the same in all runs,
so what is gained is waiting. Compare the ratios rather than the seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import arguments, fill
from step_work import describe, environment, recipe_of, rows, save_model

REWARDS = ("call", "judge")


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(repeat=12)
    parser.add_argument("--seconds", type=float, default=1.0, help="that a call, or a judge's request, takes")
    parser.add_argument("--concurrency", type=int, default=64, help="requests of the judge at once")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2], help="values of train.max_staleness")
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--top-k", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    fill(args)
    if args.side:
        reward, staleness = args.side.split(":")
        print("RESULT " + json.dumps(run(args, reward, int(staleness))))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        save_model(args)
        print(f"{describe(args)}; a reward of {args.seconds:g} s", flush=True)
        figures = {}
        for reward in args.rewards:
            for staleness in (0, *args.staleness):
                figures[f"{reward}:{staleness}"] = in_new_process(args, f"{reward}:{staleness}")
                report(reward, staleness, figures)
    if args.json:
        args.json.write_text(json.dumps({"work": describe(args), "seconds": args.seconds, "runs": figures}, indent=2))


def run(args: argparse.Namespace, reward: str, staleness: int) -> dict[str, float]:
    from groupwise.config import with_settings
    from groupwise.tasks.base import Task
    from groupwise.training.trainer import Trainer

    warm = max(3, staleness + 2)
    # A run draws nothing for steps after its last one, so that the last steps are cheaper; they are not run.
    recipe = with_settings(
        recipe_of(args, warm + args.repeat + staleness + 1),
        {"train.max_staleness": staleness, "train.replay": None},
    )
    task = Task("benchmark", rows(args))
    steps: list[dict[str, float]] = []
    folder = args.folder / f"{reward}-{staleness}"
    with Trainer(recipe, task=task, rewards=[make_reward(args, reward)], folder=folder) as trainer:
        for result in trainer.steps():
            steps.append(result.metrics)
            if len(steps) == warm + args.repeat:
                break
    counted = steps[warm:]
    if any(step["completions/mean_length"] != args.new_tokens for step in counted):
        raise SystemExit("completions ended early; the comparison would not be fair")
    names = {
        "step": "step_time",
        "sampling": "time/generate",
        "rewards": "time/reward",
        "waiting": "time/wait",
        "training": "time/train",
        "staleness": "async/staleness_mean",
        "dropped": "async/dropped_stale",
        "ratio": "ratio",
    }
    return {label: sum(step.get(name, 0.0) for step in counted) / len(counted) for label, name in names.items()}


def make_reward(args: argparse.Namespace, kind: str) -> Any:
    def score(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [sum(ids) % 101 / 100 for ids in completion_ids]

    def call(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        time.sleep(args.seconds)
        return score(completion_ids)

    slots = asyncio.Semaphore(args.concurrency)  # of all calls together: one endpoint

    async def judge(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        async def request() -> None:
            async with slots:
                await asyncio.sleep(args.seconds)

        await asyncio.gather(*(request() for _ in completion_ids))
        return score(completion_ids)

    return call if kind == "call" else judge


def in_new_process(args: argparse.Namespace, side: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side, "--folder", str(args.folder), "--model", args.model]
    names = ("device", "prompts", "prompt_tokens", "samples", "new_tokens", "repeat", "top_k", "seconds", "concurrency")
    for name in names:
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--dtype", args.dtype] if args.dtype else []
    done = subprocess.run(command, capture_output=True, text=True, env=environment("groupwise"))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{side} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def report(reward: str, staleness: int, figures: dict[str, dict[str, float]]) -> None:
    if not staleness:
        print(f"\nreward {reward}, seconds per step")
        print("max_staleness     step  sampling  rewards  waiting  training  staleness  ratio  dropped  faster")
    seconds = figures[f"{reward}:{staleness}"]
    faster = figures[f"{reward}:0"]["step"] / seconds["step"]
    print(
        f"{staleness:13d} {seconds['step']:8.2f} {seconds['sampling']:9.2f} {seconds['rewards']:8.2f} "
        f"{seconds['waiting']:8.2f} {seconds['training']:9.2f} {seconds['staleness']:10.2f} {seconds['ratio']:6.3f} "
        f"{seconds['dropped']:8.2f} {faster:6.2f}×",
        flush=True,
    )


if __name__ == "__main__":
    main()
