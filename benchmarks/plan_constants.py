"""Measure what the cost model of `groupwise plan` needs, on one GPU, with random weights.

Usage::

    python benchmarks/plan_constants.py --output benchmarks/results/plan_h200.json
    python benchmarks/plan_constants.py --shape tiny --device cpu --output /tmp/tiny.json    # a trial run

For every shape and work (prompts × prompt tokens × samples × new tokens): the engine's prefill and decode, training
forward and backward, a forward pass without gradient, optimizer, copy of the masters into the model, and the peak
memory of each. Every answer has its full length. The first call of each compiles and is not counted; a time is the
least of the others, since other programs may use the machine. The file is written after every measurement, so that a
run that is stopped keeps what it has; what fails is recorded under ``failed``. Measurements marked ``validation`` must
not be used to fit the model.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from common import SHAPES, ceilings, synchronize
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.config import Recipe, make_recipe
from groupwise.core.losses import LOSSES
from groupwise.data import Prompt
from groupwise.generate.engine import Engine
from groupwise.generate.types import Rollout, Sampling
from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.packing import default_token_budget
from groupwise.model.precision import MasterWeights
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.update.minibatch import MiniBatch, build_minibatch
from groupwise.training.update.optimizer import make_optimizer
from groupwise.training.update.updater import Updater

TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    prompts: int
    prompt_tokens: int
    samples: int
    new_tokens: int
    train: bool = True  # also measure training on it
    validation: bool = False


STANDARD = Work(16, 250, 16, 512)
LONG_PROMPTS = Work(16, 1000, 4, 128)
FITTED = [STANDARD, Work(4, 250, 16, 256), LONG_PROMPTS, Work(32, 250, 16, 256), Work(1, 250, 8, 256, train=False)]
LONG_ANSWERS = [Work(16, 250, 16, 1536, validation=True), Work(8, 250, 8, 2048, validation=True)]
LARGER_MODEL = [Work(16, 250, 16, 512, validation=True), Work(4, 250, 16, 256, validation=True)]
LARGER_MODEL += [Work(16, 1000, 4, 128, validation=True), Work(16, 250, 16, 1536, train=False, validation=True)]

PLAN = {
    "smollm2-135m-shape": FITTED,
    "qwen2.5-0.5b-shape": FITTED + LONG_ANSWERS,
    "qwen2.5-1.5b-shape": LARGER_MODEL,
    "tiny": [Work(2, 20, 4, 8), Work(2, 20, 2, 16, validation=True)],
}


class Report:
    """The measurements, in a file that is complete after each of them."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device, self.start = path, device, time.perf_counter()
        self.rows: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.head = {
            "gpu": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "memory": torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
            "command": " ".join(["python benchmarks/plan_constants.py", *sys.argv[1:]]),
        }

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def measure(self, what: str, facts: dict[str, Any], function: Callable[[], dict[str, Any]]) -> None:
        """Record ``function()``, or why it failed; nothing that happens here ends the run."""
        row = {"what": what, **facts}
        try:
            row |= function()
        except Exception as error:
            self.failed.append(row | {"error": f"{type(error).__name__}: {error}"[:600]})
            print(f"{self.seconds():6.0f} s  failed: {self.failed[-1]}", flush=True)
        else:
            self.rows.append(row)
            print(f"{self.seconds():6.0f} s  {row}", flush=True)
        clean_up(self.device)
        self.write()

    def write(self) -> None:
        report = self.head | {"seconds": round(self.seconds(), 1), "measurements": self.rows, "failed": self.failed}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(report, indent=1) + "\n")


def clean_up(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def timed(device: str, repeat: int, function: Callable[[], object]) -> tuple[float, dict[str, int]]:
    """The least time of ``repeat`` calls after one that is not counted, and bytes allocated before and at most in them.

    The bytes are 0 on a CPU.
    """
    function()
    before = 0
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds), {"allocated": before, "peak": torch.cuda.max_memory_allocated() if device == "cuda" else 0}


def make_model(shape: str, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**(SHAPES | {"tiny": TINY})[shape], max_position_embeddings=8192)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()


