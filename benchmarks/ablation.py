"""Ablation of the enhancements of GRPO on the quiz: accuracy, KL and stability over several seeds.

The quiz of `make train` is made harder: each batch is used for several updates (so that samples become off-policy),
answers are sampled from the three most likely bytes (so that the sampling distribution differs from the policy), and
the SFT warm-up is short (so that many of the first answers are not a letter). Each variant adds one enhancement to
plain GRPO; two have all three, as in DeepSeek-V3.2 (arXiv 2512.02556) and as in the Enhanced GRPO design for USMLE.

Usage::

    python benchmarks/ablation.py --keep runs/ablation --at-once 2     # 8 variants, 5 seeds: over an hour on two cores
    python benchmarks/ablation.py --draw runs/ablation                 # table and plot of finished runs
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from trials import folder_of, train

from groupwise.plots import COLOURS, new_figure, save_figure
from groupwise.rundir import metric_column, read_metrics
from groupwise.stats import bootstrap_interval, paired_test

HARDER = {
    "loss.name": "reinforce",  # without clipping, only a mask can drop an off-policy sample
    "advantages.scale": "none",
    "train.steps": "100",
    "train.iterations": "2",
    "train.mini_batches": "4",
    "sampling.top_k": "3",
    "sft.steps": "20",
    "masks.min_length": "1",  # an answer is one letter
    "masks.off_policy_threshold": "0.5",
    "loss.kl_coef": "0.1",
    "loss.kl_aggregation": "token_mean",
    "run.checkpoint_every": "0",
    "run.resumable": "false",
    "run.save_rollouts": "false",
    "run.tensorboard": "false",
    "run.plot": "false",
    "model.device": "cpu",
}
PLAIN = "plain"
V32 = {
    "unbiased KL": {"loss.kl": "unbiased"},
    "off-policy mask": {"masks.off_policy": "v3.2"},
    "keep sampling mask": {"masks.keep_sampling_mask": "true"},
    "all three (V3.2)": {"loss.kl": "unbiased", "masks.off_policy": "v3.2", "masks.keep_sampling_mask": "true"},
}
ENHANCED = {
    "full KL × mean ratio": {"loss.kl": "full_ratio_weighted"},
    "validity filter": {"masks.validity": "true"},
    "all three (Enhanced GRPO)": {
        "loss.kl": "full_ratio_weighted",
        "masks.off_policy": "reference_drift",
        "masks.validity": "true",
    },
}
VARIANTS: dict[str, dict[str, str]] = {PLAIN: {}, **V32, **ENHANCED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=1, help="runs in parallel; each uses one core")
    parser.add_argument("--keep", type=Path, help="keep the runs and the plot in this folder")
    parser.add_argument("--draw", type=Path, help="only read the runs in this folder")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="only these variants")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.draw or args.keep or Path(temporary)
        names = args.only or list(VARIANTS)
        if args.draw is None:
            runs = [(name, seed) for seed in range(args.seeds) for name in names]
            with ThreadPoolExecutor(args.at_once) as pool:
                list(pool.map(lambda pair: train("quiz.toml", settings_of(*pair), folder_of(root, *pair)), runs))
        results = {name: [read(folder_of(root, name, seed)) for seed in range(args.seeds)] for name in names}
        report(results)
        if args.draw or args.keep:
            draw(results, root / "ablation.png")
            print(f"plot: {root / 'ablation.png'}")


def settings_of(name: str, seed: int) -> dict[str, str]:
    return {**HARDER, **VARIANTS[name], "train.seed": str(seed)}


def read(folder: Path) -> dict[str, np.ndarray]:
    """A run's curves: held-out accuracy and its steps, KL, gradient norm, shares kept and without answer."""
    rows = read_metrics(folder / "metrics.jsonl")
    steps, accuracy = metric_column(rows, "eval/accuracy")
    curves = {"at": steps, "accuracy": accuracy}
    for name in ("kl", "grad_norm", "mask_ratio", "accuracy_no_answer"):
        curves[name] = metric_column(rows, name)[1]
    return {name: np.asarray(values, dtype=np.float64) for name, values in curves.items()}


