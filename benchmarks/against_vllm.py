"""groupwise's engine beside vLLM for several models, numbers of prompts and samplers; see generate.py."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import SHAPES, SHORT_NAMES, load, median, shape_config
from limits import ModelSize
from offline_vllm import has_flashinfer, require_vllm
from results import Results
from sides import SIDES, Job, SideError, SideProcess, save_checkpoint
from transformers import LlamaForCausalLM

GIB = 2**30
SPARE_MEMORY = {"cuda": 6 * GIB, "cpu": GIB}  # for activations, graphs and the libraries, of each side
ALONE = 0.85  # of the GPU's memory, for vLLM without ours beside it
SMALL_SHARE = 0.02  # of it, where vLLM is told the size of its cache
STARTED = 3 * GIB  # of a side that waits: activations, graphs, the libraries
SAMPLER = re.compile(r"(plain|topk[1-9]\d*)(-logprobs)?")


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    model: str
    prompts: int
    sampler: str  # plain, topk40, topk40-logprobs

    @property
    def name(self) -> str:
        return f"{self.model} {self.prompts} {self.sampler}"

    def job(self, args: argparse.Namespace) -> Job:
        kind, _, logprobs = self.sampler.partition("-")
        return Job(
            prompt_lengths(args.prompt_tokens, self.prompts),
            args.samples,
            args.new_tokens,
            top_k=int(kind.removeprefix("topk")) if kind != "plain" else 0,
            logprobs=bool(logprobs),
        )


def prompt_lengths(tokens: int, prompts: int) -> list[int]:
    """Different lengths around ``tokens``."""
    return [max(1, tokens + more) for more in range(-(prompts // 2), prompts - prompts // 2)]


def samplers(text: str) -> list[str]:
    """Names of samplers with commas between them, for an argument."""
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not SAMPLER.fullmatch(word)]:
        raise argparse.ArgumentTypeError(
            f"unknown sampler {wrong[0]!r} (allowed: plain, or topk40 with any number, each also with -logprobs)"
        )
    return list(dict.fromkeys(words))


def compare(args: argparse.Namespace) -> bool:
    """Measure all cells that ``args.json`` does not have yet, and print the table. False if one of them failed."""
    version = require_vllm(args.device)
    results = Results(args.json, {**work_of(args), "vllm": version})
    sampler = "installed" if has_flashinfer() else "not installed"
    print(f"{describe(args)}\nvLLM {version}, in a process of its own; FlashInfer's sampler: {sampler}", flush=True)
    failures: list[str] = []
    print(HEADER, flush=True)
    missing: dict[str, list[Cell]] = {}
    for model in args.shapes or [args.model]:
        for cell in (Cell(model, prompts, sampler) for prompts in args.prompts for sampler in args.only):
            if cell.name in results:
                print(row(args, cell, results.found[cell.name]), flush=True)
            else:
                missing.setdefault(model, []).append(cell)
    with ExitStack() as stack:
        started = start_together(args, missing, stack, failures) if args.together else None
        for model, cells in missing.items():
            try:
                for cell, result in (
                    measure(args, cells) if started is None else measure_with(args, cells, started[model])
                ):
                    if isinstance(result, SideError):
                        failures.append(f"{cell.name}: {result}")
                        continue
                    results.add(cell.name, result)
                    print(row(args, cell, result), flush=True)
            except SideError as error:
                failures.append(f"{model}: {error}")
    print(LEGEND)
    for failure in failures:
        print(f"not measured: {failure}")
    return not failures


def work_of(args: argparse.Namespace) -> dict[str, Any]:
    """What must be the same in all results of a file."""
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    names = ("samples", "prompt_tokens", "new_tokens", "dtype", "eager", "repeat")
    sampler = "installed" if has_flashinfer() else "not installed"
    facts = {"device": where, "torch": torch.__version__, "FlashInfer's sampler": sampler}
    return {**facts, **{name: getattr(args, name) for name in names}}


def describe(args: argparse.Namespace) -> str:
    where = work_of(args)["device"]
    return (
        f"prompts of about {args.prompt_tokens} tokens × {args.samples} samples × {args.new_tokens} tokens on {where}, "
        f"torch {torch.__version__}; medians of {args.repeat}"
    )


Measured = tuple[Cell, dict[str, Any] | SideError]


def measure(args: argparse.Namespace, cells: list[Cell]) -> Iterator[Measured]:
    """Each cell of one model, as soon as it is measured."""
    jobs = {cell: cell.job(args) for cell in cells}
    with tempfile.TemporaryDirectory(prefix="groupwise-bench-") as folder:
        save_checkpoint(args, cells[0].model, folder, args.timeout)
        need = memory_of(args, cells[0].model, list(jobs.values()))
        share = memory_share(need.total, total_memory(args.device), SPARE_MEMORY[args.device])
        options = side_options(args, jobs, args.memory_share or share or ALONE, need.cache)

        def start(side: str) -> SideProcess:
            return SideProcess(side, folder, options[side], args.timeout)

        if share is None:
            print(f"  {cells[0].model}: one side after the other, because both do not fit into memory", flush=True)
            yield from one_after_the_other(args, jobs, start)
        else:
            with ExitStack() as stack:
                # vLLM first: it measures the free memory while it starts.
                sides = {side: stack.enter_context(start(side)) for side in ("vllm", "groupwise")}
                for cell, job in jobs.items():
                    yield cell, in_turn(args, job, sides)


Sides = dict[str, SideProcess]


def measure_with(args: argparse.Namespace, cells: list[Cell], sides: Sides | SideError) -> Iterator[Measured]:
    """Each cell of one model whose sides have been started; they end afterwards."""
    if isinstance(sides, SideError):
        raise sides
    for cell in cells:
        yield cell, in_turn(args, cell.job(args), sides)
    for side in sides.values():
        side.close()


def start_together(
    args: argparse.Namespace, cells: dict[str, list[Cell]], stack: ExitStack, failures: list[str]
) -> dict[str, Sides | SideError]:
    """Both sides of all models, started at the same time: vLLM takes minutes to start, most of it on the host.

    They wait for their turn with their weights, and vLLM with its cache, on the device. Cells for which the memory does
    not suffice are left out, the largest first.
    """
    needs = {cell: memory_of(args, model, [cell.job(args)]) for model, of_model in cells.items() for cell in of_model}
    limit = int(0.95 * total_memory(args.device))
    while needs and _memory_together(needs) > limit:
        largest = max(needs, key=lambda cell: needs[cell].total)
        del needs[largest]
        cells[largest.model].remove(largest)
        failures.append(f"{largest.name}: the memory does not hold it beside the others; measure it without --together")
    for model in [model for model, of_model in cells.items() if not of_model]:
        del cells[model]

    def start(model: str, side: str, folder: str) -> SideProcess:
        jobs = {cell: cell.job(args) for cell in cells[model]}
        cache = max(needs[cell].cache for cell in jobs)
        return SideProcess(side, folder, side_options(args, jobs, SMALL_SHARE, cache)[side], args.timeout)

    folders = {model: stack.enter_context(tempfile.TemporaryDirectory(prefix="groupwise-bench-")) for model in cells}
    with ThreadPoolExecutor(max_workers=max(1, 2 * len(cells))) as pool:
        list(pool.map(lambda model: save_checkpoint(args, model, folders[model], args.timeout), cells))
        starting = {model: {side: pool.submit(start, model, side, folders[model]) for side in SIDES} for model in cells}
    found: dict[str, Sides | SideError] = {}
    for model, futures in starting.items():
        errors = [error for future in futures.values() if (error := future.exception()) is not None]
        sides = {side: future.result() for side, future in futures.items() if future.exception() is None}
        for process in sides.values():
            stack.callback(process.close)
        if errors and not isinstance(errors[0], SideError):
            raise errors[0]
        found[model] = errors[0] if errors else sides
    return found


def _memory_together(needs: dict[Cell, Need]) -> int:
    """The largest cells of all models on both sides; vLLM keeps its caches, groupwise has one of them at a time."""
    models = {cell.model for cell in needs}
    largest = [max(need for cell, need in needs.items() if cell.model == model) for model in models]
    theirs = sum(need.total + need.cache // 4 + STARTED for need in largest)
    ours = sum(need.total - need.cache + STARTED // 4 for need in largest) + max(need.cache for need in largest)
    return theirs + ours


def side_options(
    args: argparse.Namespace, jobs: dict[Cell, Job], share: float, cache_bytes: int
) -> dict[str, dict[str, Any]]:
    sequences = max(len(job.completion_lengths) for job in jobs.values())
    longest = max(max(job.prompt_lengths) + max(job.completion_lengths) for job in jobs.values()) + 8
    common = {"device": args.device, "sequences": sequences, **({"dtype": args.dtype} if args.dtype else {})}
    vllm = {**common, "longest": longest, "memory_share": round(share, 3), "eager": args.eager}
    if args.device == "cpu" or args.together:  # where it has no share of the memory, but a size
        vllm["cache_mib"] = -(-cache_bytes * 5 // 4 // 2**20)
    return {"groupwise": common, "vllm": vllm}


def in_turn(args: argparse.Namespace, job: Job, sides: dict[str, SideProcess]) -> dict[str, Any] | SideError:
    """Repeats of both sides in turn, after a first call of each, which compiles and captures graphs."""
    answers: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    try:
        for _ in range(args.repeat + 1):
            for side in SIDES:
                answers[side].append(sides[side].ask("generate", job))
        return result_of(answers, sides["groupwise"].ask("limits", job))
    except SideError as error:
        return error


def one_after_the_other(
    args: argparse.Namespace, jobs: dict[Cell, Job], start: Callable[[str], SideProcess]
) -> Iterator[Measured]:
    theirs: dict[Cell, list[dict[str, Any]] | SideError] = {}
    with start("vllm") as side:
        for cell, job in jobs.items():
            try:
                theirs[cell] = [side.ask("generate", job) for _ in range(args.repeat + 1)]
            except SideError as error:
                theirs[cell] = error
    with start("groupwise") as side:
        for cell, job in jobs.items():
            others = theirs[cell]
            if isinstance(others, SideError):
                yield cell, others
                continue
            try:
                ours = [side.ask("generate", job) for _ in range(args.repeat + 1)]
                yield cell, result_of({"groupwise": ours, "vllm": others}, side.ask("limits", job))
            except SideError as error:
                yield cell, error


def result_of(answers: dict[str, list[dict[str, Any]]], limits: dict[str, Any]) -> dict[str, Any]:
    """A cell's result: the first call of each side is not counted."""
    seconds = {side: [answer["seconds"] for answer in answers[side][1:]] for side in SIDES}
    peak = {side: answers[side][-1]["peak"] for side in SIDES}
    return {"seconds": seconds, "first_call": {side: answers[side][0]["seconds"] for side in SIDES}, "peak": peak,
            "limits": limits}  # fmt: skip


