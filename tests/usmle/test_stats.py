"""McNemar's exact test against scipy's binomial test, and pass@k against every way to draw."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from groupwise.errors import InputError
from groupwise.stats import mcnemar, pass_at_k


@given(gained=st.integers(0, 1273), lost=st.integers(0, 1273))
def test_mcnemar_is_the_binomial_test_of_the_changed_pairs(gained, lost):
    expected = scipy_stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_by_hand():
    """One of four: 2 · (1 + 4) / 16. Two of four cannot be less extreme, and nothing changed says nothing."""
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
def test_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
