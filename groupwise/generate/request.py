"""A call to generate, checked; and the record of what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from groupwise.core.filters import KeptSets
from groupwise.errors import InputError
from groupwise.generate.runner import Group, Outcome, Rows
from groupwise.generate.sampling import uniforms
from groupwise.generate.scheduler import Scheduler
from groupwise.generate.types import Rollout, Sampling, Stop
from groupwise.model.handle import ModelHandle
from groupwise.model.logprobs import Ids, check_ids


class Request:
    """Prompts, samples of each and settings, once they make sense for the model."""

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
        self.sampling = sampling
        self.prompts = [check_ids(ids, handle, f"prompt {number}") for number, ids in enumerate(prompts)]
        self.prompt_lengths = [len(ids) for ids in self.prompts]
        self.counts = [samples] * len(prompts) if isinstance(samples, int) else list(samples)
        if len(self.counts) != len(prompts) or not all(_whole(number, 1) for number in self.counts):
            raise InputError(f"samples must be a whole number of at least 1, or one for each prompt, got {samples!r}")
        self.keys = list(range(len(prompts))) if keys is None else list(keys)
        if len(self.keys) != len(prompts) or not all(_whole(key, 0) for key in self.keys):
            raise InputError("keys must be whole numbers of at least 0, one for each prompt")
        self.prompt_of = np.repeat(np.arange(len(prompts)), self.counts)
        self.number_of = np.concatenate([np.arange(count) for count in self.counts])  # within its group
        lengths = np.array(self.prompt_lengths)[self.prompt_of]
        room = np.full(len(lengths), sampling.max_new_tokens)
        if handle.window is not None:
            room = np.minimum(room, handle.window - lengths)
            full = np.flatnonzero(room < 1)
            if len(full):
                raise InputError(
                    f"prompt {self.prompt_of[full[0]]} has {lengths[full[0]]} tokens and fills the model's window of "
                    f"{handle.window}: there is no room for a new one"
                )
        self.limits = room  # of each sample: new tokens
        self.longest = int(room.max())
        self.eos = _eos(handle, sampling)


class RandomStream:
    """The uniform numbers of the samples that run, one row per slot."""

    def __init__(self, request: Request, slots: int) -> None:
        self.request = request
        self._numbers = np.empty((slots, request.longest), np.float32)

    def enter(self, samples: Sequence[int], slots: Sequence[int]) -> None:
        """Samples take their slots."""
        request, numbers, places = self.request, np.array(samples), np.array(slots)
        prompts = request.prompt_of[numbers]
        for prompt in np.unique(prompts).tolist():
            own = prompts == prompt
            self._numbers[places[own]] = uniforms(
                request.sampling.seed, request.keys[prompt], request.number_of[numbers[own]], request.longest
            )

    def of(self, rows: Rows) -> np.ndarray:
        """The number of each row's next token."""
        numbers: np.ndarray = self._numbers[rows.slots, rows.index]
        return numbers


class ActiveSamples:
    """The samples that run, in the order of their admission, and how many tokens of each have been launched."""

    def __init__(self, request: Request, scheduler: Scheduler) -> None:
        self.request, self.scheduler = request, scheduler
        self.launched = np.zeros(len(request.prompt_of), np.int64)
        self._lengths = np.array(request.prompt_lengths)
        self._rows: tuple[np.ndarray, np.ndarray, list[Group]] | None = None

    def admit(self, samples: Sequence[tuple[int, int]]) -> Rows:
        """Rows for the first token of new samples."""
        self._rows = None
        numbers, slots = (np.array(column) for column in zip(*samples, strict=True))
        self.launched[numbers] = 1
        return Rows(numbers, np.zeros_like(numbers), slots, self._lengths[self.request.prompt_of[numbers]] - 1, [])

    def next(self) -> Rows | None:
        """Rows for one more token of everyone, or None when nobody runs."""
        if self._rows is None:
            self._rows = self._arrange()
        samples, slots, groups = self._rows
        if not len(samples):
            return None
        index = self.launched[samples]
        self.launched[samples] += 1
        return Rows(samples, index, slots, self._lengths[self.request.prompt_of[samples]] + index - 1, groups)

    def drop(self, sample: int) -> None:
        """A sample has ended; nothing happens when it has left already."""
        if sample in self.scheduler.slot_of:
            self.scheduler.finish(sample)
            self._rows = None

    def drop_full(self) -> None:
        """Whoever has all the tokens it may have leaves, without waiting for what they are."""
        running = np.fromiter(self.scheduler.slot_of, np.int64)
        for sample in running[self.launched[running] >= self.request.limits[running]].tolist():
            self.drop(sample)

    def _arrange(self) -> tuple[np.ndarray, np.ndarray, list[Group]]:
        samples: list[int] = []
        groups: list[Group] = []
        for number, members in self.scheduler.groups().items():
            prompt = self.scheduler.prompts[number]
            groups.append((prompt.start or 0, prompt.length, slice(len(samples), len(samples) + len(members))))
            samples += members
        slots = np.array([self.scheduler.slot_of[sample] for sample in samples], np.int64)
        return np.array(samples, np.int64), slots, groups


