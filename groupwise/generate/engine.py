"""Generation with each prompt computed once: continuous batching over a cache in which a group shares its prompt.

`Engine.generate` is the loop: let in whoever fits, prefill new prompts, draw first tokens, then one token for all that
run, and look at what came out a fixed number of steps ago. Who runs is the scheduler's business, how a step is
computed the runner's, how a token is drawn the sampler's.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import InputError
from groupwise.generate.memory import CachePlan, plan_cache
from groupwise.generate.plain import PlainGenerator
from groupwise.generate.request import ActiveSamples, OutputBuffer, RandomStream, Request
from groupwise.generate.runner import Rows, Runner
from groupwise.generate.scheduler import Scheduler
from groupwise.generate.types import Rollout, Sampling, Stop
from groupwise.model.cache import SharedCache
from groupwise.model.handle import ModelHandle, prepare, without_dropout
from groupwise.model.logprobs import Ids
from groupwise.model.small_batch_linear import few_rows_layers


class Engine:
    """Samples from a causal language model of transformers.

    cache_bytes: the most memory that keys and values may take; by default what is free, less a reserve.
    max_num_seqs: the most samples that run at once (512 on a GPU, 128 on a CPU).
    prefill_tokens: the most prompt tokens in one pass (16,384 on a GPU, 2,048 on a CPU).
    isolated: a sample's tokens then do not depend, to the last bit, on what else is in the batch: every prompt is
    prefilled alone and every step has ``max_num_seqs`` rows. Without it only the chance is the same; sums are added in
    another order when the batch has another size, and a token may tip over.
    graphs: whether to decode by captured CUDA graphs; by default where that is possible.
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
    ) -> None:
        self.handle: ModelHandle = prepare(model)
        for name, number in (
            ("cache_bytes", cache_bytes),
            ("max_num_seqs", max_num_seqs),
            ("prefill_tokens", prefill_tokens),
        ):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise InputError(f"{name} must be a whole number of at least 1, or None, got {number!r}")
        gpu = self.handle.device.type == "cuda"
        self.cache_bytes = cache_bytes
        self.max_num_seqs = max_num_seqs or (512 if gpu else 128)
        self.prefill_tokens = 1 if isolated else prefill_tokens or (16384 if gpu else 2048)
        self.isolated = isolated
        self.graphs = _can_capture(self.handle) if graphs is None else graphs
        self._cache: SharedCache | None = None
        self._graphs: Any = None

    def release(self) -> None:
        """Give the cache's memory back; the next call takes it again."""
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
            return PlainGenerator(self.handle).generate(prompts, samples, sampling, stop=stop, keys=keys)
        request = Request(self.handle, prompts, samples, sampling, keys)
        with without_dropout(self.handle.model), few_rows_layers(self.handle.trunk):
            return self._generate(request, stop)

    def _generate(self, request: Request, stop: Stop | None) -> Rollout:
        plan = self._plan(request)
        runner = self._runner(plan, request)
        scheduler = Scheduler(request.prompt_lengths, request.counts, plan.prompt_tokens, plan.slots)
        running, record, chance = (
            ActiveSamples(request, scheduler),
            OutputBuffer(request, stop),
            RandomStream(request, plan.slots),
        )
        in_flight: deque[tuple[Rows, Any]] = deque()
        first_logits: dict[int, Tensor] = {}
        facts = {"rows": plan.slots, "prefilled_prompts": 0, "prefilled_tokens": 0, "decode_steps": 0}
        while not scheduler.done or in_flight:
            before = len(in_flight)
            admission = scheduler.admit(self.prefill_tokens)
            if admission.prefill:
                numbers, starts = zip(*admission.prefill, strict=True)
                logits = runner.prefill([request.prompts[number] for number in numbers], starts)
                first_logits.update(zip(numbers, logits, strict=True))
                facts["prefilled_prompts"] += len(numbers)
                facts["prefilled_tokens"] += sum(request.prompt_lengths[number] for number in numbers)
            if admission.samples:
                rows = running.admit(admission.samples)
                logits = torch.stack([first_logits[request.prompt_of[sample]] for sample in rows.samples])
                chance.enter(rows.samples.tolist(), rows.slots.tolist())
                in_flight.append((rows, runner.first(logits, rows, chance.of(rows))))
                first_logits = {number: first_logits[number] for number in scheduler.partly_waiting()}
                running.drop_full()
            if (following := running.next()) is not None:
                in_flight.append((following, runner.decode(following, chance.of(following))))
                facts["decode_steps"] += 1
                running.drop_full()
            idle = len(in_flight) == before  # nothing could be launched until something is known
            while len(in_flight) > (before - 1 if idle else runner.lag):
                rows, launched = in_flight.popleft()
                for sample in record.take(rows, runner.read(launched)):
                    running.drop(sample)
        return record.rollout(facts, runner.kept_ids())

    def _plan(self, request: Request) -> CachePlan:
        held = 0 if self._cache is None else self._cache.bytes
        return plan_cache(
            self.handle,
            request.prompt_lengths,
            request.counts,
            request.sampling.max_new_tokens if self.isolated else request.longest,
            self.max_num_seqs,
            self.cache_bytes,
            held_bytes=held,
            all_rows=self.isolated,
        )

    def _runner(self, plan: CachePlan, request: Request) -> Runner:
        head = self.handle.head
        if head is None:
            raise InputError(f"this model's prompts cannot be shared: {self.handle.fallback_reason}")
        if self._cache is None or not self._cache.fits(*plan):
            self.release()
            self._cache = SharedCache(self.handle, *plan)
        self._cache.attach()
        if not self.graphs:
            return Runner(self.handle, head, self._cache, request.sampling, request.eos, self.isolated)
        from groupwise.generate.graphs import GraphRunner, Graphs

        if self._graphs is None:
            self._graphs = Graphs(
                self.handle, head, self._cache, None if self.isolated else max(request.prompt_lengths)
            )
        return GraphRunner(self._graphs, request, self.isolated)


def _can_capture(handle: ModelHandle) -> bool:
    types = (torch.bfloat16, torch.float16, torch.float32)
    return handle.device.type == "cuda" and handle.dtype in types and importlib.util.find_spec("triton") is not None
