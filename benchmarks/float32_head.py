"""A float32 head (`model.float32_head`) against one that rounds its logits: agreement, time and memory.

Completions are sampled and their log-probs computed by the trainer, with the same model and both heads in turn. Printed
are the differences between the sampler's and the trainer's log-probs (their mean, the square root of their mean square,
and the largest), the k3 estimate of the KL per token, seconds of sampling and of a forward and backward pass, and peak
memory. Times are medians of runs taken in turn in one process, after a warm-up round; compare the ratios.

Usage::

    python benchmarks/float32_head.py --device cuda --model qwen2.5-0.5b-shape
    python benchmarks/float32_head.py --device cuda --model MODEL_FOLDER         # real weights: real logits
    python benchmarks/float32_head.py --model tiny --prompts 2 --prompt-tokens 9 --samples 2 --new-tokens 4   # on a CPU
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import partial

import torch
from common import arguments, describe, fill, in_turn, load, make_prompts, median, peak_memory
from torch import Tensor

from groupwise.generate.engine import Engine
from groupwise.generate.types import Rollout, Sampling
from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.logprobs import completion_logps, iter_packs

HEADS = {"rounded": False, "float32": True}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--token-budget", type=int, help="tokens of a pass")
    args = parser.parse_args()
    fill(args)
    args.dtype = args.dtype or "bfloat16"
    model = load(args)
    prompts = make_prompts(args, model.config.vocab_size)
    print(describe(args, model, prompts))
    base = prepare(model)
    if base.head is None:
        raise SystemExit(f"this model takes the plain path: {base.fallback_reason}")
    handles = {name: replace(base, head=base.head._replace(float32=float32)) for name, float32 in HEADS.items()}
    engines = {name: Engine(handle) for name, handle in handles.items()}
    rollouts: dict[str, Rollout] = {}

    def sample(name: str) -> None:
        sampling = Sampling(max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens)
        rollouts[name] = engines[name].generate(prompts, args.samples, sampling)

    def sample_alone(name: str) -> None:
        for engine in engines.values():
            engine.release()
        sample(name)

    sampling = in_turn(args.device, args.repeat, {name: partial(sample, name) for name in HEADS})
    sampling_memory = {name: peak_memory(args.device, partial(sample_alone, name)) for name in HEADS}
    print(f"\n{'head':10}{'mean |d|':>11}{'rms d':>11}{'max |d|':>11}{'KL':>11}")
    for name, handle in handles.items():
        report_agreement(name, handle, prompts, rollouts[name], args)
    for engine in engines.values():
        engine.release()

    def learn(name: str) -> None:
        train(handles[name], prompts, rollouts["rounded"].completions(), args)

    training = in_turn(args.device, args.repeat, {name: partial(learn, name) for name in HEADS})
    training_memory = {name: peak_memory(args.device, partial(learn, name)) for name in HEADS}
    print(f"\n{'head':10}{'sampling':>11}{'training':>11}{'peak memory: sampling':>23}{'training':>11}")
    for name in HEADS:
        seconds = f"{median(sampling[name]):>10.3f}s{median(training[name]):>10.3f}s"
        print(f"{name:10}{seconds}{sampling_memory[name] / 2**30:>19.2f} GiB{training_memory[name] / 2**30:>7.2f} GiB")


def report_agreement(
    name: str, handle: ModelHandle, prompts: list[Tensor], rollout: Rollout, args: argparse.Namespace
) -> None:
    with torch.no_grad():
        result = completion_logps(handle, prompts, rollout.completions(), token_budget=args.token_budget)
    d = (result.logps.cpu() - rollout.logps)[result.mask.cpu()].double()
    kl = float((d.expm1() - d).mean())
    numbers = float(d.abs().mean()), math.sqrt(float(d.square().mean())), float(d.abs().max()), kl
    print(f"{name:10}{''.join(f'{number:>11.2e}' for number in numbers)}")


def train(
    handle: ModelHandle, prompts: list[Tensor], completions: list[list[Tensor]], args: argparse.Namespace
) -> None:
    for _, result in iter_packs(handle, prompts, completions, with_entropy=True, token_budget=args.token_budget):
        result.logps.sum().backward()  # type: ignore[no-untyped-call]
    handle.model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
