"""Memory and time of an optimizer step with masters and AdamW's state divided among processes.

    torchrun --standalone --nproc-per-node 2 benchmarks/sharded_masters.py --layers 30 --width 576
    python benchmarks/sharded_masters.py --layers 30 --width 576

A Llama of random bfloat16 weights; the default is the shape of SmolLM2-135M. Rank 0 prints the bytes of masters and
optimizer state per rank, and the median time of five updates: sum of the gradients, step, and join of the weights.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.distributed.ranks import connect
from groupwise.model.device import resolve_device
from groupwise.model.sharded_masters import make_masters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    ranks = connect(device)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.width,
        intermediate_size=arguments.width * 8 // 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    masters = make_masters(model, ranks)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-6, fused=device.type == "cuda")
    times = []
    for _ in range(6):
        for parameter in model.parameters():
            (parameter.float().sum() * 1e-3).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        masters.reduce_gradients()
        masters.clip_gradient(1.0)
        optimizer.step()
        masters.sync_to_model()
        masters.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    kept = [*masters.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    held = sum(value.numel() * value.element_size() for value in kept)
    if ranks.is_main:
        weights = sum(parameter.numel() for parameter in model.parameters())
        peak = f", {torch.cuda.memory_allocated() / 2**20:,.0f} MiB allocated" if device.type == "cuda" else ""
        print(
            f"{ranks.size} rank(s), {weights / 1e6:.0f} M weights on {device}: {held / 2**20:,.0f} MiB of masters and "
            f"optimizer state per rank{peak}; {statistics.median(times[1:]):.2f} s per update"
        )
    ranks.close()


if __name__ == "__main__":
    main()