class OutputBuffer:
    """Tokens as they come out, and when each sample ended."""

    def __init__(self, request: Request, stop: Stop | None) -> None:
        shape = (len(request.prompt_of), request.longest)
        self.request, self.stop = request, stop
        self.ids = np.zeros(shape, np.int64)
        self.logps, self.filtered_logps = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.lengths = np.zeros(shape[0], np.int64)
        self.reasons = np.full(shape[0], "", dtype="<U11")
        kept = shape if request.sampling.keep_sets else (0, 0)
        self._kept_starts, self._kept_counts = np.zeros(kept, np.int64), np.zeros(kept, np.int64)
        self._kept_ids: list[np.ndarray] = []
        self._kept_total = 0
        self._eos = np.array(request.eos, np.int64)

    def take(self, rows: Rows, outcome: Outcome) -> list[int]:
        """Write a step down; the samples that ended with it. What a sample drew after its end is not looked at."""
        alive = np.flatnonzero(self.reasons[rows.samples] == "")
        samples, index, ids = rows.samples[alive], rows.index[alive], outcome.ids[alive]
        self.ids[samples, index] = ids
        self.logps[samples, index] = outcome.logps[alive]
        self.filtered_logps[samples, index] = outcome.filtered_logps[alive]
        self.lengths[samples] = index + 1
        if outcome.kept_counts is not None:
            starts = self._kept_total + outcome.kept_counts.cumsum() - outcome.kept_counts
            self._kept_starts[samples, index] = starts[alive]
            self._kept_counts[samples, index] = outcome.kept_counts[alive]
            self._kept_total += int(outcome.kept_counts.sum())
            if outcome.kept_ids is not None:
                self._kept_ids.append(outcome.kept_ids)
            self._check_kept()
        full = index + 1 >= self.request.limits[samples]
        eos = np.isin(ids, self._eos)
        self.reasons[samples[full]] = "length"
        if self.stop is not None:
            for sample, last in zip(samples.tolist(), index.tolist(), strict=True):
                if self.stop(self.ids[sample, : last + 1].tolist()):
                    self.reasons[sample] = "stop_string"
        self.reasons[samples[eos]] = "eos"
        ended: list[int] = samples[self.reasons[samples] != ""].tolist()
        return ended

    def _check_kept(self) -> None:
        if 4 * self._kept_total > self.request.sampling.kept_bytes:
            raise InputError(
                f"the kept sets take more than kept_bytes, {self.request.sampling.kept_bytes:,} bytes, after "
                f"{int(self.lengths.sum()):,} tokens; filter more (top_k bounds them), sample less, or raise kept_bytes"
            )

    def _kept(self, ids: np.ndarray | None) -> KeptSets:
        """The sets in the samples' order, out of the steps' order."""
        pool = np.concatenate([np.empty(0, np.int32), *self._kept_ids]) if ids is None else ids
        mask = np.arange(self.ids.shape[1]) < self.lengths[:, None]
        starts, counts = self._kept_starts[mask], self._kept_counts[mask]
        ends = counts.cumsum()
        place = np.repeat(starts - ends + counts, counts) + np.arange(counts.sum())
        return KeptSets(torch.from_numpy(pool[place]), torch.from_numpy(np.concatenate([[0], ends])))

    def rollout(self, facts: dict[str, Any], kept_ids: np.ndarray | None = None) -> Rollout:
        """Everything, once all samples have ended."""
        width = int(self.lengths.max())
        kept = self._kept(kept_ids) if self.request.sampling.keep_sets else None
        ids, logps, filtered = (
            torch.from_numpy(x[:, :width].copy()) for x in (self.ids, self.logps, self.filtered_logps)
        )
        return Rollout(
            ids,
            torch.from_numpy(self.lengths),
            logps,
            filtered,
            tuple(self.reasons.tolist()),
            torch.from_numpy(self.request.prompt_of),
            kept,
            facts,
        )


def _whole(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _eos(handle: ModelHandle, sampling: Sampling) -> list[int]:
    """The settings' EOS ids, or the model's own."""
    given: Any = sampling.eos_ids
    if given is None:
        given = getattr(handle.model.generation_config, "eos_token_id", None)
    own: list[int] = [] if given is None else [given] if isinstance(given, int) else list(given)
    for number in own:
        if not 0 <= number < handle.vocabulary:
            raise InputError(f"the EOS id {number} is outside the vocabulary of {handle.vocabulary}")
    return own
