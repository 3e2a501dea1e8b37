"""On-policy distillation: the quiz on a CPU, and GSM8K with a model that teaches itself on a GPU.

quiz: a quiz model is trained by GRPO; then, for each seed, it teaches a fresh model, with the exact KL and with the
sampled one, and on request GRPO trains the same fresh model. Held-out accuracy by sampled tokens.

gsm8k: Qwen2.5-Coder-1.5B with LoRA. Arms: "before", the model itself; "self", where the teacher is the model at the
start, shown the worked answer of the data set above the problem, and the student is not; "grpo"; on request
"self-below", where the answer stands below the problem, "self-sampled" and "both".
Each is trained until it has sampled as many tokens. An arm writes its result, with every held-out answer's grade, into
the folder --results as soon as it is done, and is not run again; one that was interrupted goes on from its last
checkpoint, in the folder --keep. --table prints accuracies and paired differences with 95 % intervals.

Estimated on an H200, from the times of the recipe gsm8k (docs/gsm8k.md), for 3,000,000 tokens, about 60 steps, and all
1,319 questions: "before" 2 minutes, "grpo" 5, "self" 7, of which 1.5 load and compile the model. So each arm is one
command of at most 10 minutes; --tokens 1500000 halves the steps, --limit 400 shortens the evaluation to a third.

Usage::

    python benchmarks/distillation.py quiz --at-once 2              # five seeds, about an hour on two cores
    python benchmarks/distillation.py gsm8k --data FOLDER --results RESULTS --only before grpo
    python benchmarks/distillation.py gsm8k --data FOLDER --results RESULTS --only self
    python benchmarks/distillation.py gsm8k --results RESULTS --table
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from distillation_gsm8k import DEFAULT, arms, gsm8k
from gsm8k_arms import add_arguments
from trials import QUIET, add_run_arguments, folder_of, given, train

from groupwise.rundir import metric_column, read_metrics
from groupwise.stats import bootstrap_interval

GOAL = 0.9


def quiz(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    teacher = args.teacher
    if teacher is None:
        teacher = root / "teacher" / "model"
        train("quiz.toml", {**QUIET, **given(args.set)}, root / "teacher")
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "full": ("distill-quiz.toml", {"distillation.teacher": teacher}),
        "sampled": ("distill-quiz.toml", {"distillation.teacher": teacher, "distillation.kl": "sampled"}),
        "grpo": ("quiz.toml", {}),
    }

    def run(method: str, seed: int) -> dict[str, Any]:
        recipe, settings = methods[method]
        folder = folder_of(root, method, seed)
        train(recipe, {**QUIET, **settings, "train.seed": seed, **given(args.set)}, folder)
        return quiz_row(method, seed, folder)

    print(
        f"{'method':<10}{'seed':>5}{'before':>9}{'after':>9}{'tokens to 90 %':>16}{'tokens':>9}{'seconds':>9}",
        flush=True,
    )
    runs = [(method, seed) for method in args.methods for seed in range(1, args.seeds + 1)]
    results: dict[str, Any] = {}
    with ThreadPoolExecutor(args.at_once) as pool:
        for (method, _), row in zip(runs, pool.map(lambda pair: run(*pair), runs), strict=True):
            results.setdefault(method, []).append(row)
    for method, rows in results.items():
        after = bootstrap_interval([row["after"] for row in rows])
        needed = sorted(row["needed"] or float("inf") for row in rows)
        least = min(row["after"] for row in rows)
        print(
            f"{method}: {after.estimate:.1%} after ({after.low:.1%} to {after.high:.1%}; {least:.1%} at least); "
            f"90 % after {needed} tokens"
        )
    return results


def quiz_row(method: str, seed: int, folder: Path) -> dict[str, Any]:
    rows = read_metrics(folder / "metrics.jsonl")
    steps, accuracy = metric_column(rows, "eval/accuracy")
    tokens = {0: 0.0, **dict(zip(*metric_column(rows, "num_tokens"), strict=True))}
    reached = next((step for step, value in zip(steps, accuracy, strict=True) if value >= GOAL), None)
    row = {
        "seed": seed,
        "before": accuracy[0],
        "after": accuracy[-1],
        "needed": None if reached is None else tokens[reached],
        "tokens": max(tokens.values()),
        "seconds": sum(metric_column(rows, "step_time")[1]),
    }
    needed = "never" if row["needed"] is None else f"{row['needed']:,.0f}"
    print(
        f"{method:<10}{seed:5}{row['before']:9.1%}{row['after']:9.1%}{needed:>16}{row['tokens']:9,.0f}{row['seconds']:9.0f}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("quiz", "gsm8k"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=("full", "sampled", "grpo"),
        default=["full", "sampled"],
        help="quiz: also grpo, on the same seeds",
    )
    parser.add_argument("--teacher", type=Path, help="quiz: the model of an earlier run of the recipe quiz")
    add_run_arguments(parser)
    parser.add_argument("--json", type=Path, help="quiz: write the figures into this file")
    group = parser.add_argument_group("gsm8k")
    add_arguments(group, list(arms(1)), DEFAULT, "distillation-gsm8k")
    group.add_argument("--tokens", type=int, default=3_000_000, help="sampled tokens of each arm")
    args = parser.parse_args()
    if args.work == "gsm8k":
        gsm8k(args)
        return
    with tempfile.TemporaryDirectory() as temporary:
        results = quiz(args, args.keep or Path(temporary))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
