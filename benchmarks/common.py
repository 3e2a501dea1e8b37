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
    "qwen2.5-7b-shape": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "tiny-shape": {
        "vocab_size": 259, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip
SHORT_NAMES = {
    "135m": "smollm2-135m-shape", "0.5b": "qwen2.5-0.5b-shape", "1.5b": "qwen2.5-1.5b-shape",
    "7b": "qwen2.5-7b-shape", "tiny": "tiny-shape",
}  # fmt: skip

WORK = {"cpu": (4, 240, 8, 48), "cuda": (16, 250, 16, 512)}  # prompts, prompt tokens, samples, new tokens


def arguments(description: str | None, prompts: Callable[[str], object] = int) -> argparse.ArgumentParser:
    """The arguments of all benchmarks. ``prompts`` parses the number of prompts, or several of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cpu", "cuda"))
    parser.add_argument("--model", help="a model's name or folder, or a shape with random weights")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, else the fastest of the CPU")
    parser.add_argument("--prompts", type=prompts)
    for name in ("prompt-tokens", "samples", "new-tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    return parser


def names(text: str) -> list[str]:
    """The words of a list with commas, for an argument."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return list(dict.fromkeys(words))


def counts(text: str) -> list[int]:
    """The whole numbers of a list with commas, each at least 1, for an argument."""
    words = names(text)
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"expected whole numbers of at least 1 with commas between them, got {text!r}")
    return [int(word) for word in words]


def shapes(text: str) -> list[str]:
    """Names of shapes, short or complete, for an argument."""
    chosen = [SHORT_NAMES.get(word, word) for word in names(text)]
    if unknown := [name for name in chosen if name not in SHAPES]:
        raise argparse.ArgumentTypeError(f"unknown shape {unknown[0]!r} (allowed: {', '.join(SHORT_NAMES)})")
    return chosen


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
    with torch.device(args.device):
        return LlamaForCausalLM(shape_config(args.model, getattr(args, "positions", 8192))).to(dtype).eval()


def shape_config(shape: str, positions: int = 8192) -> LlamaConfig:
    return LlamaConfig(**SHAPES[shape], max_position_embeddings=positions)


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


def copy_rate(device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes/s that a large copy reads and writes."""
    size = 2**30 if device == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / best_seconds(device, lambda: target.copy_(source), 20, clock)


def ceilings(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Measured limits of the device: bytes/s of a large copy, operations/s of a matrix product."""
    bandwidth = copy_rate(device)
    n = 8192 if device == "cuda" else 1536
    a = torch.randn(n, n, device=device).to(dtype)
    return bandwidth, 2 * n**3 / best_seconds(device, lambda: a @ a, 10)


def best_seconds(
    device: str, function: Callable[[], object], calls: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one call, at best, of ``calls`` in a row."""
    best = float("inf")
    for _ in range(4):
        synchronize(device)
        start = clock()
        for _ in range(calls):
            function()
        synchronize(device)
        best = min(best, (clock() - start) / calls)
    return best


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
