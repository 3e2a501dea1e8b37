"""Pass rates of rows, and the order that depends on them: against a literal version, its shares, and resuming."""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.data import DrawShares, Order, PassRateOrder, PassRates

SHARES = DrawShares(solved_from=0.9, solved=0.1, unsolved_to=0.05, unsolved=0.5)


def make(rows, shares=SHARES, **options):
    rates = PassRates(rows, 0.5)
    return PassRateOrder(rates, shares, rows, **options), rates


# --- pass rates -------------------------------------------------------------------------------------------------------


def test_running_averages_by_hand():
    rates = PassRates(3, 0.75)
    for value in (1.0, 0.0, 0.5):
        rates.add(1, value)
    assert rates.of(1) == 0.75 * (0.75 * 1.0) + 0.25 * 0.5
    assert math.isnan(rates.of(0))
    assert rates.visited().tolist() == [rates.of(1)]
    rates.clear()
    assert math.isnan(rates.of(1))


def test_only_the_last_visit_counts_without_memory():
    rates = PassRates(1, 0.0)
    rates.add(0, 1.0)
    rates.add(0, 0.25)
    assert rates.of(0) == 0.25


def test_rewards_outside_of_0_to_1_are_scaled_by_their_range():
    rates = PassRates(3, 0.5)
    rates.add(0, 0.5)
    assert rates.of(0) == 0.5  # within 0 to 1
    rates.add(1, 3.0)
    rates.add(2, -1.0)
    assert [rates.of(row) for row in range(3)] == [(0.5 + 1) / 4, 1.0, 0.0]
    rates.add(1, -1.0)
    assert rates.of(1) == 0.5  # the average of 3 and −1 lies in the middle


def test_a_range_beyond_a_float_is_no_error():
    rates = PassRates(2, 0.5)
    rates.add(0, 1e308)
    rates.add(1, -1e308)
    assert [rates.of(0), rates.of(1)] == [1.0, 0.0]


# --- the order --------------------------------------------------------------------------------------------------------


def literal(rows, seed, rates, shares, sizes):
    """The batches, one row at a time, from the definition."""
    epoch, position, batches = 0, 0, []

    def numbers(epoch):
        raw = np.random.PCG64(np.random.SeedSequence((seed, epoch, 1))).random_raw(rows)
        return [(int(word) >> 11) / 2**53 for word in raw]

    permutation = Order(rows, seed=seed).take(rows)
    uniform = numbers(0)
    for size in sizes:
        batch, looked, seen = [], 0, set()
        while len(batch) < size:
            if position == rows:
                epoch, position = epoch + 1, 0
                order = Order(rows, seed=seed)
                order.load_state({**order.state(), "epoch": epoch})
                permutation, uniform = order.take(rows), numbers(epoch)
            if len(seen) == rows:
                seen = set()
            row = permutation[position]
            position += 1
            if row in seen:
                continue
            looked += 1
            rate = rates.get(row)
            share = 1.0
            if rate is not None and rate >= shares.solved_from:
                share = shares.solved
            elif rate is not None and rate <= shares.unsolved_to:
                share = shares.unsolved
            if looked <= rows and uniform[row] >= share:
                continue
            seen.add(row)
            batch.append(row)
        batches.append(batch)
    return batches


@given(
    st.integers(1, 12),
    st.integers(0, 2**32),
    st.dictionaries(st.integers(0, 11), st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0])),
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
    st.sampled_from([SHARES, DrawShares(0.9, 0.0, 0.05, 0.0), DrawShares(1.0, 0.3, 0.0, 1.0)]),
)
def test_batches_are_those_of_the_literal_version(rows, seed, known, sizes, shares):
    order, rates = make(rows, shares, seed=seed)
    known = {row: rate for row, rate in known.items() if row < rows}
    for row, rate in known.items():
        rates.add(row, rate)
    batches = [order.take(size) for size in sizes]
    assert batches == literal(rows, seed, known, shares, sizes)
    for batch in batches:
        assert max(Counter(batch).values()) <= math.ceil(len(batch) / rows)


