"""The order in which training sees the rows: endless, drawn from a seed, and resumable from a few numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from groupwise.errors import CheckpointError, ConfigError, DataError, InputError


class Order:
    """Row numbers without end: one permutation of all rows after another, each made from (seed, epoch) alone.

    A batch never holds a row twice, unless it is larger than the data set. Where it reaches into the next epoch, rows
    that it has already are put off until the next batch; each epoch still shows every row once.
    """

    def __init__(self, rows: int, *, shuffle: bool = True, seed: int = 0) -> None:
        if not _is_count(rows) or rows < 1:
            raise InputError(f"an order needs a number of rows from 1, got {rows!r}")
        if not _is_count(seed):
            raise InputError(f"the seed of an order must be a whole number from 0, got {seed!r}")
        self.rows = rows
        self.shuffle = bool(shuffle)
        self.seed = seed
        self._epoch = 0
        self._position = 0  # how many places of this epoch's permutation have been looked at
        self._deferred: deque[int] = deque()  # rows before that place whose turn is still to come
        self._permutation = self._permute(0)

    @property
    def epoch(self) -> float:
        """How many times the rows have been seen: 1.25 after all of them and a quarter."""
        return self._epoch + (self._position - len(self._deferred)) / self.rows

    def take(self, n: int) -> list[int]:
        """The next ``n`` row numbers."""
        if not _is_count(n) or n < 1:
            raise InputError(f"take needs a whole number from 1, got {n!r}")
        batch: list[int] = []
        seen: set[int] = set()
        while len(batch) < n:
            row = self._next(seen)
            if row is None:
                seen.clear()  # more are asked for than there are rows: they come again
                continue
            seen.add(row)
            batch.append(row)
        return batch

    def state(self) -> dict[str, Any]:
        """Where the order is, as JSON can hold it; `load_state` goes on from there."""
        return {
            "rows": self.rows,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self._epoch,
            "position": self._position,
            "deferred": list(self._deferred),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken. It must come from an order over as many rows, with the same settings."""
        missing = [name for name in self.state() if not isinstance(state, Mapping) or name not in state]
        if missing:
            raise CheckpointError(f"the saved order of rows is damaged: it lacks {', '.join(missing)}")
        if state["rows"] != self.rows:
            raise DataError(
                f"the saved order is over {state['rows']} rows, but there are {self.rows} now; go on with the same data"
            )
        for name in ("shuffle", "seed"):
            if state[name] != getattr(self, name):
                raise ConfigError(
                    f"the saved order was made with {name}={state[name]!r}, but {name}={getattr(self, name)!r} is set "
                    "now; go on with the same setting"
                )
        epoch, position, deferred = state["epoch"], state["position"], state["deferred"]
        sound = _is_count(epoch) and _is_count(position) and position <= self.rows and isinstance(deferred, list)
        permutation = self._permute(epoch) if sound else self._permutation
        if sound:
            waiting = set(filter(_is_count, deferred))
            sound = len(waiting) == len(deferred) and waiting <= set(permutation[:position].tolist())
        if not sound:
            raise CheckpointError(
                f"the saved order of rows is damaged: epoch={epoch!r}, position={position!r}, deferred={deferred!r} "
                f"is no place in an order over {self.rows} rows"
            )
        self._epoch, self._position, self._deferred, self._permutation = epoch, position, deque(deferred), permutation

    def _next(self, seen: set[int]) -> int | None:
        """The next row that is not in ``seen``; None if only such rows are left of this epoch."""
        # Rows are put off because they are in `seen`, so all that wait are in it, or (in a new batch) none is.
        if self._deferred and self._deferred[0] not in seen:
            return self._deferred.popleft()
        if self._position == self.rows and not self._deferred:
            self._epoch += 1
            self._position = 0
            self._permutation = self._permute(self._epoch)
        while self._position < self.rows:
            row = int(self._permutation[self._position])
            self._position += 1
            if row not in seen:
                return row
            self._deferred.append(row)
        return None

    def _permute(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self.shuffle:
            return np.arange(self.rows)
        # numpy promises the raw numbers of PCG64 for ever, but not what its shuffling makes of them.
        keys = np.random.PCG64(np.random.SeedSequence((self.seed, epoch))).random_raw(self.rows)
        return np.argsort(keys, kind="stable")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
