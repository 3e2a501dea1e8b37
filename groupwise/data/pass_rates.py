"""Rows chosen by how often they are answered correctly: a running pass rate per row, and an order that depends on it.

A prompt whose completions are all right or all wrong has no learning signal. So rows that are solved are mostly
skipped, but seen again now and then, which shows whether they were forgotten; rows that were never solved are drawn
less often; all others, and rows that were not visited yet, are always drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupwise.data.order import Order


class PassRates:
    """The running pass rate of each of ``rows`` rows: rate ← memory · rate + (1 − memory) · success, at each visit.

    A success is the share of right answers, or a mean reward. Rewards outside of 0 to 1 are divided by their range:
    from the smallest to the largest mean of a visit so far, and at least from 0 to 1.
    """

    def __init__(self, rows: int, memory: float) -> None:
        self.memory, self._averages = memory, np.full(rows, np.nan)
        self.clear()

    def clear(self) -> None:
        self._averages.fill(np.nan)
        self._low, self._high = 0.0, 1.0

    def add(self, row: int, value: float) -> None:
        """Take in a visit of a row."""
        before = float(self._averages[row])
        self._averages[row] = value if math.isnan(before) else self.memory * before + (1 - self.memory) * value
        self._low, self._high = min(self._low, value), max(self._high, value)

    def of(self, row: int) -> float:
        """The pass rate of a row; NaN before its first visit."""
        return float(self._scaled(self._averages[row]))

    def visited(self) -> Any:
        """The pass rates of all rows that were visited, as an array."""
        return self._scaled(self._averages[~np.isnan(self._averages)])

    def _scaled(self, averages: Any) -> Any:
        low, high = self._low / 2, self._high / 2  # half: the range of rewards may be beyond a float
        return (averages / 2 - low) / (high - low)


@dataclass(frozen=True)
class DrawShares:
    """How often a row is drawn when it is its turn, by its pass rate: always between the two limits."""

    solved_from: float
    solved: float
    unsolved_to: float
    unsolved: float

    def of(self, rate: float) -> float:
        """The share of its turns at which a row with this pass rate is drawn; 1 if the rate is NaN, not known yet."""
        if rate >= self.solved_from:
            return self.solved
        return self.unsolved if rate <= self.unsolved_to else 1.0


class PassRateOrder(Order):
    """The rows in the order of `Order`, without those that are skipped because of their pass rate.

    Whether a row is skipped in an epoch depends on its pass rate when it is its turn and on one random number of (seed,
    epoch, row). A batch that has looked at as many rows as there are is filled without skipping. A row that a batch
    contains already is left out of it: here an epoch is no promise that each row comes once.
    """

    def __init__(self, rates: PassRates, shares: DrawShares, rows: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self.rates, self.shares = rates, shares
        self._looked = self._skipped = 0  # since `take_metrics`
        super().__init__(rows, shuffle=shuffle, seed=seed)

    def take(self, n: int) -> list[int]:
        batch: list[int] = []
        seen: set[int] = set()
        looked = 0
        while len(batch) < n:
            if self._position == self.rows:
                self._begin_epoch()
            if len(seen) == self.rows:
                seen.clear()  # the batch is larger than the dataset
            row = int(self._permutation[self._position])
            self._position += 1
            if row in seen:
                continue
            looked += 1
            if looked <= self.rows and self._numbers[row] >= self.shares.of(self.rates.of(row)):
                self._skipped += 1
                continue
            seen.add(row)
            batch.append(row)
        self._looked += looked
        return batch

    def take_metrics(self) -> dict[str, float]:
        rates = self.rates.visited()
        skipped = self._skipped / max(1, self._looked)
        self._looked = self._skipped = 0
        metrics = {"pass_rate/skipped": skipped, "pass_rate/visited": len(rates) / self.rows}
        if len(rates):
            metrics |= {
                "pass_rate/mean": float(rates.mean()),
                "pass_rate/solved": float((rates >= self.shares.solved_from).mean()),
                "pass_rate/unsolved": float((rates <= self.shares.unsolved_to).mean()),
            }
        return metrics

    def state(self) -> dict[str, Any]:
        """The position, and what is counted for the metrics; the pass rates follow from the log of questions."""
        return {**super().state(), "looked": self._looked, "skipped": self._skipped}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state({**state, "deferred": []})
        self._looked, self._skipped = state.get("looked", 0), state.get("skipped", 0)

    def _permute(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        raw = np.random.PCG64(np.random.SeedSequence((self.seed, epoch, 1))).random_raw(self.rows)
        self._numbers = (raw >> np.uint64(11)) * 2.0**-53  # one in [0, 1) for each row
        return super()._permute(epoch)
