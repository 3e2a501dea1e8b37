"""Reward and diversity on writing prompts: GRPO within prompts and within similarity groups.

`groupwise train recipes/creative.toml` with both groupings and several seeds. Diversity is that of the training
answers: the mean cosine distance of two answers to a prompt, and the share of distinct word pairs. A policy that
learned less also lost less diversity, so diversity is compared at equal reward too.

Usage::

    python benchmarks/creative.py --data creative_prompts.jsonl --keep runs/creative --at-once 6   # one GPU, 12 minutes
    python benchmarks/creative.py --draw runs/creative                     # table and plot of finished runs
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from trials import folder_of, smooth, train

from groupwise.plots import COLOURS, new_figure, save_figure
from groupwise.rundir import metric_column, read_metrics
from groupwise.stats import bootstrap_interval

GROUPINGS = {"within prompts": "prompt", "within similarity groups": "similarity"}
QUIET = {"run.tensorboard": "false", "run.plot": "false", "run.checkpoint_every": "0", "run.resumable": "false",
         "grouping.log_diversity": "true"}  # fmt: skip
MEASURED = {
    "reward": "reward",
    "diversity/mean_distance": "distance of two answers",
    "diversity/distinct_2": "distinct word pairs",
    "diversity/effective_clusters": "effective clusters",
}
LAST = 20  # steps at the start and at the end of a run
FIRST_AND_LAST = (slice(0, LAST), slice(-LAST, None))

Runs = list[dict[str, np.ndarray]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a .jsonl file of prompts")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs in parallel on the device")
    parser.add_argument("--keep", type=Path, help="train, and keep the runs and the plot in this folder")
    parser.add_argument("--draw", type=Path, help="only read the runs in this folder")
    args = parser.parse_args()
    if args.draw is None and (args.data is None or args.keep is None):
        parser.error("pass --data and --keep to train, or --draw to read finished runs")
    root = args.draw or args.keep
    runs = [(grouping, seed) for seed in range(args.seeds) for grouping in GROUPINGS]
    if args.draw is None:
        common = {
            **QUIET,
            "data.train": args.data.resolve(),
            "data.held_out_from_train": 40,
            "model.source": args.model,
        }
        settings = {
            (grouping, seed): {**common, "advantages.grouping": GROUPINGS[grouping], "train.seed": seed}
            for grouping, seed in runs
        }
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(lambda run: train("creative.toml", settings[run], folder_of(root, *run)), runs))
    results = {name: [read(folder_of(root, name, seed)) for seed in range(args.seeds)] for name in GROUPINGS}
    report(results)
    draw(results, root / "creative.png")
    print(f"plot: {root / 'creative.png'}")


def read(folder: Path) -> dict[str, np.ndarray]:
    rows = read_metrics(folder / "metrics.jsonl")
    names = [*MEASURED, "eval/reward", "time/group", "step_time", "similarity_groups/n_single_member_groups"]
    return {name: np.asarray(metric_column(rows, name)[1], dtype=np.float64) for name in names}


def report(results: dict[str, Runs]) -> None:
    print(f"{f'first and last {LAST} steps':30}{''.join(f'{name:>40}' for name in results)}")
    for name, words in MEASURED.items():
        cells = []
        for runs in results.values():
            start, end = (bootstrap_interval([run[name][part].mean() for run in runs]) for part in FIRST_AND_LAST)
            cells.append(f"{start.estimate:.3f} → {end.estimate:.3f} [{end.low:.3f}, {end.high:.3f}]")
        print(f"{words:30}{''.join(f'{cell:>40}' for cell in cells)}")
    cells = [
        " → ".join(f"{np.mean([run['eval/reward'][k] for run in runs]):.3f}" for k in (0, -1))
        for runs in results.values()
    ]
    print(f"{'reward, held-out prompts':30}{''.join(f'{cell:>40}' for cell in cells)}")
    seconds = [np.mean([run["time/group"].mean() for run in runs]) for runs in results.values()]
    step_seconds = [np.mean([run["step_time"].mean() for run in runs]) for runs in results.values()]
    cells = [f"{100 * part / step:.1f} % of {step:.2f} s" for part, step in zip(seconds, step_seconds, strict=True)]
    print(f"{'embedding and clustering':30}{''.join(f'{cell:>40}' for cell in cells)}")
    level = min(smooth(run["reward"]).max() for runs in results.values() for run in runs)
    cells = []
    for name in ("diversity/mean_distance", "diversity/distinct_2"):
        bands = [bootstrap_interval([at_reward(run, name, level) for run in runs]) for runs in results.values()]
        cells.append([f"{band.estimate:.3f} [{band.low:.3f}, {band.high:.3f}]" for band in bands])
    for name, row in zip(("distance", "distinct word pairs"), cells, strict=True):
        print(f"{f'{name} at reward {level:.2f}':30}{''.join(f'{cell:>40}' for cell in row)}")


def at_reward(run: dict[str, np.ndarray], name: str, level: float) -> float:
    """A metric at the step where the reward first reaches the level."""
    return float(smooth(run[name])[int(np.argmax(smooth(run["reward"]) >= level))])


def draw(results: dict[str, Runs], path: Path) -> None:
    figure = new_figure(11, 6.8)
    grid = figure.add_gridspec(2, 2)
    shown = list(MEASURED.items())[:3]
    for place, (name, words) in enumerate(shown):
        axes = figure.add_subplot(grid[place // 2, place % 2])
        for colour, (grouping, runs) in zip(COLOURS, results.items(), strict=False):
            band = bootstrap_interval(np.stack([smooth(run[name]) for run in runs]))
            steps = np.arange(1, len(band.estimate) + 1)
            axes.plot(steps, band.estimate, color=colour, linewidth=2, label=f"{grouping} ({len(runs)} seeds)")
            axes.fill_between(steps, band.low, band.high, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(words, loc="left", fontsize=10)
        axes.set(xlabel="step")
        if place == 0:
            axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes = figure.add_subplot(grid[1, 1])
    for colour, runs in zip(COLOURS, results.values(), strict=False):
        for run in runs:
            axes.plot(smooth(run["reward"]), smooth(run["diversity/mean_distance"]), color=colour, linewidth=1.2)
    axes.set_title("distance at each reward, run by run", loc="left", fontsize=10)
    axes.set(xlabel="reward")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