def make_prompts(work: Work, vocabulary: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(10, vocabulary, (work.prompt_tokens,)) for _ in range(work.prompts)]


def make_rollout(work: Work, prompts: list[torch.Tensor], vocabulary: int) -> Rollout:
    """Random answers: training does not care who sampled them."""
    count, tokens = work.prompts * work.samples, work.new_tokens
    torch.manual_seed(2)
    return Rollout(
        ids=torch.randint(10, vocabulary, (count, tokens)),
        lengths=torch.full((count,), tokens),
        logps=torch.full((count, tokens), -8.0),
        filtered_logps=torch.full((count, tokens), -8.0),
        stop_reasons=("length",) * count,
        groups=torch.arange(work.prompts).repeat_interleave(work.samples),
        versions=torch.zeros(count, tokens, dtype=torch.int32),
    )


# --- generation ------------------------------------------------------------------------------------------------------


def generation(handle: ModelHandle, work: Work, args: argparse.Namespace) -> dict[str, Any]:
    """Times of a call that samples one token per answer (prefill), and of a complete one; the rest is decoding."""
    prompts = make_prompts(work, handle.vocabulary)
    engine = Engine(handle)

    stats: dict[str, int] = {}

    def generate(tokens: int) -> None:
        sampling = Sampling(max_new_tokens=tokens, min_new_tokens=tokens, top_k=40, eos_ids=(2,))
        stats.update(engine.generate(prompts, work.samples, sampling).stats)

    try:
        prefill, _ = timed(args.device, args.repeat + 1, lambda: generate(1))
        complete, memory = timed(args.device, args.repeat, lambda: generate(work.new_tokens))
        cache = engine._cache.bytes if engine._cache is not None else 0
    finally:
        engine.close()
    numbers = {name: stats[name] for name in ("rows", "decode_steps", "prefilled_tokens")}
    return {"generate": complete, "prefill": prefill, "cache_bytes": cache, **numbers, **memory}


# --- training --------------------------------------------------------------------------------------------------------


def recipe_of(work: Work) -> Recipe:
    return make_recipe(
        {
            "sampling": {"samples_per_prompt": work.samples, "max_new_tokens": work.new_tokens},
            "train": {"batch_size": work.prompts, "accumulation": 1},
        }
    )


def minibatch_of(work: Work, vocabulary: int, recipe: Recipe) -> MiniBatch:
    prompts = make_prompts(work, vocabulary)
    rollout, count = make_rollout(work, prompts, vocabulary), work.prompts * work.samples
    batch = Batch(
        rows=[{}] * work.prompts, row_numbers=list(range(work.prompts)),
        prompts=[Prompt(tuple(ids.tolist()), "") for ids in prompts], samples=work.samples, ids=list(rollout.ids),
        texts=[""] * count, stop_reasons=["length"] * count, sampler_logps=list(rollout.logps),
        versions=list(rollout.versions), kept=None, rewards=torch.zeros(count, 1, dtype=torch.float64),
        dropped=torch.zeros(count, dtype=torch.bool),
    )  # fmt: skip
    torch.manual_seed(3)
    advantages = GroupAdvantages(
        torch.zeros(count, dtype=torch.float64), batch.prompt_of, torch.randn(count), {}, torch.zeros(count).bool()
    )
    return build_minibatch(batch, advantages, list(range(work.prompts)), recipe)


