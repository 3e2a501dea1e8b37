"""Arms of a benchmark on GSM8K: each is a command of groupwise of its own, whose result is a JSON file.

An arm writes its result, with every held-out answer's grade, as soon as it is done, and is not run again; one that was
interrupted goes on from its last checkpoint, if it has any. Arms are compared question by question.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from trials import RECIPES, as_options, given

from groupwise.rundir import metric_column, read_metrics
from groupwise.stats import bootstrap_interval, proportion_interval
from groupwise.text import format_duration, markdown_table
from groupwise.training.store.rollout_files import read_rows, step_files
from groupwise.training.store.token_files import EVALUATIONS

FILES = {"data.train": "gsm8k_train.jsonl", "data.held_out": "gsm8k_test.jsonl"}
MODEL = "qwen2.5-coder-1.5b"
MEASURED = {"data.max_prompt_length": 1024, "evaluate.max_new_tokens": 512}
# A column of the table and the metric that it shows, at the first and the last step that has it.
Columns = Mapping[str, str]


@dataclass(frozen=True)
class Arm:
    """A recipe with settings, trained for its steps or until ``tokens`` are sampled, or only evaluated."""

    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = "gsm8k.toml"
    trained: bool = True
    tokens: int | None = None


def add_arguments(parser: Any, arms: Sequence[str], default: Sequence[str], folder: str) -> None:
    """The options of a benchmark with these arms."""
    parser.add_argument("--only", nargs="+", choices=arms, help=f"these arms (default: {' '.join(default)})")
    parser.add_argument("--results", type=Path, default=Path(folder), help="folder of the arms' results")
    parser.add_argument("--table", action="store_true", help="run nothing, and print the table of the results")
    parser.add_argument("--model", default=MODEL, help="a known name, or a folder with a chat template")
    parser.add_argument("--data", type=Path, default=Path("shared/data"), help="folder of GSM8K's two files")
    parser.add_argument("--limit", type=int, help="evaluate on the first N held-out questions (default: all)")


def run_arms(arms: Mapping[str, Arm], names: Sequence[str], args: argparse.Namespace) -> None:
    """Run these arms, unless they have a result."""
    args.results.mkdir(parents=True, exist_ok=True)
    for name in FILES.values():
        if not (args.data / name).is_file():
            raise SystemExit(f"there is no {args.data / name}; name the folder of GSM8K's two files with --data")
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda name: _run(name, arms[name], args), names))


def _run(name: str, arm: Arm, args: argparse.Namespace) -> None:
    file = args.results / f"{name}.json"
    own = {"recipe": Path(arm.recipe).name, "settings": dict(arm.settings), "tokens": arm.tokens}
    work = {"model": Path(args.model).name, "limit": args.limit, "settings": sorted(args.set), "arm": own}
    if file.exists():
        other = {key: value for key, value in _read(file)["work"].items() if work[key] != value}
        if other:
            raise SystemExit(f"{file} is of other work ({other}); choose another folder with --results, or delete it")
        print(f"{name}: {file} is there already", flush=True)
        return
    start, folder = time.perf_counter(), (args.keep or args.results / "runs") / name
    folder.mkdir(parents=True, exist_ok=True)
    recipe = RECIPES / arm.recipe
    settings: dict[str, Any] = {
        **{key: args.data / file_name for key, file_name in FILES.items()},
        **MEASURED,
        "model.source": args.model,
        **({} if args.limit is None else {"data.held_out_rows": args.limit}),
        **arm.settings,
        **given(args.set),
    }
    if arm.trained:
        if arm.tokens is not None:
            recipe = _with_phase(recipe, arm.tokens, folder)
        begun = any((folder / "run").glob("checkpoint-*"))
        settings["run.folder"] = folder / "run"
        _groupwise("train", recipe, settings, name, "--resume" if begun else "--overwrite")
        result = _figures(folder / "run")
    else:
        answers = folder / "answers.jsonl"
        _groupwise("eval", recipe, settings, name, "--answers", str(answers))
        rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
        result = {**_graded(rows, ""), "sampled": 0}
    result = {"arm": name, "work": work, **result, "wall": time.perf_counter() - start, "machine": _machine()}
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result) + "\n", encoding="utf-8")
    unfinished.replace(file)
    print(f"{name}: {sum(result['right'])} of {len(result['right'])} right, in {format_duration(result['wall'])}")
    sys.stdout.flush()


def _groupwise(command: str, recipe: Path, settings: Mapping[str, object], arm: str, *options: str) -> None:
    words = [sys.executable, "-m", "groupwise", command, str(recipe), *options, *as_options(settings)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arm}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _with_phase(recipe: Path, tokens: int, folder: Path) -> Path:
    """The recipe with a single phase, which is over after this many sampled tokens."""
    changed = folder / recipe.name
    text = recipe.read_text(encoding="utf-8")
    changed.write_text(f'{text}\n[[phases]]\nname = "all"\ntokens = {tokens}\ntemperature = 1.0\n', encoding="utf-8")
    return changed


def _figures(run: Path) -> dict[str, Any]:
    """What a finished run has measured."""
    rows = read_metrics(run / "metrics.jsonl")
    evaluations = step_files(run / EVALUATIONS)
    names = {name for row in rows for name, value in row.items() if isinstance(value, (int, float))}
    return {
        **_graded(list(read_rows(evaluations[max(evaluations)])), "grade/"),
        "sampled": max(metric_column(rows, "num_tokens")[1], default=0),
        "steps": len(metric_column(rows, "step_time")[1]),
        "seconds": sum(metric_column(rows, "step_time")[1]),
        "metrics": {name: [float(value) for value in metric_column(rows, name)[1]] for name in sorted(names)},
    }


def _graded(rows: list[dict[str, Any]], prefix: str) -> dict[str, list[bool]]:
    """Which answers are right, and which if their form does not count."""
    names = {"right": "accuracy", "lenient": "accuracy_lenient"}
    return {name: [bool(row[prefix + grade]) for row in rows] for name, grade in names.items()}


def table(arms: Mapping[str, Arm], results: Path, against: Sequence[str], columns: Columns) -> str:
    """Accuracy of each arm with its interval, and the paired differences to the arms ``against``."""
    found = {name: _read(results / f"{name}.json") for name in arms if (results / f"{name}.json").exists()}
    if not found:
        return f"{results} has no results yet"
    works = [{key: value for key, value in result["work"].items() if key != "arm"} for result in found.values()]
    sizes = {len(result["right"]) for result in found.values()}
    budgets = {result["work"]["arm"]["tokens"] for result in found.values()} - {None}
    if len(sizes) > 1 or len(budgets) > 1 or any(work != works[0] for work in works):
        raise SystemExit(f"the results in {results} are of different work, and cannot be compared; run them alike")
    rows = []
    for name, result in found.items():
        right = result["right"]
        rows.append(
            [
                arms[name].title,
                _shown(proportion_interval(sum(right), len(right))),
                _shown(proportion_interval(sum(result["lenient"]), len(right))),
                *(_difference(found, name, other) for other in against),
                f"{result['sampled']:,.0f}",
                f"{result.get('steps', 0)}",
                f"{result.get('seconds', 0.0):.0f}",
                f"{result['wall']:.0f}",
                *(_first_and_last(result.get("metrics", {}).get(metric)) for metric in columns.values()),
            ]
        )
    header = ["arm", "right", "in any form", *(f"− {arms[other].title}" for other in against)]
    header += ["sampled tokens", "steps", "s in steps", "s in all", *columns]
    machine = next(iter(found.values()))["machine"]
    first = f"{works[0]['model']}, {sizes.pop():,} held-out questions, {machine}; 95 % intervals"
    return f"{first}\n\n{markdown_table(header, rows)}"


def _difference(found: Mapping[str, Mapping[str, Any]], arm: str, other: str) -> str:
    """The paired difference of two arms, question by question; nothing for an arm and itself or a later one."""
    order = list(found)
    if other not in found or order.index(arm) <= order.index(other):
        return ""
    mine, others = (np.array(found[name]["right"], float) for name in (arm, other))
    return _shown(bootstrap_interval(mine - others), "+")


def _first_and_last(values: Sequence[float] | None) -> str:
    return f"{values[0]:.3f} → {values[-1]:.3f}" if values else ""


def _shown(interval: Any, sign: str = "") -> str:
    return f"{interval.estimate:{sign}.1%} [{100 * interval.low:{sign}.1f}, {100 * interval.high:{sign}.1f}]"


def _machine() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"


def _read(file: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result
