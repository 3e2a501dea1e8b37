"""Completions from vLLM servers.

A call to `generate` cuts the prompts into jobs, and each server takes jobs from one queue. If a server fails, its job
goes back to the queue; the server gets jobs again once it has loaded the current weights completely. During an update
of the weights, a server's requests end with the tokens that they have, and the rest is sampled with the new weights:
so the version of each token is known exactly.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from groupwise.distributed.ranks import Ranks
from groupwise.errors import GroupwiseError
from groupwise.generate.request import Request
from groupwise.generate.stop import StopStrings
from groupwise.generate.types import Progress, Rollout, Sampling, Stop
from groupwise.integrations.vllm.errors import ServerError, ServerSetupError, VllmError
from groupwise.integrations.vllm.samples import (
    Sample,
    SampleTable,
    check_supported,
    derive_seed,
    sampling_fields,
)
from groupwise.integrations.vllm.server import Probe, Server
from groupwise.integrations.vllm.weights import WeightTransfer
from groupwise.model.export import iter_full_weights
from groupwise.model.handle import ModelHandle, eval_mode
from groupwise.model.logprobs import completion_logps
from groupwise.model.packing import Ids

MAX_NUM_SEQS = 256
MAX_FAILURES = 5  # of one job, on any servers: then the job is the reason
RETRY_SECONDS = 2.0  # between two tries to use a server that failed
PROBE_TOKENS = 33
MAX_STOPS = 4  # stop strings that a server accepts


@dataclass
class _Job:
    """Samples of one prompt to be continued after the same tokens; fresh ones together, others one by one."""

    samples: list[Sample]
    failures: int = 0


class _Work:
    """The jobs of one call to generate. The generator's lock guards it."""

    def __init__(self, table: SampleTable, jobs: Sequence[_Job]) -> None:
        self.table, self.jobs = table, deque(jobs)
        self.done = 0  # samples
        self.error: GroupwiseError | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or self.done == len(self.table.samples)


