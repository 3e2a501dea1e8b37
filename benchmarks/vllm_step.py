"""A GRPO step with groupwise's engine and with vLLM in the same process: time of each part, and log-prob mismatch.

Usage::

    python benchmarks/vllm_step.py --model qwen2.5-0.5b-shape --out vllm_step.json   # needs vLLM 0.26 or 0.32
    python benchmarks/vllm_step.py --no-sleep             # vLLM keeps its memory while the model is trained

Both sides run the same recipe, prompts and lengths, each in a process of its own, one after the other; the first steps
(compilation, graph capture) are not counted. Every answer has its full length. The mismatch is that of a token's
log-prob between the sampler and the trainer, before the update; with --top-k vLLM cannot tell it. Compare the ratios
rather than the seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import arguments, fill, median, synchronize
from offline_vllm import environment
from step_work import describe, peak, recipe_of, reward, rows, save_model, start_counting

SIDES = ("engine", "vllm")
MISMATCH = ("sampler/logp_difference_mean", "sampler/logp_difference_max", "sampler/kl")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--no-sleep", action="store_true", help="vLLM keeps its memory while the model is trained")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile and CUDA graphs")
    parser.add_argument("--only", choices=SIDES, help="measure one side")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    fill(args)
    if args.side:
        print("RESULT " + json.dumps(run(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder, shape = Path(folder), args.model
        save_model(args)
        without_eos(Path(args.model))
        print(f"{shape}: {describe(args)}", flush=True)
        results = {side: in_new_process(args, side) for side in SIDES if args.only in (None, side)}
    report(results)
    if args.out:
        sizes = {name: getattr(args, name) for name in ("prompts", "prompt_tokens", "samples", "new_tokens", "top_k")}
        args.out.write_text(json.dumps({"model": shape, **sizes, "sleep": not args.no_sleep, **results}, indent=1))


def without_eos(folder: Path) -> None:
    """So that every answer has its full length, without excluding a token, which would change vLLM's log-probs."""
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        settings["eos_token_id"] = None
        (folder / name).write_text(json.dumps(settings))


def in_new_process(args: argparse.Namespace, side: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--side", side, "--folder", str(args.folder), "--model", args.model]
    for name in ("device", "prompts", "prompt_tokens", "samples", "new_tokens", "repeat", "top_k"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--gpu-memory-utilization", str(args.gpu_memory_utilization)]
    command += ["--dtype", args.dtype] if args.dtype else []
    command += [f"--{name.replace('_', '-')}" for name in ("no_sleep", "eager") if getattr(args, name)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{side} failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    result = dict(json.loads(lines[-1].removeprefix("RESULT ")))
    print(f"{side}: {json.dumps(result)}", flush=True)
    return result


def run(args: argparse.Namespace) -> dict[str, Any]:
    from groupwise.config import with_settings
    from groupwise.tasks.base import Task
    from groupwise.training.trainer import Trainer

    warm = 3 if args.device == "cuda" else 1
    settings: dict[str, Any] = {"sampling.generator": args.side, "data.max_prompt_length": 2 * args.prompt_tokens}
    settings |= {"evaluate.before_training": False, "vllm.sleep": not args.no_sleep, "vllm.enforce_eager": args.eager}
    settings["sampling.min_new_tokens"] = 0
    settings["vllm.gpu_memory_utilization"] = args.gpu_memory_utilization
    recipe = with_settings(recipe_of(args, warm + args.repeat), settings)
    steps: list[dict[str, float]] = []
    weights: list[float] = []
    folder = args.folder / f"run-{args.side}"
    with Trainer(recipe, task=Task("benchmark", rows(args)), rewards=[reward], folder=folder) as trainer:
        update = trainer.generator.update_weights

        def timed(version: int) -> None:
            synchronize(args.device)
            start = time.perf_counter()
            update(version)
            synchronize(args.device)
            weights.append(time.perf_counter() - start)

        trainer.generator.update_weights = timed  # type: ignore[method-assign]
        start_counting(args)
        for result in trainer.steps():
            steps.append(result.metrics)
            if len(steps) == warm + args.repeat:
                break
    counted = steps[warm:]
    if any(step["completions/mean_length"] != args.new_tokens for step in counted):
        raise SystemExit(f"{args.side} stopped early; the comparison would not be fair")
    used = 0.0
    if args.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        used = (total - free) / 2**30
    return {
        "step": median([step["step_time"] for step in counted]),
        "generation": median([step["time/generate"] for step in counted]),
        "training": median([step["time/train"] for step in counted]),
        "weights": median(weights[-args.repeat :]),
        "tokens": args.prompts * args.samples * args.new_tokens,
        "peak": peak(args),  # of torch's allocator; vLLM with sleep has its own
        "used_at_end": used,
        "steps": [step["step_time"] for step in steps],
        **{name: median([step.get(name, math.nan) for step in counted]) for name in MISMATCH},
    }


def report(results: dict[str, dict[str, float]]) -> None:
    print(
        f"\n{'':10}{'step':>9}{'generation':>12}{'training':>10}{'weights':>9}{'tokens/s':>10}{'mismatch':>10}{'max':>8}"
    )
    for side, result in results.items():
        print(
            f"{side:10}{result['step']:8.2f}s{result['generation']:11.2f}s{result['training']:9.2f}s"
            f"{result['weights']:8.3f}s{result['tokens'] / result['step']:10,.0f}{result[MISMATCH[0]]:10.4f}"
            f"{result[MISMATCH[1]]:8.3f}"
        )
    if len(results) == 2:
        ours, theirs = (results[side] for side in SIDES)
        print(f"{'ratio':10}{theirs['step'] / ours['step']:8.2f}×{theirs['generation'] / ours['generation']:11.2f}×")


if __name__ == "__main__":
    main()
