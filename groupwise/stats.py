"""Statistics for comparing runs: confidence intervals, paired tests, the interquartile mean, pass@k.

Resampling uses a fixed seed, so that every number in a report can be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from groupwise.errors import InputError

FloatArray = NDArray[np.float64]
Statistic = Callable[..., Any]  # called as statistic(values, axis=…)

TAILS = (1 - 0.95) / 2, (1 + 0.95) / 2  # the quantiles between which a 95 % interval lies
LARGE = 1e290
VALUES_AT_ONCE = 2**22  # random values in memory during resampling: 32 MB


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % confidence interval: three numbers, or three arrays of one shape."""

    estimate: Any
    low: Any
    high: Any

    def __str__(self) -> str:
        return f"{self.estimate:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class PairedTest:
    """The mean difference a − b over pairs with its interval, and the two-sided p-value."""

    difference: Interval
    p_value: float
    pairs: int


def mean(values: Sequence[float]) -> float:
    """The mean of finite numbers, which is finite even if their sum is not."""
    total = sum(values) / len(values)
    return total if math.isfinite(total) else sum(value / len(values) for value in values)


def scale_of(values: ArrayLike) -> float:
    """1, or for numbers so large that sums overflow, the power of two to divide them by; NaN does not count."""
    largest = float(np.nanmax(np.abs(values), initial=0.0))
    return math.ldexp(1.0, math.frexp(largest)[1] - 2) if largest > LARGE else 1.0


def interquartile_mean(values: ArrayLike, axis: int = 0) -> Any:
    """The mean of the middle half (rliable's IQM): a quarter of the values, rounded down, is cut off at each end."""
    array = np.sort(_finite("values", values), axis=axis)
    cut = array.shape[axis] // 4
    return np.take(array, range(cut, array.shape[axis] - cut), axis=axis).mean(axis=axis)


def bootstrap_interval(
    values: ArrayLike, *, statistic: Statistic = np.mean, resamples: int = 2000, seed: int = 0
) -> Interval:
    """A statistic over the first axis of ``values``, ``(runs, …)``, with its percentile bootstrap interval.

    Complete runs are drawn with replacement, so learning curves ``(runs, points)`` give an interval at each point.
    """
    array = _finite("values", values)
    scale = scale_of(array)
    array = array / scale
    blocks = _draws(len(array), len(array), resamples, seed)
    replicas = np.stack([statistic(array[draw], axis=0) for block in blocks for draw in block])
    bounds = (scale * bound for bound in (statistic(array, axis=0), *np.quantile(replicas, TAILS, axis=0)))
    return Interval(*(float(bound) if np.ndim(bound) == 0 else bound for bound in bounds))


