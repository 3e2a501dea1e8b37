"""The order in which training sees the rows: endless, from a seed, and resumable from a small state."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from groupwise.errors import ConfigError, DataError, check_integer


class Order:
    """An endless sequence of row numbers: one permutation of all rows per epoch, which depends on (seed, epoch) only.

    A batch contains a row twice only if it is larger than the dataset. If it reaches into the next epoch, rows that it
    already contains are deferred to the next batch; every epoch still contains each row once.
    """

    def __init__(self, rows: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self.rows = check_integer("rows", rows, 1)
        self.seed = check_integer("seed", seed, 0)
        self.shuffle = bool(shuffle)
        self._epoch = 0
        self._position = 0  # in the permutation of this epoch
        self._deferred: deque[int] = deque()  # rows before the position that are still to come
        self._permutation = self._permute(0)

    @property
    def epoch(self) -> float:
        """The number of passes over the rows, e.g. 1.25."""
        return self._epoch + (self._position - len(self._deferred)) / self.rows

    def take(self, n: int) -> list[int]:
        """The next ``n`` row numbers."""
        check_integer("n", n, 1)
        batch: list[int] = []
        seen: set[int] = set()
        while len(batch) < n:
            row = self._next(seen)
            if row is None:
                seen.clear()  # the batch is larger than the dataset
            else:
                seen.add(row)
                batch.append(row)
        return batch

    def skip_epoch(self) -> None:
        """Leave out the rows that are left of this epoch; before its first row nothing is left out."""
        if self._position:
            self._begin_epoch()

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the draws since the last call; this order has none."""
        return {}

    def state(self) -> dict[str, Any]:
        """The position as JSON values, for `load_state`."""
        settings = {"rows": self.rows, "shuffle": self.shuffle, "seed": self.seed}
        return {**settings, "epoch": self._epoch, "position": self._position, "deferred": list(self._deferred)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, which must come from an order with the same number of rows and the same settings."""
        if state["rows"] != self.rows:
            raise DataError(
                f"the saved order is over {state['rows']} rows, but there are {self.rows}; resume with the same data"
            )
        for name in ("shuffle", "seed"):
            if state[name] != getattr(self, name):
                settings = f"made with {name}={state[name]!r}, but {name}={getattr(self, name)!r} is set"
                raise ConfigError(f"the saved order was {settings}; resume with the same setting")
        self._epoch, self._position, self._deferred = state["epoch"], state["position"], deque(state["deferred"])
        self._permutation = self._permute(self._epoch)

    def _next(self, seen: set[int]) -> int | None:
        """The next row that is not in ``seen``; None if this epoch has no other rows left."""
        # Deferred rows are all in `seen`, or none of them is (in a new batch).
        if self._deferred and self._deferred[0] not in seen:
            return self._deferred.popleft()
        if self._position == self.rows and not self._deferred:
            self._begin_epoch()
        while self._position < self.rows:
            row = int(self._permutation[self._position])
            self._position += 1
            if row not in seen:
                return row
            self._deferred.append(row)
        return None

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._position = 0
        self._deferred.clear()
        self._permutation = self._permute(self._epoch)

    def _permute(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self.shuffle:
            return np.arange(self.rows)
        # numpy keeps the raw stream of PCG64 stable across versions, but not the result of its shuffle methods.
        keys = np.random.PCG64(np.random.SeedSequence((self.seed, epoch))).random_raw(self.rows)
        return np.argsort(keys, kind="stable")
