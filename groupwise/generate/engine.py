"""Generation with continuous batching; a group's samples share the KV cache of their prompt.

`Engine.generate` is the loop: admit samples that fit, prefill new prompts, sample their first tokens, decode one token
for all running samples, and read the output of a step a fixed number of steps ago. The scheduler decides which samples
run, the runner computes a step, and `sampling` samples the tokens.
"""

from __future__ import annotations

import importlib.util
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from groupwise.config import Recipe
from groupwise.distributed.ranks import Ranks
from groupwise.errors import InputError, check_choice, check_integer
from groupwise.generate.kept_tokens import KeptTokens
from groupwise.generate.local import LocalGenerator
from groupwise.generate.memory import EXPECTED_SHARE, CachePlan, plan_cache
from groupwise.generate.plain import PlainGenerator
from groupwise.generate.request import ActiveSamples, OutputBuffer, RandomStream, Request
from groupwise.generate.runner import Runner, SavedSample, StepBatch
from groupwise.generate.sampling import OccurredTokens
from groupwise.generate.scheduler import PageEstimate, Scheduler
from groupwise.generate.types import Generator, Progress, Rollout, Sampling, Stop
from groupwise.model.attention import to_device
from groupwise.model.cache import CACHE_DTYPES, SharedCache
from groupwise.model.handle import ModelHandle, eval_mode, prepare
from groupwise.model.joint_products import JointProducts
from groupwise.model.packing import Ids
from groupwise.model.small_batch_linear import small_batch_linears