def median_interval(values: ArrayLike, *, resamples: int = 2000, seed: int = 0) -> Interval:
    """The median with its percentile bootstrap interval. Values may be ``inf``, for events that never happened.

    The bounds are two of the drawn medians, without interpolation, which infinite values would not allow.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size or np.isnan(array).any() or np.isneginf(array).any():
        raise InputError(f"a median needs a list of numbers without NaN and −inf, got {values!r}")
    blocks = _draws(len(array), len(array), resamples, seed)
    medians = np.sort(np.concatenate([np.median(array[block], axis=1) for block in blocks]))
    low, high = ((resamples - 1) * tail for tail in TAILS)
    return Interval(float(np.median(array)), float(medians[math.floor(low)]), float(medians[math.ceil(high)]))


def proportion_interval(successes: int, number: int) -> Interval:
    """A proportion, such as an accuracy, with its Wilson interval, which is also valid near 0 and 1."""
    if not 0 <= successes <= number or number < 1:
        raise InputError(f"need 0 ≤ successes ≤ number and number ≥ 1, got {successes} of {number}")
    z = NormalDist().inv_cdf(TAILS[1])
    share = successes / number
    centre = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(values: ArrayLike) -> Interval:
    """The mean with its interval: Wilson's if every value is 0 or 1, else the bootstrap interval.

    For 0 of 20 the bootstrap would give an interval of width 0.
    """
    array = _finite("values", values)
    if np.isin(array, (0.0, 1.0)).all():
        return proportion_interval(int(array.sum()), len(array))
    return bootstrap_interval(array)


def paired_test(a: ArrayLike, b: ArrayLike, *, resamples: int = 10_000, seed: int = 0) -> PairedTest:
    """A two-sided sign-flip permutation test on pairs, such as the same seeds under two algorithms.

    If ``a`` and ``b`` do not differ, each difference has either sign with equal probability. With up to 13 pairs that
    differ, all sign patterns are tried; with more, ``resamples`` random ones.
    """
    first, second = _finite("a", a), _finite("b", b)
    if first.shape != second.shape or first.ndim != 1:
        raise InputError(f"a and b must be equally long lists of numbers, got shapes {first.shape} and {second.shape}")
    difference = first - second
    changed = difference[difference != 0]
    observed = abs(changed.sum())
    exact = len(changed) <= 13
    if exact:
        blocks = iter([(np.arange(2 ** len(changed))[:, None] >> np.arange(len(changed))) & 1])
    else:
        blocks = _draws(2, len(changed), resamples, seed, np.int8)
    patterns, extreme = 0, 0
    for block in blocks:
        sums = np.abs(2.0 * (block @ changed) - changed.sum())
        patterns += len(block)
        extreme += int((sums >= observed * (1 - 1e-12)).sum())
    p_value = extreme / patterns if exact else (extreme + 1) / (patterns + 1)
    return PairedTest(bootstrap_interval(difference, seed=seed), float(p_value), len(first))


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p-value of McNemar's test: do as many pairs change one way as the other?

    The sum is over integers, so it is also exact for thousands of pairs.
    """
    if gained < 0 or lost < 0:
        raise InputError(f"gained and lost are counts, got {gained} and {lost}")
    changed = gained + lost
    tail = sum(math.comb(changed, number) for number in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << changed))


def pass_at_k(number: int, right: int, k: int) -> float:
    """The probability that at least one of ``k`` answers, drawn without replacement from ``number``, is right.

    This is the unbiased estimate of pass@k from ``number`` samples of which ``right`` are right.
    """
    if not 0 <= right <= number or not 1 <= k <= number:
        raise InputError(f"need 0 ≤ right ≤ number and 1 ≤ k ≤ number, got right {right}, number {number} and k {k}")
    return 1 - math.comb(number - right, k) / math.comb(number, k)


def probability_of_improvement(a: ArrayLike, b: ArrayLike) -> Interval:
    """The probability that a run of ``a`` beats a run of ``b``, ties counting half, with a bootstrap interval."""
    first, second = _finite("a", a), _finite("b", b)
    wins = (np.sign(first[:, None] - second[None, :]) + 1) / 2  # (runs of a, runs of b)
    rng = np.random.default_rng(0)
    rows, columns = (rng.integers(0, number, size=(2000, number)) for number in wins.shape)
    replicas = np.array([wins[row][:, column].mean() for row, column in zip(rows, columns, strict=True)])
    low, high = np.quantile(replicas, TAILS)
    return Interval(float(wins.mean()), float(low), float(high))


def _draws(bound: int, number: int, resamples: int, seed: int, kind: Any = np.int64) -> Iterator[NDArray[Any]]:
    """Blocks of rows of ``number`` random integers below ``bound``, ``resamples`` rows in all.

    They hold the same integers as a single draw of (resamples, number), but only one is in memory at a time.
    """
    rng = np.random.default_rng(seed)
    rows = 4 * max(1, VALUES_AT_ONCE // (4 * number))  # NumPy draws int8 values four at a time
    for start in range(0, resamples, rows):
        yield rng.integers(0, bound, size=(min(rows, resamples - start), number), dtype=kind)


def _finite(name: str, values: ArrayLike) -> FloatArray:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be numbers: {error}") from error
    if array.ndim < 1 or not array.size:
        raise InputError(f"{name} must hold at least one number, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise InputError(f"{name} holds {np.count_nonzero(~np.isfinite(array))} values that are NaN or infinite")
    return array
