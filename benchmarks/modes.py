"""Mode collapse: six equally good answers and a noisy reward, with several groupings (recipes/modes.py).

Two tasks. In the first, all six scenes have the same reward: GRPO within prompts should lose some of them by chance,
similarity groups should keep them at the same quality. In the second, one scene has a lower reward and should become
rare: here similarity groups must fail, since answers with different scenes are never compared. Each run is
`groupwise train recipes/modes.toml` with a few settings changed.

Usage::

    python benchmarks/modes.py --keep runs/modes --at-once 2     # 3 groupings, 2 tasks, 5 seeds: an hour on two cores
    python benchmarks/modes.py --seeds 2 --steps 60 --at-once 2  # a first look
    python benchmarks/modes.py --draw runs/modes                 # table and plot of finished runs
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
PLAIN = "within prompts"
GROUPINGS = {
    PLAIN: {"advantages.grouping": "prompt", "grouping.log_diversity": "true"},
    "similarity groups": {},
    "similarity groups, shrinkage 1": {"advantages.shrinkage": "1.0"},
}
TASKS = {"equal": "task", "one worse": "task_with_worse"}
QUIET = {"run.tensorboard": "false", "run.plot": "false", "run.save_rollouts": "false", "run.resumable": "false",
         "run.export_dtype": "float32", "model.device": "cpu"}  # fmt: skip
LAST = 25  # steps at the end of a run
MEASURED = ("modes/effective", "modes/quality", "modes/worth", "modes/no_scene", f"modes/share/{WORSE}",
            "similarity_groups/avg_groups_per_prompt", "similarity_groups/n_single_member_groups")  # fmt: skip

Runs = list[dict[str, np.ndarray]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="default: those of the recipe")
    parser.add_argument("--at-once", type=int, default=1, help="runs in parallel; each uses one core")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS), help="only these tasks")
    choices = list(GROUPINGS)
    parser.add_argument("--groupings", nargs="*", choices=choices, default=choices, help="only these groupings")
    parser.add_argument("--keep", type=Path, help="keep the runs and the plot in this folder")
    parser.add_argument("--draw", type=Path, help="only read the runs in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.draw or args.keep or Path(temporary)
        runs = [(task, name, seed) for seed in range(args.seeds) for task in args.tasks for name in args.groupings]
        if args.draw is None:
            with ThreadPoolExecutor(args.at_once) as pool:
                list(
                    pool.map(
                        lambda run: train("modes.toml", settings_of(*run, args.steps), folder_of(root, *run)), runs
                    )
                )
        results = {
            task: {
                name: [read(folder_of(root, task, name, seed)) for seed in range(args.seeds)] for name in args.groupings
            }
            for task in args.tasks
        }
        for task, groupings in results.items():
            report(task, groupings)
        if args.draw or args.keep:
            draw(results, root / "modes.png")
            print(f"plot: {root / 'modes.png'}")


def settings_of(task: str, grouping: str, seed: int, steps: int | None) -> dict[str, object]:
    settings = {"task": f"{RECIPES / 'modes.py'}:{TASKS[task]}", "train.seed": seed}
    return {**QUIET, **GROUPINGS[grouping], **settings, **({"train.steps": steps} if steps else {})}


def read(folder: Path) -> dict[str, np.ndarray]:
    rows = read_metrics(folder / "metrics.jsonl")
    return {name: np.asarray(metric_column(rows, name)[1], dtype=np.float64) for name in MEASURED}


def end(runs: Runs, name: str) -> list[float]:
    return [float(run[name][-LAST:].mean()) for run in runs]


def report(task: str, groupings: dict[str, Runs]) -> None:
    heads = (("effective scenes", 22), ("p", 7), ("worth", 20), ("p", 7), ("no scene", 10), (f"share of {WORSE}", 17),
             ("clusters", 10), ("alone", 7))  # fmt: skip
    print(f"\n{task + ', last ' + str(LAST) + ' steps':32}{''.join(f'{head:>{width}}' for head, width in heads)}")
    for grouping, runs in groupings.items():
        cells = []
        for name, width in (("modes/effective", 22), ("modes/worth", 20)):
            band = bootstrap_interval(end(runs, name))
            span = f"{band.estimate:.2f} [{band.low:.2f}, {band.high:.2f}]"
            differs = ""
            if grouping != PLAIN and PLAIN in groupings and len(runs) > 1:
                differs = f"{paired_test(end(runs, name), end(groupings[PLAIN], name)).p_value:.2f}"
            cells.append(f"{span:>{width}}{differs:>7}")
        rest = [np.mean(end(runs, name)) for name in MEASURED[3:]]
        cells.append(f"{rest[0]:>10.1%}{rest[1]:>17.1%}{rest[2]:>10.2f}{rest[3]:>7.0f}")
        print(f"{grouping:32}{''.join(cells)}")


def draw(results: dict[str, dict[str, Runs]], path: Path) -> None:
    figure = new_figure(11, 3.7 * len(results))
    grid = figure.add_gridspec(len(results), 2)
    panels: Sequence[tuple[str, str, str, tuple[float, float]]] = (
        ("equal", "modes/effective", "six scenes with equal reward: effective number of scenes", (0.8, 6.2)),
        ("equal", "modes/worth", "… and reward without the noise", (0.3, 1.02)),
        ("one worse", f"modes/share/{WORSE}", "one scene with half a point less: its share", (0.0, 0.36)),
        ("one worse", "modes/worth", "… and reward without the noise", (0.1, 1.02)),
    )
    for place, (task, name, title, limits) in enumerate(panel for panel in panels if panel[0] in results):
        axes = figure.add_subplot(grid[place // 2, place % 2])
        for colour, (grouping, runs) in zip(COLOURS, results[task].items(), strict=False):
            band = bootstrap_interval(np.stack([smooth(run[name]) for run in runs]))
            steps = np.arange(1, len(band.estimate) + 1)
            axes.plot(steps, band.estimate, color=colour, linewidth=2, label=grouping)
            axes.fill_between(steps, band.low, band.high, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set(xlabel="step", ylim=limits)
        if place == 0:
            axes.legend(frameon=False, fontsize=8, loc="lower left")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
