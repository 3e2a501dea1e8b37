"""When each sample runs, and where its keys and values are stored. Plain Python, deterministic, without tensors.

Samples wait in order. A sample is admitted when a slot and a page are free and its prompt is in the pool or fits into
it. A prompt is prefilled once and stays in the pool until its last sample has finished. Where a sample may need several
pages, it gets them as it grows, and each running sample has one in reserve when others are admitted, or as many as it
is expected to need. If none is left, the sample that was admitted last is preempted: it waits, first of all, and goes
on where it was. The order depends on nothing else, so that the same requests give the same schedule.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class PromptState:
    """A prompt: its length, its unfinished samples, the tokens to compute, its start in the pool while it is there."""

    length: int
    samples_left: int
    to_compute: int
    start: int | None = None


@dataclass
class PageEstimate:
    """The mean number of pages that a sample needs, as this call has shown so far.

    All pages in use and those that ended samples had, over the number of ended samples: the estimate for lifetimes of
    which some are not over. One sample of ``prior`` pages is counted in; the mean is at most ``most``.
    """

    prior: int
    most: int
    ended: int = 0
    ended_pages: int = 0

    def mean(self, pages_in_use: int) -> int:
        total = self.prior + self.ended_pages + pages_in_use
        return min(self.most, -(-total // (1 + self.ended)))


class Scheduler:
    """For prompts of ``lengths`` with ``counts`` samples each; samples are numbered prompt after prompt.

    to_compute: the tokens of each prompt that must be computed; by default all.
    pages: by default one for each slot, and samples do not grow.
    estimate: what running samples are expected to need is kept free when others are admitted; by default one page each.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        counts: Sequence[int],
        pool_tokens: int,
        slots: int,
        pages: int | None = None,
        estimate: PageEstimate | None = None,
        to_compute: Sequence[int] | None = None,
    ) -> None:
        to_compute = lengths if to_compute is None else to_compute
        self.prompts = [PromptState(*numbers) for numbers in zip(lengths, counts, to_compute, strict=True)]
        self.prompt_of = [prompt for prompt, count in enumerate(counts) for _ in range(count)]
        self.waiting = deque(range(len(self.prompt_of)))
        self.slot_of: dict[int, int] = {}  # of each running sample, in order of admission
        self.free_slots = list(range(slots))  # a heap: the lowest first, so that used slots stay adjacent
        self.slots = slots
        self.grows = pages is not None
        self.pages = slots if pages is None else pages
        self.free_pages = list(range(self.pages))  # a heap, too
        self.estimate = estimate
        self.pages_of: dict[int, list[int]] = {}  # of each running sample
        self.preempted: dict[int, int] = {}  # samples that were running and wait again, and how many pages they filled
        self.pool = RangeAllocator(pool_tokens)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.slot_of

    def partly_waiting(self) -> list[int]:
        """The prompt that is in the pool while some of its samples have not begun, if there is one."""
        new = next((sample for sample in self.waiting if sample not in self.preempted), None)
        number = None if new is None else self.prompt_of[new]
        return [] if number is None or self.prompts[number].start is None else [number]

    def admit(self, prefill_tokens: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Admit the samples that fit, in order, with at most ``prefill_tokens`` of new prompts but at least one prompt.

        Returns the new prompts with their starts in the pool, and the admitted samples with their slots. A new prompt
        waits until slots are free for all of its samples, or an eighth of all slots: prefilling for one sample at a
        time would delay all others at every step.
        """
        prompts: list[tuple[int, int]] = []
        samples: list[tuple[int, int]] = []
        used = 0
        expected = self._expected_pages()
        reserve = sum(max(1, expected - len(own)) for own in self.pages_of.values()) if self.grows else 0
        while self.waiting and self.free_slots:
            sample = self.waiting[0]
            number = self.prompt_of[sample]
            prompt = self.prompts[number]
            pages = self.preempted.get(sample, 0) + 1
            own_growth = max(0, expected - pages) if self.slot_of else 0  # alone it may take what there is
            if len(self.free_pages) < pages + own_growth + reserve:
                break
            if prompt.start is None:
                enough = min(prompt.samples_left, -(-self.slots // 8))
                if (used and used + prompt.to_compute > prefill_tokens) or (
                    self.slot_of and len(self.free_slots) < enough
                ):
                    break
                prompt.start = self.pool.allocate(prompt.length)
                if prompt.start is None:
                    break
                used += prompt.to_compute
                prompts.append((number, prompt.start))
            self.waiting.popleft()
            self.preempted.pop(sample, None)
            self.slot_of[sample] = heapq.heappop(self.free_slots)
            self.pages_of[sample] = [heapq.heappop(self.free_pages) for _ in range(pages)]
            samples.append((sample, self.slot_of[sample]))
            reserve += max(1, expected - pages) if self.grows else 0
        return prompts, samples

    def _expected_pages(self) -> int:
        """The number of pages that a sample is expected to need."""
        return 1 if self.estimate is None else self.estimate.mean(self.pages - len(self.free_pages))

    def grow(self, sample: int) -> int | None:
        """Give a running sample another page; None if there is none."""
        if not self.free_pages:
            return None
        self.pages_of[sample].append(heapq.heappop(self.free_pages))
        return self.pages_of[sample][-1]

    def preempt(self, sample: int, filled: int) -> None:
        """Let a running sample wait, before all others. It will get its ``filled`` pages again, and one more."""
        self._free(sample)
        self.preempted[sample] = filled
        self.waiting.appendleft(sample)

    def _free(self, sample: int) -> int:
        """Free the slot and the pages of a running sample; returns the number of its pages."""
        heapq.heappush(self.free_slots, self.slot_of.pop(sample))
        pages = self.pages_of.pop(sample)
        for page in pages:
            heapq.heappush(self.free_pages, page)
        return len(pages)

    def finish(self, sample: int) -> None:
        """Free a sample's slot and pages, and with the last sample of a prompt also the prompt's range."""
        if sample in self.preempted:  # its last token was on its way
            pages = self.preempted.pop(sample)
            self.waiting.remove(sample)
        else:
            pages = self._free(sample)
        if self.estimate is not None:
            self.estimate.ended += 1
            self.estimate.ended_pages += pages
        prompt = self.prompts[self.prompt_of[sample]]
        prompt.samples_left -= 1
        if not prompt.samples_left and prompt.start is not None:
            self.pool.release(prompt.start, prompt.length)
            prompt.start = None

    def groups(self) -> dict[int, list[int]]:
        """The running samples by prompt, in order of admission."""
        running: dict[int, list[int]] = {}
        for sample in self.slot_of:
            running.setdefault(self.prompt_of[sample], []).append(sample)
        return running


class RangeAllocator:
    """A first-fit allocator of ranges in ``size`` places; released ranges merge with their neighbours."""

    def __init__(self, size: int) -> None:
        self.free_ranges = [(0, size)] if size else []  # (start, length), in order, never adjacent

    def allocate(self, length: int) -> int | None:
        """The start of an allocated range, or None if none is long enough."""
        for index, (start, room) in enumerate(self.free_ranges):
            if room >= length:
                self.free_ranges[index : index + 1] = [(start + length, room - length)] if room > length else []
                return start
        return None

    def release(self, start: int, length: int) -> None:
        self.free_ranges.append((start, length))
        merged: list[tuple[int, int]] = []
        for first, size in sorted(self.free_ranges):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((first, size))
        self.free_ranges = merged
