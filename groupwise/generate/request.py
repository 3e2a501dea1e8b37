"""A checked call to generate, its active samples and random numbers, and the buffer of its output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from groupwise.core.filters import KeptSets
from groupwise.errors import InputError, NotFiniteError
from groupwise.generate.kept_tokens import KeptTokens
from groupwise.generate.page_table import PageTable
from groupwise.generate.runner import Group, Runner, StepBatch, StepOutput
from groupwise.generate.sampling import uniforms
from groupwise.generate.scheduler import Scheduler
from groupwise.generate.types import Progress, Rollout, Sampling, Stop
from groupwise.model.handle import ModelHandle
from groupwise.model.packing import Ids, check_ids
from groupwise.model.precision import name_not_finite

REPORT_SECONDS = 0.2  # between two reports of progress


class Request:
    """Prompts, samples per prompt and sampling parameters, checked against the model."""

    def __init__(
        self,
        handle: ModelHandle,
        prompts: Sequence[Ids],
        samples: int | Sequence[int],
        sampling: Sampling,
        keys: Sequence[int] | None,
    ) -> None:
        if not len(prompts):
            raise InputError("there is no prompt")
        self.sampling, self.handle = sampling, handle
        self.prompts = [check_ids(ids, handle, f"prompt {number}") for number, ids in enumerate(prompts)]
        self.prompt_lengths = [len(ids) for ids in self.prompts]
        self.counts = [samples] * len(prompts) if isinstance(samples, int) else list(samples)
        if len(self.counts) != len(prompts) or not all(_is_integer(number, 1) for number in self.counts):
            raise InputError(f"samples must be an integer of at least 1, or one for each prompt, got {samples!r}")
        self.keys = list(range(len(prompts))) if keys is None else list(keys)
        if len(self.keys) != len(prompts) or not all(_is_integer(key, 0) for key in self.keys):
            raise InputError("keys must be integers of at least 0, one for each prompt")
        self.prompt_of = np.repeat(np.arange(len(prompts)), self.counts)
        self.number_of = np.concatenate([np.arange(count) for count in self.counts])  # within its group
        lengths = np.array(self.prompt_lengths)[self.prompt_of]
        room = np.full(len(lengths), sampling.max_new_tokens)
        if handle.context_length is not None:
            room = np.minimum(room, handle.context_length - lengths)
            full = np.flatnonzero(room < 1)
            if len(full):
                raise InputError(
                    f"prompt {self.prompt_of[full[0]]} has {lengths[full[0]]} tokens and fills the model's context "
                    f"length of {handle.context_length}: there is no room for a new token"
                )
        self.limits = room  # new tokens per sample
        self.longest = int(room.max())
        self.eos = _eos(handle, sampling)


class RandomStream:
    """The uniform numbers of the active samples, one row per slot."""

    def __init__(self, request: Request, slots: int) -> None:
        self.request = request
        self._uniforms = np.empty((slots, request.longest), np.float32)

    def assign(self, samples: Sequence[int], slots: Sequence[int]) -> None:
        """Fill the slots with the numbers of these samples."""
        request, numbers, places = self.request, np.array(samples), np.array(slots)
        prompts = request.prompt_of[numbers]
        for prompt in np.unique(prompts).tolist():
            members = prompts == prompt
            self._uniforms[places[members]] = uniforms(
                request.sampling.seed, request.keys[prompt], request.number_of[numbers[members]], request.longest
            )

    def of(self, batch: StepBatch) -> np.ndarray:
        """The number for each row's next token."""
        numbers: np.ndarray = self._uniforms[batch.slots, batch.index]
        return numbers


