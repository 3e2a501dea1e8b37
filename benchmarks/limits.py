"""The least time that a device can take for generation and for a training step, from rates measured in the same run.

Memory: the bytes that the decode steps read (all weights, the prompts' keys and values once per group, and each
sample's own), at the speed of a large copy. Arithmetic: the model's matrix products with as many rows as a step has,
each timed alone; on a GPU they are replayed as a CUDA graph, so that launching them from Python does not count.
Attention, norms and sampling are in neither limit. A program that overlaps reading and computing perfectly needs the
larger of the two; one that does not overlap them needs their sum.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from common import synchronize
from torch import nn
from transformers import PreTrainedModel

REPEAT = 20
MOST_ROWS = {"cpu": 1024, "cuda": 8192}  # of a product that is timed; the time of more rows is proportional

Weight = tuple[int, int]  # outputs, inputs


@dataclass(frozen=True)
class ModelSize:
    """What a step of a model reads and multiplies."""

    weights: int  # numbers that a forward pass reads: without an input embedding that is not also the head
    layers: Mapping[Weight, int]  # how many linear layers there are of each size, without the head
    head: Weight
    cached: int  # numbers in the cache of one token

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelSize:
        """The size of a model, which may be on the meta device."""
        config, head, embedding = model.config, model.get_output_embeddings(), model.get_input_embeddings()
        linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
        numbers = sum(parameter.numel() for parameter in model.parameters())
        if embedding.weight is not head.weight:
            numbers -= embedding.weight.numel()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cached = 2 * config.num_hidden_layers * config.num_key_value_heads * width
        layers = Counter((module.out_features, module.in_features) for module in linear)
        return cls(numbers, layers, (head.out_features, head.in_features), cached)


def decode_reads(size: ModelSize, prompt_lengths: Sequence[int], samples: int, new_tokens: int) -> float:
    """Numbers that the decode steps of ``samples`` completions per prompt read.

    The first token comes from the prefill, so that there is one step less than tokens.
    """
    steps = new_tokens - 1
    own = len(prompt_lengths) * samples * steps * new_tokens / 2
    return steps * (size.weights + sum(prompt_lengths) * size.cached) + own * size.cached


ProductSeconds = Callable[[int, Weight], float]
"""The seconds of one product of so many rows with a weight."""


class MeasuredProducts:
    """The seconds of matrix products on a device, each measured once."""

    def __init__(self, device: str, dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.dtype, self.clock = device, dtype, clock
        self.known: dict[tuple[int, Weight], float] = {}

    def __call__(self, rows: int, weight: Weight) -> float:
        timed = min(rows, MOST_ROWS[self.device])
        if (timed, weight) not in self.known:
            self.known[timed, weight] = self._measure(timed, weight)
        return self.known[timed, weight] * rows / timed

    def _measure(self, rows: int, weight: Weight) -> float:
        a = torch.randn(rows, weight[1], device=self.device).to(self.dtype)
        b = torch.randn(*weight, device=self.device).to(self.dtype)

        @torch.no_grad()
        def product() -> None:
            nn.functional.linear(a, b)

        product()  # libraries choose and load their kernel in the first call
        if self.device == "cuda":
            return seconds_in_graph(product)
        best = float("inf")
        for _ in range(REPEAT):
            start = self.clock()
            product()
            best = min(best, self.clock() - start)
        return best


def seconds_in_graph(function: Callable[[], None]) -> float:
    """The GPU's seconds for one call, as a CUDA graph of several."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEAT):
            function()
    best = float("inf")
    for _ in range(4):
        synchronize("cuda")
        start = time.perf_counter()
        graph.replay()
        synchronize("cuda")
        best = min(best, (time.perf_counter() - start) / REPEAT)
    return best


def forward_seconds(size: ModelSize, rows: int, head_rows: int, product: ProductSeconds) -> float:
    """The matrix products of a forward pass over ``rows`` tokens, with logits for ``head_rows`` of them."""
    layers = sum(count * product(rows, weight) for weight, count in size.layers.items())
    return layers + product(head_rows, size.head)


@dataclass(frozen=True)
class GenerationLimits:
    """Seconds."""

    bandwidth: float
    arithmetic: float

    @property
    def sum(self) -> float:
        return self.bandwidth + self.arithmetic


def generation_limits(
    size: ModelSize,
    prompt_lengths: Sequence[int],
    samples: int,
    new_tokens: int,
    *,
    bytes_per_number: int,
    bytes_per_second: float,
    product: ProductSeconds,
) -> GenerationLimits:
    """Prompts are prefilled once per group, in one pass; all samples run at once."""
    rows = len(prompt_lengths) * samples
    prefill = forward_seconds(size, sum(prompt_lengths), len(prompt_lengths), product)
    decode = (new_tokens - 1) * forward_seconds(size, rows, rows, product)
    read = decode_reads(size, prompt_lengths, samples, new_tokens) * bytes_per_number
    return GenerationLimits(read / bytes_per_second, prefill + decode)


def training_limit(size: ModelSize, prompt_tokens: int, completion_tokens: int, product: ProductSeconds) -> float:
    """The products of a forward and a backward pass, which has two for each one of the forward pass.

    ``prompt_tokens`` counts each prompt once, however many completions it has.
    """
    return 3 * forward_seconds(size, prompt_tokens + completion_tokens, completion_tokens, product)
