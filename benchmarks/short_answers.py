"""CPU time of a training step with many short answers, by part, with the model's own products measured apart.

Usage::

    python benchmarks/short_answers.py                           # answers of one token, and of at most 8
    python benchmarks/short_answers.py --against ../other        # and the same with another checkout, in turn

The quiz with a tiny model on one core, where a step's time is mostly spent around the model. Products are the matrix
products and attention kernels of the same steps: their shapes are recorded in a run of its own, and each is timed by
itself. What is left is the host's part. Everything is CPU time, which a busy machine changes less than seconds; each
number is the least of several rounds. With ``--against``, both checkouts run this file in processes of their own, and
both must compute the same losses, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("sampling", "scoring", "log-probs before", "update", "record", "rest")
WARM = 2  # steps that are not counted
PRODUCTS = {
    "mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the folder of another checkout")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8], help="tokens of an answer, at most")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print("RESULT " + json.dumps([measure(args, tokens) for tokens in args.tokens]))
        return
    if args.against is not None and not (args.against / "groupwise").is_dir():
        raise SystemExit(f"{args.against} is no checkout: it has no folder groupwise")
    checkouts = {"this checkout": ROOT} | ({} if args.against is None else {"the other": args.against.resolve()})
    results: dict[str, list[Any]] = {name: [] for name in checkouts}
    for _ in range(args.rounds):
        for name, folder in checkouts.items():
            results[name].append(in_new_process(folder))
    for number, tokens in enumerate(args.tokens):
        print(f"\n{args.prompts} prompts × {args.samples} answers of at most {tokens} tokens, ms of CPU time per step")
        report({name: best([rounds[number] for rounds in results[name]]) for name in checkouts})


def in_new_process(checkout: Path) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--side", *sys.argv[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{checkout} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The least of each number, and the losses, which are the same in every round."""
    merged: dict[str, Any] = {"losses": rounds[0]["losses"]}
    for kind in ("cpu", "products"):
        merged[kind] = {part: min(result[kind][part] for result in rounds) for part in PARTS}
    return merged


def report(sides: dict[str, dict[str, Any]]) -> None:
    rows = [(name, part, side["cpu"][part], side["products"][part]) for name, side in sides.items() for part in PARTS]
    print(f"{'':16}{'':18}{'total':>10}{'products':>10}{'host':>10}")
    for name in sides:
        own = [row[1:] for row in rows if row[0] == name]
        for part, cpu, products in [*own, ("step", sum(row[1] for row in own), sum(row[2] for row in own))]:
            print(f"{name:16}{part:18}{1e3 * cpu:10.1f}{1e3 * products:10.1f}{1e3 * (cpu - products):10.1f}")
    if len(sides) == 2:
        ours, other = sides.values()
        totals = [sum(side["cpu"].values()) for side in (other, ours)]
        hosts = [total - sum(side["products"].values()) for total, side in zip(totals, (other, ours), strict=True)]
        equal = "equal" if ours["losses"] == other["losses"] else "NOT EQUAL"
        print(f"the other / this: step {totals[0] / totals[1]:.2f}, host {hosts[0] / hosts[1]:.2f}; losses are {equal}")


def measure(args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """CPU seconds per step of each part, those of its products, and the losses."""
    clock = PartClock()
    losses = run(args, tokens, clock)
    recorder = ProductRecorder()
    run(args, tokens, recorder)
    cpu = {part: clock.seconds[part] / args.steps for part in PARTS}
    return {"cpu": cpu, "products": recorder.seconds(args.steps), "losses": losses}


def run(args: argparse.Namespace, tokens: int, watch: PartClock | ProductRecorder) -> list[float]:
    """The losses of a short run of the quiz, watched from step `WARM` on."""
    from groupwise.config import load_recipe
    from groupwise.training.display import Display
    from groupwise.training.trainer import Trainer

    settings = {
        "sampling.samples_per_prompt": args.samples, "sampling.max_new_tokens": tokens, "sft.steps": 5,
        "train.batch_size": args.prompts, "train.steps": WARM + args.steps + 1, "evaluate.before_training": False,
        "evaluate.every": 0, "run.checkpoint_every": 0, "run.tensorboard": False, "run.plot": False,
        "model.device": "cpu", "data.train_rows": args.prompts * (WARM + args.steps + 1), "data.held_out_rows": 4,
    }  # fmt: skip
    recipe = load_recipe(ROOT / "recipes" / "quiz.toml", settings)
    with tempfile.TemporaryDirectory() as folder, Trainer(recipe, folder=f"{folder}/run", display=Display()) as trainer:
        for owner, method, part in (
            (trainer.collector, "_sample", "sampling"),
            (trainer.collector, "_score", "scoring"),
            (trainer.updates, "begin", "log-probs before"),
            (trainer.updates, "run", "update"),
            (trainer, "_record", "record"),
        ):
            setattr(owner, method, within(watch, part, getattr(owner, method)))
        steps, losses = trainer.steps(), []
        for number in range(WARM + args.steps):
            watch.counts = number >= WARM
            with watch.part("rest"):
                losses.append(next(steps).metrics["loss"])
        return losses


def within(watch: PartClock | ProductRecorder, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*positional: Any, **named: Any) -> Any:
        with watch.part(part):
            return function(*positional, **named)

    return watched


class PartClock:
    """CPU seconds of each part; a part within another one does not count there."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.counts = False
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._add()
        self._open.append(name)
        try:
            yield
        finally:
            self._add()
            self._open.pop()

    def _add(self) -> None:
        now = time.process_time()
        if self._open and self.counts:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


class ProductRecorder(TorchDispatchMode):
    """The products of each part by their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = False
        self._calls: Counter[Any] = Counter()
        self._open: list[str] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._open.append(name)
        try:
            with self if self.counts and len(self._open) == 1 else nullcontext():
                yield
        finally:
            self._open.pop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.name.removeprefix("aten::") in PRODUCTS:
            described = tuple(map(describe, args)), tuple((name, describe(value)) for name, value in kwargs.items())
            self._calls[self._open[-1], function, *described] += 1
        return function(*args, **kwargs)

    def seconds(self, steps: int) -> dict[str, float]:
        """CPU seconds per step, from each call repeated alone."""
        total = dict.fromkeys(PARTS, 0.0)
        for (part, function, args, named), count in self._calls.items():
            values, options = [make(value) for value in args], {name: make(value) for name, value in named}
            times = []
            for _ in range(5):
                start = time.process_time()
                function(*values, **options)
                times.append(time.process_time() - start)
            total[part] += min(times) * count / steps
        return total


def describe(value: Any) -> Any:
    return ("tensor", tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def make(value: Any) -> Any:
    if isinstance(value, tuple) and value and value[0] == "tensor":
        _, shape, strides, dtype = value
        size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        return torch.randn(size, dtype=dtype).as_strided(shape, strides)
    return value


if __name__ == "__main__":
    main()
