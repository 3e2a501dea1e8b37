"""Log-probs with gradients: packed rows with shared prompts against padded rows.

Usage::

    python benchmarks/logprobs.py                  # on the GPU if there is one, else on the CPU
    python benchmarks/logprobs.py --no-gradients   # only the forward pass, as for a reference model

Padded: one row per sample with its prompt, the model's forward pass, logits of the completion, log-softmax, gather.
Both have the same token budget per micro-batch. Times are medians of runs taken in turn in one process, after a warm-up
round; compare the ratios.
"""

from __future__ import annotations

import argparse

import torch
from common import (
    arguments,
    ceilings,
    default_attention,
    describe,
    fill,
    in_turn,
    load,
    make_prompts,
    median,
    peak_memory,
    profile,
)
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.logprobs import iter_packs
from groupwise.model.packing import default_token_budget


def packed(
    handle: ModelHandle, prompts: list[Tensor], completions: list[list[Tensor]], args: argparse.Namespace
) -> float:
    total = torch.zeros((), device=handle.device)
    with torch.set_grad_enabled(not args.no_gradients):
        for _, result in iter_packs(handle, prompts, completions, token_budget=args.token_budget):
            loss = -result.logps.sum()
            if not args.no_gradients:
                loss.backward()
            total += loss.detach()
    handle.model.zero_grad(set_to_none=True)
    return total.item()


def padded(
    model: PreTrainedModel, prompts: list[Tensor], completions: list[list[Tensor]], args: argparse.Namespace
) -> float:
    """Rows are padded on the left, so that all completions end together and logits_to_keep selects them."""
    pairs = [(prompt, ids) for prompt, members in zip(prompts, completions, strict=True) for ids in members]
    width = max(len(prompt) + len(ids) for prompt, ids in pairs)
    rows = torch.stack(
        [torch.cat([prompt.new_zeros(width - len(prompt) - len(ids)), prompt, ids]) for prompt, ids in pairs]
    )
    mask = torch.stack([torch.arange(width) >= width - len(prompt) - len(ids) for prompt, ids in pairs]).long()
    rows, mask = rows.to(model.device), mask.to(model.device)
    total = torch.zeros((), device=model.device)
    step = max(1, args.token_budget // width)
    keep = args.new_tokens
    with default_attention(model), torch.set_grad_enabled(not args.no_gradients):
        for start in range(0, len(rows), step):
            part, seen = rows[start : start + step], mask[start : start + step]
            logits = model(part, attention_mask=seen, use_cache=False, logits_to_keep=keep + 1).logits[:, :-1]
            logps = logits.float().log_softmax(-1).gather(-1, part[:, -keep:, None]).squeeze(-1)
            loss = -logps.sum()
            if not args.no_gradients:
                loss.backward()
            total += loss.detach()
    model.zero_grad(set_to_none=True)
    return total.item()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--token-budget", type=int, help="tokens of a micro-batch")
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="packed without torch.compile")
    parser.add_argument("--no-peer", action="store_true", help="packed alone")
    parser.add_argument("--profile", action="store_true", help="print the operations that take the most time")
    args = parser.parse_args()
    fill(args)
    model = load(args)
    prompts = make_prompts(args, model.config.vocab_size)
    print(describe(args, model, prompts), flush=True)
    completions = [list(torch.randint(10, model.config.vocab_size, (args.samples, args.new_tokens))) for _ in prompts]
    handle = prepare(model, compile=False if args.no_compile else None)
    args.token_budget = args.token_budget or default_token_budget(handle)
    print(f"micro-batches of up to {args.token_budget:,} tokens")
    losses: dict[str, float] = {}
    work = {"groupwise": lambda: losses.update(packed=packed(handle, prompts, completions, args))}
    if not args.no_peer:
        work["padded"] = lambda: losses.update(padded=padded(model, prompts, completions, args))
    seconds = in_turn(args.device, args.repeat, work)
    if args.profile:
        profile(args.device, work["groupwise"])
    peaks = {name: peak_memory(args.device, function) for name, function in work.items()}
    total = sum(map(len, prompts))
    tokens = {
        "groupwise": total + len(prompts) * args.samples * (args.new_tokens - 1),
        "padded": len(prompts) * args.samples * (max(map(len, prompts)) + args.new_tokens),
    }
    body = sum(p.numel() for p in model.model.parameters()) - model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings().weight.numel()
    passes = 2 if args.no_gradients else 6
    print(f"\n{'':12}{'seconds':>9}{'tokens computed':>17}{'TFLOP/s':>9}{'peak GiB':>10}")
    rates = {}
    for name, numbers in seconds.items():
        operations = passes * (body * tokens[name] + head * len(prompts) * args.samples * args.new_tokens)
        rates[name] = operations / median(numbers)
        print(f"{name:12}{median(numbers):9.2f}{tokens[name]:17,}{rates[name] / 1e12:9.2f}{peaks[name] / 2**30:10.2f}")
    _, rate = ceilings(args.device, model.dtype)
    print(f"a large matrix product reaches {rate / 1e12:.2f} TFLOP/s here; attention is not counted above")
    if not args.no_peer:
        ratio = median(seconds["padded"]) / median(seconds["groupwise"])
        more = tokens["padded"] / tokens["groupwise"]
        print(f"groupwise is {ratio:.2f} times as fast as padded, which computes {more:.2f} times the tokens")
        print(f"loss: packed {losses['packed']:.4f}, padded {losses['padded']:.4f}")


if __name__ == "__main__":
    main()
