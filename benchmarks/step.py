"""A complete GRPO step: groupwise's trainer, its drop-in for TRL, and TRL, with the same model, prompts and settings.

Usage::

    python benchmarks/step.py --against trl            # on the GPU if there is one, else on the CPU
    python benchmarks/step.py                          # groupwise, and the script for TRL with its import changed
    python benchmarks/step.py --against trl --micro 16 # TRL with micro-batches of 16 answers
    python benchmarks/step.py --against trl --trl-vllm # TRL generates with vLLM in the same process
    python benchmarks/step.py --device cpu --cpu-time  # CPU seconds: on a busy machine they vary less than wall time
    python benchmarks/step.py --turns                  # what the drop-in adds to a step, on a busy machine too

Every answer has its full length, the loss is DAPO's, without KL and gradient checkpointing. Each side runs in a
separate process, one after the other, so that peak memory is measured separately; the first steps (compilation, graph
capture) are not counted. Before that both compute loss and gradient of the same samples in float32, which must agree.
A step is the time from one step's end to the next, so that it holds callbacks and logs too. Compare the ratios rather
than the seconds. With ``--turns``, groupwise's trainer and the drop-in take steps in turn, in one process, so that both
see the same machine; CPU time is reported beside wall time.

The line "limits" has what the device needs at least (benchmarks/limits.py), measured in the same run: for generation,
reading weights and cache and the matrix products; for training, the products of a forward and a backward pass. Each
prompt is counted once per group.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, fill, median
from offline_vllm import require_vllm
from step_trl import make_trl, run_agreement, run_trl, run_trl_vllm, watch_of
from step_work import (
    between,
    describe,
    environment,
    now,
    peak,
    recipe_of,
    reward,
    rows,
    run_limits,
    save_model,
    start_counting,
    timed_generation,
)

from groupwise.rundir import write_json


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--against", choices=("trl",), help="the library to compare with")
    parser.add_argument("--micro", type=int, help="TRL's micro-batch in answers (default: 32 on a GPU, 8 on a CPU)")
    parser.add_argument("--top-k", type=int, default=40)
    parser.add_argument("--turns", action="store_true", help="only groupwise and the drop-in, step by step in turn")
    parser.add_argument("--no-drop-in", action="store_true", help="without the drop-in for TRL")
    parser.add_argument("--trl-vllm", action="store_true", help="TRL generates with vLLM, in its own process")
    parser.add_argument("--memory-share", type=float, default=0.3, help="of the GPU's memory, for TRL's vLLM")
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds instead of wall time")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu_time and args.device != "cpu":
        parser.error("--cpu-time counts what the CPU computes; it needs --device cpu")
    if args.trl_vllm and not args.against:
        parser.error("--trl-vllm needs --against trl")
    if args.turns and (args.against or args.no_drop_in or args.cpu_time or args.json):
        parser.error("--turns compares groupwise and the drop-in only, and prints wall and CPU time")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.absolute().parent}")
    if args.trl_vllm:
        require_vllm(args.device)
    fill(args)
    args.micro = args.micro or (32 if args.device == "cuda" else 8)
    if args.side:
        print("RESULT " + json.dumps(SIDES[args.side](args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder, shape = Path(folder), args.model
        save_model(args)
        print(describe(args), flush=True)
        if args.turns:
            report_turns(in_new_process(args, "turns"))
            return
        if args.against:
            report_agreement(in_new_process(args, "agreement"))
        other = "trl-vllm" if args.trl_vllm else args.against
        sides = ["groupwise", *([] if args.no_drop_in else ["drop-in"]), *([other] if other else [])]
        results = {side: in_new_process(args, side) for side in sides}
        limits = in_new_process(args, "limits")
        report(args, results, limits)
    if args.json:
        sizes = ("device", "prompts", "prompt_tokens", "samples", "new_tokens", "repeat", "micro", "top_k", "cpu_time")
        work = {"model": shape, **{name: getattr(args, name) for name in sizes}}
        write_json(args.json, {"work": work, "results": results, "limits": limits})


def in_new_process(args: argparse.Namespace, side: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--side", side, "--folder", str(args.folder), "--model", args.model]
    for name in ("device", "prompts", "prompt_tokens", "samples", "new_tokens", "repeat", "micro", "top_k"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--memory-share", str(args.memory_share), *(["--cpu-time"] if args.cpu_time else [])]
    command += ["--dtype", args.dtype] if args.dtype else []
    done = subprocess.run(command, capture_output=True, text=True, env=environment(side))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{side} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


# --- the sides -------------------------------------------------------------------------------------------------------


def native_trainer(args: argparse.Namespace, steps: int, **settings: Any) -> Any:
    from groupwise.config import with_settings
    from groupwise.tasks.base import Task
    from groupwise.training.trainer import Trainer

    recipe, task = with_settings(recipe_of(args, steps), settings), Task("benchmark", rows(args))
    return Trainer(recipe, task=task, rewards=[reward], folder=args.folder / "run")


def run_groupwise(args: argparse.Namespace) -> dict[str, Any]:
    warm = 3 if args.device == "cuda" else 1
    steps: list[dict[str, float]] = []
    ends: list[float] = []
    with timed_generation(args) as generations, native_trainer(args, warm + args.repeat) as trainer:
        start_counting(args)
        for result in trainer.steps():
            steps.append(result.metrics)
            ends.append(now(args))
            if len(steps) == warm + args.repeat:
                break
    return result_of(args, steps[warm:], between(ends, warm), generations[warm:])


def run_drop_in(args: argparse.Namespace) -> dict[str, Any]:
    import groupwise.trl
    from groupwise.rundir import read_metrics

    warm, watch = 3 if args.device == "cuda" else 1, watch_of(args)
    trainer = make_trl(args, warm + args.repeat, [watch], library=groupwise.trl)
    start_counting(args)
    with timed_generation(args) as generations:
        trainer.train()
    steps = [row for row in read_metrics(args.folder / "trl" / "metrics.jsonl") if "step_time" in row]
    return result_of(args, steps[warm:], between(watch.ends, warm), generations[warm:])


def run_turns(args: argparse.Namespace) -> dict[str, Any]:
    """Steps of the drop-in, each followed by one of groupwise's trainer, in one process."""
    from transformers import TrainerCallback

    import groupwise.trl

    warm = 3 if args.device == "cuda" else 1
    seconds: dict[str, list[tuple[float, float]]] = {"groupwise": [], "drop-in": []}

    def clock() -> tuple[float, float]:
        return now(args), time.process_time()

    with native_trainer(args, warm + args.repeat + 1, **{"run.save_rollouts": True}) as native:  # as the drop-in does
        steps = native.steps()

        class Turns(TrainerCallback):
            before: tuple[float, float] | None = None

            def on_step_end(self, *_: Any, **__: Any) -> None:
                ended = clock()
                if self.before is not None:
                    seconds["drop-in"].append((ended[0] - self.before[0], ended[1] - self.before[1]))
                    next(steps)
                    wall, cpu = clock()
                    seconds["groupwise"].append((wall - ended[0], cpu - ended[1]))
                self.before = clock()

        make_trl(args, warm + args.repeat + 1, [Turns()], library=groupwise.trl).train()
    return {
        side: {"wall": median([wall for wall, _ in turns[warm:]]), "CPU": median([cpu for _, cpu in turns[warm:]])}
        for side, turns in seconds.items()
    }


