"""Ways to place a step on several GPUs, with the time, the memory and the exchanges of each.

Colocated: every GPU samples its share of the prompts with the engine, then learns its share. Disaggregated: some GPUs
are servers that sample, the others learn; the next batch is sampled while the last one is learned.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from groupwise.planning import memory
from groupwise.planning.cost import (
    Terms,
    decode_terms,
    device_of,
    longest_share,
    optimizer_terms,
    prefill_terms,
    scaled,
    seconds,
    sync_terms,
    training_terms,
)
from groupwise.planning.gpus import Gpu
from groupwise.planning.links import Exchange, Links
from groupwise.planning.shapes import HALF, ModelShape
from groupwise.planning.work import StepWork

COLOCATED, DISAGGREGATED = "colocated", "disaggregated"
SHARDINGS = ("optimizer", "weights")
SMALLEST_BUDGET = 1024
SAMPLE_BYTES = 8 + 4 + 4 + 4  # of one token of a `Rollout`
# A server's host needs so long for each sample and step, so that it has at most 50,000 tokens per second: chosen by
# hand to match vLLM 0.26 on the host of one H200, see docs/scale.md.
SERVER_HOST_SECONDS = 20e-6
CANDIDATES = 48  # numbers of servers to try


@dataclass(frozen=True)
class SamplingCost:
    """Sampling on one GPU, or on one server of several."""

    seconds: Terms
    rows: int
    memory: memory.Bytes


@dataclass(frozen=True)
class TrainingCost:
    """Learning on ``ranks`` GPUs."""

    ranks: int
    sharding: str
    seconds: Terms
    exchanges: tuple[Exchange, ...]
    budget: float
    memory: memory.Bytes


@dataclass(frozen=True)
class Layout:
    """A placement. Seconds by phase and term, the exchanges between GPUs, and the memory of a GPU in each phase."""

    kind: str
    gpu: Gpu
    gpus: int
    sampling: SamplingCost
    training: TrainingCost
    exchanges: tuple[Exchange, ...] = ()
    servers: int = 0  # GPUs that only sample
    tensor_parallel: int = 1  # GPUs of one server
    missing: str | None = None  # why it does not fit
    work: StepWork = field(kw_only=True)

    @property
    def sampling_seconds(self) -> float:
        return sum(self.sampling.seconds.values())

    @property
    def training_seconds(self) -> float:
        return sum(self.training.seconds.values()) + sum(part.seconds for part in self.training.exchanges)

    @property
    def transfer_seconds(self) -> float:
        """Of the new weights to where samples are drawn, and of the samples to where they are learned."""
        return sum(part.seconds for part in self.exchanges)

    @property
    def synchronous_seconds(self) -> float:
        """Of a step if sampling waits for learning and learning for sampling."""
        return self.sampling_seconds + self.transfer_seconds + self.training_seconds

    @property
    def step_seconds(self) -> float:
        if self.kind == COLOCATED:
            return self.synchronous_seconds
        return max(self.sampling_seconds + self.transfer_seconds, self.training_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.work.sampled_tokens / self.step_seconds

    @property
    def most_memory(self) -> float:
        return max(sum(self.training.memory.values()), sum(self.sampling.memory.values()))

    @property
    def all_exchanges(self) -> tuple[Exchange, ...]:
        return (*self.exchanges, *self.training.exchanges)


def sample_share(
    shape: ModelShape,
    work: StepWork,
    gpu: Gpu,
    replicas: int,
    static: memory.Bytes,
    tensor_parallel: int = 1,
    ideal: bool = False,
    server: bool = False,
) -> SamplingCost:
    """The busiest of ``replicas`` samplers, each on ``tensor_parallel`` GPUs, with as many samples at once as fit.

    ``server``: with the host of a vLLM server instead of this engine's.
    """
    share, device = work.share(replicas), device_of(gpu)
    rows = memory.most_rows(shape, static, share, gpu, tensor_parallel, server=server)
    held = memory.sampling_bytes(shape, static, max(rows, 1), share, tensor_parallel)
    decode, steps = decode_terms(shape, share, device, max(rows, 1), tensor_parallel, total=work)
    prefill = prefill_terms(shape, share, device, tensor_parallel)
    parts = {f"decode: {name}": value for name, value in seconds("decode", decode).items()}
    parts["prefill"] = sum(seconds("passes", prefill).values())
    if tensor_parallel > 1:  # two sums over the GPUs of a server per layer and step
        links = Links(gpu, tensor_parallel, ideal)
        size = HALF * shape.hidden * max(rows, 1)
        parts["decode: sums over a server's GPUs"] = links.sum_in_server("", size, 2 * shape.layers * steps).seconds
    if server:
        host = SERVER_HOST_SECONDS * share.sampled_tokens * longest_share(work, work.completions / share.completions)
        parts["decode: the server's host"] = max(0.0, host - sum(parts.values()) + parts["prefill"])
    return SamplingCost(parts, rows, held)


@functools.lru_cache(2048)  # the same for servers of any number of GPUs
def train_share(
    shape: ModelShape, work: StepWork, gpu: Gpu, ranks: int, sharding: str, ideal: bool = False
) -> TrainingCost:
    """The busiest of ``ranks`` that learn, with the largest token budget that fits. Each mini-batch is divided."""
    share = replace(work, prompts=work.prompts_per_update).share(ranks)
    device, links = device_of(gpu), Links(gpu, ranks, ideal)
    trained = memory.trained_weights(shape, work)
    budget = float(max(work.token_budget or memory.default_budget(shape, gpu), work.longest))
    held = memory.training_bytes(shape, share, ranks, sharding, budget)
    while sum(held.values()) > gpu.memory and budget / 2 >= max(SMALLEST_BUDGET, work.longest):
        budget /= 2
        held = memory.training_bytes(shape, share, ranks, sharding, budget)
    passes = training_terms(shape, share, device, budget)
    compute = {f"train: {name}": value for name, value in seconds("passes", passes).items()}
    forward = seconds("passes", training_terms(shape, share, device, budget, backward=False))
    compute = scaled(compute, work.updates)
    if work.forwards:
        compute["log-probs"] = work.forwards * work.mini_batches * sum(forward.values())
    packs = share.packs(budget).number * work.updates
    own = trained / ranks
    update = sum(seconds("optimizer", optimizer_terms(own, device)).values())
    update += sum(seconds("sync", sync_terms(own, device)).values()) if sharding == "optimizer" else 0.0
    exchanges: tuple[Exchange, ...] = ()
    if ranks > 1 and sharding == "optimizer":
        tensors = 14 * shape.layers if work.lora_rank else shape.tensors  # one exchange each (model/sharded_masters.py)
        exchanges = (
            links.ring("gradients, summed (reduce-scatter)", 4 * trained / tensors, work.updates * tensors),
            links.ring("updated weights (all-gather)", HALF * trained / tensors, work.updates * tensors),
        )
    elif ranks > 1:
        exchanges = _fsdp_exchanges(shape, work, links, trained, packs, sum(compute.values()))
    return TrainingCost(ranks, sharding, compute | {"optimizer": work.updates * update}, exchanges, budget, held)


def _fsdp_exchanges(
    shape: ModelShape, work: StepWork, links: Links, trained: float, packs: float, compute: float
) -> tuple[Exchange, ...]:
    """Each pack gathers all layers forward and again backward, and sums the gradients of all layers.

    A layer's exchange goes on while another layer is computed: what the step waits for is the first layer's, and any
    excess over the time of the computation.
    """
    layers = shape.layers
    gathers = (2 * packs + packs / work.passes * work.forwards) * layers
    parts = (
        links.ring("weights of each layer (all-gather)", HALF * shape.parameters / layers, gathers),
        links.ring("gradients of each layer (reduce-scatter)", 4 * trained / layers, packs * layers),
    )
    total = sum(part.seconds for part in parts)
    waited = (max(total - compute, 0.0) + total / layers) / total if total else 0.0
    return tuple(replace(part, seconds=part.seconds * waited) for part in parts)


def _samples(work: StepWork, links: Links) -> Exchange:
    """Every rank gets all samples, padded to the longest: ids, two log-probs and a version for each token."""
    return links.to_every_host("samples to every rank", SAMPLE_BYTES * work.completions * work.max_tokens)


def colocated(shape: ModelShape, work: StepWork, gpu: Gpu, gpus: int, sharding: str, ideal: bool = False) -> Layout:
    training, links = train_share(shape, work, gpu, gpus, sharding, ideal), Links(gpu, gpus, ideal)
    exchanges: tuple[Exchange, ...] = (_samples(work, links),) if gpus > 1 else ()
    if sharding == "optimizer":
        static = memory.optimizer_sharded(shape, work, gpus)
    else:  # a complete copy in bfloat16 while sampling
        static = memory.weights_sharded(shape, work, gpus) | {"weights to sample with": HALF * shape.parameters}
        if gpus > 1:
            exchanges += (links.ring("weights to sample with (all-gather)", HALF * shape.parameters),)
    sampling = sample_share(shape, work, gpu, gpus, static, ideal=ideal)
    missing = _missing(training, gpu, gpus) or _no_rows(sampling, gpu, f"with model.sharding {sharding!r}")
    return Layout(COLOCATED, gpu, gpus, sampling, training, exchanges, missing=missing, work=work)


@functools.lru_cache(2048)  # the same for each sharding
def server_share(
    shape: ModelShape, work: StepWork, gpu: Gpu, servers: int, tensor_parallel: int, ideal: bool
) -> SamplingCost:
    static = memory.server_weights(shape, tensor_parallel)
    return sample_share(shape, work, gpu, servers // tensor_parallel, static, tensor_parallel, ideal, server=True)


def disaggregated(
    shape: ModelShape, work: StepWork, gpu: Gpu, gpus: int, servers: int, tensor_parallel: int, sharding: str,
    ideal: bool = False,
) -> Layout:  # fmt: skip
    """``servers`` GPUs sample, ``tensor_parallel`` together; the others learn."""
    ranks = gpus - servers
    training = train_share(shape, work, gpu, ranks, sharding, ideal)
    sampling = server_share(shape, work, gpu, servers, tensor_parallel, ideal)
    exchanges = [Links(gpu, gpus, ideal).broadcast("new weights to the servers", HALF * shape.parameters)]
    learners = Links(gpu, ranks, ideal)
    if ranks > 1:
        exchanges.append(_samples(work, learners))
    if sharding == "weights" and ranks > 1:
        exchanges.append(learners.ring("new weights gathered (all-gather)", HALF * shape.parameters))
    missing = _missing(training, gpu, ranks) or _no_rows(sampling, gpu, f"on servers of {tensor_parallel} GPUs")
    return Layout(
        DISAGGREGATED, gpu, gpus, sampling, training, tuple(exchanges), servers, tensor_parallel, missing, work=work
    )


def all_layouts(shape: ModelShape, work: StepWork, gpu: Gpu, gpus: int, ideal: bool = False) -> Iterator[Layout]:
    """Every layout that is worth comparing, also those that do not fit."""
    for sharding in SHARDINGS[: 1 if gpus == 1 else 2]:
        yield colocated(shape, work, gpu, gpus, sharding, ideal)
    for tensor_parallel in (1, 2, 4, 8):
        if tensor_parallel > gpu.per_node or shape.heads % tensor_parallel:
            continue
        choices = range(tensor_parallel, gpus, tensor_parallel)
        for servers in choices[:: max(1, len(choices) // CANDIDATES)]:
            for sharding in SHARDINGS:
                yield disaggregated(shape, work, gpu, gpus, servers, tensor_parallel, sharding, ideal)


def _missing(training: TrainingCost, gpu: Gpu, ranks: int) -> str | None:
    need = sum(training.memory.values())
    if need <= gpu.memory:
        return None
    return (
        f"learning with model.sharding {training.sharding!r} on {ranks} × {gpu.name} takes {need / 1e9:,.0f} GB per "
        f"GPU of {gpu.memory / 1e9:,.0f}"
    )


def _no_rows(sampling: SamplingCost, gpu: Gpu, where: str) -> str | None:
    if sampling.rows >= 1:
        return None
    need = sum(sampling.memory.values())
    return (
        f"sampling {where} leaves too little for the completions of one prompt ({need / 1e9:,.0f} GB per GPU with a "
        f"single one, of {gpu.memory / 1e9:,.0f})"
    )
