"""Which sequences of tokens are kept, and where: a prefix tree over token ids. NumPy and plain Python, without tensors.

Sequences that begin alike share the runs of their beginning. A run can be removed once nothing follows it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

import numpy as np


class TokenRun:
    """Tokens that follow those of the parent, and the place of each in the storage."""

    def __init__(self, ids: np.ndarray, places: np.ndarray, parent: TokenRun | None) -> None:
        self.ids, self.places, self.parent = ids, places, parent
        self.children: dict[int, TokenRun] = {}  # by their first token
        self.last_used = 0
        self.readers = 0  # sequences that are still to be read from here upwards


class PrefixTree:
    """Sequences of token ids, each place of the storage in at most one run."""

    def __init__(self) -> None:
        nothing = np.empty(0, np.int64)
        self.root = TokenRun(nothing, nothing, None)
        self._clock = 0

    def find(self, ids: np.ndarray) -> tuple[TokenRun, int]:
        """The longest beginning of ``ids`` that is kept: the run that ends there, and the length."""
        self._clock += 1
        run, length = self.root, 0
        while length < len(ids) and (child := run.children.get(int(ids[length]))) is not None:
            same = _common_length(child.ids, ids[length:])
            run = child if same == len(child.ids) else _split(child, same)
            run.last_used = self._clock
            length += same
        return run, length

    def places(self, run: TokenRun) -> np.ndarray:
        """The places of all tokens up to the end of a run."""
        parts = [run.places]
        while run.parent is not None:
            run = run.parent
            parts.append(run.places)
        return np.concatenate(parts[::-1])

    def add(self, ids: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Keep ``ids``, the last of which are stored at ``places``. Returns the places that are not needed.

        Those are all if a token before them is not kept any more.
        """
        run, length = self.find(ids)
        missing = len(ids) - length
        if missing > len(places):
            return places
        unused, new = np.split(places, [len(places) - missing])
        if missing:
            child = TokenRun(ids[length:], new, run)
            child.last_used = self._clock
            run.children[int(ids[length])] = child
        return unused

    def remove(self, tokens: int) -> np.ndarray:
        """Remove the runs that have not been used for longest, of ``tokens`` tokens or more if there are as many.

        A run that is still to be read stays. Returns the places that are free now.
        """
        order = count()
        ends = [(run.last_used, next(order), run) for run in self.runs() if _removable(run)]
        heapq.heapify(ends)
        freed, total = [self.root.places], 0
        while ends and total < tokens:
            run = heapq.heappop(ends)[-1]
            freed.append(run.places)
            total += len(run.places)
            parent = run.parent
            if parent is not None:
                del parent.children[int(run.ids[0])]
                if _removable(parent):
                    heapq.heappush(ends, (parent.last_used, next(order), parent))
        return np.concatenate(freed)

    def runs(self) -> Iterator[TokenRun]:
        """All runs."""
        waiting = list(self.root.children.values())
        while waiting:
            run = waiting.pop()
            yield run
            waiting += run.children.values()


def _removable(run: TokenRun) -> bool:
    return run.parent is not None and not run.children and not run.readers


def _split(run: TokenRun, length: int) -> TokenRun:
    """Divide a run after ``length`` tokens; returns the first part. The run itself is the second, with its readers."""
    parent = run.parent
    first = TokenRun(run.ids[:length], run.places[:length], parent)
    first.last_used = run.last_used
    first.children[int(run.ids[length])] = run
    if parent is not None:
        parent.children[int(run.ids[0])] = first
    run.ids, run.places, run.parent = run.ids[length:], run.places[length:], first
    return first


def _common_length(one: np.ndarray, other: np.ndarray) -> int:
    """The number of tokens with which both begin."""
    shorter = min(len(one), len(other))
    different = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(different[0]) if len(different) else shorter
