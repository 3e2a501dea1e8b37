"""Reward and variety of a real model on real writing prompts: all answers compared with all, or like with like.

`groupwise train recipes/creative.toml`, with both ways and several seeds. The variety is that of the answers that the
runs train on: the mean cosine distance of two answers to a prompt, the share of distinct word pairs. A policy that has
learned less has also lost less, so variety is compared at the same reward too.

Usage::

    python benchmarks/creative.py --data creative_prompts.jsonl --keep runs/creative --at-once 6   # one GPU, 12 minutes
    python benchmarks/creative.py --draw runs/creative                     # table and picture of runs that are there
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

WAYS = {"all with all": "prompt", "like with like": "similarity"}
QUIET = {"run.tensorboard": "false", "run.plot": "false", "run.checkpoint_every": "0", "run.resumable": "false",
         "grouping.log_diversity": "true"}  # fmt: skip
MEASURED = {
    "reward": "reward",
    "diversity/mean_distance": "distance of two answers",
    "diversity/distinct_2": "distinct word pairs",
    "diversity/effective_clusters": "effective clusters",
}
LAST = 20  # steps over which the end of a run is taken
FIRST_AND_LAST = (slice(0, LAST), slice(-LAST, None))

Runs = list[dict[str, np.ndarray]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the prompts, a .jsonl file")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side on the device")
    parser.add_argument("--keep", type=Path, help="train, and keep the runs in this folder, with the picture")
    parser.add_argument("--draw", type=Path, help="only read the runs that are in this folder")
    args = parser.parse_args()
    if args.draw is None and (args.data is None or args.keep is None):
        parser.error("give --data and --keep to train, or --draw to read runs that are there")
    root = args.draw or args.keep
    wanted = [(way, seed) for seed in range(args.seeds) for way in WAYS]
    if args.draw is None:
        own = {"data.train": args.data.resolve(), "model.source": args.model}
        settings = {(w, s): {**QUIET, **own, "advantages.grouping": WAYS[w], "train.seed": s} for w, s in wanted}
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(lambda run: train("creative.toml", settings[run], folder_of(root, *run)), wanted))
    found = {way: [read(folder_of(root, way, seed)) for seed in range(args.seeds)] for way in WAYS}
    tell(found)
    draw(found, root / "creative.png")
    print(f"picture: {root / 'creative.png'}")


def read(folder: Path) -> dict[str, np.ndarray]:
    rows = read_metrics(folder / "metrics.jsonl")
    names = [*MEASURED, "eval/reward", "time/group", "step_time", "similarity_groups/n_single_member_groups"]
    return {name: np.asarray(metric_column(rows, name)[1], dtype=np.float64) for name in names}


def tell(found: dict[str, Runs]) -> None:
    print(f"{f'first and last {LAST} steps':30}{''.join(f'{way:>40}' for way in found)}")
    for name, words in MEASURED.items():
        cells = []
        for runs in found.values():
            start, end = (bootstrap_interval([run[name][part].mean() for run in runs]) for part in FIRST_AND_LAST)
            cells.append(f"{start.estimate:.3f} → {end.estimate:.3f} [{end.low:.3f}, {end.high:.3f}]")
        print(f"{words:30}{''.join(f'{cell:>40}' for cell in cells)}")
    cells = [
        " → ".join(f"{np.mean([run['eval/reward'][k] for run in runs]):.3f}" for k in (0, -1))
        for runs in found.values()
    ]
    print(f"{'reward, held-out prompts':30}{''.join(f'{cell:>40}' for cell in cells)}")
    seconds = [np.mean([run["time/group"].mean() for run in runs]) for runs in found.values()]
    whole = [np.mean([run["step_time"].mean() for run in runs]) for runs in found.values()]
    cells = [f"{100 * own / all_:.1f} % of {all_:.2f} s" for own, all_ in zip(seconds, whole, strict=True)]
    print(f"{'embedding and clustering':30}{''.join(f'{cell:>40}' for cell in cells)}")
    level = min(smooth(run["reward"]).max() for runs in found.values() for run in runs)
    cells = []
    for name in ("diversity/mean_distance", "diversity/distinct_2"):
        own = [bootstrap_interval([at_reward(run, name, level) for run in runs]) for runs in found.values()]
        cells.append([f"{band.estimate:.3f} [{band.low:.3f}, {band.high:.3f}]" for band in own])
    for name, row in zip(("distance", "distinct word pairs"), cells, strict=True):
        print(f"{f'{name} at reward {level:.2f}':30}{''.join(f'{cell:>40}' for cell in row)}")


def at_reward(run: dict[str, np.ndarray], name: str, level: float) -> float:
    """A measure at the step at which the reward first reached a level."""
    return float(smooth(run[name])[int(np.argmax(smooth(run["reward"]) >= level))])


def draw(found: dict[str, Runs], path: Path) -> None:
    figure = new_figure(11, 6.8)
    grid = figure.add_gridspec(2, 2)
    shown = list(MEASURED.items())[:3]
    for place, (name, words) in enumerate(shown):
        axes = figure.add_subplot(grid[place // 2, place % 2])
        for colour, (way, runs) in zip(COLOURS, found.items(), strict=False):
            band = bootstrap_interval(np.stack([smooth(run[name]) for run in runs]))
            steps = np.arange(1, len(band.estimate) + 1)
            axes.plot(steps, band.estimate, color=colour, linewidth=2, label=f"{way} ({len(runs)} seeds)")
            axes.fill_between(steps, band.low, band.high, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(words, loc="left", fontsize=10)
        axes.set(xlabel="step")
        if place == 0:
            axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes = figure.add_subplot(grid[1, 1])
    for colour, runs in zip(COLOURS, found.values(), strict=False):
        for run in runs:
            axes.plot(smooth(run["reward"]), smooth(run["diversity/mean_distance"]), color=colour, linewidth=1.2)
    axes.set_title("distance at each reward, run by run", loc="left", fontsize=10)
    axes.set(xlabel="reward")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
