"""One step on the device: prefill prompts, or decode one token for every running sample.

`Runner` uses plain PyTorch operations and works on every device. A step can be launched before the tokens of the step
before it are known on the host: they stay on the device, in ``last``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.core.filters import KeptSets
from groupwise.generate.sampling import DrawnTokens, OccurredTokens, draw, eos_mask
from groupwise.generate.types import Sampling
from groupwise.model.attention import to_device
from groupwise.model.cache import ContinuedPrefillLayout, DecodeLayout, PrefillLayout, SharedCache
from groupwise.model.handle import Head, ModelHandle

Group = tuple[int, int, slice]
"""A prompt's start and length in the pool, and the rows of its samples."""


@dataclass(frozen=True)
class StepBatch:
    """The samples of one step, one row each, on the host."""

    samples: np.ndarray
    index: np.ndarray  # of the token to sample, within its completion
    slots: np.ndarray
    # (rows, n) of each sample's keys and values, in order; the spare page where it has fewer. If the runner knows the
    # earlier ones, (rows, 1): the page of the input token.
    pages: np.ndarray
    positions: np.ndarray  # of the input token, which is the one before
    groups: Sequence[Group]


class StepOutput(NamedTuple):
    """The tokens of one step, on the host."""

    ids: np.ndarray
    logps: np.ndarray
    filtered_logps: np.ndarray
    kept_counts: np.ndarray | None = None  # tokens kept per row; 0 if nothing was filtered
    kept_ids: np.ndarray | None = None  # row after row


class SavedSample(NamedTuple):
    """What a preempted sample needs to go on: its last token, its keys and values, the tokens that have occurred."""

    last: Tensor
    pages: list[tuple[Tensor, Tensor]]  # of each layer, on the host
    occurred: Tensor | None


class Runner:
    """Runs the steps of one call to generate.

    isolated: every step has the same shape, so that a sample's results do not depend on the others, bit for bit.
    """

    lag = 0  # steps launched ahead of the one that is read
    knows_pages = False  # it keeps the pages of earlier steps on the device
    occurred: OccurredTokens | None = None

    def __init__(
        self,
        handle: ModelHandle,
        head: Head,
        cache: SharedCache,
        sampling: Sampling,
        eos: Sequence[int],
        isolated: bool = False,
        occurred: OccurredTokens | None = None,
    ) -> None:
        self.handle, self.head, self.cache, self.sampling = handle, head, cache, sampling
        self.device, self.isolated = handle.device, isolated
        self.last = torch.zeros(cache.slots + 1, dtype=torch.long, device=self.device)
        self.eos = eos_mask(eos, handle)
        self.occurred = occurred

    def prefill(self, prompts: Sequence[Tensor], present: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Write the prompts' keys and values to the pool; returns the logits ``(n, V)`` after each prompt.

        present: how many tokens of each are in the pool already.
        """
        lengths = [len(ids) for ids in prompts]
        layout = PrefillLayout(lengths, starts, self.device)
        if any(present):
            layout = ContinuedPrefillLayout(lengths, present, starts, self.device)
        row = to_device(torch.cat([ids[length:] for ids, length in zip(prompts, present, strict=True)]), self.device)
        hidden = self.handle.hidden(row[None], layout.positions[None], layout)[0]
        return self.head.logits(hidden[layout.prompt_ends[1:].long() - 1])

    def first(self, logits: Tensor, batch: StepBatch, uniform: np.ndarray) -> Any:
        """Sample the first tokens, from the prompts' logits ``(rows, V)``."""
        self.clear(batch.pages.flatten().tolist())
        slots = torch.from_numpy(batch.slots).to(self.device)
        drawn = self._draw(logits, slots, batch.index, uniform)
        self.last[slots] = drawn.ids
        return drawn

    def decode(self, batch: StepBatch, uniform: np.ndarray) -> Any:
        """Sample the next token of each row."""
        slots, index, positions, groups, pages = batch.slots, batch.index, batch.positions, batch.groups, batch.pages
        if self.isolated:  # pad to all slots, and let every sample read its prompt separately
            spare = self.cache.slots - len(slots)
            slots = np.pad(slots, (0, spare), constant_values=self.cache.slots)
            pages = np.pad(pages, ((0, spare), (0, 0)), constant_values=self.cache.pages)
            index, positions = np.pad(index, (0, spare), constant_values=1), np.pad(positions, (0, spare))
            uniform = np.pad(uniform, (0, spare))
            groups = [
                (start, length, slice(row, row + 1))
                for start, length, members in groups
                for row in range(members.start, members.stop)
            ]
        rows = torch.from_numpy(slots).to(self.device)
        layout = DecodeLayout(
            pages=torch.from_numpy(pages).to(self.device),
            lengths=torch.from_numpy(index - 1).to(self.device),
            positions=torch.from_numpy(positions).to(self.device),
            groups=groups,
            page_tokens=self.cache.page_tokens,
            own_tokens=self.sampling.max_new_tokens if self.isolated else None,
        )
        hidden = self.handle.hidden(self.last[rows, None], layout.positions[:, None], layout)[:, 0]
        drawn = self._draw(self.head.logits(hidden), rows, index, uniform)
        self.last[rows] = drawn.ids
        return drawn

    def clear(self, pages: Sequence[int]) -> None:
        """Prepare these pages for another sample."""
        self.cache.clear(pages)

    def save(self, slot: int, pages: Sequence[int]) -> SavedSample:
        """What the sample in this slot needs to go on in another slot."""
        occurred = None if self.occurred is None else self.occurred.mask[slot].clone()
        return SavedSample(self.last[slot].clone(), self.cache.read_pages(pages), occurred)

    def restore(self, saved: SavedSample, slot: int, pages: Sequence[int]) -> None:
        """Let a saved sample go on in this slot and these pages."""
        self.last[slot] = saved.last
        held = len(saved.pages[0][0])
        if held:
            self.cache.write_pages(pages[:held], saved.pages)
        self.clear(pages[held:])
        if self.occurred is not None and saved.occurred is not None:
            self.occurred.mask[slot] = saved.occurred

    def read(self, step: Any) -> StepOutput:
        """The output of a launched step."""
        return to_step_output(step, self.sampling.keep_sets)

    def kept_ids(self) -> np.ndarray | None:
        """All kept sets in the order of the steps, if the step outputs do not contain them."""
        return None

    def _draw(self, logits: Tensor, slots: Tensor, index: np.ndarray, uniform: np.ndarray) -> DrawnTokens:
        early = index < self.sampling.min_new_tokens
        banned = torch.from_numpy(early).to(self.device) if early.any() else None
        numbers = torch.from_numpy(uniform).to(self.device)
        if self.occurred is None:
            return draw(logits, numbers, banned, self.eos, self.sampling)
        drawn = draw(logits, numbers, banned, self.eos, self.sampling, self.occurred.mask[slots])
        self.occurred.add(slots, drawn.ids)
        return drawn


def to_step_output(drawn: DrawnTokens, keep_sets: bool) -> StepOutput:
    """Copy the tokens and log-probs of a step to the host, with the kept sets if requested."""
    ids, logps, filtered_logps = (
        x.cpu().numpy() for x in (drawn.ids, drawn.logps.float(), drawn.filtered_logps.float())
    )
    if not keep_sets:
        return StepOutput(ids, logps, filtered_logps)
    sets = KeptSets.from_logits(drawn.filtered)
    return StepOutput(ids, logps, filtered_logps, sets.offsets.diff().cpu().numpy(), sets.ids.cpu().numpy())