class ActiveSamples:
    """The running samples in order of admission, and how many tokens of each have been launched."""

    def __init__(self, request: Request, scheduler: Scheduler, runner: Runner, kept: KeptTokens) -> None:
        self.request, self.scheduler, self.runner, self.kept = request, scheduler, runner, kept
        self.page_tokens = runner.cache.page_tokens
        columns = -(-request.longest // self.page_tokens) + 1 if scheduler.grows else 0
        self.table = PageTable(scheduler.slots, columns, self.page_tokens, runner.cache.pages)
        self.launched = np.zeros(len(request.prompt_of), np.int64)
        self._room = np.zeros(len(request.prompt_of), np.int64)  # tokens that each sample's pages hold
        self._lengths = np.array(request.prompt_lengths)
        self._rows: tuple[np.ndarray, np.ndarray, list[Group]] | None = None

    def admit(self, samples: Sequence[tuple[int, int]]) -> StepBatch:
        """The batch for the first token of new samples."""
        for sample, _ in samples:
            self.resume(sample)
        numbers, slots = (np.array(column) for column in zip(*samples, strict=True))
        self.launched[numbers] = 1
        positions = self._lengths[self.request.prompt_of[numbers]] - 1
        index = np.zeros_like(numbers)
        return StepBatch(numbers, index, slots, self._pages(slots, index), positions, [])

    def resume(self, sample: int) -> None:
        """Run a sample with the pages that it has now."""
        self._rows = None
        pages = self.scheduler.pages_of[sample]
        self._room[sample] = len(pages) * self.page_tokens
        if self.scheduler.grows:
            self.table.assign(self.scheduler.slot_of[sample], pages)

    def without_room(self) -> list[int]:
        """The running samples that need another page for their next token, in order of admission."""
        if not self.scheduler.grows:
            return []
        running = np.fromiter(self.scheduler.slot_of, np.int64)
        needy: list[int] = running[self.launched[running] > self._room[running]].tolist()
        return needy

    def grow(self, sample: int) -> bool:
        """Give a sample another page; false if there is none."""
        page = self.scheduler.grow(sample)
        if page is None:
            return False
        self.runner.clear([page])
        self.table.append(self.scheduler.slot_of[sample], page)
        self._room[sample] += self.page_tokens
        return True

    def filled_pages(self, sample: int) -> list[int]:
        """The pages that have keys and values of the sample; its newest token has none yet."""
        return self.scheduler.pages_of[sample][: -(-(int(self.launched[sample]) - 1) // self.page_tokens)]

    def preempt(self, sample: int) -> None:
        self.scheduler.preempt(sample, len(self.filled_pages(sample)))
        self._rows = None

    def next_batch(self) -> StepBatch | None:
        """The batch for the next token of all running samples, or None if there are none."""
        if self._rows is None:
            self._rows = self._arrange()
        samples, slots, groups = self._rows
        if not len(samples):
            return None
        index = self.launched[samples]
        self.launched[samples] += 1
        positions = self._lengths[self.request.prompt_of[samples]] + index - 1
        return StepBatch(samples, index, slots, self._pages(slots, index - 1), positions, groups)

    def drop(self, samples: Sequence[int]) -> None:
        """Remove finished samples, of which some may have been removed already. What running ones have is kept."""
        running = [sample for sample in samples if sample in self.scheduler.slot_of]
        if running and self.kept.limit:
            self.kept.keep_samples(running, [self._places(sample) for sample in running], self.runner.cache)
        for sample in samples:
            if sample in self.scheduler.slot_of or sample in self.scheduler.preempted:
                self.scheduler.finish(sample)
                self._rows = None

    def drop_full(self) -> None:
        """Remove the samples whose last allowed token has been launched, without waiting for that token."""
        running = np.fromiter(self.scheduler.slot_of, np.int64)
        self.drop(running[self.launched[running] >= self.request.limits[running]].tolist())

    def _arrange(self) -> tuple[np.ndarray, np.ndarray, list[Group]]:
        samples: list[int] = []
        groups: list[Group] = []
        for number, members in self.scheduler.groups().items():
            prompt = self.scheduler.prompts[number]
            groups.append((prompt.start or 0, prompt.length, slice(len(samples), len(samples) + len(members))))
            samples += members
        slots = np.array([self.scheduler.slot_of[sample] for sample in samples], np.int64)
        return np.array(samples, np.int64), slots, groups

    def _places(self, sample: int) -> np.ndarray:
        """Where the pages have the sample's keys and values; its newest token has none yet."""
        scheduler, at = self.scheduler, np.arange(self.launched[sample] - 1)
        pages = np.array(scheduler.pages_of[sample] if scheduler.grows else [scheduler.slot_of[sample]])
        size = self.runner.cache.page_tokens
        places: np.ndarray = pages[at // size] * size + at % size
        return places

    def _pages(self, slots: np.ndarray, places: np.ndarray) -> np.ndarray:
        """See `StepBatch.pages`; ``places`` are those of the input tokens in their completions."""
        if not self.scheduler.grows:  # a sample's only page has the number of its slot
            return slots[:, None]
        if self.runner.knows_pages:
            return self.table.page_at(slots, places)[:, None]
        return self.table.rows(slots)


class OutputBuffer:
    """The tokens generated so far, and why each sample ended."""

    def __init__(self, request: Request, stop: Stop | None, progress: Progress | None = None) -> None:
        shape = (len(request.prompt_of), request.longest)
        self.request, self.stop, self.progress = request, stop, progress
        self._ended, self._reported_at = 0, time.monotonic()
        self.ids = np.zeros(shape, np.int64)
        self.logps, self.filtered_logps = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.lengths = np.zeros(shape[0], np.int64)
        self.reasons = np.full(shape[0], "", dtype="<U11")
        kept = shape if request.sampling.keep_sets else (0, 0)
        self._kept_starts, self._kept_counts = np.zeros(kept, np.int64), np.zeros(kept, np.int64)
        self._kept_ids: list[np.ndarray] = []
        self._kept_total = 0
        self._eos = np.array(request.eos, np.int64)

    def append(self, batch: StepBatch, output: StepOutput) -> list[int]:
        """Store a step; returns the samples that ended with it. Tokens after a sample's end are ignored."""
        running = np.flatnonzero(self.reasons[batch.samples] == "")
        samples, index, ids = batch.samples[running], batch.index[running], output.ids[running]
        finite = np.isfinite(output.logps[running]) & np.isfinite(output.filtered_logps[running])
        if not finite.all():
            first = int(np.flatnonzero(~finite)[0])
            self._refuse(int(samples[first]), int(index[first]))
        self.ids[samples, index] = ids
        self.logps[samples, index] = output.logps[running]
        self.filtered_logps[samples, index] = output.filtered_logps[running]
        self.lengths[samples] = index + 1
        if output.kept_counts is not None:
            starts = self._kept_total + output.kept_counts.cumsum() - output.kept_counts
            self._kept_starts[samples, index] = starts[running]
            self._kept_counts[samples, index] = output.kept_counts[running]
            self._kept_total += int(output.kept_counts.sum())
            if output.kept_ids is not None:
                self._kept_ids.append(output.kept_ids)
            if 4 * self._kept_total > self.request.sampling.kept_bytes:
                raise InputError(
                    f"the kept sets take more than kept_bytes, {self.request.sampling.kept_bytes:,} bytes, after "
                    f"{int(self.lengths.sum()):,} tokens; filter more (top_k bounds them), sample less, or raise "
                    "kept_bytes"
                )
        full = index + 1 >= self.request.limits[samples]
        eos = np.isin(ids, self._eos)
        self.reasons[samples[full]] = "length"
        if self.stop is not None:
            may_end = getattr(self.stop, "may_end", None)  # of StopStrings; any function may stop a completion
            at = slice(None) if may_end is None else may_end(ids)
            for sample, last in zip(samples[at].tolist(), index[at].tolist(), strict=True):
                if self.stop(self.ids[sample, : last + 1].tolist()):
                    self.reasons[sample] = "stop_string"
        self.reasons[samples[eos]] = "eos"
        ended: list[int] = samples[self.reasons[samples] != ""].tolist()
        self._ended += len(ended)
        if self.progress is not None:
            self._report(self.progress)
        return ended

    def _refuse(self, sample: int, index: int) -> NoReturn:
        request = self.request
        place = f"token {index + 1} of completion {request.number_of[sample] + 1} of prompt {request.prompt_of[sample]}"
        name, dtype = name_not_finite(request.handle.model), str(request.handle.dtype).removeprefix("torch.")
        if name is not None:
            cause = (
                f"the weight {name} holds NaN or an infinity, in {dtype}. Load another copy or checkpoint of the model"
            )
        else:
            cause = (
                f"its weights are finite, so its activations overflow in {dtype}. Use another dtype (bfloat16, "
                "float32); if it was trained with too high a learning rate, load an earlier checkpoint"
            )
        raise NotFiniteError(f"{place} has no probability: the model's logits are NaN or infinite; {cause}")

    def _report(self, progress: Progress) -> None:
        """Report the progress now and then, and at the end."""
        now, count = time.monotonic(), len(self.lengths)
        if self._ended < count and now - self._reported_at < REPORT_SECONDS:
            return
        self._reported_at = now
        done = np.where(self.reasons != "", 1.0, self.lengths / self.request.limits)
        progress(float(done.sum()), count, int(self.lengths.sum()))

    def _kept(self, ids: np.ndarray | None) -> KeptSets:
        """The kept sets, reordered from steps to samples."""
        pool = np.concatenate([np.empty(0, np.int32), *self._kept_ids]) if ids is None else ids
        mask = np.arange(self.ids.shape[1]) < self.lengths[:, None]
        starts, counts = self._kept_starts[mask], self._kept_counts[mask]
        ends = counts.cumsum()
        place = np.repeat(starts - ends + counts, counts) + np.arange(counts.sum())
        return KeptSets(torch.from_numpy(pool[place]), torch.from_numpy(np.concatenate([[0], ends])))

    def rollout(self, version: int, stats: dict[str, Any], kept_ids: np.ndarray | None = None) -> Rollout:
        """The result, once all samples have ended. ``version``: of the weights that sampled it."""
        width = int(self.lengths.max())
        kept = self._kept(kept_ids) if self.request.sampling.keep_sets else None
        return Rollout(
            ids=torch.from_numpy(self.ids[:, :width].copy()),
            lengths=torch.from_numpy(self.lengths),
            logps=torch.from_numpy(self.logps[:, :width].copy()),
            filtered_logps=torch.from_numpy(self.filtered_logps[:, :width].copy()),
            stop_reasons=tuple(self.reasons.tolist()),
            groups=torch.from_numpy(self.request.prompt_of),
            versions=torch.full((len(self.ids), width), version, dtype=torch.int32),
            kept=kept,
            stats=stats,
        )


def _is_integer(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _eos(handle: ModelHandle, sampling: Sampling) -> list[int]:
    """The EOS ids of the sampling parameters, or the model's."""
    configured: Any = sampling.eos_ids
    if configured is None:
        configured = getattr(handle.model.generation_config, "eos_token_id", None)
    several = isinstance(configured, (list, tuple))
    ids: list[int] = [] if configured is None else list(configured) if several else [configured]
    for number in ids:
        if not _is_integer(number, 0):
            raise InputError(f"the model's eos_token_id must be an id or a list of ids, got {configured!r}")
        if number >= handle.vocabulary:
            raise InputError(f"the EOS id {number} is outside the vocabulary of {handle.vocabulary}")
    return ids