def report(results: dict[str, list[dict[str, np.ndarray]]]) -> None:
    plain = [run["accuracy"][-1] for run in results.get(PLAIN, [])]
    heads = (("", -27), ("held out, at the end", 24), ("mean over the run", 19), ("worst fall", 12), ("KL", 8),
             ("no answer", 11), ("kept", 7), ("p", 8))  # fmt: skip
    print("".join(f"{head:<{-width}}" if width < 0 else f"{head:>{width}}" for head, width in heads))
    for name, runs in results.items():
        last = bootstrap_interval([run["accuracy"][-1] for run in runs])
        over = np.mean([run["accuracy"].mean() for run in runs])
        fall = max(float((np.maximum.accumulate(run["accuracy"]) - run["accuracy"]).max()) for run in runs)
        kl = np.mean([run["kl"][-20:].mean() for run in runs])
        silent = np.mean([run["accuracy_no_answer"][:20].mean() for run in runs])
        kept = np.mean([run["mask_ratio"].mean() if len(run["mask_ratio"]) else 1.0 for run in runs])
        differs = ""
        if name != PLAIN and len(plain) == len(runs) > 1:
            differs = f"{paired_test([run['accuracy'][-1] for run in runs], plain).p_value:.2f}"
        span = f"{last.estimate:.1%} [{last.low:.1%}, {last.high:.1%}]"
        print(f"{name:27}{span:>24}{over:>19.1%}{fall:>12.1%}{kl:>8.3f}{silent:>11.1%}{kept:>7.1%}{differs:>8}")


def draw(results: dict[str, list[dict[str, np.ndarray]]], path: Path) -> None:
    """Held-out accuracy over steps on the left; final accuracy and KL on the right."""
    figure = new_figure(11, 6.6)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1))
    halves = (("as in DeepSeek-V3.2", V32), ("as in Enhanced GRPO for USMLE", ENHANCED))
    colours = {PLAIN: "0.45"} | dict(zip([name for name in VARIANTS if name != PLAIN], COLOURS, strict=False))
    for row, (title, forms) in enumerate(halves):
        axes = figure.add_subplot(grid[row, 0])
        for name in (name for name in (PLAIN, *forms) if name in results):
            runs = results[name]
            band = bootstrap_interval(np.stack([run["accuracy"] for run in runs]))
            axes.plot(runs[0]["at"], band.estimate, color=colours[name], linewidth=2, label=name)
            axes.fill_between(runs[0]["at"], band.low, band.high, color=colours[name], alpha=0.13, linewidth=0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set(xlabel="step" if row else "", ylabel="right on held-out questions", ylim=(0, 1.02))
        if axes.get_lines():
            axes.legend(frameon=False, fontsize=8, loc="lower right" if row == 0 else "upper left", ncols=1 + row)
    for row, (title, values) in enumerate(
        (
            ("right at the end (hollow: mean over the run)", "accuracy"),
            ("KL to the reference, last 20 steps", "kl"),
        )
    ):
        axes = figure.add_subplot(grid[row, 1])
        for place, (name, runs) in enumerate(results.items()):
            tail = 1 if values == "accuracy" else 20
            ends = [run[values][-tail:].mean() for run in runs]
            band = bootstrap_interval(ends)
            axes.plot([band.low, band.high], [place, place], color=colours[name], linewidth=3, alpha=0.4)
            axes.plot(ends, [place] * len(ends), "o", color=colours[name], markersize=3.5, alpha=0.6)
            axes.plot(band.estimate, place, "D", color=colours[name], markersize=6)
            if values == "accuracy":
                axes.plot(np.mean([run[values].mean() for run in runs]), place, "o", mfc="white", color=colours[name])
        axes.set_yticks(range(len(results)), list(results), fontsize=8)
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
