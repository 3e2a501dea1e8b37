"""Shared by the benchmarks of generation and log-probs: arguments, models, prompts, timing and device limits."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

SHAPES = {
    "smollm2-135m-shape": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b-shape": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b-shape": {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip

WORK = {"cpu": (4, 240, 8, 48), "cuda": (16, 250, 16, 512)}  # prompts, prompt tokens, samples, new tokens


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cpu", "cuda"))
    parser.add_argument("--model", help="a model's name or folder, or a shape with random weights")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, else the fastest of the CPU")
    for name in ("prompts", "prompt-tokens", "samples", "new-tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    return parser


def fill(args: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the device."""
    from groupwise.model.device import set_threads

    for name, number in zip(("prompts", "prompt_tokens", "samples", "new_tokens"), WORK[args.device], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, number)
    if args.model is None:
        args.model = "smollm2-135m" if args.device == "cpu" else "smollm2-135m-shape"
    set_threads()


def load(args: argparse.Namespace) -> PreTrainedModel:
    from groupwise.model.device import resolve_device, resolve_dtype
    from groupwise.model.load import load_model

    if args.model not in SHAPES:
        return load_model(args.model, dtype=args.dtype or "auto", device=args.device)
    torch.manual_seed(0)
    dtype = resolve_dtype(args.dtype or "auto", resolve_device(args.device))
    config = LlamaConfig(**SHAPES[args.model], max_position_embeddings=8192)
    with torch.device(args.device):
        return LlamaForCausalLM(config).to(dtype).eval()


def make_prompts(args: argparse.Namespace, vocabulary: int) -> list[torch.Tensor]:
    """Prompts of about ``args.prompt_tokens`` tokens."""
    torch.manual_seed(1)
    spread = range(-(args.prompts // 2), args.prompts - args.prompts // 2)
    return [torch.randint(10, vocabulary, (max(1, args.prompt_tokens + more),)) for more in spread]


def describe(args: argparse.Namespace, model: PreTrainedModel, prompts: list[torch.Tensor]) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return (
        f"{args.model} ({parameters / 1e6:.0f} M parameters, {str(model.dtype).removeprefix('torch.')}) on {where}, "
        f"torch {torch.__version__}\n"
        f"{len(prompts)} prompts of {sum(map(len, prompts)) / len(prompts):.0f} tokens × {args.samples} samples × "
        f"{args.new_tokens} tokens"
    )


@contextmanager
def default_attention(model: PreTrainedModel) -> Iterator[None]:
    """The attention that transformers uses by default."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_turn(device: str, repeat: int, work: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each function, called in turn ``repeat`` times, after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeat + 1):
        for name, function in work.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if turn:
                seconds[name].append(time.perf_counter() - start)
            else:
                print(f"  first call of {name}: {time.perf_counter() - start:.2f} s", flush=True)
    return seconds


def median(numbers: list[float]) -> float:
    return statistics.median(numbers)


def peak_memory(device: str, function: Callable[[], object]) -> int:
    """Peak memory of the GPU or of this process while the function runs, model included."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    function()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def ceilings(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Measured limits of the device: bytes/s of a large copy, operations/s of a matrix product."""
    size = 2**30 if device == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 8192 if device == "cuda" else 1536
    a = torch.randn(n, n, device=device).to(dtype)
    copies, products = 20, 10
    best_copy = best_product = float("inf")
    for _ in range(4):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(copies):
            target.copy_(source)
        synchronize(device)
        best_copy = min(best_copy, (time.perf_counter() - start) / copies)
        start = time.perf_counter()
        for _ in range(products):
            a @ a
        synchronize(device)
        best_product = min(best_product, (time.perf_counter() - start) / products)
    return 2 * size / best_copy, 2 * n**3 / best_product


def product_rate(device: str, dtype: torch.dtype, rows: int, inner: int, outer: int) -> float:
    """Operations/s of a matrix product with few rows, as in a decode step."""
    a, b = torch.randn(rows, inner, device=device).to(dtype), torch.randn(outer, inner, device=device).to(dtype)
    best = float("inf")
    for _ in range(20):
        synchronize(device)
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * rows * inner * outer / best


def profile(device: str, function: Callable[[], object]) -> None:
    """Print the operations (on a GPU: the kernels) that take the most time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with record(activities=[activity]) as recording:
        function()
    times = {
        entry.key: entry.self_device_time_total if device == "cuda" else entry.self_cpu_time_total
        for entry in recording.key_averages()
    }
    total = sum(times.values())
    for name, took in sorted(times.items(), key=lambda item: -item[1])[:12]:
        print(f"  {took / 1e6:8.3f} s {took / total:6.1%}  {name[:90]}")