class Engine(LocalGenerator):
    """Samples from a causal language model of transformers.

    cache_bytes: the maximal size of the KV cache; by default 70 % of the free memory.
    max_num_seqs: the maximal number of concurrent samples (1,024 on a GPU, 128 on a CPU).
    prefill_tokens: the maximal number of prompt tokens in one prefill (16,384 on a GPU, 2,048 on a CPU).
    isolated: make a sample's tokens independent of the rest of the batch, bit for bit: every prompt is prefilled alone
    and every step has ``max_num_seqs`` rows. Otherwise only its random numbers are independent; sums are rounded
    differently in a batch of another size, which may change a token.
    graphs: whether to decode with captured CUDA graphs; by default where possible.
    keep_on_gpu: on a GPU, too, keep keys and values between the calls within `keeping`.
    kv_cache_dtype: "auto" stores keys and values as the model computes them, "fp8" in eight bits (float8_e4m3fn): half
    the memory, and half as much to read. Samples are then of a slightly different model than the one that is trained.
    joint_products: compute query, key and value, and gate and up, as one matrix product each where the layers allow it,
    by default on a GPU. Their weights become views of one tensor, still the same parameters.
    """

    def __init__(
        self,
        model: Any,
        *,
        cache_bytes: int | None = None,
        max_num_seqs: int | None = None,
        prefill_tokens: int | None = None,
        isolated: bool = False,
        graphs: bool | None = None,
        keep_on_gpu: bool = False,
        kv_cache_dtype: str = "auto",
        joint_products: bool | None = None,
    ) -> None:
        self.handle: ModelHandle = prepare(model)
        limits = {"cache_bytes": cache_bytes, "max_num_seqs": max_num_seqs, "prefill_tokens": prefill_tokens}
        for name, number in limits.items():
            if number is not None:
                check_integer(name, number, 1)
        gpu = self.handle.device.type == "cuda"
        super().__init__(max_num_seqs or (1024 if gpu else 128))
        self.cache_bytes = cache_bytes
        self.prefill_tokens = 1 if isolated else prefill_tokens or (16384 if gpu else 2048)
        self.isolated = isolated
        self.graphs = _can_capture(self.handle) if graphs is None else graphs
        self.cache_dtype = _cache_dtype(kv_cache_dtype, self.handle)
        may_keep = not isolated and self.cache_dtype is None and (keep_on_gpu or not gpu)
        self._may_keep = may_keep and self.handle.head is not None
        joint = (gpu if joint_products is None else joint_products) and self.handle.sharded is None
        self._joint_products = JointProducts(self.handle.trunk) if joint else None
        self._cache: SharedCache | None = None
        self._graphs: Any = None
        self._kept: KeptTokens | None = None

    def release(self) -> None:
        """Free the cache; the next call allocates it again."""
        self._forget()
        self._release_cache()

    def update_weights(self, version: int) -> None:
        super().update_weights(version)
        self._forget()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Within this block, calls keep the keys and values of their prompts and samples.

        A later call computes only what is new in its prompts. Everything is dropped at the end of the block and when
        the weights change. Not with ``isolated``: what is kept depends on earlier calls; nor with an "fp8" cache. On a
        GPU only with ``keep_on_gpu``.
        """
        if self._kept is not None or not self._may_keep:
            yield  # in a block within a block, the outer one keeps
            return
        self._kept = KeptTokens(self.handle)
        hook = register_optimizer_step_post_hook(self._kept.mark_stale)
        try:
            yield
        finally:
            hook.remove()
            self._kept = None

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.clear()

    def _release_cache(self) -> None:
        if self._cache is not None:
            self._cache.release()
        self._cache = self._graphs = None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Ids],
        samples: int | Sequence[int],
        sampling: Sampling,
        *,
        stop: Stop | None = None,
        keys: Sequence[int] | None = None,
    ) -> Rollout:
        """``samples`` completions of each prompt; see `Sampling` and `Rollout`."""
        if self.handle.head is None:
            plain = PlainGenerator(self.handle)
            plain.progress, plain.version = self.progress, self.version
            return plain.generate(prompts, samples, sampling, stop=stop, keys=keys)
        request = Request(self.handle, prompts, samples, sampling, keys)
        joint = nullcontext() if self._joint_products is None else self._joint_products.active()
        with eval_mode(self.handle.model), joint, small_batch_linears(self.handle.trunk):
            try:
                return self._generate(request, stop)
            except BaseException:
                self._forget()
                raise

    def _generate(self, request: Request, stop: Stop | None) -> Rollout:
        kept = self._kept or KeptTokens(self.handle)
        plan = plan_cache(
            self.handle,
            request.prompt_lengths,
            request.counts,
            request.sampling.max_new_tokens if self.isolated else request.longest,
            self.max_num_seqs,
            self.cache_bytes,
            held_bytes=kept.bytes + (0 if self._cache is None else self._cache.bytes),
            all_rows=self.isolated,
            grows=not self.isolated,
            keeps=self._kept is not None,
            dtype=self.cache_dtype,
        )
        beginnings = kept.start(request.prompts, self._room_to_keep(plan))
        pages = None if plan.page_tokens >= request.longest else plan.pages
        runner = self._runner(plan, request, paged=pages is not None)
        estimate = self._page_estimate(request.longest, runner) if pages is not None else None
        scheduler = Scheduler(
            request.prompt_lengths,
            request.counts,
            plan.prompt_tokens,
            plan.slots,
            pages,
            estimate,
            [length - present for length, (_, present) in zip(request.prompt_lengths, beginnings, strict=True)],
        )
        active, output = ActiveSamples(request, scheduler, runner, kept), OutputBuffer(request, stop, self.progress)
        preempted: dict[int, SavedSample] = {}
        random_stream = RandomStream(request, plan.slots)
        in_flight: deque[tuple[StepBatch, Any]] = deque()
        first_logits: dict[int, Tensor] = {}
        names = ("prefilled_prompts", "prefilled_tokens", "reused_tokens", "decode_steps", "preempted")
        stats = {"rows": plan.slots, **dict.fromkeys(names, 0)}
        while not scheduler.done or in_flight:
            before = len(in_flight)
            new_prompts, new_samples = scheduler.admit(self.prefill_tokens)
            if new_prompts:
                numbers, starts = zip(*new_prompts, strict=True)
                contexts, known = ([of[number] for number in numbers] for of in (request.prompts, beginnings))
                kept.restore(known, starts, runner.cache)
                logits = runner.prefill(contexts, [present for _, present in known], starts)
                kept.keep_contexts(contexts, known, starts, runner.cache)
                first_logits.update(zip(numbers, logits, strict=True))
                stats["prefilled_prompts"] += len(numbers)
                stats["reused_tokens"] += sum(present for _, present in known)
                stats["prefilled_tokens"] += sum(
                    len(ids) - present for ids, (_, present) in zip(contexts, known, strict=True)
                )
            for sample, slot in [pair for pair in new_samples if pair[0] in preempted]:
                new_samples.remove((sample, slot))
                active.resume(sample)
                random_stream.assign([sample], [slot])
                runner.restore(preempted.pop(sample), slot, scheduler.pages_of[sample])
            if new_samples:
                admitted = active.admit(new_samples)
                beginning, row_of = np.unique(request.prompt_of[admitted.samples], return_inverse=True)
                logits = torch.stack([first_logits[number] for number in beginning.tolist()])
                logits = logits[to_device(torch.from_numpy(row_of), logits.device)]
                random_stream.assign(admitted.samples.tolist(), admitted.slots.tolist())
                if runner.occurred is not None:
                    prompts = [request.prompts[request.prompt_of[sample]] for sample in admitted.samples]
                    runner.occurred.start(admitted.slots.tolist(), prompts)
                in_flight.append((admitted, runner.first(logits, admitted, random_stream.of(admitted))))
                first_logits = {number: first_logits[number] for number in scheduler.partly_waiting()}
                active.drop_full()
            for sample in active.without_room():
                while sample in scheduler.slot_of and not active.grow(sample):
                    last = next(reversed(scheduler.slot_of))
                    preempted[last] = runner.save(scheduler.slot_of[last], active.filled_pages(last))
                    active.preempt(last)
                    stats["preempted"] += 1
            if (following := active.next_batch()) is not None:
                in_flight.append((following, runner.decode(following, random_stream.of(following))))
                stats["decode_steps"] += 1
                active.drop_full()
            idle = len(in_flight) == before  # nothing can be launched before an output is read
            while in_flight and len(in_flight) > (before - 1 if idle else runner.lag):
                batch, step = in_flight.popleft()
                ended = output.append(batch, runner.read(step))
                active.drop(ended)
                for sample in ended:
                    preempted.pop(sample, None)
        kept.finish(request.prompts, request.prompt_of, output.ids, output.lengths)
        return output.rollout(self.version, stats, runner.kept_ids())

    def _room_to_keep(self, plan: CachePlan) -> int:
        """The tokens for which there is memory beside the cache of running samples."""
        if self._kept is None:
            return 0
        present = self._cache is not None and self._cache.fits(*plan.size)
        tokens = self._cache.tokens if self._cache is not None and present else plan.tokens
        return max(0, plan.memory_tokens - tokens)

    def _page_estimate(self, longest: int, runner: Runner) -> PageEstimate | None:
        """With graphs a preempted sample waits in pinned memory, so no more are admitted than are likely to fit."""
        if not runner.knows_pages:
            return None
        most = -(-longest // runner.cache.page_tokens)
        return PageEstimate(math.ceil(most * EXPECTED_SHARE), most)

    def _runner(self, plan: CachePlan, request: Request, paged: bool) -> Runner:
        head = self.handle.head
        if head is None:
            raise InputError(f"this model's prompts cannot be shared: {self.handle.fallback_reason}")
        if self._cache is None or not self._cache.fits(*plan.size):
            self._release_cache()
            self._cache = SharedCache(self.handle, *plan.size, self.cache_dtype)
        self._cache.attach()
        penalizes = request.sampling.repetition_penalty != 1
        if not self.graphs or penalizes:  # a captured step does not know which tokens have occurred
            occurred = OccurredTokens(self._cache.slots + 1, self.handle) if penalizes else None
            return Runner(self.handle, head, self._cache, request.sampling, request.eos, self.isolated, occurred)
        from groupwise.generate.graphs import DecodeGraphs, GraphRunner

        if self._graphs is None:
            self._graphs = DecodeGraphs(
                self.handle, head, self._cache, None if self.isolated else max(request.prompt_lengths)
            )
        return GraphRunner(self._graphs, request, self.isolated, paged)


def make_engine(recipe: Recipe, handle: ModelHandle, ranks: Ranks) -> Engine:
    settings = recipe.sampling
    return Engine(handle, max_num_seqs=settings.max_num_seqs, kv_cache_dtype=settings.kv_cache_dtype)


@contextmanager
def watched(generator: Generator, progress: Progress) -> Iterator[None]:
    """Within this block a generator reports its progress, see `Progress`."""
    before, generator.progress = generator.progress, progress
    try:
        yield
    finally:
        generator.progress = before


def _cache_dtype(name: str, handle: ModelHandle) -> torch.dtype | None:
    """The dtype of stored keys and values; None for the model's."""
    check_choice("kv_cache_dtype", name, CACHE_DTYPES)
    dtype, device = CACHE_DTYPES[name], handle.device
    if dtype is None:
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise InputError(
            f'an "fp8" KV cache needs a GPU with eight-bit floating point (compute capability 8.9 or higher), and '
            f'{torch.cuda.get_device_name(device)} has none; use kv_cache_dtype "auto"'
        )
    if device.type not in ("cuda", "cpu"):
        raise InputError(f'an "fp8" KV cache is not supported on {device.type}; use kv_cache_dtype "auto"')
    return dtype


def _can_capture(handle: ModelHandle) -> bool:
    types = (torch.bfloat16, torch.float16, torch.float32)
    return handle.device.type == "cuda" and handle.dtype in types and importlib.util.find_spec("triton") is not None
