"""A complete GRPO step: groupwise's trainer, its drop-in for TRL, and TRL, with the same model, prompts and settings.

Usage::

    python benchmarks/step.py --against trl            # on the GPU if there is one, else on the CPU
    python benchmarks/step.py                          # groupwise, and the script for TRL with its import changed
    python benchmarks/step.py --against trl --micro 16 # TRL with micro-batches of 16 answers
    python benchmarks/step.py --turns                  # what the drop-in adds to a step, on a busy machine too

Every answer has its full length, the loss is DAPO's, without KL and gradient checkpointing. Each side runs in a
separate process, one after the other, so that peak memory is measured separately; the first steps (compilation, graph
capture) are not counted. Before that both compute loss and gradient of the same samples in float32, which must agree.
A step is the time from one step's end to the next, so that it holds callbacks and logs too. Compare the ratios rather
than the seconds. With ``--turns``, groupwise's trainer and the drop-in take steps in turn, in one process, so that both
see the same machine; CPU time is reported beside wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import arguments, fill, load, median, synchronize

ENVIRONMENT = dict(os.environ)
LEARNING_RATE = 1e-6
LETTERS = "abcdefghijklmnopqrstuvwxyz     "


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A cheap reward that differs between answers."""
    return [sum(ids) % 101 / 100 for ids in completion_ids]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--against", choices=("trl",), help="the library to compare with")
    parser.add_argument("--micro", type=int, help="TRL's micro-batch in answers (default: 32 on a GPU, 8 on a CPU)")
    parser.add_argument("--top-k", type=int, default=40)
    parser.add_argument("--turns", action="store_true", help="only groupwise and the drop-in, step by step in turn")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    fill(args)
    args.micro = args.micro or (32 if args.device == "cuda" else 8)
    if args.side:
        print("RESULT " + json.dumps(SIDES[args.side](args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        save_model(args)
        print(describe(args), flush=True)
        if args.turns:
            report_turns(in_new_process(args, "turns"))
            return
        if args.against:
            report_agreement(in_new_process(args, "agreement"))
        sides = ("groupwise", "drop-in", *([args.against] * bool(args.against)))
        report(args, {side: in_new_process(args, side) for side in sides})


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


def in_new_process(args: argparse.Namespace, side: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--side", side, "--folder", str(args.folder), "--model", args.model]
    for name in ("device", "prompts", "prompt_tokens", "samples", "new_tokens", "repeat", "micro", "top_k"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--dtype", args.dtype] if args.dtype else []
    done = subprocess.run(command, capture_output=True, text=True, env=environment(side))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{side} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def environment(side: str) -> dict[str, str]:
    """The environment; for groupwise with the variable that its command line sets."""
    return ENVIRONMENT if side != "groupwise" else {"MIMALLOC_PURGE_DELAY": "10000", **ENVIRONMENT}


# --- the sides -------------------------------------------------------------------------------------------------------


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
    with native_trainer(args, warm + args.repeat) as trainer:
        start_counting(args)
        for result in trainer.steps():
            steps.append(result.metrics)
            ends.append(now(args))
            if len(steps) == warm + args.repeat:
                break
    return result_of(args, steps[warm:], between(ends, warm))


def run_drop_in(args: argparse.Namespace) -> dict[str, Any]:
    import groupwise.trl
    from groupwise.rundir import read_metrics

    warm, watch = 3 if args.device == "cuda" else 1, watch_of(args)
    trainer = make_trl(args, warm + args.repeat, [watch], library=groupwise.trl)
    start_counting(args)
    trainer.train()
    steps = [row for row in read_metrics(args.folder / "trl" / "metrics.jsonl") if "step_time" in row]
    return result_of(args, steps[warm:], between(watch.ends, warm))


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


def result_of(args: argparse.Namespace, steps: list[dict[str, float]], times: list[float]) -> dict[str, Any]:
    if any(step["completions/mean_length"] != args.new_tokens for step in steps):
        raise SystemExit("groupwise stopped early; the comparison would not be fair")
    return {
        "step": median(times),
        "generation": median([step["time/generate"] for step in steps]),
        "training": median([step["time/train"] for step in steps]),
        "peak": peak(args),
        "tokens": args.prompts * args.samples * args.new_tokens,
    }


def watch_of(args: argparse.Namespace) -> Any:
    """A callback of transformers that takes the time at each step's end."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(now(args))

    return Watch()


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    import trl

    warm, watch = 1, watch_of(args)
    times: list[float] = []
    trainer = make_trl(args, warm + args.repeat, [watch], library=trl)
    generate = trainer._generate

    def timed(*args_: Any, **kwargs: Any) -> Any:
        synchronize(args.device)
        start = time.perf_counter()
        completions = generate(*args_, **kwargs)
        synchronize(args.device)
        times.append(time.perf_counter() - start)
        return completions

    trainer._generate = timed
    start_counting(args)
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "reward" in entry]
    if any(length != args.new_tokens for length in lengths):
        raise SystemExit(f"TRL stopped early ({lengths}); the comparison would not be fair")
    step, generation = median(between(watch.ends, warm)), median(times[warm:])
    return {
        "step": step,
        "generation": generation,
        "training": step - generation,
        "peak": peak(args),
        "tokens": args.prompts * args.samples * args.new_tokens,
    }


def make_trl(
    args: argparse.Namespace, steps: int, callbacks: list[Any], library: Any, dtype: torch.dtype | None = None
) -> Any:
    """The trainer of `trl`, or of `groupwise.trl`: everything else is the same."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from groupwise.model.device import resolve_device, resolve_dtype

    answers = args.prompts * args.samples
    micro = min(args.micro, answers)
    dtype = dtype or resolve_dtype(args.dtype or "auto", resolve_device(args.device))
    config = library.GRPOConfig(
        output_dir=str(args.folder / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=answers // micro,
        num_generations=args.samples,
        max_completion_length=args.new_tokens,
        temperature=1.0,
        top_k=args.top_k or 0,
        top_p=1.0,
        generation_kwargs={"min_new_tokens": args.new_tokens},
        loss_type="dapo",
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        bf16=dtype == torch.bfloat16,
        use_cpu=args.device == "cpu",
        shuffle_dataset=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows(args)),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            callbacks=callbacks,
        )


def run_agreement(args: argparse.Namespace) -> dict[str, Any]:
    """Loss and gradient of the same samples by both, in float32, on a smaller batch."""
    from groupwise.core import group_advantages
    from groupwise.core.losses import LOSSES
    from groupwise.data import Prompt
    from groupwise.generate import Engine, Sampling
    from groupwise.model import MasterWeights, load_model, prepare
    from groupwise.training.rollout.batch import Batch, GroupAdvantages
    from groupwise.training.update.minibatch import build_minibatch
    from groupwise.training.update.optimizer import make_optimizer
    from groupwise.training.update.updater import Updater

    args.prompts, args.samples, args.new_tokens, args.dtype = 2, 4, min(32, args.new_tokens), "float32"
    torch.backends.cuda.matmul.allow_tf32 = False
    texts = [row["prompt"] for row in rows(args)]
    prompts = [tuple(text.encode()) for text in texts]
    model = load_model(args.model, device=args.device, dtype="float32")
    handle = prepare(model, compile=False)
    rollout = Engine(handle).generate(
        prompts,
        args.samples,
        Sampling(max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens, top_k=args.top_k),
    )
    ids = [row.clone() for row in rollout.ids]
    rewards = torch.tensor(reward([row.tolist() for row in ids]), dtype=torch.float64)
    advantages = group_advantages(rewards, args.samples).float()
    recipe = recipe_of(args, 1)
    batch = Batch(
        rows=rows(args), row_numbers=[0, 1], prompts=[Prompt(p, t) for p, t in zip(prompts, texts, strict=True)],
        samples=args.samples, ids=ids, texts=[""] * len(ids), stop_reasons=["length"] * len(ids),
        sampler_logps=list(rollout.logps), versions=list(rollout.versions), kept=None, rewards=rewards[:, None],
        dropped=torch.zeros(len(ids), dtype=torch.bool),
    )  # fmt: skip
    none = torch.zeros(len(ids), dtype=torch.bool)
    batch_advantages = GroupAdvantages(rewards, batch.prompt_of, advantages, {}, none)
    masters = MasterWeights(model)
    updater = Updater(handle, masters, make_optimizer(recipe, model, masters), None, 10**6, LOSSES["dapo"])
    result = updater._gradient(build_minibatch(batch, batch_advantages, [0, 1], recipe), recipe, False, False)
    ours = {name: master.grad.clone() for name, master in masters.named_parameters()}
    masters.close()

    import trl

    trainer = make_trl(args, 1, [], trl, torch.float32)
    trl_model = trainer.model
    device = next(trl_model.parameters()).device
    width = max(map(len, prompts))
    padded = torch.tensor([[256] * (width - len(p)) + list(p) for p in prompts]).repeat_interleave(args.samples, 0)
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).repeat_interleave(args.samples, 0)
    inputs = {
        "prompt_ids": padded, "prompt_mask": seen, "completion_ids": torch.stack(ids),
        "completion_mask": torch.ones(len(ids), args.new_tokens, dtype=torch.long), "advantages": advantages,
        "num_items_in_batch": torch.tensor(len(ids) * args.new_tokens),
    }  # fmt: skip
    # TRL divides by the accumulation steps of its loop, which does not run here.
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trl_model.train(), {name: value.to(device) for name, value in inputs.items()})
    loss.backward()
    theirs = {name: parameter.grad for name, parameter in trl_model.named_parameters() if parameter.grad is not None}
    if ours.keys() != theirs.keys():
        raise SystemExit(f"the two models have different weights: {sorted(ours.keys() ^ theirs.keys())[:3]}")
    difference = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours) ** 0.5
    size = sum(float(gradient.double().square().sum()) for gradient in theirs.values()) ** 0.5
    return {
        "ours": float(sum(result.values.values())),
        "theirs": float(loss.detach()),
        "gradient": difference / size,
        "size": size,
    }


SIDES = {
    "groupwise": run_groupwise, "drop-in": run_drop_in, "turns": run_turns, "trl": run_trl, "agreement": run_agreement,
}  # fmt: skip


# --- measuring and reporting -----------------------------------------------------------------------------------------


def now(args: argparse.Namespace) -> float:
    synchronize(args.device)
    return time.perf_counter()


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


def report_agreement(result: dict[str, float]) -> None:
    print(
        f"on the same samples, float32: loss {result['ours']:.3e} and {result['theirs']:.3e}; the gradients differ by "
        f"{result['gradient']:.1e} of their norm {result['size']:.3g}",
        flush=True,
    )
    if result["gradient"] > 1e-3:
        raise SystemExit("loss and gradient do not agree; the comparison is meaningless")


def report(args: argparse.Namespace, results: dict[str, dict[str, float]]) -> None:
    print(f"\n{'':12}{'step':>9}{'generation':>12}{'training':>10}{'peak GiB':>10}{'tokens/s':>10}")
    for side, result in results.items():
        print(
            f"{side:12}{result['step']:8.2f}s{result['generation']:11.2f}s{result['training']:9.2f}s{result['peak']:10.1f}"
            f"{result['tokens'] / result['step']:10,.0f}"
        )
    ours = results.pop("groupwise")
    for side, result in results.items():
        ratios = {name: result[name] / ours[name] for name in ("step", "generation", "training", "peak")}
        print(
            f"{side + ' /':12}{ratios['step']:8.2f}×{ratios['generation']:11.2f}×{ratios['training']:9.2f}×"
            f"{ratios['peak']:9.2f}×"
        )
    print("the ratios are to groupwise")


def report_turns(result: dict[str, dict[str, float]]) -> None:
    for time_of in ("wall", "CPU"):
        ours, drop_in = result["groupwise"][time_of], result["drop-in"][time_of]
        print(f"{time_of} time of a step: groupwise {ours:.3f} s, drop-in {drop_in:.3f} s, {drop_in / ours:.3f}×")


if __name__ == "__main__":
    main()
