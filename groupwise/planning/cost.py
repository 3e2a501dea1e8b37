"""The time of each phase of a step on one GPU: a sum of terms, each an ideal time or a count, times a fitted constant.

An ideal time is operations over the rate of a large matrix product, or bytes over the rate of a large copy, as measured
on the device. The constants (`constants.FITTED`) say how many times the ideal each takes, and what a kernel launch and
a call cost. Terms add up, because the kernels of a layer run one after another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from groupwise.planning.constants import FITTED
from groupwise.planning.gpus import Gpu
from groupwise.planning.shapes import HALF, ModelShape
from groupwise.planning.work import StepWork

FLOAT = 4  # bytes of a float32 number
PREFILL_TOKENS = 16384  # of one prefill (`Engine`)
HOST = ("launches",)  # terms of the host in passes over packed rows
BACKWARD_LAUNCHES = 1.5  # the time to launch a backward pass, relative to a forward pass: 0.06 and 0.04 s
INTERVALS = 24  # of the integral over a decode whose samples end at different times

Terms = dict[str, float]


@dataclass(frozen=True)
class Device:
    """What large operations reach on a GPU: operations and bytes per second."""

    flops: float
    bandwidth: float


def device_of(gpu: Gpu) -> Device:
    """A GPU's rates: the share of the data sheet's peaks that was measured on an H200."""
    return Device(gpu.flops * FITTED["device"]["flops"], gpu.bandwidth * FITTED["device"]["bandwidth"])


def seconds(phase: str, terms: Mapping[str, float]) -> Terms:
    """The seconds of each term of a phase.

    In passes over packed rows the host launches kernels while the GPU computes: they take as long as the slower of the
    two. Decoding replays captured graphs, whose launches are a part of the GPU's time; the optimizer waits for norms.
    """
    constants = FITTED[phase]
    parts = {name: constants[name] * value for name, value in terms.items()}
    if phase != "passes":
        return parts
    host = {name: parts.pop(name) for name in HOST}
    return host if sum(host.values()) > sum(parts.values()) else parts


def add(*parts: Mapping[str, float]) -> Terms:
    total: Terms = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def scaled(terms: Mapping[str, float], factor: float) -> Terms:
    return {name: factor * value for name, value in terms.items()}


# --- generation ------------------------------------------------------------------------------------------------------


def prefill_terms(shape: ModelShape, work: StepWork, device: Device, tensor_parallel: int = 1) -> Terms:
    """Prompts are computed once per group, at most 16,384 tokens at a time; then each sample's first token is drawn."""
    tokens = work.prompts * work.prompt_tokens
    operations = 2 * shape.layers * shape.layer_matrices * tokens + 2 * shape.head_weights * work.prompts
    attention = 4 * shape.layers * shape.heads * shape.head_dim * tokens * work.prompt_tokens / 2
    return {
        "products": operations / device.flops / tensor_parallel,
        "attention": attention / device.flops / tensor_parallel,
        "activations": shape.activation_bytes * tokens / device.bandwidth / tensor_parallel,
        "logits": work.completions * shape.vocabulary * FLOAT / device.bandwidth,
        "launches": math.ceil(tokens / PREFILL_TOKENS),
    }