# --- memory ----------------------------------------------------------------------------------------------------------


class Need(NamedTuple):
    """Bytes of the largest job: keys and values of all samples; these, the weights, and logits with two copies."""

    cache: int
    total: int


def memory_of(args: argparse.Namespace, model: str, jobs: list[Job]) -> Need:
    from groupwise.model.device import resolve_device, resolve_dtype

    with torch.device("meta"):
        loaded = LlamaForCausalLM(shape_config(model)) if model in SHAPES else None
    if loaded is None:
        loaded = load(argparse.Namespace(**{**vars(args), "model": model, "device": "cpu"}))
    size, itemsize = ModelSize.of(loaded), resolve_dtype(args.dtype or "auto", resolve_device(args.device)).itemsize
    weights = sum(parameter.numel() for parameter in loaded.parameters()) * itemsize
    cache = max(sum(job.prompt_lengths) + job.tokens for job in jobs) * size.cached * itemsize
    logits = 3 * 4 * max(len(job.completion_lengths) for job in jobs) * size.head[0]
    return Need(cache, weights + cache + logits)


def memory_share(need: int, memory: int, spare: int) -> float | None:
    """The share of the memory that vLLM gets so that ours fits beside it; None if it does not."""
    wanted = 1.25 * need + spare
    return wanted / memory if 2 * wanted <= 0.95 * memory else None