def result_of(
    args: argparse.Namespace, steps: list[dict[str, float]], times: list[float], generations: list[float]
) -> dict[str, Any]:
    """A side's result. The trainer's own times of the parts are wall times; CPU time counts generation and the rest."""
    if any(step["completions/mean_length"] != args.new_tokens for step in steps):
        raise SystemExit("groupwise stopped early; the comparison would not be fair")
    step = median(times)
    if args.cpu_time:
        generation = median(generations)
        parts = {"generation": generation, "training": step - generation}
    else:
        parts = {name: median([step[f"time/{key}"] for step in steps]) for name, key in PARTS.items()}
    return {"step": step, **parts, "peak": peak(args), "tokens": args.prompts * args.samples * args.new_tokens}


PARTS = {"generation": "generate", "training": "train"}
SIDES = {
    "groupwise": run_groupwise, "drop-in": run_drop_in, "turns": run_turns, "trl": run_trl, "trl-vllm": run_trl_vllm,
    "agreement": run_agreement, "limits": run_limits,
}  # fmt: skip


# --- reporting -------------------------------------------------------------------------------------------------------


def report_agreement(result: dict[str, float]) -> None:
    print(
        f"on the same samples, float32: loss {result['ours']:.3e} and {result['theirs']:.3e}; the gradients differ by "
        f"{result['gradient']:.1e} of their norm {result['size']:.3g}",
        flush=True,
    )
    if result["gradient"] > 1e-3:
        raise SystemExit("loss and gradient do not agree; the comparison is meaningless")


def report(args: argparse.Namespace, results: dict[str, dict[str, float]], limits: dict[str, float]) -> None:
    seconds = "CPU seconds" if args.cpu_time else "seconds"
    print(f"\n{seconds:18}{'step':>9}{'generation':>12}{'training':>10}{'peak GiB':>10}{'tokens/s':>10}")
    for side, result in results.items():
        print(f"{side:18}{parts(result)}{result['peak']:10.1f}{result['tokens'] / result['step']:10,.0f}")
    print(f"{'limits':18}{parts(limits)}")
    ours = results["groupwise"]
    for side, result in results.items():
        if side != "groupwise":
            print(f"{side + ' /':18}{ratios(result, ours)}{result['peak'] / ours['peak']:9.2f}×")
    print(f"{'groupwise / limits':18}{ratios(ours, limits)}")
    print(
        f"the ratios are to groupwise; the limit of generation is {limits['bandwidth']:.3f} s to read weights and "
        f"cache and {limits['products']:.3f} s of matrix products, that of a step is the sum of both parts"
    )


def parts(result: dict[str, float]) -> str:
    return f"{result['step']:8.3f}s{result['generation']:11.3f}s{result['training']:9.3f}s"


def ratios(result: dict[str, float], base: dict[str, float]) -> str:
    one, two, three = (result[name] / base[name] for name in ("step", "generation", "training"))
    return f"{one:8.2f}×{two:11.2f}×{three:9.2f}×"


def report_turns(result: dict[str, dict[str, float]]) -> None:
    for time_of in ("wall", "CPU"):
        ours, drop_in = result["groupwise"][time_of], result["drop-in"][time_of]
        print(f"{time_of} time of a step: groupwise {ours:.3f} s, drop-in {drop_in:.3f} s, {drop_in / ours:.3f}×")


if __name__ == "__main__":
    main()
