"""Which rows a step draws, on the quiz: each once per epoch, by running pass rate, or with dynamic resampling.

The quiz of `make train` with few rows, so that each comes up many times: pass rates are known from the second epoch on.
Printed for each variant, over seeds: held-out accuracy at the end and as a mean over the run, the share of groups
without a learning signal, the share of rows that were skipped, and sampled tokens; p is that of a paired test against
the first variant. `adaptive entropy` is the same run with the KL replaced by an entropy bonus that adapts to a target.

Usage::

    python benchmarks/row_sampling.py --keep runs/row-sampling               # all variants, seeds 0 to 4
    python benchmarks/row_sampling.py --keep runs/row-sampling --only uniform "pass rate" --seeds 0 1
    python benchmarks/row_sampling.py --draw runs/row-sampling               # the table of finished runs
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from trials import folder_of, train

from groupwise.rundir import metric_column, read_metrics
from groupwise.stats import bootstrap_interval, paired_test

BASE = {
    "data.train_rows": "1024",  # 250 steps of 64 prompts are 16 epochs
    "run.checkpoint_every": "0",
    "run.resumable": "false",
    "run.save_rollouts": "false",
    "run.tensorboard": "false",
    "run.plot": "false",
    "model.device": "cpu",
}
PASS_RATE = {"data.sampling": "pass_rate"}
RESAMPLED = {"train.resample_rounds": "2"}
VARIANTS: dict[str, dict[str, str]] = {
    "uniform": {},
    "pass rate": PASS_RATE,
    "resampled": RESAMPLED,
    "pass rate, resampled": {**PASS_RATE, **RESAMPLED},
    "no KL": {"loss.kl_coef": "0"},
    "adaptive entropy": {"loss.kl_coef": "0", "loss.entropy_target": "0.7", "loss.entropy_step": "0.02"},
}
COLUMNS = ("frac_reward_zero_std", "pass_rate/skipped", "num_tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--at-once", type=int, default=1, help="runs in parallel; each uses one core")
    parser.add_argument("--steps", type=int, help="fewer steps, to try the script")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder; finished ones are not run again")
    parser.add_argument("--draw", type=Path, help="only read the runs in this folder")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="only these variants")
    args = parser.parse_args()
    steps = {} if args.steps is None else {"train.steps": str(args.steps)}
    with tempfile.TemporaryDirectory() as temporary:
        root, names = args.draw or args.keep or Path(temporary), args.only or list(VARIANTS)
        if args.draw is None:
            runs = [(name, seed) for seed in args.seeds for name in names]

            def run(name: str, seed: int) -> None:
                settings = {**BASE, **VARIANTS[name], **steps, "train.seed": str(seed)}
                train("quiz.toml", settings, folder_of(root, name, seed))

            with ThreadPoolExecutor(args.at_once) as pool:
                list(pool.map(lambda pair: run(*pair), runs))
        report({name: [read(folder_of(root, name, seed)) for seed in args.seeds] for name in names})


def read(folder: Path) -> dict[str, np.ndarray]:
    rows = read_metrics(folder / "metrics.jsonl")
    curves = {name: metric_column(rows, name)[1] for name in ("eval/accuracy", *COLUMNS)}
    return {name: np.asarray(values, dtype=np.float64) for name, values in curves.items()}


def report(results: dict[str, list[dict[str, np.ndarray]]]) -> None:
    first = next(iter(results))
    head = (f"{'held out, at the end':>24}", f"{'mean over the run':>19}", f"{'no signal':>11}", f"{'skipped':>9}")
    print(f"{'':22}{''.join(head)}{'tokens':>11}{'p':>8}")
    for name, runs in results.items():
        ends = [run["eval/accuracy"][-1] for run in runs]
        interval, over = bootstrap_interval(ends), np.mean([run["eval/accuracy"].mean() for run in runs])
        signal = np.mean([run["frac_reward_zero_std"].mean() for run in runs])
        skipped = np.mean([run["pass_rate/skipped"].mean() if len(run["pass_rate/skipped"]) else 0.0 for run in runs])
        tokens = np.mean([run["num_tokens"][-1] for run in runs])
        p = ""
        if name != first and len(runs) > 1:
            p = f"{paired_test(ends, [run['eval/accuracy'][-1] for run in results[first]]).p_value:.2f}"
        span = f"{interval.estimate:.1%} [{interval.low:.1%}, {interval.high:.1%}]"
        print(f"{name:22}{span:>24}{over:>19.1%}{signal:>11.1%}{skipped:>9.1%}{tokens:>11,.0f}{p:>8}")


if __name__ == "__main__":
    main()
