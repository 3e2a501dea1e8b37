"""What generation and a training step cost as prompts, groups and completions grow, and for uneven lengths.

Usage::

    python benchmarks/lengths.py                                   # on the GPU if there is one, else a tiny model
    python benchmarks/lengths.py --against vllm --json lengths.json --picture lengths.png
    python benchmarks/lengths.py --data data/gsm8k_train.jsonl --only gsm8k,heavy --limits 8192,16384
    python benchmarks/lengths.py --draw lengths.json --picture lengths.png      # only the table and the picture

Three sweeps change one length and leave the others at --prompt-tokens, --samples and --new-tokens: ``prompts``,
``groups`` (samples per prompt) and ``completions``. Two distributions have completions of different lengths: ``gsm8k``,
those of its worked answers, and ``heavy``, log-normal with a long tail (--median, --sigma), once per value of --limits,
which is the sampler's max_new_tokens. Beside each stands ``even``: as many tokens, in completions of equal length. The
lengths are forced: each sample ends at its own, which the engine's plan of its cache does not know, only the limit.

"running" is the number of samples in a decode step, at most and on average; "preempted" counts the samples that had to
wait for memory after they had begun. A training step is forward and backward passes, gradient clipping and AdamW; it
does not see what was sampled. Peak memory holds the model. Generation and training of groupwise, and vLLM, are measured
one after the other, each in a process of its own, so that each has the device to itself; the first call of each point
is not counted. With --json each result is saved as it is measured, and the command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from against_vllm import ALONE, prompt_lengths
from common import SHORT_NAMES, arguments, counts, fill, median, names
from length_distributions import at_quantile, even, gsm8k_lengths, log_normal, spread
from offline_vllm import has_flashinfer, require_vllm
from results import Results
from sides import SIDES, Job, SideError, SideProcess, save_checkpoint

from groupwise.plots import COLOURS, new_figure, save_figure

SWEEPS = {"prompts": "tokens of a prompt", "groups": "samples per prompt", "completions": "tokens of a completion"}
PARTS = {"vllm": "vllm", "generation": "groupwise", "training": "groupwise"}  # and the side that measures each
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "model": "tiny-shape", "prompts": 4, "prompt_tokens": 64, "samples": 4, "new_tokens": 32,
        "sweep_prompts": [32, 128, 512], "sweep_groups": [2, 8, 32], "sweep_completions": [16, 64, 256],
        "limits": [128, 512], "gsm8k_limit": 512, "median": 40.0,
    },
    "cuda": {
        "model": "smollm2-135m-shape", "prompts": 16, "prompt_tokens": 250, "samples": 16, "new_tokens": 512,
        "sweep_prompts": [250, 1000, 4000, 8000], "sweep_groups": [4, 8, 16, 32, 64],
        "sweep_completions": [128, 512, 2048, 8192], "limits": [8192, 16384], "gsm8k_limit": 512, "median": 800.0,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One line of the table. ``x``: the length that a sweep changes; for a distribution its name."""

    kind: str  # a sweep, gsm8k or heavy
    x: int | str
    job: Job

    @property
    def name(self) -> str:
        return f"{self.kind} {self.x}" if self.kind in SWEEPS else str(self.x)


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(repeat=1)
    for sweep in SWEEPS:
        parser.add_argument(f"--sweep-{sweep}", type=counts, metavar="N,N,…", help=f"{SWEEPS[sweep]} in this sweep")
    parser.add_argument("--limits", type=counts, metavar="N,N,…", help="max_new_tokens of the heavy-tailed lengths")
    parser.add_argument("--median", type=float, help="of the heavy-tailed lengths, in tokens")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the logarithm of these lengths")
    parser.add_argument("--gsm8k-limit", type=int, help="max_new_tokens for GSM8K's answers")
    parser.add_argument("--data", type=Path, help="GSM8K's rows, or their folder (default: quantiles of its answers)")
    parser.add_argument("--tokenizer", help="a model's folder or name; default: words, digits and signs are tokens")
    parser.add_argument("--only", type=names, help=f"of: {', '.join((*SWEEPS, 'gsm8k', 'heavy'))}")
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds, which a busy machine changes less")
    parser.add_argument("--no-training", action="store_true", help="only generation")
    parser.add_argument(
        "--cache-mib",
        type=int,
        help="size of the cache of keys and values (default: what fits, and 1,024 for vLLM on a CPU)",
    )
    parser.add_argument("--against", choices=("vllm",), help="also measure vLLM, which must be installed")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile and CUDA graphs")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a side's start, and for each call")
    parser.add_argument("--json", "--results", type=Path, help="save each result in this file, and go on from there")
    parser.add_argument("--picture", type=Path, help="draw the results in this file (.png, .svg or .pdf)")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="measure nothing: table and picture of such a file")
    args = parser.parse_args()
    check_arguments(parser, args)
    if args.draw:
        show(args, read_results(args.draw))
        return
    version = require_vllm(args.device) if args.against else None
    for name, value in DEFAULTS[args.device].items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    fill(args)
    points = points_of(args)
    results = Results(args.json, {**work_of(args), **({"vllm": version} if version else {})})
    print(describe(args, points), flush=True)
    failures = measure(args, points, results)
    show(args, results.found)
    for failure in failures:
        print(f"not measured: {failure}")
    sys.exit(1 if failures else 0)


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    kinds = (*SWEEPS, "gsm8k", "heavy")
    if unknown := [name for name in args.only or () if name not in kinds]:
        parser.error(f"--only {unknown[0]}: allowed are {', '.join(kinds)}")
    if args.cpu_time and (args.device != "cpu" or args.against):
        parser.error("--cpu-time counts what groupwise's process computes; it needs --device cpu, without --against")
    for name in ("median", "sigma", "gsm8k_limit", "cache_mib"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    if args.picture and args.picture.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--picture must end in .png, .svg or .pdf, got {args.picture.name}")
    for path in (args.picture, args.json):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.absolute().parent}")
    if args.tokenizer and not args.data:
        parser.error("--tokenizer counts the tokens of --data, which is missing")


