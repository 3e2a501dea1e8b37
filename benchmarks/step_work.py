"""The work of a GRPO step that benchmarks compare: model, prompts, reward, recipe, and how it is measured."""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from common import copy_rate, load, synchronize
from limits import MeasuredProducts, ModelSize, generation_limits, training_limit
from offline_vllm import environment as vllm_environment

ENVIRONMENT = dict(os.environ)
LEARNING_RATE = 1e-6
LETTERS = "abcdefghijklmnopqrstuvwxyz     "


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A cheap reward that differs between answers."""
    return [sum(ids) % 101 / 100 for ids in completion_ids]


def save_model(args: argparse.Namespace) -> None:
    """The model for both sides, with a byte tokenizer, so that lengths are exact."""
    from groupwise.model.tiny import tiny_tokenizer

    model = load(args)
    model.generation_config.eos_token_id = 258
    model.config.eos_token_id, model.config.pad_token_id = 258, 256
    model.save_pretrained(args.folder / "model")
    tiny_tokenizer().save_pretrained(args.folder / "model")
    args.model = str(args.folder / "model")


def rows(args: argparse.Namespace) -> list[dict[str, str]]:
    """Prompts of about ``args.prompt_tokens`` tokens."""
    draw = torch.Generator().manual_seed(1)
    prompts = []
    for number in range(args.prompts):
        length = args.prompt_tokens - args.prompts // 2 + number
        letters = torch.randint(len(LETTERS), (max(1, length),), generator=draw).tolist()
        prompts.append({"prompt": "".join(LETTERS[letter] for letter in letters)})
    return prompts


def describe(args: argparse.Namespace) -> str:
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return (
        f"{args.prompts} prompts of about {args.prompt_tokens} tokens × {args.samples} samples × {args.new_tokens} "
        f"tokens, top-k {args.top_k}, on {where}, torch {torch.__version__}"
    )


def environment(side: str) -> dict[str, str]:
    """The environment; for groupwise with the variable that its command line sets."""
    if side == "trl-vllm":
        return vllm_environment()
    return ENVIRONMENT if side != "groupwise" else {"MIMALLOC_PURGE_DELAY": "10000", **ENVIRONMENT}


def recipe_of(args: argparse.Namespace, steps: int) -> Any:
    from groupwise.config import make_recipe

    return make_recipe(
        {
            "model": {
                "source": args.model,
                "device": args.device,
                "dtype": args.dtype or "auto",
                "gradient_checkpointing": False,
            },
            "data": {"chat": False, "max_prompt_length": None},
            "sampling": {
                "samples_per_prompt": args.samples,
                "max_new_tokens": args.new_tokens,
                "min_new_tokens": args.new_tokens,
                "top_k": args.top_k or None,
            },
            "optimizer": {"learning_rate": LEARNING_RATE},
            "train": {"steps": steps, "batch_size": args.prompts, "accumulation": 1},
            "run": {"checkpoint_every": 0, "save_rollouts": False, "tensorboard": False, "plot": False},
        }
    )


def clock(args: argparse.Namespace) -> Callable[[], float]:
    """Wall time, or the CPU time of all threads of this process."""
    return time.process_time if args.cpu_time else time.perf_counter


def now(args: argparse.Namespace) -> float:
    synchronize(args.device)
    return clock(args)()


@contextmanager
def timed_generation(args: argparse.Namespace) -> Iterator[list[float]]:
    """The seconds of each call of the engine in this block, which has one per step."""
    from groupwise.generate.engine import Engine

    seconds: list[float] = []
    generate = Engine.generate

    def timed(*values: Any, **options: Any) -> Any:
        start = now(args)
        rollout = generate(*values, **options)
        seconds.append(now(args) - start)
        return rollout

    if not args.cpu_time:
        yield seconds
        return
    Engine.generate = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Engine.generate = generate  # type: ignore[method-assign]


def between(ends: list[float], warm: int) -> list[float]:
    """Seconds of the steps after the first ``warm``, from the times at which all ended."""
    return [after - before for before, after in pairwise(ends[warm - 1 :])]


def start_counting(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(args: argparse.Namespace) -> float:
    """Peak memory in GiB, of the GPU's allocator or of this process."""
    if args.device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run_limits(args: argparse.Namespace) -> dict[str, float]:
    """The least seconds of a step, of generation and of training, with each prompt computed once per group."""
    model = load(args)
    size, product = ModelSize.of(model), MeasuredProducts(args.device, model.dtype, clock(args))
    itemsize = model.dtype.itemsize
    del model
    lengths = [len(row["prompt"]) for row in rows(args)]
    generation = generation_limits(
        size, lengths, args.samples, args.new_tokens,
        bytes_per_number=itemsize, bytes_per_second=copy_rate(args.device, clock(args)), product=product,
    )  # fmt: skip
    training = training_limit(size, sum(lengths), args.prompts * args.samples * args.new_tokens, product)
    return {
        "step": generation.sum + training,
        "generation": generation.sum,
        "training": training,
        "bandwidth": generation.bandwidth,
        "products": generation.arithmetic,
    }
