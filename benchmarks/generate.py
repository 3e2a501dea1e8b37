"""Generation: groupwise's engine against transformers' `generate` and its continuous batching, and against vLLM.

Usage::

    python benchmarks/generate.py                                  # on the GPU if there is one, else on the CPU
    python benchmarks/generate.py --device cuda --continuous 120   # also transformers' continuous batching, 120 s each
    python benchmarks/generate.py --against vllm --shapes 135m,0.5b,1.5b,7b --prompts 16,64 --only topk40,plain

Every sample has its full length. Times are medians of runs taken in turn, after a warm-up round; compare the ratios.
The memory floor is the time to read what decode steps must read (weights, and caches with the prompt once per group)
at the measured speed of a large copy.

With ``--against vllm`` (it must be installed) both sides load the same weights and get the same prompts, each in a
process of its own: in turn where the memory holds both, else one after the other. vLLM has CUDA graphs for as many
sequences as there are samples, and prefix caching, so that it computes a prompt once per group; its cache is emptied
before each call, as after an update of the weights. ``--together`` starts the sides of all shapes at the same time,
which saves minutes, and measures them in turn. groupwise always returns log-probs, vLLM with a sampler such as
``topk40-logprobs``. Beside the times stand the limits of benchmarks/limits.py. With ``--json FILE`` each result is
saved as soon as it is measured; started again, the command measures what the file lacks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from against_vllm import compare, samplers
from common import (
    arguments,
    ceilings,
    counts,
    default_attention,
    describe,
    fill,
    in_turn,
    load,
    make_prompts,
    median,
    peak_memory,
    profile,
    shapes,
)
from limits import MeasuredProducts, ModelSize, decode_reads
from transformers import GenerationConfig, PreTrainedModel

from groupwise.generate.engine import Engine
from groupwise.generate.types import Sampling


def generate_plainly(model: PreTrainedModel, prompts: list[torch.Tensor], args: argparse.Namespace) -> None:
    """`model.generate` with a left-padded row per sample."""
    width = max(map(len, prompts))
    rows = torch.stack([torch.cat([ids.new_zeros(width - len(ids)), ids]) for ids in prompts])
    mask = torch.stack([(torch.arange(width) >= width - len(ids)).long() for ids in prompts])
    rows, mask = (x.repeat_interleave(args.samples, 0).to(model.device) for x in (rows, mask))
    with default_attention(model):
        out = model.generate(rows, attention_mask=mask, generation_config=settings(args))
    if out.shape[1] != width + args.new_tokens:
        raise SystemExit("model.generate stopped early; the comparison would not be fair")


def settings(args: argparse.Namespace) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, top_k=args.top_k, top_p=args.top_p, max_new_tokens=args.new_tokens,
        min_new_tokens=args.new_tokens, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip


def generate_continuously(model: PreTrainedModel, prompts: list[torch.Tensor], args: argparse.Namespace) -> None:
    inputs = [ids.tolist() for ids in prompts for _ in range(args.samples)]
    model.generate_batch(inputs=inputs, generation_config=settings(args), progress_bar=False)


def main() -> None:
    parser = arguments(__doc__, prompts=counts)
    parser.add_argument("--top-k", type=int, default=40)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--no-compile", action="store_true", help="the engine without torch.compile")
    parser.add_argument(
        "--continuous", type=int, default=0, help="seconds to give to continuous batching; 0: leave it out"
    )
    parser.add_argument("--only-continuous", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-peer", action="store_true", help="without transformers' generate")
    parser.add_argument("--profile", action="store_true", help="print the operations that take the most time")
    versus = parser.add_argument_group("against vLLM")
    versus.add_argument("--against", choices=("vllm",), help="compare with vLLM instead of transformers")
    versus.add_argument("--shapes", type=shapes, help="135m,0.5b,1.5b,7b: models with random weights")
    versus.add_argument("--only", type=samplers, help="samplers: topk40,plain,topk40-logprobs (default: topk40)")
    versus.add_argument("--eager", action="store_true", help="vLLM without torch.compile and CUDA graphs")
    versus.add_argument(
        "--memory-share",
        type=float,
        help="of the GPU's memory, for vLLM (default: what it needs, or 0.85 where it is alone)",
    )
    versus.add_argument("--together", action="store_true", help="start the sides of all shapes at once (a GPU)")
    versus.add_argument("--timeout", type=float, default=600, help="seconds for a side's start, and for each call")
    versus.add_argument("--json", "--results", type=Path, help="save each result in this file, and go on from there")
    args = parser.parse_args()
    if args.memory_share is not None and not 0 < args.memory_share < 1:
        parser.error(f"--memory-share must lie between 0 and 1, got {args.memory_share:g}")
    fill(args)
    args.prompts = args.prompts if isinstance(args.prompts, list) else [args.prompts]
    if args.against:
        args.only = args.only or ["topk40"]
        sys.exit(0 if compare(args) else 1)
    for name in ("shapes", "only", "eager", "memory_share", "together", "json"):
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')} needs --against vllm")
    if len(args.prompts) > 1:
        parser.error("several numbers of prompts need --against vllm")
    args.prompts = args.prompts[0]
    model = load(args)
    prompts = make_prompts(args, model.config.vocab_size)
    if args.only_continuous:
        seconds = in_turn(args.device, 1, {"continuous": lambda: generate_continuously(model, prompts, args)})
        print(f"PEER {median(seconds['continuous']):.3f}")
        return
    print(describe(args, model, prompts), flush=True)
    sampling = Sampling(
        max_new_tokens=args.new_tokens,
        min_new_tokens=args.new_tokens,
        top_k=args.top_k or None,
        top_p=args.top_p,
        eos_ids=(2,),
    )
    if args.no_compile:
        from groupwise.model.handle import prepare

        engine = Engine(prepare(model, compile=False))
    else:
        engine = Engine(model)
    facts: dict[str, int] = {}
    work = {"groupwise": lambda: facts.update(engine.generate(prompts, args.samples, sampling).stats)}
    if not args.no_peer:
        work["model.generate"] = lambda: generate_plainly(model, prompts, args)
    seconds = in_turn(args.device, args.repeat, work)
    if args.profile:
        profile(args.device, work["groupwise"])
    peaks = {name: peak_memory(args.device, function) for name, function in work.items()}
    tokens = len(prompts) * args.samples * args.new_tokens
    print(f"\n{'':16}{'seconds':>9}{'tokens/s':>11}{'ms/step':>9}{'peak GiB':>10}")
    for name, numbers in seconds.items():
        took = median(numbers)
        print(
            f"{name:16}{took:9.2f}{tokens / took:11,.0f}{1000 * took / args.new_tokens:9.2f}{peaks[name] / 2**30:10.2f}"
        )
    ours = median(seconds["groupwise"])
    if not args.no_peer:
        print(f"groupwise is {median(seconds['model.generate']) / ours:.2f} times as fast as model.generate")
    total = sum(map(len, prompts))
    plain_work = args.samples * (total + len(prompts) * args.new_tokens)
    shared_work = total + len(prompts) * args.samples * args.new_tokens
    times = plain_work / shared_work
    print(f"tokens to compute: {plain_work:,} plainly, {shared_work:,} with shared prompts, {times:.2f} times")
    bandwidth, rate = ceilings(args.device, model.dtype)
    size = ModelSize.of(model)
    moved = decode_reads(size, [*map(len, prompts)], args.samples, args.new_tokens) * model.dtype.itemsize
    operations = 2 * sum(p.numel() for p in model.parameters()) * shared_work
    print(
        f"memory: {moved / 1e9:,.0f} GB must be read, {moved / ours / 1e9:,.0f} of {bandwidth / 1e9:,.0f} GB/s "
        f"(floor {moved / bandwidth:.2f} s); arithmetic: {operations / ours / 1e12:.3f} of {rate / 1e12:.3f} TFLOP/s "
        f"(floor {operations / rate:.2f} s)"
    )
    config, rows = model.config, facts["rows"]
    weight = config.intermediate_size, config.hidden_size
    few = 2 * rows * weight[0] * weight[1] / MeasuredProducts(args.device, model.dtype)(rows, weight)
    print(f"a product of {rows} rows, as the MLP of a decode step has, reaches {few / 1e12:.3f} TFLOP/s")
    print(f"the engine prefilled {facts['prefilled_tokens']:,} tokens and took {facts['decode_steps']} decode steps")
    if args.continuous:
        print(in_own_process("continuous batching", ["--only-continuous"], args.continuous, ours))


def in_own_process(name: str, options: list[str], limit: int, ours: float) -> str:
    """The time of a peer, in a separate process with a time limit."""
    command = [sys.executable, __file__, *sys.argv[1:], *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"{name}: not done in {limit} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("PEER")]
    if not lines:
        return f"{name} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    took = float(lines[0].split()[1])
    return f"{name}: {took:.2f} s, {took / ours:.2f} times groupwise's"


if __name__ == "__main__":
    main()