# --- what is measured ------------------------------------------------------------------------------------------------


def points_of(args: argparse.Namespace) -> list[Point]:
    base = {"prompts": args.prompt_tokens, "groups": args.samples, "completions": args.new_tokens}
    points = []
    for sweep in SWEEPS:
        for x in getattr(args, f"sweep_{sweep}"):
            size = {**base, sweep: x}
            job = Job(prompt_lengths(size["prompts"], args.prompts), size["groups"], size["completions"])
            points.append(Point(sweep, x, job))
    for kind, limit, quantile in distributions(args):
        lengths = spread(quantile, args.prompts * args.samples, limit)
        name = kind if kind == "gsm8k" else f"{kind} {limit}"
        for label, chosen in ((name, lengths), (f"{name}, even", even(lengths))):
            job = Job(prompt_lengths(args.prompt_tokens, args.prompts), args.samples, limit, lengths=chosen)
            points.append(Point(kind, label, job))
    return [point for point in points if point.kind in (args.only or (*SWEEPS, "gsm8k", "heavy"))]


def distributions(args: argparse.Namespace) -> list[tuple[str, int, Any]]:
    """The name, the limit and the quantiles of each distribution."""
    tokenizer = None
    if args.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    ordered = gsm8k_lengths(args.data, tokenizer)
    heavy = log_normal(args.median, args.sigma)
    return [
        ("gsm8k", args.gsm8k_limit, lambda share: at_quantile(ordered, share)),
        *(("heavy", limit, heavy) for limit in args.limits),
    ]


def work_of(args: argparse.Namespace) -> dict[str, Any]:
    """What must be the same in all results of a file; the values of the sweeps may be extended."""
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    sizes = ("model", "dtype", "prompts", "prompt_tokens", "samples", "new_tokens", "repeat", "median", "sigma",
             "gsm8k_limit", "cache_mib", "cpu_time")  # fmt: skip
    sampler = {"FlashInfer's sampler": "installed" if has_flashinfer() else "not installed"} if args.against else {}
    facts = {"device": where, "torch": torch.__version__, "lengths of GSM8K": str(args.data or "quantiles"), **sampler}
    return {**facts, **{name: getattr(args, name) for name in sizes}}


