"""What each enhancement of Enhanced GRPO does, on the quiz: accuracy, KL and stability over several seeds.

The quiz of `make train`, made harder in the ways that the enhancements are for: each batch is used for several updates
(so that samples go stale), answers are sampled among the three likeliest bytes (so that the sampler's distribution is
not the policy's), and the warm-up is short (so that a good part of the first answers is no letter at all). Each variant
adds one thing to plain GRPO; two have all three, in DeepSeek-V3.2's forms and in the first document's.

Usage::

    python benchmarks/ablation.py --keep runs/ablation --at-once 2     # 8 variants, 5 seeds: over an hour on two cores
    python benchmarks/ablation.py --draw runs/ablation                 # table and picture of runs that are there
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
    "loss.name": "reinforce",  # the document's loss: nothing is clipped, so only a mask can stop a stale sample
    "advantages.scale": "none",
    "train.steps": "100",
    "train.iterations": "2",
    "train.mini_batches": "4",
    "sampling.top_k": "3",
    "sft.steps": "20",
    "masks.min_length": "1",  # an answer is one letter
    "masks.off_policy_threshold": "0.5",
    "loss.kl_coef": "0.1",
    "run.checkpoint_every": "0",
    "run.resumable": "false",
    "run.save_rollouts": "false",
    "run.tensorboard": "false",
    "run.plot": "false",
    "model.device": "cpu",
}
PLAIN = "plain"
PAPER = {
    "unbiased KL": {"loss.kl": "unbiased"},
    "off-policy mask": {"masks.off_policy": "v3.2"},
    "keep sampling mask": {"masks.keep_sampling_mask": "true"},
    "all three (V3.2)": {"loss.kl": "unbiased", "masks.off_policy": "v3.2", "masks.keep_sampling_mask": "true"},
}
DOCUMENT = {
    "exact KL (document)": {"loss.kl": "full_ratio_weighted"},
    "validity filter (document)": {"masks.validity": "true"},
    "all three (literal)": {
        "loss.kl": "full_ratio_weighted",
        "masks.off_policy": "reference_drift",
        "masks.validity": "true",
    },
}
VARIANTS: dict[str, dict[str, str]] = {PLAIN: {}, **PAPER, **DOCUMENT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side; each uses one core")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, with the picture")
    parser.add_argument("--draw", type=Path, help="only read the runs that are in this folder")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="these variants alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.draw or args.keep or Path(temporary)
        names = args.only or list(VARIANTS)
        if args.draw is None:
            wanted = [(name, seed) for seed in range(args.seeds) for name in names]
            with ThreadPoolExecutor(args.at_once) as pool:
                list(pool.map(lambda pair: train("quiz.toml", settings_of(*pair), folder_of(root, *pair)), wanted))
        found = {name: [read(folder_of(root, name, seed)) for seed in range(args.seeds)] for name in names}
        tell(found)
        if args.draw or args.keep:
            draw(found, root / "ablation.png")
            print(f"picture: {root / 'ablation.png'}")


def settings_of(name: str, seed: int) -> dict[str, str]:
    return {**HARDER, **VARIANTS[name], "train.seed": str(seed)}


def read(folder: Path) -> dict[str, np.ndarray]:
    """A run's curves: held-out accuracy with its steps, KL, gradient norm, kept and unanswered shares."""
    rows = read_metrics(folder / "metrics.jsonl")
    steps, accuracy = metric_column(rows, "eval/accuracy")
    curves = {"at": steps, "accuracy": accuracy}
    for name in ("kl", "grad_norm", "mask_ratio", "accuracy_no_answer"):
        curves[name] = metric_column(rows, name)[1]
    return {name: np.asarray(values, dtype=np.float64) for name, values in curves.items()}


def tell(found: dict[str, list[dict[str, np.ndarray]]]) -> None:
    plain = [run["accuracy"][-1] for run in found.get(PLAIN, [])]
    heads = (("", -27), ("held out, at the end", 24), ("mean over the run", 19), ("worst fall", 12), ("KL", 8),
             ("no answer", 11), ("kept", 7), ("p", 8))  # fmt: skip
    print("".join(f"{head:<{-width}}" if width < 0 else f"{head:>{width}}" for head, width in heads))
    for name, runs in found.items():
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


def draw(found: dict[str, list[dict[str, np.ndarray]]], path: Path) -> None:
    """Curves of the held-out accuracy with intervals on the left; the end and the KL of each variant on the right."""
    figure = new_figure(11, 6.6)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1))
    halves = (("DeepSeek-V3.2's forms, one by one", PAPER), ("the first document's forms", DOCUMENT))
    colours = {PLAIN: "0.45"} | dict(zip([name for name in VARIANTS if name != PLAIN], COLOURS, strict=False))
    for row, (title, forms) in enumerate(halves):
        axes = figure.add_subplot(grid[row, 0])
        for name in (name for name in (PLAIN, *forms) if name in found):
            runs = found[name]
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
        for place, (name, runs) in enumerate(found.items()):
            tail = 1 if values == "accuracy" else 20
            each = [run[values][-tail:].mean() for run in runs]
            band = bootstrap_interval(each)
            axes.plot([band.low, band.high], [place, place], color=colours[name], linewidth=3, alpha=0.4)
            axes.plot(each, [place] * len(each), "o", color=colours[name], markersize=3.5, alpha=0.6)
            axes.plot(band.estimate, place, "D", color=colours[name], markersize=6)
            if values == "accuracy":
                axes.plot(np.mean([run[values].mean() for run in runs]), place, "o", mfc="white", color=colours[name])
        axes.set_yticks(range(len(found)), list(found), fontsize=8)
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