class Training:
    """The updater of a run, with its masters and its optimizer."""

    def __init__(self, handle: ModelHandle, args: argparse.Namespace) -> None:
        self.handle, self.args = handle, args
        self.masters = MasterWeights(handle.model)
        self.optimizer = make_optimizer(make_recipe({}), handle.model, self.masters)
        self.budget = default_token_budget(handle)

    def updater(self, budget: int) -> Updater:
        return Updater(self.handle, self.masters, self.optimizer, None, budget, LOSSES["dapo"])

    def work(self, work: Work, budget: int, checkpointing: bool) -> dict[str, Any]:
        """Forward and backward over a batch, forward alone, and their memory with gradients and optimizer in place."""
        model, device, repeat = self.handle.model, self.args.device, self.args.repeat
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        recipe = recipe_of(work)
        minibatch, updater = minibatch_of(work, self.handle.vocabulary, recipe), self.updater(budget)
        try:
            gradient, memory = timed(device, repeat, lambda: updater._gradient(minibatch, recipe, False, False))
            forward = None if checkpointing else timed(device, 1, lambda: updater._logps(minibatch, recipe))[0]
        finally:
            model.gradient_checkpointing_disable()
            model.eval()
        return {"forward_backward": gradient, "forward": forward, "budget": updater.token_budget, **memory}

    def step(self) -> dict[str, Any]:
        """Clipping, AdamW and the finite check; the copy of the masters into the model; what each of them holds."""
        device, repeat, updater, recipe = self.args.device, self.args.repeat + 2, self.updater(1024), make_recipe({})
        for master in self.masters.parameters():
            master.grad = torch.full_like(master, 1e-4)

        def optimize() -> None:
            updater._clip_gradient(recipe)
            updater._optimizer_step()
            self.masters.check_finite("the update", "")

        seconds, memory = timed(device, repeat, optimize)
        sync, _ = timed(device, repeat, self.masters.sync_to_model)
        state = sum(v.nbytes for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
        weights = list(self.handle.model.parameters())
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "optimizer": seconds,
            "sync": sync,
            "to_host": timed(device, repeat, lambda: [weight.detach().cpu() for weight in weights])[0],
            "parameters": sum(weight.numel() for weight in weights),
            "weight_bytes": sum(weight.nbytes for weight in weights),
            "master_bytes": sum(master.nbytes for master in self.masters.parameters()),
            "adam_bytes": state,
            **memory,
        }


def measure_shape(shape: str, report: Report, args: argparse.Namespace) -> None:
    handle = prepare(make_model(shape, args.device))

    def facts(work: Work) -> dict[str, Any]:
        return {"shape": shape, **asdict(work)}

    works = PLAN[shape]
    for work in works:
        if report.seconds() < args.limit:
            report.measure("generation", facts(work), lambda work=work: generation(handle, work, args))
    training = Training(handle, args)
    report.measure("step", {"shape": shape, "validation": works[0].validation}, training.step)
    for work in works:
        if work.train and report.seconds() < args.limit:
            report.measure("training", facts(work), lambda work=work: training.work(work, training.budget, False))
    for checkpointing, budget in ((True, training.budget), (False, training.budget // 4)):
        if report.seconds() < args.limit:
            name = {"checkpointing": True} if checkpointing else {"small_budget": True}
            report.measure(
                "training",
                facts(works[0]) | name,
                lambda c=checkpointing, b=budget: training.work(works[0], b, c),
            )
    training.masters.close()


def limits(device: str, repeat: int) -> dict[str, Any]:
    """What a large copy, a large matrix product, and reductions of few numbers reach."""
    bandwidth, rate = ceilings(device, torch.bfloat16 if device == "cuda" else torch.float32)
    size = 2**28 if device == "cuda" else 2**24
    source = torch.ones(size, dtype=torch.uint8, device=device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    to_host = timed(device, repeat, lambda: (host.copy_(source, non_blocking=True), synchronize(device)))[0]
    from_host = timed(device, repeat, lambda: (source.copy_(host, non_blocking=True), synchronize(device)))[0]
    return {"copy": bandwidth, "product": rate, "to_host": size / to_host, "from_host": size / from_host}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", action="append", choices=tuple(PLAN), help="repeatable; default: all but tiny")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--limit", type=float, default=330, help="start no measurement after so many seconds")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args()
    report = Report(args.output, args.device)
    report.measure("limits", {}, lambda: limits(args.device, args.repeat))
    for shape in args.shape or [name for name in PLAN if name != "tiny"]:
        try:
            measure_shape(shape, report, args)
        except Exception as error:
            report.failed.append({"what": "shape", "shape": shape, "error": f"{type(error).__name__}: {error}"[:600]})
            report.write()
        clean_up(args.device)
    print(f"{len(report.rows)} measurements, {len(report.failed)} failed, in {report.seconds():.0f} s: {args.output}")


if __name__ == "__main__":
    main()