def describe(args: argparse.Namespace, points: list[Point]) -> str:
    work = work_of(args)
    model = next((short for short, name in SHORT_NAMES.items() if name == args.model), Path(args.model).name)
    text = (
        f"{model} on {work['device']}, torch {work['torch']}\n{args.prompts} prompts; unless a sweep changes it, of "
        f"about {args.prompt_tokens} tokens × {args.samples} samples × {args.new_tokens} tokens"
    )
    if args.against:
        text += f"\nvLLM; FlashInfer's sampler: {'installed' if has_flashinfer() else 'not installed'}"
    for point in points:
        if point.kind not in SWEEPS and not point.name.endswith("even"):
            lengths = sorted(point.job.completion_lengths)
            text += (
                f"\n{point.name}: {len(lengths)} completions of {lengths[0]} to {lengths[-1]} tokens, "
                f"{sum(lengths) / len(lengths):.0f} on average, half of them up to {lengths[len(lengths) // 2]}"
            )
    return text


def measure(args: argparse.Namespace, points: list[Point], results: Results) -> list[str]:
    """Measure what ``results`` lacks, side after side; returns what failed.

    A side generates before it trains, so that the optimizer's state is not in its memory yet.
    """
    parts = [
        part for part in PARTS if (part != "vllm" or args.against) and (part != "training" or not args.no_training)
    ]
    missing = [(part, point) for part in parts for point in points if f"{part}: {point.name}" not in results]
    failures: list[str] = []
    if not missing:
        return failures
    longest = max(max(point.job.prompt_lengths) + point.job.new_tokens for point in points) + 8
    with tempfile.TemporaryDirectory(prefix="groupwise-bench-") as folder:
        save_checkpoint(args, args.model, folder, args.timeout, positions=max(8192, longest))
        for name in SIDES:
            left = [pair for pair in missing if PARTS[pair[0]] == name]
            if not left:
                continue
            try:
                with SideProcess(name, folder, options_of(args, name, points, longest), args.timeout) as side:
                    for part, point in left:
                        failures += measure_point(args, part, point, side, results)
            except SideError as error:
                failures.append(f"{name}: {error}")
    return failures


def options_of(args: argparse.Namespace, side: str, points: list[Point], longest: int) -> dict[str, Any]:
    sequences = max(len(point.job.completion_lengths) for point in points)
    options = {"device": args.device, "sequences": sequences, **({"dtype": args.dtype} if args.dtype else {})}
    if args.cache_mib:
        options["cache_mib"] = args.cache_mib
    if side == "vllm":
        return {**options, "longest": longest, "memory_share": ALONE, "eager": args.eager, "counts": True}
    return {**options, "clock": "cpu" if args.cpu_time else "wall"}


def measure_point(args: argparse.Namespace, part: str, point: Point, side: SideProcess, results: Results) -> list[str]:
    kind = "train" if part == "training" else "generate"
    try:
        answers = [side.ask(kind, point.job) for _ in range(args.repeat + 1)]
    except SideError as error:
        return [f"{part}: {point.name}: {error}"]
    lengths = point.job.completion_lengths
    facts = {"kind": point.kind, "x": point.x, "tokens": sum(lengths), "longest": max(lengths)}
    facts["unit"] = "CPU seconds" if args.cpu_time else "seconds"
    seconds = median([answer["seconds"] for answer in answers[1:]])
    result = {**answers[-1], **facts, "seconds": seconds, "first_call": answers[0]["seconds"]}
    results.add(f"{part}: {point.name}", result)
    print(f"  {part}, {point.name}: {seconds:.3f} s", flush=True)
    return []


# --- the table and the picture ---------------------------------------------------------------------------------------


