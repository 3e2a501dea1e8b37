"""Who runs when, and where its keys and values lie. Plain Python: no tensors, no clock, no chance.

Samples wait in their order. A sample runs when a slot is free and its prompt lies in the pool, or fits into it; then
the prompt is prefilled, once, and stays until its last sample has left. The order never changes, so that the same
requests give the same schedule.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class PromptState:
    """A prompt: how long, how many of its samples are not done, and where it lies while it lies anywhere."""

    length: int
    samples_left: int
    start: int | None = None


@dataclass(frozen=True)
class Admission:
    """What begins now: prompts to prefill, with their starts in the pool, and samples with their slots."""

    prefill: list[tuple[int, int]] = field(default_factory=list)  # (prompt, start)
    samples: list[tuple[int, int]] = field(default_factory=list)  # (sample, slot)


class Scheduler:
    """For prompts of ``lengths``, with ``counts`` samples each, numbered through."""

    def __init__(self, lengths: Sequence[int], counts: Sequence[int], pool_tokens: int, slots: int) -> None:
        self.prompts = [PromptState(length, count) for length, count in zip(lengths, counts, strict=True)]
        self.prompt_of = [prompt for prompt, count in enumerate(counts) for _ in range(count)]
        self.waiting = deque(range(len(self.prompt_of)))
        self.slot_of: dict[int, int] = {}  # of each running sample, in the order of admission
        self.free_slots = list(range(slots))  # a heap: the lowest first, so that the busy ones stay together
        self.slots = slots
        self.pool = RangePool(pool_tokens)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.slot_of

    def partly_waiting(self) -> list[int]:
        """The prompt that lies in the pool while some of its samples still wait, if there is one."""
        number = self.prompt_of[self.waiting[0]] if self.waiting else None
        return [] if number is None or self.prompts[number].start is None else [number]

    def admit(self, prefill_tokens: int) -> Admission:
        """Let in whoever fits, in order; at most ``prefill_tokens`` of new prompts, but at least one.

        A new prompt waits until slots are free for all of its samples, or for an eighth of all slots: prefilling for
        one sample at a time would hold up everyone else at every step.
        """
        admission, used = Admission(), 0
        while self.waiting and self.free_slots:
            sample = self.waiting[0]
            number = self.prompt_of[sample]
            prompt = self.prompts[number]
            if prompt.start is None:
                enough = min(prompt.samples_left, -(-self.slots // 8))
                if (used and used + prompt.length > prefill_tokens) or (self.slot_of and len(self.free_slots) < enough):
                    break
                prompt.start = self.pool.take(prompt.length)
                if prompt.start is None:
                    break
                used += prompt.length
                admission.prefill.append((number, prompt.start))
            self.waiting.popleft()
            self.slot_of[sample] = heapq.heappop(self.free_slots)
            admission.samples.append((sample, self.slot_of[sample]))
        return admission

    def finish(self, sample: int) -> None:
        """A sample leaves; with the last of its prompt, the prompt leaves too."""
        heapq.heappush(self.free_slots, self.slot_of.pop(sample))
        prompt = self.prompts[self.prompt_of[sample]]
        prompt.samples_left -= 1
        if not prompt.samples_left and prompt.start is not None:
            self.pool.give(prompt.start, prompt.length)
            prompt.start = None

    def groups(self) -> dict[int, list[int]]:
        """The running samples by their prompts, in the order of admission."""
        running: dict[int, list[int]] = {}
        for sample in self.slot_of:
            running.setdefault(self.prompt_of[sample], []).append(sample)
        return running


class RangePool:
    """Ranges of a line of ``size`` places: the first that is long enough is taken, neighbours join when given back."""

    def __init__(self, size: int) -> None:
        self.free = [(0, size)] if size else []  # (start, length), in order, never touching

    def take(self, length: int) -> int | None:
        """The start of a free range, now taken, or None."""
        for index, (start, room) in enumerate(self.free):
            if room >= length:
                self.free[index : index + 1] = [(start + length, room - length)] if room > length else []
                return start
        return None

    def give(self, start: int, length: int) -> None:
        self.free.append((start, length))
        joined: list[tuple[int, int]] = []
        for begin, room in sorted(self.free):
            if joined and sum(joined[-1]) == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((begin, room))
        self.free = joined
