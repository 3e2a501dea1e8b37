"""What does a preference term add to GRPO? The quiz by GRPO, by DPO, and by both at several weights.

Two experiments. In the first the reward is right, and pairs come from the groups themselves: a right answer against a
wrong one, which says nothing that the reward has not said. In the second the reward is wrong four times in ten, and the
preferences are clean: 512 pairs about other questions, or a judge who puts the answers of each group in order
(recipes/preference.py). Each run is `groupwise train recipes/preference.toml` with a few settings changed.

Usage::

    python benchmarks/preference.py --keep runs/preference --at-once 2      # 60 runs: over an hour on two cores
    python benchmarks/preference.py --seeds 2 --steps 60 --at-once 2        # a first look
    python benchmarks/preference.py --draw runs/preference                  # tables and picture of runs that are there
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
GROUP, NOISY = "a right reward, pairs of the groups", "a noisy reward, clean preferences"
GRPO = "GRPO"
DATA = {
    "task": f"{RECIPES / 'preference.py'}:noisy_quiz",
    "preference.pairs": "data",
    "preference.shuffle": "false",  # four questions about the same options follow one another, as in the quiz itself
    "preference.batch_size": "64",
}
JUDGE = {"task": DATA["task"], "preference.reward": "correct"}
WAYS: dict[str, dict[str, dict[str, str]]] = {
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

Curves = dict[str, np.ndarray]  # by way: accuracy (seeds, evaluations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="by default the recipe's")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side; each uses one core")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, with the picture")
    parser.add_argument("--draw", type=Path, help="only read the runs that are in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.draw or args.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        wanted = [(kind, way, seed) for seed in range(args.seeds) for kind, ways in WAYS.items() for way in ways]
        if args.draw is None:
            for seed in range(args.seeds):
                write_pairs(pairs_of(root, seed), PAIRS, seed)
            with ThreadPoolExecutor(args.at_once) as pool:
                list(pool.map(lambda run: one_run(root, *run, args.steps), wanted))
        found = {kind: read(root, kind, ways, args.seeds) for kind, ways in WAYS.items()}
        for kind, (samples, curves) in found.items():
            tell(kind, samples, curves)
        if args.draw or args.keep:
            draw(found, root / "preference.png")
            print(f"picture: {root / 'preference.png'}")


def pairs_of(root: Path, seed: int) -> Path:
    return root / f"pairs-{seed}.jsonl"


def one_run(root: Path, kind: str, way: str, seed: int, steps: int | None) -> None:
    settings = {**SAME, **WAYS[kind][way], "train.seed": seed, **({"train.steps": steps} if steps else {})}
    if "preference.pairs" in settings:
        settings["preference.train"] = pairs_of(root, seed)
    train("preference.toml", settings, folder_of(root, kind, way, seed))


def read(root: Path, kind: str, ways: Mapping[str, object], seeds: int) -> tuple[np.ndarray, Curves]:
    """How many answers had been sampled at each evaluation, and the accuracy there."""
    curves, samples = {}, np.zeros(0)
    for way in ways:
        found = []
        for seed in range(seeds):
            rows = read_metrics(folder_of(root, kind, way, seed) / "metrics.jsonl")
            steps, accuracy = metric_column(rows, "eval/accuracy")
            _, tokens = metric_column(rows, "num_tokens")  # an answer is one token
            samples = np.array([tokens[step - 1] if step else 0 for step in steps], dtype=np.float64)
            found.append(accuracy)
        curves[way] = np.array(found, dtype=np.float64)
    return samples, curves


def tell(kind: str, samples: np.ndarray, curves: Curves) -> None:
    heads = (("at the end", 24), ("p", 7), ("mean of the curve", 24), ("p", 7), (f"{GOAL:.0%} in", 9), ("answers", 10))
    print(f"\n{kind + f', {samples[-1]:,.0f} answers':52}{''.join(f'{head:>{width}}' for head, width in heads)}")
    for way, accuracy in curves.items():
        cells = []
        for value, against in ((accuracy[:, -1], curves[GRPO][:, -1]), (accuracy.mean(1), curves[GRPO].mean(1))):
            band = bootstrap_interval(value)
            span = f"{band.estimate:.1%} [{band.low:.1%}, {band.high:.1%}]"
            differs = "" if way == GRPO or len(value) < 2 else f"{paired_test(value, against).p_value:.2f}"
            cells.append(f"{span:>24}{differs:>7}")
        there = [next((at for at, right in enumerate(run) if right >= GOAL), None) for run in accuracy]
        reached = [samples[at] for at in there if at is not None]
        middle = f"{np.median(reached):,.0f}" if len(reached) > len(there) / 2 else "–"
        cells.append(f"{f'{len(reached)} of {len(there)}':>9}{middle:>10}")
        print(f"{way:52}{''.join(cells)}")


def draw(found: Mapping[str, tuple[np.ndarray, Curves]], path: Path) -> None:
    figure = new_figure(12, 4.6)
    grid = figure.add_gridspec(1, len(found))
    for place, (kind, (samples, curves)) in enumerate(found.items()):
        axes = figure.add_subplot(grid[0, place])
        for colour, (way, accuracy) in zip(COLOURS, curves.items(), strict=False):
            band = bootstrap_interval(accuracy)
            axes.plot(samples / 1000, 100 * band.estimate, color=colour, linewidth=2, label=way)
            axes.fill_between(samples / 1000, 100 * band.low, 100 * band.high, color=colour, alpha=0.12, linewidth=0)
        axes.set_title(kind, loc="left", fontsize=10)
        axes.set(xlabel="answers sampled, in thousands", ylim=(15, 102))
        if place == 0:
            axes.set_ylabel("right on held-out questions, %")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
