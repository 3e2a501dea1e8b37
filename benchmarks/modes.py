"""Does variety survive? Six equally good answers and a noisy reward, by several ways of comparing (recipes/modes.py).

Two tasks. In the first all six scenes are worth the same, and whatever becomes of them is chance: plain GRPO should
lose some, comparing like with like should keep them, at the same quality. In the second one scene is worth less than
the others, which is a reason to tell it less: here comparing like with like has to fail, since no answer of that scene
is ever compared with one of another. Each run is `groupwise train recipes/modes.toml` with a few settings changed.

Usage::

    python benchmarks/modes.py --keep runs/modes --at-once 2     # 3 ways, 2 tasks, 5 seeds: about an hour on two cores
    python benchmarks/modes.py --seeds 2 --steps 60 --at-once 2  # a first look
    python benchmarks/modes.py --draw runs/modes                 # table and picture of runs that are there
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from trials import RECIPES, folder_of, smooth, train

from groupwise.plots import COLOURS, new_figure, save_figure
from groupwise.rundir import metric_column, read_metrics
from groupwise.stats import bootstrap_interval, paired_test

WORSE = "castle"
PLAIN = "all with all"
WAYS = {
    PLAIN: {"advantages.grouping": "prompt", "grouping.log_diversity": "true"},
    "like with like": {},
    "like with like, shrinkage 1": {"advantages.shrinkage": "1.0"},
}
TASKS = {"equal": "task", "one worse": "task_with_worse"}
QUIET = {"run.tensorboard": "false", "run.plot": "false", "run.save_rollouts": "false", "run.resumable": "false",
         "run.export_dtype": "float32", "model.device": "cpu"}  # fmt: skip
LAST = 25  # steps over which the end of a run is taken
MEASURED = ("modes/effective", "modes/quality", "modes/worth", "modes/no_scene", f"modes/share/{WORSE}",
            "similarity_groups/avg_groups_per_prompt", "similarity_groups/n_single_member_groups")  # fmt: skip

Runs = list[dict[str, np.ndarray]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="by default the recipe's")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side; each uses one core")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS), help="these tasks alone")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS), help="these ways alone")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, with the picture")
    parser.add_argument("--draw", type=Path, help="only read the runs that are in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.draw or args.keep or Path(temporary)
        wanted = [(task, way, seed) for seed in range(args.seeds) for task in args.tasks for way in args.ways]
        if args.draw is None:
            with ThreadPoolExecutor(args.at_once) as pool:
                list(
                    pool.map(
                        lambda run: train("modes.toml", settings_of(*run, args.steps), folder_of(root, *run)), wanted
                    )
                )
        found = {
            task: {way: [read(folder_of(root, task, way, seed)) for seed in range(args.seeds)] for way in args.ways}
            for task in args.tasks
        }
        for task, ways in found.items():
            tell(task, ways)
        if args.draw or args.keep:
            draw(found, root / "modes.png")
            print(f"picture: {root / 'modes.png'}")


def settings_of(task: str, way: str, seed: int, steps: int | None) -> dict[str, object]:
    given = {"task": f"{RECIPES / 'modes.py'}:{TASKS[task]}", "train.seed": seed}
    return {**QUIET, **WAYS[way], **given, **({"train.steps": steps} if steps else {})}


def read(folder: Path) -> dict[str, np.ndarray]:
    rows = read_metrics(folder / "metrics.jsonl")
    return {name: np.asarray(metric_column(rows, name)[1], dtype=np.float64) for name in MEASURED}


def end(runs: Runs, name: str) -> list[float]:
    return [float(run[name][-LAST:].mean()) for run in runs]


def tell(task: str, ways: dict[str, Runs]) -> None:
    heads = (("effective scenes", 22), ("p", 7), ("worth", 20), ("p", 7), ("no scene", 10), (f"share of {WORSE}", 17),
             ("clusters", 10), ("alone", 7))  # fmt: skip
    print(f"\n{task + ', last ' + str(LAST) + ' steps':32}{''.join(f'{head:>{width}}' for head, width in heads)}")
    for way, runs in ways.items():
        cells = []
        for name, width in (("modes/effective", 22), ("modes/worth", 20)):
            band = bootstrap_interval(end(runs, name))
            span = f"{band.estimate:.2f} [{band.low:.2f}, {band.high:.2f}]"
            differs = ""
            if way != PLAIN and PLAIN in ways and len(runs) > 1:
                differs = f"{paired_test(end(runs, name), end(ways[PLAIN], name)).p_value:.2f}"
            cells.append(f"{span:>{width}}{differs:>7}")
        rest = [np.mean(end(runs, name)) for name in MEASURED[3:]]
        cells.append(f"{rest[0]:>10.1%}{rest[1]:>17.1%}{rest[2]:>10.2f}{rest[3]:>7.0f}")
        print(f"{way:32}{''.join(cells)}")


def draw(found: dict[str, dict[str, Runs]], path: Path) -> None:
    figure = new_figure(11, 3.7 * len(found))
    grid = figure.add_gridspec(len(found), 2)
    panels: Sequence[tuple[str, str, str, tuple[float, float]]] = (
        ("equal", "modes/effective", "six scenes worth the same: effective number of scenes", (0.8, 6.2)),
        ("equal", "modes/worth", "… and what an answer is worth, without the noise", (0.3, 1.02)),
        ("one worse", f"modes/share/{WORSE}", "one scene worth half a point less: how often it is told", (0.0, 0.36)),
        ("one worse", "modes/worth", "… and what an answer is worth", (0.1, 1.02)),
    )
    for place, (task, name, title, limits) in enumerate(panel for panel in panels if panel[0] in found):
        axes = figure.add_subplot(grid[place // 2, place % 2])
        for colour, (way, runs) in zip(COLOURS, found[task].items(), strict=False):
            band = bootstrap_interval(np.stack([smooth(run[name]) for run in runs]))
            steps = np.arange(1, len(band.estimate) + 1)
            axes.plot(steps, band.estimate, color=colour, linewidth=2, label=way)
            axes.fill_between(steps, band.low, band.high, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set(xlabel="step", ylim=limits)
        if place == 0:
            axes.legend(frameon=False, fontsize=8, loc="lower left")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
