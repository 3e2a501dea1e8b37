"""One step on the device: prompts into the cache, or one more token for every running sample.

`Runner` launches PyTorch's operations one by one and works everywhere. What a step needs is known before its
predecessor's tokens are: they stay on the device, in ``last``, and everything else is counted on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.core.filters import KeptSets
from groupwise.generate.sampling import Drawn, draw, eos_mask
from groupwise.generate.types import Sampling
from groupwise.model.attention import to_device
from groupwise.model.cache import DecodeLayout, PrefillLayout, SharedCache
from groupwise.model.handle import Head, ModelHandle

Group = tuple[int, int, slice]
"""A prompt's start and length in the pool, and the rows of its samples."""


@dataclass(frozen=True)
class Rows:
    """The samples of one step, one entry each; known on the host."""

    samples: np.ndarray  # which
    index: np.ndarray  # which of its tokens is drawn now
    slots: np.ndarray
    positions: np.ndarray  # of the token before, which is fed in
    groups: Sequence[Group]


class Outcome(NamedTuple):
    """What a step drew, on the host."""

    ids: np.ndarray
    logps: np.ndarray
    filtered_logps: np.ndarray
    kept_counts: np.ndarray | None = None  # how many tokens each row kept; 0 where nothing was filtered
    kept_ids: np.ndarray | None = None  # which, row after row


class Runner:
    """Runs the steps of one call to generate.

    isolated: every step has the same shape whoever else runs, so that each sample's numbers are the same to the bit.
    """

    lag = 0  # how many steps are launched before a step's outcome is read

    def __init__(
        self,
        handle: ModelHandle,
        head: Head,
        cache: SharedCache,
        sampling: Sampling,
        eos: Sequence[int],
        isolated: bool = False,
    ) -> None:
        self.handle, self.head, self.cache, self.sampling = handle, head, cache, sampling
        self.device, self.isolated = handle.device, isolated
        self.last = torch.zeros(cache.slots + 1, dtype=torch.long, device=self.device)
        self.eos = eos_mask(eos, handle)

    def prefill(self, prompts: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
        """The logits ``(n, V)`` that follow each prompt; their keys and values are in the pool."""
        layout = PrefillLayout([len(ids) for ids in prompts], starts, self.device)
        row = to_device(torch.cat(list(prompts)), self.device)
        hidden = self.handle.hidden(row[None], layout.positions[None], layout)[0]
        return self.head.logits(hidden[layout.prompt_ends[1:].long() - 1])

    def first(self, logits: Tensor, rows: Rows, uniform: np.ndarray) -> Any:
        """The first token of samples, from their prompts' logits ``(rows, V)``."""
        self.cache.clear(rows.slots.tolist())
        drawn = self._draw(logits, rows.index, uniform)
        self.last[torch.from_numpy(rows.slots).to(self.device)] = drawn.ids
        return drawn

    def decode(self, rows: Rows, uniform: np.ndarray) -> Any:
        """The next token of each of these."""
        slots, index, positions, groups = rows.slots, rows.index, rows.positions, rows.groups
        if self.isolated:  # the rest of the rows is nobody's, and every sample reads its prompt by itself
            spare = self.cache.slots - len(slots)
            slots = np.pad(slots, (0, spare), constant_values=self.cache.slots)
            index, positions = np.pad(index, (0, spare), constant_values=1), np.pad(positions, (0, spare))
            uniform = np.pad(uniform, (0, spare))
            groups = [
                (start, length, slice(row, row + 1))
                for start, length, members in groups
                for row in range(members.start, members.stop)
            ]
        layout = DecodeLayout(
            slots=torch.from_numpy(slots).to(self.device),
            lengths=torch.from_numpy(index - 1).to(self.device),
            positions=torch.from_numpy(positions).to(self.device),
            groups=groups,
            own_tokens=self.sampling.max_new_tokens if self.isolated else None,
        )
        hidden = self.handle.hidden(self.last[layout.slots, None], layout.positions[:, None], layout)[:, 0]
        drawn = self._draw(self.head.logits(hidden), index, uniform)
        self.last[layout.slots] = drawn.ids
        return drawn

    def read(self, launched: Any) -> Outcome:
        """What a step drew."""
        return read_drawn(launched, self.sampling.keep_sets)

    def kept_ids(self) -> np.ndarray | None:
        """All kept sets, in the order of the steps, where outcomes do not bring theirs."""
        return None

    def _draw(self, logits: Tensor, index: np.ndarray, uniform: np.ndarray) -> Drawn:
        early = index < self.sampling.min_new_tokens
        banned = torch.from_numpy(early).to(self.device) if early.any() else None
        return draw(logits, torch.from_numpy(uniform).to(self.device), banned, self.eos, self.sampling)


def read_drawn(drawn: Drawn, keep_sets: bool) -> Outcome:
    """Tokens and log-probs of a step on the host, and the tokens that were kept."""
    ids, logps, filtered_logps = (
        x.cpu().numpy() for x in (drawn.ids, drawn.logps.float(), drawn.filtered_logps.float())
    )
    if not keep_sets:
        return Outcome(ids, logps, filtered_logps)
    sets = KeptSets.from_logits(drawn.filtered)
    return Outcome(ids, logps, filtered_logps, sets.offsets.diff().cpu().numpy(), sets.ids.cpu().numpy())
