"""On-policy distillation: the quiz on a CPU, and GSM8K with a model that teaches itself on a GPU.

quiz: a quiz model is trained by GRPO; then, for each seed, it teaches a fresh model, with the exact KL and with the
sampled one, and on request GRPO trains the same fresh model. Held-out accuracy by sampled tokens.

gsm8k: Qwen2.5-Coder-1.5B with LoRA. The teacher is the model at the start, shown the worked answer of the data set;
the student is not. Beside it GRPO, and both together, until each has sampled as many tokens; held-out accuracy before
and after, with 95 % intervals, and paired differences. Several runs fit one GPU (--at-once 4), with the same results
but longer times.

Usage::

    python benchmarks/distillation.py quiz --at-once 2              # five seeds, about an hour on two cores
    python benchmarks/distillation.py gsm8k --data shared/data      # about 15 minutes on an H200
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from trials import RECIPES, folder_of, train

from groupwise.rundir import metric_column, read_metrics
from groupwise.stats import bootstrap_interval
from groupwise.training.store.rollout_files import read_rows, step_files
from groupwise.training.store.token_files import EVALUATIONS

GOAL = 0.9
SHOW = (
    "{prompt}\n\nThis is a correct solution of the problem, for your reference:\n{answer}\n\nNow write your own "
    "solution, step by step, in the requested form, as if you had not seen it."
)
LORA = {
    "data.max_prompt_length": 1024,  # of the teacher, too, who is shown the worked answer
    "model.lora.rank": 32,
    "model.lora.alpha": 64.0,
    "optimizer.learning_rate": 2e-5,
    "optimizer.warmup_steps": 5,
    "evaluate.max_new_tokens": 512,
    "evaluate.every": 0,
    "train.batch_size": 32,
    "train.steps": "none",
    "run.resumable": "false",
    "run.save_tokens_every": 0,
}
TEACHER = {"distillation.weight": 1.0, "distillation.teacher": "reference", "distillation.show": SHOW}
GSM8K: dict[str, dict[str, Any]] = {  # each step samples 256 completions
    "grpo": {"sampling.samples_per_prompt": 8},
    "itself, shown the answer": {**TEACHER, "loss.policy_coef": 0.0, "sampling.samples_per_prompt": 8},
    "the same, sampled KL": {
        **TEACHER, "distillation.kl": "sampled", "loss.policy_coef": 0.0, "sampling.samples_per_prompt": 8,
    },
    "both": {**TEACHER, "distillation.weight": 0.1, "sampling.samples_per_prompt": 8},
}  # fmt: skip


def quiz(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    quiet = {"model.device": "cpu", "run.checkpoint_every": 0, "run.resumable": "false", "run.save_tokens_every": 0}
    teacher = args.teacher
    if teacher is None:
        teacher = root / "teacher" / "model"
        train("quiz.toml", {**quiet, **given(args.set)}, root / "teacher")
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "full": ("distill-quiz.toml", {"distillation.teacher": teacher}),
        "sampled": ("distill-quiz.toml", {"distillation.teacher": teacher, "distillation.kl": "sampled"}),
        "grpo": ("quiz.toml", {}),
    }

    def run(method: str, seed: int) -> dict[str, Any]:
        recipe, settings = methods[method]
        folder = folder_of(root, method, seed)
        train(recipe, {**quiet, **settings, "train.seed": seed, **given(args.set)}, folder)
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


def gsm8k(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    files = {"data.train": args.data / "gsm8k_train.jsonl", "data.held_out": args.data / "gsm8k_test.jsonl"}
    recipe = str(until(args.tokens, root))

    def run(method: str) -> dict[str, Any]:
        folder = folder_of(root, method)
        train(recipe, {**files, **LORA, **GSM8K[method], **given(args.set)}, folder)
        return gsm8k_row(method, folder)

    with ThreadPoolExecutor(args.at_once) as pool:
        results = dict(zip(GSM8K, pool.map(run, GSM8K), strict=True))
    reference = results.pop("grpo")
    for method, result in results.items():
        difference = bootstrap_interval(np.array(result["right"], float) - np.array(reference["right"], float))
        print(f"{method:<26} − grpo: {difference.estimate:+.1%} ({difference.low:+.1%} to {difference.high:+.1%})")
    return {"grpo": reference, **results}


def gsm8k_row(method: str, folder: Path) -> dict[str, Any]:
    rows = read_metrics(folder / "metrics.jsonl")
    (before, *_, after) = [row for row in rows if "eval/accuracy" in row]
    result = {
        "before": interval(before),
        "after": interval(after),
        "tokens": max(metric_column(rows, "num_tokens")[1]),
        "seconds": sum(metric_column(rows, "step_time")[1]),
        "kl": [row["distillation/kl"] for row in rows if "distillation/kl" in row],
        "length": [row["completions/mean_length"] for row in rows if "completions/mean_length" in row],
        "right": graded(folder),
    }
    print(
        f"{method:<26} accuracy {shown(result['before'])} → {shown(result['after'])}, {result['tokens']:,.0f} tokens, "
        f"{result['seconds']:.0f} s",
        flush=True,
    )
    return result


def until(tokens: int, root: Path) -> Path:
    """The recipe with a single phase, which is over after this many sampled tokens."""
    root.mkdir(parents=True, exist_ok=True)
    recipe = root / "gsm8k-tokens.toml"
    text = (RECIPES / "gsm8k.toml").read_text(encoding="utf-8")
    recipe.write_text(f'{text}\n[[phases]]\nname = "all"\ntokens = {tokens}\ntemperature = 1.0\n', encoding="utf-8")
    return recipe


def given(words: list[str]) -> Mapping[str, str]:
    return dict(word.split("=", 1) for word in words)


def interval(row: Mapping[str, Any]) -> list[float]:
    return [row[f"eval/accuracy{end}"] for end in ("", "_low", "_high")]


def shown(values: list[float]) -> str:
    return f"{values[0]:.1%} ({values[1]:.1%} to {values[2]:.1%})"


def graded(folder: Path) -> list[bool]:
    """Whether each held-out question was answered right after the last step."""
    files = step_files(folder / EVALUATIONS)
    return [bool(row["grade/accuracy"]) for row in read_rows(files[max(files)])]


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
    parser.add_argument("--at-once", type=int, default=1, help="runs in parallel; the quiz's use one core each")
    parser.add_argument("--teacher", type=Path, help="quiz: the model of an earlier run of the recipe quiz")
    parser.add_argument("--tokens", type=int, default=3_000_000, help="gsm8k: sampled tokens of each run")
    parser.add_argument("--data", type=Path, default=Path("shared/data"), help="gsm8k: folder of its two files")
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE", help="other settings of all runs")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder; finished ones are not repeated")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        results = (quiz if args.work == "quiz" else gsm8k)(args, args.keep or Path(temporary))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
