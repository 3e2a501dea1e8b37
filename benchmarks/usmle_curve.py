"""The learning curves of USMLE runs over sampled tokens, as tables and a plot, with the curve the design expects.

Usage::

    python benchmarks/usmle_curve.py runs/…-usmle [MORE RUNS] --out curve.png
    python benchmarks/usmle_curve.py "GRPO=runs/one,runs/two" --out curve.png    # a title; a run and its continuation
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from groupwise.plots import COLOURS, new_figure, save_figure
from groupwise.rundir import read_metrics

# Expected by the Enhanced GRPO design: tokens, accuracy, average reward, KL.
EXPECTED = (
    (0, 0.25, 0.25, 0.00),
    (50e6, 0.28, 0.28, 0.05),
    (150e6, 0.33, 0.33, 0.15),
    (300e6, 0.38, 0.38, 0.25),
    (450e6, 0.41, 0.41, 0.32),
    (600e6, 0.42, 0.42, 0.35),
)
MEASURE = "eval/accuracy_lenient"
WINDOW = 10  # steps before an evaluation over which reward and KL are averaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="[TITLE=]RUN[,CONTINUED]")
    parser.add_argument("--out", type=Path, help="draw the curves into this file")
    args = parser.parse_args()
    curves = {}
    for text in args.runs:
        title, _, paths = text.rpartition("=")
        runs = [Path(path) for path in paths.split(",")]
        curves[title or runs[0].name] = [
            point for run, before in zip(runs, starts(runs), strict=True) for point in curve(run, *before)
        ]
    for name, points in curves.items():
        print(f"\n{name}\n\n| step | tokens | held out | reward | KL |\n|---|---|---|---|---|")
        for point in points:
            accuracy = f"{100 * point['accuracy']:.1f} % [{100 * point['low']:.1f}, {100 * point['high']:.1f}]"
            rest = [f"{point[key]:.3f}" if math.isfinite(point[key]) else "" for key in ("reward", "kl")]
            print(f"| {point['step']:.0f} | {point['tokens'] / 1e6:.2f} M | {accuracy} | {rest[0]} | {rest[1]} |")
    if args.out:
        draw(curves, args.out)
        print(f"\npicture: {args.out}")


def starts(runs: list[Path]) -> Iterator[tuple[float, float]]:
    """The steps and tokens of the runs before each one."""
    steps = tokens = 0.0
    for run in runs:
        yield steps, tokens
        rows = [row for row in read_metrics(run / "metrics.jsonl") if "num_tokens" in row]
        steps, tokens = steps + rows[-1]["step"], tokens + rows[-1]["num_tokens"]


def curve(run: Path, steps_before: float, tokens_before: float) -> list[dict[str, float]]:
    """The evaluations of a run, with sampled tokens, reward and KL."""
    steps: list[dict[str, float]] = []
    points = []
    for row in read_metrics(run / "metrics.jsonl"):
        if MEASURE not in row:
            steps.append(row)
            continue
        recent = steps[-WINDOW:]
        points.append(
            {
                "step": steps_before + row["step"],
                "tokens": tokens_before + (steps[-1].get("num_tokens", 0) if steps else 0),
                "accuracy": row[MEASURE],
                "low": row[f"{MEASURE}_low"],
                "high": row[f"{MEASURE}_high"],
                "reward": mean(recent, "reward"),
                "kl": mean(recent, "kl"),
            }
        )
    return points


def mean(rows: list[dict[str, float]], name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else math.nan


def draw(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    figure = new_figure(7.5, 4.4)
    axes = figure.add_subplot()
    start = min(point["tokens"] for points in curves.values() for point in points if point["tokens"])
    for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
        at = [max(point["tokens"], start / 2) for point in points]
        axes.fill_between(at, [p["low"] for p in points], [p["high"] for p in points], color=colour, alpha=0.12, lw=0)
        axes.plot(at, [p["accuracy"] for p in points], "o-", color=colour, linewidth=2, markersize=4, label=name)
    expected = [(max(tokens, start / 2), accuracy) for tokens, accuracy, _, _ in EXPECTED]
    axes.plot(*zip(*expected, strict=True), "s--", color="0.5", markersize=4, label="expected by the design")
    axes.set(xscale="log", xlabel="sampled tokens (the first point is before training)", ylabel="right, held out")
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
