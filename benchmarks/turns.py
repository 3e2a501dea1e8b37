"""Conversations of several turns: the engine with and without the keys and values that it keeps between them.

Usage::

    python benchmarks/turns.py                                  # on the GPU if there is one, else on the CPU
    python benchmarks/turns.py --models tiny --turns 4,8,16
    python benchmarks/turns.py --device cuda --models 0.5b,1.5b --prompts 16 --samples 8

Every turn has its full length, and after it as many tokens are given. The conversations of both sides are the same,
with the same engine, in turn; compare the ratios. ``equal`` is the share of conversations with the same tokens: in half
precision, sums that are rounded differently may change one.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from common import arguments, counts, fill, in_turn, load, make_prompts, median, shapes

from groupwise.generate import Engine, Sampling
from groupwise.generate.types import keeping

WORK = {"cpu": (1, 100, 4, 16), "cuda": (16, 500, 8, 128)}  # prompts, prompt tokens, samples, new tokens


class Conversations:
    """The conversations of one side, and what they took the last time."""

    def __init__(self, engine: Engine, args: argparse.Namespace, turns: int, keeps: bool) -> None:
        self.engine, self.args, self.turns, self.keeps = engine, args, turns, keeps
        self.prompts = [ids.tolist() for ids in make_prompts(args, engine.handle.vocabulary)]
        self.computed = 0  # tokens before turns, and decode steps' tokens
        self.contexts: list[list[int]] = []

    def run(self) -> None:
        args, new = self.args, self.args.new_tokens
        given = torch.Generator().manual_seed(2)
        self.contexts, self.computed = self.prompts, 0
        with keeping(self.engine) if self.keeps else nullcontext():
            for turn in range(self.turns):
                samples = 1 if turn else args.samples
                sampling = Sampling(max_new_tokens=new, eos_ids=(), seed=turn)
                rollout = self.engine.generate(self.contexts, samples, sampling)
                self.computed += rollout.stats["prefilled_tokens"] + rollout.ids.numel()
                replies = torch.randint(10, self.engine.handle.vocabulary, rollout.ids.shape, generator=given)
                self.contexts = [
                    self.contexts[group] + ids + reply
                    for group, ids, reply in zip(
                        rollout.groups.tolist(), rollout.ids.tolist(), replies.tolist(), strict=True
                    )
                ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", type=shapes, help="tiny,135m,0.5b,1.5b,7b: random weights (default: tiny,135m)")
    parser.add_argument("--turns", type=counts, default=[2, 4, 8])
    args = parser.parse_args()
    for name, number in zip(("prompts", "prompt_tokens", "samples", "new_tokens"), WORK[args.device], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, number)
    fill(args)
    print(
        f"{args.prompts} prompts of about {args.prompt_tokens} tokens × {args.samples} samples; turns of "
        f"{args.new_tokens} sampled and as many given tokens; medians of {args.repeat}"
    )
    for model in args.models or ["tiny-shape", "smollm2-135m-shape"]:
        args.model = model
        engine = Engine(load(args), keep_on_gpu=True)
        rows = []
        for turns in args.turns:
            kept, again = (Conversations(engine, args, turns, keeps) for keeps in (True, False))
            seconds = in_turn(args.device, args.repeat, {"keeping": kept.run, "computing again": again.run})
            equal = sum(map(list.__eq__, kept.contexts, again.contexts)) / len(kept.contexts)
            time = median(seconds["keeping"]) / median(seconds["computing again"])
            rows.append(f"{turns:6}{time:10.2f}{kept.computed / again.computed:18.2f}{equal:8.2f}")
        print(f"\n{model}: keeping, relative to computing again\n turns      time   tokens computed   equal")
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
