"""The preference term: the quiz with GRPO, with DPO, and with both at several weights.

Two experiments. In the first, the reward is correct and pairs come from the groups: a right answer against a wrong one,
which adds no information to the reward. In the second, the reward is wrong four times in ten, and the preferences are
correct: 512 pairs about other questions, or a judge that ranks the answers of each group (recipes/preference.py). Each
run is `groupwise train recipes/preference.toml` with a few settings changed.

Usage::

    python benchmarks/preference.py --keep runs/preference --at-once 2      # 60 runs: over an hour on two cores
    python benchmarks/preference.py --seeds 2 --steps 60 --at-once 2        # a first look
    python benchmarks/preference.py --draw runs/preference                  # tables and plot of finished runs
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from trials import RECIPES, folder_of, train

from groupwise.plots import COLOURS, new_figure, save_figure
from groupwise.rundir import metric_column, read_metrics
from groupwise.stats import bootstrap_interval, paired_test

sys.path.insert(0, str(RECIPES))
from preference import write_pairs

PAIRS = 512
GOAL = 0.9
GROUP, NOISY = "correct reward, pairs from groups", "noisy reward, correct preferences"
GRPO = "GRPO"
DATA = {
    "task": f"{RECIPES / 'preference.py'}:noisy_quiz",
    "preference.pairs": "data",
    "preference.shuffle": "false",  # four questions about the same options in a row, as in the quiz
    "preference.batch_size": "64",
}
JUDGE = {"task": DATA["task"], "preference.reward": "correct"}
VARIANTS: dict[str, dict[str, dict[str, str]]] = {
    GROUP: {
        GRPO: {"preference.weight": "0"},
        "DPO": {"loss.policy_coef": "0", "loss.kl_coef": "0", "preference.weight": "1"},
        "DPO and KL, w₂ 3": {"loss.policy_coef": "0", "preference.weight": "3"},
        "both, w₂ 1": {"preference.weight": "1"},
        "both, w₂ 3": {"preference.weight": "3"},
        "both, w₂ 10": {"preference.weight": "10"},
    },
    NOISY: {
        GRPO: {**DATA, "preference.weight": "0"},
        "DPO and KL, w₂ 10": {**DATA, "loss.policy_coef": "0", "preference.weight": "10"},
        "both, w₂ 3": {**DATA, "preference.weight": "3"},
        "both, w₂ 10": {**DATA, "preference.weight": "10"},
        "both, w₂ 30": {**DATA, "preference.weight": "30"},
        "both, a judge, w₂ 3": {**JUDGE, "preference.weight": "3"},
    },
}
SAME = {
    "run.tensorboard": "false",
    "run.plot": "false",
    "run.save_rollouts": "false",
    "run.resumable": "false",
    "run.checkpoint_every": "0",
    "model.device": "cpu",
    "evaluate.every": "10",
    "train.log_term_gradients_every": "0",
}

Curves = dict[str, np.ndarray]  # by variant: accuracy (seeds, evaluations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="default: those of the recipe")
    parser.add_argument("--at-once", type=int, default=1, help="runs in parallel; each uses one core")
    parser.add_argument("--keep", type=Path, help="keep the runs and the plot in this folder")
    parser.add_argument("--draw", type=Path, help="only read the runs in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.draw or args.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        runs = [(kind, name, seed) for seed in range(args.seeds) for kind in VARIANTS for name in VARIANTS[kind]]
        if args.draw is None:
            for seed in range(args.seeds):
                write_pairs(pairs_of(root, seed), PAIRS, seed)
            with ThreadPoolExecutor(args.at_once) as pool:
                list(pool.map(lambda run: one_run(root, *run, args.steps), runs))
        results = {kind: read(root, kind, variants, args.seeds) for kind, variants in VARIANTS.items()}
        for kind, (samples, curves) in results.items():
            report(kind, samples, curves)
        if args.draw or args.keep:
            draw(results, root / "preference.png")
            print(f"plot: {root / 'preference.png'}")


def pairs_of(root: Path, seed: int) -> Path:
    return root / f"pairs-{seed}.jsonl"


def one_run(root: Path, kind: str, variant: str, seed: int, steps: int | None) -> None:
    settings = {**SAME, **VARIANTS[kind][variant], "train.seed": seed, **({"train.steps": steps} if steps else {})}
    if "preference.pairs" in settings:
        settings["preference.train"] = pairs_of(root, seed)
    train("preference.toml", settings, folder_of(root, kind, variant, seed))


def read(root: Path, kind: str, variants: Mapping[str, object], seeds: int) -> tuple[np.ndarray, Curves]:
    """The number of answers sampled before each evaluation, and the accuracies."""
    curves, samples = {}, np.zeros(0)
    for variant in variants:
        accuracies = []
        for seed in range(seeds):
            rows = read_metrics(folder_of(root, kind, variant, seed) / "metrics.jsonl")
            steps, accuracy = metric_column(rows, "eval/accuracy")
            _, tokens = metric_column(rows, "num_tokens")  # an answer is one token
            samples = np.array([tokens[step - 1] if step else 0 for step in steps], dtype=np.float64)
            accuracies.append(accuracy)
        curves[variant] = np.array(accuracies, dtype=np.float64)
    return samples, curves


def report(kind: str, samples: np.ndarray, curves: Curves) -> None:
    heads = (("at the end", 24), ("p", 7), ("mean of the curve", 24), ("p", 7), (f"{GOAL:.0%} in", 9), ("answers", 10))
    print(f"\n{kind + f', {samples[-1]:,.0f} answers':52}{''.join(f'{head:>{width}}' for head, width in heads)}")
    for variant, accuracy in curves.items():
        cells = []
        for value, against in ((accuracy[:, -1], curves[GRPO][:, -1]), (accuracy.mean(1), curves[GRPO].mean(1))):
            band = bootstrap_interval(value)
            span = f"{band.estimate:.1%} [{band.low:.1%}, {band.high:.1%}]"
            differs = "" if variant == GRPO or len(value) < 2 else f"{paired_test(value, against).p_value:.2f}"
            cells.append(f"{span:>24}{differs:>7}")
        first = [next((at for at, right in enumerate(run) if right >= GOAL), None) for run in accuracy]
        reached = [samples[at] for at in first if at is not None]
        middle = f"{np.median(reached):,.0f}" if len(reached) > len(first) / 2 else "–"
        cells.append(f"{f'{len(reached)} of {len(first)}':>9}{middle:>10}")
        print(f"{variant:52}{''.join(cells)}")


def draw(results: Mapping[str, tuple[np.ndarray, Curves]], path: Path) -> None:
    figure = new_figure(12, 4.6)
    grid = figure.add_gridspec(1, len(results))
    for place, (kind, (samples, curves)) in enumerate(results.items()):
        axes = figure.add_subplot(grid[0, place])
        for colour, (variant, accuracy) in zip(COLOURS, curves.items(), strict=False):
            band = bootstrap_interval(accuracy)
            axes.plot(samples / 1000, 100 * band.estimate, color=colour, linewidth=2, label=variant)
            axes.fill_between(samples / 1000, 100 * band.low, 100 * band.high, color=colour, alpha=0.12, linewidth=0)
        axes.set_title(kind, loc="left", fontsize=10)
        axes.set(xlabel="answers sampled, in thousands", ylim=(15, 102))
        if place == 0:
            axes.set_ylabel("right on held-out questions, %")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
