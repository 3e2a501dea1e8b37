"""The bytes on one GPU: what is always there, and what sampling and training add."""

from __future__ import annotations

import math

from groupwise.planning.constants import FITTED
from groupwise.planning.cost import FLOAT
from groupwise.planning.gpus import Gpu
from groupwise.planning.shapes import HALF, ModelShape
from groupwise.planning.work import StepWork

ADAM = 2 * FLOAT  # bytes per weight
LOGITS = 3 * 512 * 2**20  # a chunk of float32 logits, its gradient and its rounded copy (core/logps.py)
RESERVED = 2 * 2**30  # the CUDA context, the libraries' workspaces, fragmentation
FREE_MEMORY_SHARE = 0.7  # of what is free, for the engine's cache (generate/memory.py)
SERVER_SHARE = 0.9  # vLLM's gpu_memory_utilization
MAX_BUDGET, BUDGET_SHARE = 40960, 0.35  # of the default token budget (model/packing.py)

Bytes = dict[str, float]


def trained_weights(shape: ModelShape, work: StepWork) -> int:
    return shape.parameters if work.lora_rank is None else shape.lora_weights(work.lora_rank)


def optimizer_sharded(shape: ModelShape, work: StepWork, ranks: int) -> Bytes:
    """Sharding "optimizer" (ZeRO-1): each rank has all weights, and its share of the masters and of AdamW's state."""
    trained = trained_weights(shape, work)
    return {
        "weights": HALF * (shape.parameters + (trained if work.lora_rank else 0)),
        "masters": FLOAT * trained / ranks,
        "AdamW": ADAM * trained / ranks,
        "reference": HALF * shape.parameters * work.reference,
        "teacher": float(HALF * work.teacher),
    }


def weights_sharded(shape: ModelShape, work: StepWork, ranks: int) -> Bytes:
    """Sharding "weights" (FSDP2): each rank has its share of the float32 weights, which are their own masters.

    The frozen weights under an adapter are bfloat16.
    """
    trained, frozen = trained_weights(shape, work), shape.parameters if work.lora_rank else 0
    return {
        "weights": (FLOAT * trained + HALF * frozen) / ranks,
        "AdamW": ADAM * trained / ranks,
        "reference": FLOAT * shape.parameters / ranks * work.reference,
        "teacher": HALF * work.teacher / ranks,
    }


def gradient_bytes(shape: ModelShape, work: StepWork, ranks: int, sharding: str) -> float:
    """Float32 gradients: with sharding "optimizer" of all weights, until they are summed over the ranks."""
    return FLOAT * trained_weights(shape, work) / (ranks if sharding == "weights" else 1)


def gathered_bytes(shape: ModelShape, sharding: str) -> float:
    """With sharding "weights": the layer that is computed and the next one, gathered, and the head."""
    if sharding != "weights":
        return 0.0
    return HALF * (2 * shape.layer_matrices + shape.head_weights)


def default_budget(shape: ModelShape, gpu: Gpu) -> int:
    """`model.packing.default_token_budget` on this GPU."""
    return max(1024, min(MAX_BUDGET, int(gpu.memory * BUDGET_SHARE / shape.activation_bytes) // 1024 * 1024))


def activation_bytes(shape: ModelShape, tokens: float, *, checkpointing: bool) -> float:
    """Of one pass. With gradient checkpointing: the inputs of all layers, and everything of the recomputed one."""
    constants = FITTED["memory"]
    if not checkpointing:
        return constants["activations"] * shape.activation_bytes * tokens
    return constants["checkpoints"] * (shape.checkpoint_bytes + 2 * shape.activation_bytes / shape.layers) * tokens


def logits_bytes(shape: ModelShape) -> float:
    """Chunks of logits, and the float32 gradient of the head."""
    return LOGITS + FLOAT * shape.head_weights


def training_bytes(shape: ModelShape, work: StepWork, ranks: int, sharding: str, budget: float) -> Bytes:
    """The memory of one rank while it learns with this token budget."""
    static = (optimizer_sharded if sharding == "optimizer" else weights_sharded)(shape, work, ranks)
    tokens = work.packs(budget).largest
    return static | {
        "gradients": gradient_bytes(shape, work, ranks, sharding),
        "gathered layers": gathered_bytes(shape, sharding),
        f"activations of {tokens:,.0f} tokens": activation_bytes(shape, tokens, checkpointing=work.checkpointing),
        "logits": logits_bytes(shape),
        "reserved": RESERVED,
    }


def cache_bytes(shape: ModelShape, work: StepWork, rows: float) -> float:
    """The KV cache of ``rows`` samples of full length and a spare one, and of their prompts once per group.

    If others wait, there is room for one more prompt (`generate.memory.plan_cache`).
    """
    prompts = min(work.prompts, math.ceil(rows / work.samples) + 1)
    return work.cache_share * shape.cache_bytes * ((rows + 1) * work.max_tokens + prompts * work.prompt_tokens)


def sampling_bytes(shape: ModelShape, static: Bytes, rows: float, work: StepWork, tensor_parallel: int = 1) -> Bytes:
    """The memory of one GPU while it samples, with ``rows`` samples at once."""
    return static | {
        f"KV cache of {rows:,.0f} samples": cache_bytes(shape, work, rows) / min(tensor_parallel, shape.kv_heads),
        "logits": 2 * FLOAT * rows * shape.vocabulary / tensor_parallel,
        "reserved": RESERVED,
    }


def server_weights(shape: ModelShape, tensor_parallel: int) -> Bytes:
    return {"weights": HALF * shape.parameters / tensor_parallel}


def most_rows(
    shape: ModelShape, static: Bytes, work: StepWork, gpu: Gpu, tensor_parallel: int = 1, *, server: bool = False
) -> int:
    """How many samples fit at once beside ``static``; 0 if none does, or fewer than the engine needs: one group.

    The engine's cache is at most 70 % of what is free, a server may use 90 % of the GPU.
    """
    free = gpu.memory - sum(static.values()) - RESERVED
    free = free - (1 - SERVER_SHARE) * gpu.memory if server else free * FREE_MEMORY_SHARE
    parallel = min(tensor_parallel, shape.kv_heads)
    token = work.cache_share * shape.cache_bytes
    free -= token * (work.max_tokens + 2 * work.prompt_tokens) / parallel  # the spare one, and rounding up
    each = token * (work.max_tokens + work.prompt_tokens / work.samples) / parallel
    each += 2 * FLOAT * shape.vocabulary / tensor_parallel
    rows = min(work.completions, work.max_num_seqs, int(max(free, 0.0) / each))
    return rows if server or rows >= min(work.samples, work.max_num_seqs) else 0