def total_memory(device: str) -> int:
    """The GPU's memory; on a CPU what is free now."""
    from groupwise.model.device import free_memory

    return torch.cuda.mem_get_info()[1] if device == "cuda" else free_memory("cpu")


# --- the table -------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("model", -7), ("prompts × samples", 18), ("sampler", 17), ("groupwise", 11), ("vLLM", 9), ("ratio", 8),
    ("bandwidth", 11), ("products", 10), ("at best rate", 14), ("ours/limits", 13), ("vLLM/limits", 13),
)  # fmt: skip
HEADER = "\n" + "".join(f"{name:<{-width}}" if width < 0 else f"{name:>{width}}" for name, width in COLUMNS)
LEGEND = (
    "ratio: vLLM's time in groupwise's; bandwidth and products: the seconds that the device needs at least, to read\n"
    "weights and cache at the speed of a large copy and for the matrix products, as large as those of a step; "
    "both measured in this run;\n"
    "at best rate: all operations at the rate of a large product; limits: the sum of bandwidth and products"
)


def row(args: argparse.Namespace, cell: Cell, result: dict[str, Any]) -> str:
    ours, theirs = (median(result["seconds"][side]) for side in SIDES)
    limits = result["limits"]
    total = limits["bandwidth"] + limits["arithmetic"]
    short = {name: alias for alias, name in SHORT_NAMES.items()}
    values = (
        short.get(cell.model, Path(cell.model).name), f"{cell.prompts} × {args.samples}", cell.sampler,
        f"{ours:.3f} s", f"{theirs:.3f} s", f"{theirs / ours:.2f}×", f"{limits['bandwidth']:.3f} s",
        f"{limits['arithmetic']:.3f} s", f"{limits['at_matmul_rate']:.3f} s", f"{ours / total:.2f}",
        f"{theirs / total:.2f}",
    )  # fmt: skip
    return "".join(
        f"{value:<{-width}}" if width < 0 else f"{value:>{width}}"
        for value, (_, width) in zip(values, COLUMNS, strict=True)
    )
