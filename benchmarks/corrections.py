"""The quiz with each advantage, aggregation, mask and correction, over several seeds: accuracy, with intervals.

Each batch is used for eight updates, so that the clip and the divergence mask have something to limit; success is rare
at first (eight samples, a short warm-up), where MaxRL and pass@k differ from GRPO. Two more bases: "rounded sampler"
samples with weights rounded to five values a row (plugins/rounded_sampler.py), for the corrections of a sampler
that is not the policy; its held-out answers, too. With "long answers" dots may follow the letter (long_quiz.py), so
that completions have different lengths.

Usage::

    python benchmarks/corrections.py --at-once 2                          # all rows, five seeds: two hours on two cores
    python benchmarks/corrections.py --only plain maxrl --seeds 5         # some rows
    python benchmarks/corrections.py --table                              # the table of what is in the results

A run adds its numbers to benchmarks/results/corrections.json and is not repeated while they are there.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from trials import QUIET, folder_of, train

from groupwise.rundir import metric_column, read_metrics
from groupwise.stats import bootstrap_interval, paired_test
from groupwise.training.store.rollout_files import read_rows, step_files
from groupwise.training.store.token_files import EVALUATIONS

RESULTS = Path(__file__).parent / "results" / "corrections.json"
STEPS = 40
PLUGINS = Path(__file__).resolve().parent / "plugins"
SHORT = {
    **QUIET,
    "train.steps": STEPS,
    "evaluate.every": 10,
    "evaluate.samples": 4,
    "evaluate.temperature": 1.0,  # a greedy answer does not show whether several answers are kept
}
UPDATES = {**SHORT, "train.iterations": 2, "train.mini_batches": 4, "sampling.samples_per_prompt": 8, "sft.steps": 40}
ROUNDED = {**UPDATES, "sampling.generator": "rounded"}
LONG = {
    **UPDATES,
    "task": f"{PLUGINS.parent / 'long_quiz.py'}:long_quiz",
    "sampling.max_new_tokens": 5,
    "sft.steps": 80,
}
PLAIN, PLAIN_ROUNDED, PLAIN_LONG = "plain", "rounded sampler", "long answers"
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    PLAIN: (UPDATES, {}),
    "maxrl": (UPDATES, {"algorithm": "maxrl"}),
    "pass@4": (UPDATES, {"advantages.pass_at_k": 4}),
    "dppo, TV": (UPDATES, {"algorithm": "dppo"}),
    "dppo, KL": (UPDATES, {"algorithm": "dppo", "masks.divergence": "kl"}),
    PLAIN_ROUNDED: (ROUNDED, {}),
    "token TIS": (ROUNDED, {"loss.importance_cap": 2.0}),
    "sequence TIS, normalized": (
        ROUNDED,
        {
            "loss.importance_sampling": "sequence_truncate",
            "loss.importance_cap": 2.0,
            "loss.importance_normalize": "true",
        },
    ),
    "IcePop": (
        ROUNDED,
        {"loss.importance_sampling": "token_mask", "loss.importance_floor": 0.5, "loss.importance_cap": 5.0},
    ),
    "geometric rejection": (ROUNDED, {"loss.rejection_low": 0.8, "loss.rejection_high": 1.25}),
    "k3 rejection": (ROUNDED, {"loss.rejection": "k3", "loss.rejection_high": 0.05}),
    PLAIN_LONG: (LONG, {}),
    "prompt mean": (LONG, {"loss.aggregation": "prompt_mean"}),
    "sequence mean": (LONG, {"loss.aggregation": "sequence_mean"}),
    "scalerl": (LONG, {"algorithm": "scalerl"}),
    "length penalty 0.2": (LONG, {"scoring.length_penalty": 0.2}),
    "length penalty 0.2, batch scale": (LONG, {"scoring.length_penalty": 0.2, "advantages.scale": "batch"}),
    "overlong penalty": (LONG, {"scoring.overlong_buffer": 4, "scoring.overlong_weight": 0.2}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), help="only these rows")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=1, help="runs in parallel; each uses one core")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file to add the numbers to")
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    args = parser.parse_args()
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    os.environ["PYTHONPATH"] = os.pathsep.join((str(PLUGINS), os.environ.get("PYTHONPATH", "")))
    lock = Lock()

    def run(name: str, seed: int, root: Path) -> None:
        base, changes = ROWS[name]
        folder = folder_of(root, name, seed)
        train("quiz.toml", {**base, **changes, "train.seed": seed}, folder)
        with lock:
            results.setdefault(name, {})[str(seed)] = read(folder)
            args.results.write_text(json.dumps(results, indent=1) + "\n")

    if not args.table:
        names = args.only or list(ROWS)
        wanted = [(name, seed) for seed in range(args.seeds) for name in names]
        with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.at_once) as pool:
            root = args.keep or Path(temporary)
            missing = [(name, seed) for name, seed in wanted if str(seed) not in results.get(name, {})]
            list(pool.map(lambda pair: run(*pair, root), missing))
    report(results)


def read(folder: Path) -> dict[str, float]:
    """The numbers of a run: held-out accuracy at the end and over the run, length, entropy, and what is masked."""
    rows = read_metrics(folder / "metrics.jsonl")

    def last(name: str, steps: int = 20) -> float:
        values = metric_column(rows, name)[1][-steps:]
        return float(np.mean(values)) if len(values) else float("nan")

    accuracy = metric_column(rows, "eval/accuracy")[1]
    files = step_files(folder / EVALUATIONS)
    right: dict[str, bool] = {}
    for row in read_rows(files[max(files)]):
        right[row["prompt"]] = right.get(row["prompt"], False) or bool(row["grade/accuracy"])
    return {
        "end": float(accuracy[-1]),
        "pass@4": sum(right.values()) / len(right),
        "mean": float(np.mean(accuracy)),
        "length": last("completions/mean_length"),
        "entropy": last("entropy"),
        "clipped": last("clip_ratio/region_mean", STEPS),
        "sampler_kl": last("sampler/kl", STEPS),
    }


def report(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """A Markdown table; the differences are from the plain run of the same base, seed by seed."""
    print(
        "| | seeds | held out, at the end | mean over the run | difference (p) | pass@4 | length | entropy | clipped | "
        "KL to the sampler |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, (base, _) in ROWS.items():
        runs = results.get(name, {})
        if not runs:
            continue
        last = bootstrap_interval([run["end"] for run in runs.values()])
        over = bootstrap_interval([run["mean"] for run in runs.values()])
        plain = results.get(next(other for other in (PLAIN, PLAIN_ROUNDED, PLAIN_LONG) if ROWS[other][0] is base), {})
        shared = sorted(set(runs) & set(plain))
        difference = ""
        if len(shared) > 1 and runs is not plain:
            pairs = [[table[seed]["mean"] for seed in shared] for table in (runs, plain)]
            change = float(np.mean(pairs[0]) - np.mean(pairs[1]))
            difference = f"{change:+.1%} ({paired_test(*pairs).p_value:.2f})"
        means = {key: np.mean([run[key] for run in runs.values()]) for key in next(iter(runs.values()))}
        spans = " | ".join(f"{span.estimate:.1%} [{span.low:.1%}, {span.high:.1%}]" for span in (last, over))
        numbers = f"{means['pass@4']:.1%} | {means['length']:.2f} | {means['entropy']:.3f} | {means['clipped']:.2%}"
        print(f"| {name} | {len(runs)} | {spans} | {difference} | {numbers} | {means['sampler_kl']:.4f} |")


if __name__ == "__main__":
    main()