class RemoteGenerator:
    """Samples on servers; only rank 0 talks to them. ``max_num_seqs`` completions at once on each."""

    def __init__(
        self,
        handle: ModelHandle,
        servers: Sequence[Server],
        transfer: WeightTransfer | None,
        ranks: Ranks,
        *,
        wait: float,
        max_num_seqs: int | None = None,
    ) -> None:
        self.handle, self.servers, self.transfer, self.ranks, self.wait = handle, list(servers), transfer, ranks, wait
        self.max_num_seqs = max_num_seqs or MAX_NUM_SEQS
        self.remote, self.version = True, 0
        self.progress: Progress | None = None
        self._name = uuid.uuid4().hex[:12]  # of this run, for the weights on the servers
        self._changed = threading.Condition()
        self._probe: Probe | None = None

    # --- weights -----------------------------------------------------------------------------------------------------

    def update_weights(self, version: int) -> None:
        """Send the model's weights to all servers; called on all ranks. A server that fails is left out until it can
        load them; an error is raised only if none can be used."""
        exchanges = self.handle.sharded is not None
        with self.ranks.stage("sending weights to the vLLM servers", exchanges=exchanges):
            # With repeat_tied, since a server may have untied them.
            weights = iter_full_weights(self.handle.model, self.handle.dtype, repeat_tied=True)
            probe = self._make_probe()
            if self.transfer is None:
                for _ in weights:
                    pass  # gathering them takes all ranks
                self.version = version
                return
            with self._changed:
                self._probe, self.version = probe, version
                for server in self.servers:
                    server.version = None
            self.transfer.publish(weights, version)
            self._try_all(self.servers)
            self._wait_for_any(lambda: self._try_all([s for s in self.servers if s.version is None]))

    def _make_probe(self) -> Probe:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(self.handle.vocabulary, (PROBE_TOKENS,), generator=draw).tolist()
        with torch.no_grad(), eval_mode(self.handle.model):
            logps = completion_logps(self.handle, [ids[:1]], [[ids[1:]]]).logps[0]
        return Probe(ids, logps.cpu(), self.handle.dtype in (torch.bfloat16, torch.float16))

    def _try_all(self, servers: Sequence[Server]) -> None:
        with ThreadPoolExecutor(max(1, len(servers))) as pool:
            list(pool.map(self._try_load, servers))

    def _try_load(self, server: Server) -> None:
        """Load the current weights, unless the server has them; a failure is only noted."""
        transfer, probe = self.transfer, self._probe
        if transfer is None or probe is None:
            return
        with server.loading:
            version = self.version
            if server.version == version:
                return
            try:
                server.load(transfer, version, f"groupwise-{self._name}-{version}", probe)
                server.failure = ""
            except ServerSetupError:
                raise
            except ServerError as error:
                server.version, server.failure = None, str(error)
        with self._changed:
            self._changed.notify_all()

    def _wait_for_any(self, retry: Callable[[], None]) -> None:
        """Return when a server can be used; raise an error if none can within ``vllm.wait`` seconds."""
        deadline = time.monotonic() + self.wait
        while not any(server.version == self.version for server in self.servers):
            if time.monotonic() > deadline:
                raise self._nobody()
            time.sleep(min(RETRY_SECONDS, self.wait))
            retry()

    def _nobody(self) -> VllmError:
        reasons = "; ".join(dict.fromkeys(server.failure for server in self.servers if server.failure))
        return VllmError(
            f"no vLLM server could be used for {self.wait:g} seconds (vllm.wait): {reasons or 'no reason is known'}. "
            "Start the servers, then the run again, with --resume if it has saved a step"
        )

    # --- sampling ----------------------------------------------------------------------------------------------------

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
        check_supported(sampling)
        if self._probe is None:
            self.update_weights(self.version)
        request = Request(self.handle, prompts, samples, sampling, keys)
        longest = int((np.array(request.prompt_lengths)[request.prompt_of] + request.limits).max())
        for server in self.servers:
            server.check_length(longest)
        table = SampleTable(request, stop)
        jobs = [_Job(table.of_prompt(prompt)) for prompt in range(len(prompts))]
        if sampling.greedy:  # of which vLLM gives one per request
            jobs = [_Job([sample]) for sample in table.samples]
        work = _Work(table, jobs)
        workers = []
        for server in self.servers:
            threading.Thread(target=self._revive, args=(server, work), daemon=True).start()
            for _ in range(max(1, min(len(jobs), self.max_num_seqs // max(len(job.samples) for job in jobs)))):
                workers.append(threading.Thread(target=self._work, args=(server, work), daemon=True))
                workers[-1].start()
        try:
            self._watch(work)
        finally:
            with self._changed:
                if not work.finished:
                    work.error = VllmError("sampling was interrupted")
                self._changed.notify_all()
        # After an error a request may still be under way; its thread ends with it.
        if work.error is not None:
            raise work.error
        for worker in workers:
            worker.join()
        return table.rollout({"servers": sum(server.version == self.version for server in self.servers)})

    def _watch(self, work: _Work) -> None:
        """Report the progress until all is done, or no server can be used for too long."""
        usable_at = time.monotonic()
        with self._changed:
            while not work.finished:
                if any(server.version is not None for server in self.servers):
                    usable_at = time.monotonic()
                elif time.monotonic() - usable_at > self.wait:
                    work.error = self._nobody()
                    return
                if self.progress is not None:
                    self.progress(float(work.done), len(work.table.samples), work.table.tokens)
                self._changed.wait(0.5)
            if self.progress is not None and work.error is None:
                self.progress(float(work.done), len(work.table.samples), work.table.tokens)

    def _revive(self, server: Server, work: _Work) -> None:
        """Let a server that failed load the current weights, as often as it takes."""
        while True:
            with self._changed:
                if work.finished:
                    return
                failed = server.version is None and self.transfer is not None and self.transfer.any_time
            if failed:
                try:
                    self._try_load(server)
                except GroupwiseError as error:
                    with self._changed:
                        work.error = work.error or error
                        self._changed.notify_all()
            with self._changed:
                self._changed.wait_for(lambda: work.finished, RETRY_SECONDS)

    def _work(self, server: Server, work: _Work) -> None:
        """Take jobs as long as there are any and the server has the current weights."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: work.finished or (work.jobs and server.version == self.version))
                if work.finished:
                    return
                job, version = work.jobs.popleft(), self.version
                server.in_flight += 1
            completions, error = [], None
            try:
                body = self._body(work.table, job)
                completions = server.complete(body, len(job.samples), self.handle.vocabulary)
            except GroupwiseError as failure:
                error = failure
            with self._changed:
                server.in_flight -= 1
                if error is not None:
                    self._failed(server, work, job, error)
                for sample, (ids, logps, finish) in zip(job.samples, completions, strict=error is None):
                    self._received(server, work, sample, ids, logps, finish, version)
                self._changed.notify_all()

    def _body(self, table: SampleTable, job: _Job) -> dict[str, object]:
        request, first = table.request, job.samples[0]
        done = len(first.ids)
        key, seed = request.keys[first.prompt], request.sampling.seed
        body: dict[str, object] = {
            "prompt": request.prompts[first.prompt].tolist() + first.ids,
            **sampling_fields(
                request.sampling,
                request.eos,
                done,
                first.limit,
                derive_seed(seed, key, first.number, done) if done else derive_seed(seed, key) + first.number,
            ),
            "skip_special_tokens": False,
        }
        if isinstance(table.stop, StopStrings):  # only so that vLLM does not go on in vain
            body |= {"stop": table.stop.strings[:MAX_STOPS], "include_stop_str_in_output": True}
        return body

    def _received(
        self, server: Server, work: _Work, sample: Sample, ids: list[int], logps: list[float], finish: str, version: int
    ) -> None:
        work.table.extend(sample, ids, logps, finish, version)
        if sample.reason:
            work.done += 1
        elif finish == "abort":
            work.jobs.appendleft(_Job([sample]))
        else:
            work.error = work.error or VllmError(
                f"the server {server.url} ended a completion after {len(sample.ids)} of {sample.limit} tokens "
                f"({finish}), although nothing in it ends it; is its --max-model-len too small?"
            )

    def _failed(self, server: Server, work: _Work, job: _Job, error: GroupwiseError) -> None:
        """Give a job back. The server is not used before it has loaded the weights again."""
        server.version, server.failure = None, str(error)
        job.failures += 1
        work.jobs.appendleft(job)
        if not isinstance(error, ServerError):
            work.error = work.error or error  # every server would refuse it
        elif job.failures >= MAX_FAILURES:
            work.error = work.error or VllmError(f"a prompt failed {MAX_FAILURES} times, the last time: {error}")

    # --- the rest of the protocol ------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise an error if a server was started in the wrong way, or none answers within ``vllm.wait`` seconds."""
        with self.ranks.stage("looking for the vLLM servers"):
            deadline = time.monotonic() + self.wait
            while self.transfer is not None:
                for server in self.servers:
                    server.look()
                if not all(server.failure for server in self.servers):
                    break
                if time.monotonic() > deadline:
                    raise self._nobody()
                time.sleep(min(RETRY_SECONDS, self.wait))

    def release(self) -> None:
        """The memory is the servers' own."""

    def close(self) -> None:
        if self.transfer is not None:
            self.transfer.close()