def test_before_anything_is_known_the_order_is_the_uniform_one():
    order, _ = make(100, seed=3)
    uniform = Order(100, seed=3)
    assert [order.take(10) for _ in range(10)] == [uniform.take(10) for _ in range(10)]
    assert order.take_metrics()["pass_rate/skipped"] == 0.0


def test_a_pass_rate_at_a_limit_counts_as_solved_or_unsolved():
    shares = DrawShares(solved_from=0.75, solved=0.0, unsolved_to=0.25, unsolved=0.0)
    rates = PassRates(4, 0.0)
    for row, rate in enumerate((0.75, 0.25, 0.5, 0.5)):
        rates.add(row, rate)
    order = PassRateOrder(rates, shares, 4)
    assert sorted(order.take(2)) == [2, 3]
    metrics = order.take_metrics()
    assert metrics["pass_rate/solved"] == metrics["pass_rate/unsolved"] == 0.25


def test_solved_rows_come_rarely_and_unsolved_ones_less_often():
    order, rates = make(300)
    for row in range(300):
        rates.add(row, (1.0, 0.0, 0.5)[row % 3])
    counts = Counter(row % 3 for _ in range(1000) for row in order.take(20))
    epochs = order.epoch
    shares = [counts[kind] / (100 * epochs) for kind in range(3)]
    assert shares[0] == pytest.approx(0.1, abs=0.02)
    assert shares[1] == pytest.approx(0.5, abs=0.03)
    assert shares[2] == pytest.approx(1.0, abs=0.03)
    metrics = order.take_metrics()
    assert metrics["pass_rate/skipped"] == pytest.approx(1 - (0.1 + 0.5 + 1) / 3, abs=0.02)
    assert metrics["pass_rate/mean"] == pytest.approx(0.5)
    assert metrics["pass_rate/solved"] == metrics["pass_rate/unsolved"] == pytest.approx(1 / 3)
    assert metrics["pass_rate/visited"] == 1.0
    assert order.take_metrics()["pass_rate/skipped"] == 0.0  # counted anew


def test_a_forgotten_row_comes_back():
    _, rates = make(10)
    for _ in range(3):
        rates.add(4, 1.0)
    assert SHARES.of(rates.of(4)) == 0.1
    rates.add(4, 0.25)
    assert SHARES.of(rates.of(4)) == 1.0


def test_if_all_rows_are_solved_batches_are_still_full():
    order, rates = make(7, DrawShares(0.9, 0.0, 0.05, 0.0))
    for row in range(7):
        rates.add(row, 1.0)
    batches = [order.take(3) for _ in range(50)]
    assert all(len(set(batch)) == 3 for batch in batches)
    assert set().union(*batches) == set(range(7))


@given(st.integers(0, 50), st.integers(1, 9))
def test_a_restored_order_continues_the_same(seed, taken):
    state = random.Random(seed)
    values = [(state.randrange(20), state.choice([0.0, 0.5, 1.0])) for _ in range(40)]
    order, rates = make(20, seed=seed)
    for row, value in values[:20]:
        rates.add(row, value)
    for _ in range(taken):
        order.take(4)
    again, other_rates = make(20, seed=seed)
    for row, value in values[:20]:
        other_rates.add(row, value)
    again.load_state(json.loads(json.dumps(order.state())))
    for row, value in values[20:]:
        rates.add(row, value)
        other_rates.add(row, value)
        assert order.take(3) == again.take(3)
    assert order.state() == again.state()
    assert order.take_metrics() == again.take_metrics()


def test_the_state_of_another_order_is_taken_over():
    """A run may be resumed with another data.sampling."""
    uniform = Order(10, seed=1)
    uniform.take(13)
    order, _ = make(10, seed=1)
    order.load_state(uniform.state())
    assert order.state()["position"] == uniform.state()["position"]
    back = Order(10, seed=1)
    back.load_state(order.state())
    back.take(3)


def test_the_state_does_not_grow_with_the_rows():
    order, rates = make(100_000)
    for row in range(0, 100_000, 2):
        rates.add(row, 1.0)
    assert len(set(order.take(512))) == 512
    assert len(json.dumps(order.state())) < 200
