"""Log-probs from hidden states: the plain log-softmax, `selective_logps` and TRL's fused head.

Usage::

    python benchmarks/selective_logps.py                          # 4,096 tokens, SmolLM2-135M's head, on the CPU
    python benchmarks/selective_logps.py --device cuda --dtype bfloat16 --rows 32768

Forward and backward on the same tensors. Times are medians of runs taken in turn in one process; compare the ratios.
Peak memory is measured in a separate process for each, from just before the step. It includes the gradients of the
inputs, which every variant needs.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from pathlib import Path

import torch

from groupwise.core import logps as logps_module
from groupwise.core import selective_logps

MIB = 2**20
COMPILE_FROM = logps_module.COMPILE_FROM
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def plain(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.T).float().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def trl_logps(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, 8192, None, 1.0, ())[0]


VARIANTS = {"plain": plain, "groupwise": selective_logps}
UNCOMPILED = "in steps"  # groupwise on a GPU where torch.compile does not work
if torch.cuda.is_available():
    VARIANTS[UNCOMPILED] = selective_logps
try:
    import trl.trainer.utils  # noqa: F401 - its backward pass needs this
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
except ImportError as error:
    print(f"without TRL: {error}")
else:
    VARIANTS["trl"] = trl_logps


def make_inputs(args: argparse.Namespace, rows: int) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(rows, args.width, generator=generator).to(args.device, dtype)
    weight = (torch.randn(args.vocabulary, args.width, generator=generator) * 0.05).to(args.device, dtype)
    ids = torch.randint(args.vocabulary, (rows,), generator=generator).to(args.device)
    return hidden.requires_grad_(), weight.requires_grad_(), ids


def step(variant: str, tensors: Tensors) -> torch.Tensor:
    hidden, weight, ids = tensors
    logps_module.COMPILE_FROM = math.inf if variant == UNCOMPILED else COMPILE_FROM
    hidden.grad = weight.grad = None
    logps = VARIANTS[variant](hidden, weight, ids)
    (logps * torch.linspace(-1, 1, len(ids), device=ids.device)).sum().backward()
    if ids.is_cuda:
        torch.cuda.synchronize()
    return logps.detach()


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_peak(variant: str, args: argparse.Namespace, result: multiprocessing.Queue) -> None:
    step(variant, make_inputs(args, rows=1))  # loads libraries and kernels
    tensors = make_inputs(args, args.rows)
    if args.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(variant, tensors)
        result.put(torch.cuda.max_memory_allocated() - before)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = status("VmRSS")
        step(variant, tensors)
        result.put(status("VmHWM") - before)


def peak_memory(variant: str, args: argparse.Namespace) -> int:
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=measure_peak, args=(variant, args, result))
    process.start()
    peak = result.get()
    process.join()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="number of tokens")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    peaks = {variant: peak_memory(variant, args) for variant in VARIANTS}
    tensors = make_inputs(args, args.rows)
    exact = (
        plain(*(x.detach().double() if x.is_floating_point() else x for x in tensors)) if args.rows <= 8192 else None
    )
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    errors = {}
    for round_number in range(args.repeat + 1):
        for variant in VARIANTS:
            start = time.perf_counter()
            logps = step(variant, tensors)
            if round_number:  # the first round warms up
                times[variant].append(time.perf_counter() - start)
            if exact is not None:
                errors[variant] = (logps - exact).abs().max().item()

    gradients = (tensors[0].numel() + tensors[1].numel()) * tensors[0].element_size() / MIB
    print(
        f"{args.rows:,} tokens × vocabulary {args.vocabulary:,}, width {args.width}, {args.dtype}, {args.device}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; the inputs' gradients take {gradients:,.0f} MiB"
    )
    print(f"{'':10} {'time':>10} {'ratio':>7} {'peak':>12} {'ratio':>7}   largest error against float64")
    for variant in VARIANTS:
        seconds = statistics.median(times[variant])
        error = f"{errors[variant]:.1e}" if errors else "not computed over 8,192 tokens"
        print(
            f"{variant:10} {seconds * 1e3:8.1f}ms {seconds / statistics.median(times['plain']):7.2f} "
            f"{peaks[variant] / MIB:9,.0f}MiB {peaks[variant] / peaks['plain']:7.3f}   {error}"
        )


if __name__ == "__main__":
    main()
