"""Statistics against scipy, by hand, and by their coverage and error rates."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from groupwise import stats
from groupwise.errors import InputError
from groupwise.stats import (
    Interval,
    bootstrap_interval,
    interquartile_mean,
    mcnemar,
    median_interval,
    paired_test,
    pass_at_k,
    probability_of_improvement,
    proportion_interval,
)

floats = st.floats(-1e6, 1e6)


@given(values=st.lists(floats, min_size=1, max_size=40))
def test_interquartile_mean_is_scipys_trimmed_mean(values):
    assert interquartile_mean(values) == pytest.approx(scipy_stats.trim_mean(values, 0.25), rel=1e-9, abs=1e-9)


def test_interquartile_mean_along_an_axis():
    values = np.arange(24.0).reshape(8, 3)
    np.testing.assert_allclose(interquartile_mean(values, axis=0), scipy_stats.trim_mean(values, 0.25, axis=0))
    assert interquartile_mean([1, 2, 3, 1000]) == 2.5


def test_bootstrap_is_scipys():
    values = np.random.default_rng(1).normal(size=30)
    ours = bootstrap_interval(values, resamples=20_000)
    theirs = scipy_stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, random_state=0)
    assert ours.estimate == pytest.approx(values.mean())
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.01)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.01)


@pytest.mark.slow
def test_bootstrap_covers_the_true_mean():
    """95% intervals of 30 normal values hold the true mean about 94% of the time."""
    rng = np.random.default_rng(0)
    intervals = [bootstrap_interval(rng.normal(size=30), resamples=400, seed=seed) for seed in range(300)]
    covered = np.mean([interval.low <= 0 <= interval.high for interval in intervals])
    assert 0.89 < covered < 0.98


def test_bootstrap_of_curves_draws_complete_runs():
    curves = np.random.default_rng(2).normal(size=(6, 4))
    together = bootstrap_interval(curves)
    assert together.estimate.shape == together.low.shape == together.high.shape == (4,)
    for point in range(4):
        alone = bootstrap_interval(curves[:, point])
        assert together.low[point] == pytest.approx(alone.low)
        assert together.high[point] == pytest.approx(alone.high)


def test_bootstrap_is_repeatable():
    values = np.random.default_rng(3).normal(size=9)
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values)
    assert bootstrap_interval([2.0]) == Interval(2.0, 2.0, 2.0)
    assert str(Interval(0.12345, 0.1, 0.2)) == "0.123 [0.1, 0.2]"


@pytest.mark.parametrize(
    "resample",
    [bootstrap_interval, median_interval, lambda values, resamples: paired_test(values[:3000], np.zeros(3000))],
    ids=["bootstrap_interval", "median_interval", "paired_test"],
)
def test_resampling_needs_bounded_memory(resample):
    values = np.random.default_rng(0).normal(size=100_000)
    tracemalloc.start()
    resample(values, resamples=200)  # at once, 160 MB of indices; the paired test, 240 MB of signs
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150e6


@pytest.mark.parametrize("rows", [1, 3, 7, 200])
def test_bootstrap_in_blocks_is_the_same_to_the_bit(monkeypatch, rows):
    values = np.random.default_rng(4).normal(size=31)
    draws = np.random.default_rng(5).integers(0, 31, size=(100, 31))
    means = [values[draw].mean() for draw in draws]
    monkeypatch.setattr(stats, "VALUES_AT_ONCE", rows * 31)
    blocks = bootstrap_interval(values, resamples=100, seed=5)
    assert (blocks.low, blocks.high) == tuple(np.quantile(means, [(1 - 0.95) / 2, (1 + 0.95) / 2]))
    medians = median_interval(values, resamples=100, seed=5)
    monkeypatch.undo()
    assert bootstrap_interval(values, resamples=100, seed=5) == blocks
    assert median_interval(values, resamples=100, seed=5) == medians


@pytest.mark.parametrize("rows", [4, 12, 400])
def test_paired_test_in_blocks_is_the_same(monkeypatch, rows):
    a, b = np.random.default_rng(6).normal(size=(2, 27))
    signs = np.random.default_rng(3).integers(0, 2, size=(101, 27), dtype=np.int8)
    sums = np.abs(2.0 * (signs @ (a - b)) - (a - b).sum())
    monkeypatch.setattr(stats, "VALUES_AT_ONCE", rows * 27)
    p_value = paired_test(a, b, resamples=101, seed=3).p_value
    assert p_value == ((sums >= abs((a - b).sum())).sum() + 1) / 102


def test_median_interval_of_finite_values_is_the_bootstrap_interval():
    """One takes drawn medians as bounds, the other interpolates between them: with few values these are the same."""
    values = np.random.default_rng(1).normal(size=15)
    assert median_interval(values) == bootstrap_interval(values, statistic=np.median)
    assert median_interval(values, seed=1, resamples=50) != median_interval(values, resamples=50)


@given(finite=st.lists(st.integers(0, 100), max_size=9), infinite=st.integers(0, 9))
def test_infinity_counts_as_larger_than_any_number(finite, infinite):
    if not finite and not infinite:
        return
    interval = median_interval([*finite, *[np.inf] * infinite], resamples=100)
    huge = median_interval([*finite, *[1e6] * infinite], resamples=100)
    for name in ("estimate", "low", "high"):
        bound = getattr(huge, name)
        assert getattr(interval, name) == (np.inf if bound > 1e5 else bound)


@given(number=st.integers(1, 2000), share=st.floats(0, 1))
def test_proportion_is_scipys_wilson_interval(number, share):
    successes = round(share * number)
    ours = proportion_interval(successes, number)
    theirs = scipy_stats.binomtest(successes, number).proportion_ci(0.95, method="wilson")
    assert ours.low == pytest.approx(theirs.low, abs=1e-9)
    assert ours.high == pytest.approx(theirs.high, abs=1e-9)
    assert ours.estimate == successes / number


@given(pairs=st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), min_size=2, max_size=9))
def test_paired_test_is_scipys_exact_one(pairs):
    a, b = np.array(pairs, dtype=float).T
    ours = paired_test(a, b)
    theirs = scipy_stats.permutation_test(
        (a - b,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert ours.pairs == len(pairs)
    assert ours.p_value == pytest.approx(theirs.pvalue)
    assert ours.difference.estimate == pytest.approx((a - b).mean())


def test_paired_test_of_zeros_and_ones_is_mcnemars():
    before = np.array([1] * 5 + [0] * 20 + [1] * 100)
    after = np.array([0] * 5 + [1] * 20 + [1] * 100)
    ours = paired_test(after, before, resamples=100_000)
    assert ours.p_value == pytest.approx(scipy_stats.binomtest(5, 25).pvalue, abs=0.001)
    assert ours.difference.estimate == pytest.approx(15 / 125)
    assert ours.difference.low > 0


def test_paired_test_of_equal_values():
    same = paired_test([1.0, 2.0], [1.0, 2.0])
    assert same.p_value == 1
    assert same.difference.estimate == 0


@pytest.mark.slow
def test_paired_test_has_its_error_rate():
    """Without a difference, p is below 0.05 in about 5% of cases."""
    rng = np.random.default_rng(0)
    p_values = [paired_test(rng.normal(size=20), rng.normal(size=20), resamples=500).p_value for _ in range(300)]
    assert 0.01 < np.mean(np.array(p_values) < 0.05) < 0.09


def test_probability_of_improvement():
    assert probability_of_improvement([2, 3], [0, 1]).estimate == 1
    tied = probability_of_improvement([1, 1], [1, 1])
    assert (tied.estimate, tied.low, tied.high) == (0.5, 0.5, 0.5)
    a, b = np.random.default_rng(1).normal(0.5, 1, 25), np.random.default_rng(2).normal(0, 1, 20)
    ours = probability_of_improvement(a, b)
    assert ours.estimate == pytest.approx(scipy_stats.mannwhitneyu(a, b).statistic / (25 * 20))
    assert ours.low < ours.estimate < ours.high


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_interval([]), "at least one number"),
        (lambda: bootstrap_interval([1.0, np.nan]), "1 values that are NaN or infinite"),
        (lambda: bootstrap_interval(["a"]), "values must be numbers: could not convert"),
        (lambda: median_interval([]), r"a median needs a list of numbers .* got \[\]"),
        (lambda: median_interval([1.0, np.nan]), "without NaN"),
        (lambda: median_interval([1.0, -np.inf]), "and −inf"),
        (lambda: median_interval([[1.0]]), "a list of numbers"),
        (lambda: proportion_interval(3, 2), "got 3 of 2"),
        (lambda: proportion_interval(0, 0), "number ≥ 1"),
        (lambda: paired_test([1.0], [1.0, 2.0]), "equally long"),
        (lambda: interquartile_mean([]), "at least one number"),
        (lambda: probability_of_improvement([1.0], [np.inf]), "b holds 1 values"),
    ],
)
def test_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


@given(gained=st.integers(0, 1273), lost=st.integers(0, 1273))
def test_mcnemar_is_the_binomial_test_of_the_changed_pairs(gained, lost):
    expected = scipy_stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_by_hand():
    """One of four: 2 · (1 + 4) / 16. Two of four is the least extreme, and without changes p is 1."""
    assert mcnemar(3, 1) == mcnemar(1, 3) == 0.625
    assert mcnemar(2, 2) == 1.0
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(0, 6) == 2 / 64


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    for number in range(1, 8):
        for right, k in itertools.product(range(number + 1), range(1, number + 1)):
            draws = list(itertools.combinations([True] * right + [False] * (number - right), k))
            assert pass_at_k(number, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_many():
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5)
    assert pass_at_k(5000, 4000, 2500) == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mcnemar(-1, 2), "gained and lost are counts, got -1 and 2"),
        (lambda: pass_at_k(4, 5, 1), "got right 5, number 4 and k 1"),
        (lambda: pass_at_k(4, 2, 5), "1 ≤ k ≤ number"),
        (lambda: pass_at_k(4, 2, 0), "and k 0"),
    ],
)
def test_invalid_counts(call, message):
    with pytest.raises(InputError, match=message):
        call()