def read_results(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = dict(content["results"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--draw {path} is not a file of this benchmark: {error!r}") from None
    if any(name.partition(": ")[0] not in PARTS for name in found):
        raise SystemExit(f"--draw {path} is a file of another benchmark")
    return found


def show(args: argparse.Namespace, found: dict[str, Any]) -> None:
    if not found:
        return
    report(found)
    if args.picture:
        draw(found, args.picture)
        print(f"picture: {args.picture}")


COLUMNS = (
    ("", -18), ("tokens", 11), ("generation", 12), ("tokens/s", 10), ("GiB", 7), ("running", 14), ("preempted", 11),
    ("training", 11), ("GiB", 7), ("vLLM", 10), ("ratio", 8), ("running", 14), ("preempted", 11),
)  # fmt: skip
TRAINING, VLLM = slice(7, 9), slice(9, 13)


def report(found: dict[str, Any]) -> None:
    """A line for each point, with the columns that were measured."""
    parts = {name.partition(": ")[0] for name in found}
    hidden = {
        *(range(*TRAINING.indices(len(COLUMNS))) if "training" not in parts else ()),
        *(range(*VLLM.indices(len(COLUMNS))) if "vllm" not in parts else ()),
    }

    def line(values: tuple[str, ...]) -> str:
        shown = [pair for number, pair in enumerate(zip(values, COLUMNS, strict=True)) if number not in hidden]
        return "".join(f"{value:<{-width}}" if width < 0 else f"{value:>{width}}" for value, (_, width) in shown)

    print(f"\n{unit_of(found)}\n" + line(tuple(name for name, _ in COLUMNS)))
    for name in dict.fromkeys(name.partition(": ")[2] for name in found):
        print(line(cells(name, *(found.get(f"{part}: {name}") for part in ("generation", "training", "vllm")))))


def cells(
    name: str, ours: dict[str, Any] | None, training: dict[str, Any] | None, vllm: dict[str, Any] | None
) -> tuple[str, ...]:
    any_of = ours or vllm or training or {}
    ratio = f"{vllm['seconds'] / ours['seconds']:.2f}×" if ours and vllm else "–"
    generation = (
        seconds(ours), f"{ours['tokens'] / ours['seconds']:,.0f}" if ours else "–", gib(ours), running(ours),
        preempted(ours),
    )  # fmt: skip
    theirs = seconds(vllm), ratio, running(vllm), preempted(vllm)
    return name, f"{any_of['tokens']:,}", *generation, seconds(training), gib(training), *theirs


def seconds(result: dict[str, Any] | None) -> str:
    return f"{result['seconds']:.3f} s" if result else "–"


def gib(result: dict[str, Any] | None) -> str:
    return f"{result['peak'] / 2**30:.2f}" if result and result.get("peak") else "–"


def running(result: dict[str, Any] | None) -> str:
    if not result or result.get("running_most") is None:
        return "–"
    return f"{result['running_most']} / {result['running_mean']:.1f}"


def preempted(result: dict[str, Any] | None) -> str:
    return str(result["preempted"]) if result and result.get("preempted") is not None else "–"


LINES = {"generation": "generation", "training": "training step", "vllm": "generation, vLLM"}


def draw(found: dict[str, Any], path: Path) -> None:
    """Seconds over each length, and seconds per 1,000 tokens for the distributions."""
    figure = new_figure(10, 7)
    grid = figure.add_gridspec(2, 2)
    for place, (sweep, label) in enumerate(SWEEPS.items()):
        axes = figure.add_subplot(grid[place // 2, place % 2])
        for colour, (part, name) in zip(COLOURS, LINES.items(), strict=False):
            points = sorted(
                (result["x"], result["seconds"])
                for key, result in found.items()
                if key.startswith(f"{part}: ") and result["kind"] == sweep
            )
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=2, markersize=4, label=name)
        axes.set(xlabel=label, ylabel=unit_of(found))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        if place == 0 and axes.get_lines():
            axes.legend(frameon=False, fontsize=9)
        axes.set_title(f"growing {sweep}", loc="left", fontsize=10)
    draw_distributions(figure.add_subplot(grid[1, 1]), found)
    save_figure(figure, path)


def unit_of(found: dict[str, Any]) -> str:
    return str(next(iter(found.values()))["unit"])


def draw_distributions(axes: Any, found: dict[str, Any]) -> None:
    labels = list(dict.fromkeys(str(result["x"]) for result in found.values() if result["kind"] not in SWEEPS))
    shown = [part for part in LINES if any(f"{part}: {label}" in found for label in labels)]
    colours = dict(zip(LINES, COLOURS, strict=False))
    width = 0.8 / max(1, len(shown))
    for number, part in enumerate(shown):
        for column, label in enumerate(labels):
            if (result := found.get(f"{part}: {label}")) is not None:
                cost = 1000 * result["seconds"] / result["tokens"]
                place = column + (number - (len(shown) - 1) / 2) * width
                axes.bar(place, cost, width=0.9 * width, color=colours[part])
    axes.set_xticks(range(len(labels)), [label.replace(", ", ",\n") for label in labels], fontsize=8)
    axes.set(ylabel=f"{unit_of(found)} per 1,000 tokens")
    axes.set_title("completions of different lengths", loc="left", fontsize=10)


if __name__ == "__main__":
    main()
