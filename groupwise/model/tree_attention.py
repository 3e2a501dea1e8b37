"""Attention in a tree: conversations that begin alike share more than their prompt.

A packed row holds prompts, then for each prompt the nodes of a tree. A node attends to its prompt, to the nodes above
it and to itself. Attention to these sets of keys is merged as in `groupwise.model.attention`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from groupwise.model.attention import Lengths, PackedLayout, dense_attention, round_up, to_device
from groupwise.model.flash import tree_flash


class TreeLayout(PackedLayout):
    """Prompts, then the nodes of their trees, in one row; a node's descendants follow it directly.

    ``prompts`` are the prompts' lengths, ``sizes`` the number of nodes of each, ``nodes`` their lengths, at least 1.
    ``parents`` is the node above each node, numbered within its tree, −1 for the prompt. Positions are those of a
    conversation that stands alone behind its prompt.
    """

    def __init__(
        self, prompts: Lengths, sizes: Lengths, nodes: Lengths, parents: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(prompts, sizes, nodes, device)
        segment_ends = self._ends[2].tolist()
        count = len(self._prompts)
        self._numbers = [slice(a, b) for a, b in pairwise(segment_ends)]  # the tokens of each segment
        firsts = np.append(0, np.asarray(sizes, np.int64).cumsum())[self._prompt_of].tolist()  # of each node's tree
        self._above: list[list[int]] = [[] for _ in range(count)]  # the segments above each segment, its prompt aside
        last: dict[int, int] = {}  # the last descendant of each inner segment
        for node, (parent, first) in enumerate(zip(parents, firsts, strict=True)):
            above = count + first + parent
            self._above.append([] if parent < 0 else [*self._above[above], above])
            last.update(dict.fromkeys(self._above[-1], count + node))
        self.deeper = [  # the descendants of each inner node attend to it
            (1, slice(self._numbers[node].stop, self._numbers[child].stop), self._numbers[node], False)
            for node, child in sorted(last.items())
        ]
        before = [sum(self._length(segment) for segment in above) for above in self._above]
        starts = np.array(before, np.int64)
        starts[count:] += self._prompts[self._prompt_of]
        lengths = np.diff(self._ends[2])
        shift = (starts - self._ends[2][:-1]).repeat(lengths)
        self.positions = to_device(torch.from_numpy(np.arange(self.tokens) + shift), device)
        self.longest = int((starts + lengths).max(initial=0))
        self._own: tuple[Tensor, Tensor, int] | None = None

    def prepare_windows(self, windows: Iterable[int]) -> None:
        super().prepare_windows(windows)
        self._own_keys()

    def _length(self, segment: int) -> int:
        part = self._numbers[segment]
        return int(part.stop - part.start)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        if window is not None:
            return super()._flash(query, key, value, scale, window)
        index, own_ends, longest = self._own_keys()
        prompts = slice(0, self.prompt_tokens)
        out: Tensor = tree_flash(
            query, key[prompts], value[prompts], key[index], value[index], self.segment_ends, own_ends,
            self.group_ends, self.prompt_ends, self.longest_segment, longest, self.longest_group, self.longest_prompt,
            scale,
        )[0]  # fmt: skip
        return out

    def _own_keys(self) -> tuple[Tensor, Tensor, int]:
        """Key indices per segment, their cumulative lengths, and the longest: copies of the nodes above it, itself."""
        if self._own is None:
            self._own = self._gathered(self._above)
        return self._own

    def _windowed_keys(self, window: int) -> tuple[Tensor, Tensor, int]:
        if window not in self._windowed:
            self._windowed[window] = self._gathered(self._before(), window)
        return self._windowed[window]

    def _before(self) -> list[list[int]]:
        """The segments that each segment attends to beside itself, in order: its prompt, the nodes above it."""
        prompts: list[list[int]] = [[] for _ in self._prompts]
        prompts += [[int(prompt)] for prompt in self._prompt_of]
        return [[*prompt, *above] for prompt, above in zip(prompts, self._above, strict=True)]

    def _gathered(self, before: Sequence[Sequence[int]], window: int | None = None) -> tuple[Tensor, Tensor, int]:
        """The keys of each segment: those before it, or the last of them that a window shows, then its own."""
        parts, sizes, device = [], [], self.positions.device
        for number, segments in enumerate(before):
            seen = np.concatenate([np.zeros(0, np.int64), *(self._range(segment) for segment in segments)])
            if window is not None:
                seen = seen[max(len(seen) - window + 1, 0) :]
            parts += [seen, self._range(number)]
            sizes.append(len(seen) + self._length(number))
        ends = torch.tensor([0, *np.cumsum(sizes).tolist()], dtype=torch.int32)
        keys = torch.from_numpy(np.concatenate(parts))
        return to_device(keys, device), to_device(ends, device), round_up(max(sizes))

    def _range(self, segment: int) -> np.ndarray:
        part = self._numbers[segment]
        return np.arange(part.start, part.stop)

    def _dense(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        key, value = (x.repeat_interleave(query.shape[0] // key.shape[0], 0) for x in (key, value))
        outs = []
        for number, before in enumerate(self._before()):
            ranges = [self._range(segment) for segment in (*before, number)]
            keys = torch.from_numpy(np.concatenate(ranges)).to(query.device)
            rows = self._numbers[number]
            distance = self.positions[rows, None] - self.positions[None, keys]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            outs.append(dense_attention(query[:, rows], key[:, keys], value[:, keys], scale, visible, softcap)[0])
        return torch.cat(outs, 1)
