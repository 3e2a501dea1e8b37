"""The arms of `python benchmarks/distillation.py gsm8k`: each is a command of its own, whose result is a JSON file."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from trials import RECIPES, as_options

from groupwise.rundir import metric_column, read_metrics
from groupwise.stats import bootstrap_interval, proportion_interval
from groupwise.text import format_duration, markdown_table
from groupwise.training.store.rollout_files import read_rows, step_files
from groupwise.training.store.token_files import EVALUATIONS

FILES = {"data.train": "gsm8k_train.jsonl", "data.held_out": "gsm8k_test.jsonl"}
MODEL = "qwen2.5-coder-1.5b"
ABOVE = "A correct solution of the problem below, for your reference:\n{answer}\n\nThe problem:\n{prompt}"
BELOW = (
    "{prompt}\n\nThis is a correct solution of the problem, for your reference:\n{answer}\n\nNow write your own "
    "solution, step by step, in the requested form, as if you had not seen it."
)
MEASURED = {"data.max_prompt_length": 1024, "evaluate.max_new_tokens": 512}
LORA = {
    "model.lora.rank": 32,
    "model.lora.alpha": 64.0,
    "optimizer.learning_rate": 2e-5,
    "optimizer.warmup_steps": 5,
    "sampling.samples_per_prompt": 8,  # of 32 prompts: a step samples 256 completions
    "train.batch_size": 32,
    "train.steps": "none",
    "evaluate.before_training": "false",  # that is the arm "before"
    "evaluate.every": 0,
    "run.resumable": "true",  # an adapter's checkpoint is small
    "run.checkpoint_every": 10,
    "run.save_tokens_every": 0,
}
TEACHER = {"distillation.weight": 1.0, "distillation.teacher": "reference", "distillation.show": ABOVE}
ALONE = {**TEACHER, "loss.policy_coef": 0.0}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "before": ("the model itself", {}),
    "self": ("itself, shown the worked answer above the problem", ALONE),
    "self-below": ("itself, shown it below the problem", {**ALONE, "distillation.show": BELOW}),
    "grpo": ("GRPO", {}),
    "self-sampled": ("itself, sampled KL", {**ALONE, "distillation.kl": "sampled"}),
    "both": ("GRPO and itself", {**TEACHER, "distillation.weight": 0.1}),
}
DEFAULT = ("before", "self", "grpo")


def gsm8k(args: argparse.Namespace) -> None:
    """Run the arms that have no result yet, and print the table of all that have one."""
    args.results.mkdir(parents=True, exist_ok=True)
    if not args.table:
        check_data(args.data)
        arms = args.only or DEFAULT
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(lambda arm: run_arm(arm, args), arms))
    print(table(args.results))


def run_arm(arm: str, args: argparse.Namespace) -> None:
    """Run an arm, unless its result is there, and write its result."""
    file = args.results / f"{arm}.json"
    work = {"model": Path(args.model).name, "tokens": args.tokens, "limit": args.limit, "settings": sorted(args.set)}
    if file.exists():
        other = {name: value for name, value in read(file)["work"].items() if work[name] != value}
        if other:
            raise SystemExit(f"{file} is of other work ({other}); choose another folder with --results, or delete it")
        print(f"{arm}: {file} is there already", flush=True)
        return
    start, folder = time.perf_counter(), (args.keep or args.results / "runs") / arm
    settings: dict[str, Any] = {
        **{name: args.data / file_name for name, file_name in FILES.items()},
        **MEASURED,
        "model.source": args.model,
        **({} if args.limit is None else {"data.held_out_rows": args.limit}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    if arm == "before":
        answers = folder / "answers.jsonl"
        groupwise("eval", RECIPES / "gsm8k.toml", {**settings, **given(args.set)}, arm, "--answers", str(answers))
        rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
        result: dict[str, Any] = {**graded(rows, ""), "tokens": 0}
    else:
        recipe = write_recipe(args.tokens, folder)
        settings |= {**LORA, **ARMS[arm][1], **given(args.set), "run.folder": folder / "run"}
        begun = any((folder / "run").glob("checkpoint-*"))
        groupwise("train", recipe, settings, arm, "--resume" if begun else "--overwrite")
        result = figures(folder / "run")
    result = {"arm": arm, "work": work, **result, "wall": time.perf_counter() - start, "machine": machine()}
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result) + "\n", encoding="utf-8")
    unfinished.replace(file)
    print(f"{arm}: {sum(result['right'])} of {len(result['right'])} right, in {format_duration(result['wall'])}")
    sys.stdout.flush()


def groupwise(command: str, recipe: Path, settings: Mapping[str, object], arm: str, *options: str) -> None:
    words = [sys.executable, "-m", "groupwise", command, str(recipe), *options, *as_options(settings)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arm}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def write_recipe(tokens: int, folder: Path) -> Path:
    """The recipe gsm8k with a single phase, which is over after this many sampled tokens."""
    recipe = folder / "gsm8k.toml"
    text = (RECIPES / "gsm8k.toml").read_text(encoding="utf-8")
    recipe.write_text(f'{text}\n[[phases]]\nname = "all"\ntokens = {tokens}\ntemperature = 1.0\n', encoding="utf-8")
    return recipe


def figures(run: Path) -> dict[str, Any]:
    """What a finished run has measured."""
    rows = read_metrics(run / "metrics.jsonl")
    evaluations = step_files(run / EVALUATIONS)
    return {
        **graded(list(read_rows(evaluations[max(evaluations)])), "grade/"),
        "tokens": max(metric_column(rows, "num_tokens")[1]),
        "steps": len(metric_column(rows, "step_time")[1]),
        "seconds": sum(metric_column(rows, "step_time")[1]),
        "kl": [row["distillation/kl"] for row in rows if "distillation/kl" in row],
        "length": [row["completions/mean_length"] for row in rows if "completions/mean_length" in row],
    }


def graded(rows: list[dict[str, Any]], prefix: str) -> dict[str, list[bool]]:
    """Which answers are right, and which if their form does not count."""
    names = {"right": "accuracy", "lenient": "accuracy_lenient"}
    return {name: [bool(row[prefix + grade]) for row in rows] for name, grade in names.items()}


def table(results: Path) -> str:
    """Accuracy of each arm with its interval, and the paired differences to "before" and GRPO."""
    found = {arm: read(results / f"{arm}.json") for arm in ARMS if (results / f"{arm}.json").exists()}
    if not found:
        return f"{results} has no results yet"
    sizes = {len(result["right"]) for result in found.values()}
    if len(sizes) > 1 or len({json.dumps(result["work"], sort_keys=True) for result in found.values()}) > 1:
        raise SystemExit(f"the results in {results} are of different work, and cannot be compared; run them alike")
    rows = []
    for arm, result in found.items():
        right = result["right"]
        accuracy = proportion_interval(sum(right), len(right))
        kl = result.get("kl") or []
        rows.append(
            [
                ARMS[arm][0],
                shown(accuracy),
                shown(proportion_interval(sum(result["lenient"]), len(right))) if "lenient" in result else "",
                *(difference(found, arm, other) for other in ("before", "grpo")),
                f"{result['tokens']:,.0f}",
                f"{result.get('steps', 0)}",
                f"{result.get('seconds', 0.0):.0f}",
                f"{result['wall']:.0f}",
                f"{kl[0]:.3f} → {kl[-1]:.3f}" if kl else "",
            ]
        )
    work = next(iter(found.values()))
    header = ["arm", "right", "in any form", "− before", "− GRPO"]
    header += ["sampled tokens", "steps", "s in steps", "s in all", "KL per token"]
    first = f"{work['work']['model']}, {sizes.pop():,} held-out questions, {work['machine']}; 95 % intervals"
    return f"{first}\n\n{markdown_table(header, rows)}"


def difference(found: Mapping[str, Mapping[str, Any]], arm: str, other: str) -> str:
    """The paired difference of two arms, question by question; nothing for an arm and itself."""
    if arm == other or other not in found or arm == "before":
        return ""
    mine, others = (np.array(found[name]["right"], float) for name in (arm, other))
    return shown(bootstrap_interval(mine - others), "+")


def shown(interval: Any, sign: str = "") -> str:
    return f"{interval.estimate:{sign}.1%} [{100 * interval.low:{sign}.1f}, {100 * interval.high:{sign}.1f}]"


def check_data(folder: Path) -> None:
    for name in FILES.values():
        if not (folder / name).is_file():
            raise SystemExit(f"there is no {folder / name}; name the folder of GSM8K's two files with --data")


def machine() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"


def read(file: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def given(words: list[str]) -> Mapping[str, str]:
    return dict(word.split("=", 1) for word in words)