def decode_step_terms(
    shape: ModelShape,
    rows: float,
    own_tokens: float,
    prompts: float,
    prompt_tokens: float,
    device: Device,
    tensor_parallel: int = 1,
) -> Terms:
    """One token for ``rows`` samples that have ``own_tokens`` in all, with ``prompts`` of ``prompt_tokens`` each.

    The weights are read once for all rows; their products are bound by that or by arithmetic, whichever takes longer.
    Beside these, two latencies: with few rows a product has few blocks, each of which goes through the inner dimension
    step by step (``inner``, a sum over a layer's products); and attention to a prompt goes through its tokens, for all
    heads that share keys (``prompts``).
    """
    weights = shape.layers * shape.layer_matrices + shape.head_weights
    split = tensor_parallel
    return {
        "launches": float(shape.layers),
        "products": max(weights * HALF / device.bandwidth, 2 * rows * weights / device.flops) / split,
        "cache": (own_tokens + prompts * prompt_tokens)
        * shape.cache_bytes
        / device.bandwidth
        / min(split, shape.kv_heads),
        "logits": rows * shape.vocabulary * FLOAT / device.bandwidth / split,
        "inner": shape.layers * (5 * shape.hidden + (shape.heads * shape.head_dim + shape.intermediate) / split),
        "prompts": float(shape.layers * shape.heads * shape.head_dim // shape.kv_heads) * prompt_tokens,
    }


def decode_terms(
    shape: ModelShape,
    work: StepWork,
    device: Device,
    slots: float | None = None,
    tensor_parallel: int = 1,
    total: StepWork | None = None,
) -> tuple[Terms, float]:
    """All decode steps of one rank's share, and their number. ``slots``: samples at once; others take the places of
    those that end. While samples wait, all slots are in use; then the last ones run out, the longest of the ``total``
    last. Among several ranks the time is that of the rank with the most tokens."""
    total = total or work
    rows = min(work.completions, slots or work.max_num_seqs)
    prompts = rows / work.samples

    def step(running: float, tokens: float) -> Terms:
        shared = min(prompts, running)
        return decode_step_terms(shape, running, running * tokens, shared, work.prompt_tokens, device, tensor_parallel)

    longer = longest_share(total, total.completions / work.completions)
    waiting = (work.completions - rows) * work.answer_tokens / rows * longer  # steps with all slots in use
    terms, steps = scaled(step(rows, work.mean_age), waiting), waiting
    last = work.max_tokens - 1.0  # the first token comes from the prefill
    if work.decay:
        last = min(last, math.log(2 * total.completions) / work.decay)  # until half a sample is left
    for interval in range(INTERVALS):
        tokens = last * (interval + 0.5) / INTERVALS
        terms = add(terms, scaled(step(rows * math.exp(-work.decay * tokens), tokens), last / INTERVALS))
    return terms, steps + last


def longest_share(work: StepWork, ranks: float) -> float:
    """How many times the mean's tokens the busiest of several ranks samples, since lengths are not known in advance.

    The maximum of ``ranks`` normal sums: mean + deviation · √(2 ln ranks).
    """
    if ranks <= 1 or not work.variance:
        return 1.0
    deviation = math.sqrt(work.variance * ranks / work.completions) / work.answer_tokens
    return min(1 + deviation * math.sqrt(2 * math.log(ranks)), work.max_tokens / work.answer_tokens)


# --- training --------------------------------------------------------------------------------------------------------


def training_terms(shape: ModelShape, work: StepWork, device: Device, budget: float, *, backward: bool = True) -> Terms:
    """A forward and backward pass over a batch, or a forward pass alone; prompts once per group.

    Operations per weight and token: 2 forward and 4 backward, or 2 where the weight is frozen (LoRA); the layers once
    more with gradient checkpointing, and the head once more, because its logits are recomputed. Attention's backward
    pass is 2.5 times its forward pass.
    """
    packs = work.packs(budget)
    tokens, answers = packs.tokens, work.sampled_tokens
    checkpointing = backward and work.checkpointing
    backwards = (2 if work.lora_rank else 4) if backward else 0
    layers = (2 + backwards + 2 * checkpointing) * shape.layers * shape.layer_matrices * tokens
    head = (2 + (2 + backwards if backward else 0)) * shape.head_weights * answers
    pairs = work.prompts * work.prompt_tokens**2 / 2  # of a query and a key it attends to
    pairs += work.completions * work.answer_tokens * (work.prompt_tokens + work.mean_age)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    attention *= 1 + 2.5 * backward + checkpointing
    passes = 1 + 2 * backward + checkpointing  # over the activations
    return {
        "products": (layers + head) / device.flops,
        "attention": attention / device.flops,
        "activations": passes * shape.activation_bytes * tokens / device.bandwidth,
        "logits": (3 if backward else 1) * answers * shape.vocabulary * FLOAT / device.bandwidth,
        "launches": packs.number * ((1 + BACKWARD_LAUNCHES) if backward else 1),
    }


def optimizer_terms(weights: float, device: Device) -> Terms:
    """Clipping, AdamW and the finite check. Bytes per weight: the gradient is read three times and written once, the
    master is read twice and written once, and each of Adam's two numbers is read and written."""
    return {"bytes": weights * FLOAT * (4 + 3 + 4) / device.bandwidth, "call": 1.0}


def sync_terms(weights: float, device: Device) -> Terms:
    """The copy of the float32 masters into the model's bfloat16 weights."""
    return {"bytes": weights * (FLOAT + HALF) / device.bandwidth, "call": 1.0}
