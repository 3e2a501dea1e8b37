"""The order of rows: complete epochs, no row twice in a batch, and resuming."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.data import Order
from groupwise.errors import ConfigError, DataError, InputError

rows = st.integers(1, 12)
seeds = st.integers(0, 2**64)
# The first two epochs of seed 0, and the first of seed 1, over eight rows.
RECORDED_0 = [3, 2, 1, 6, 0, 7, 4, 5]
RECORDED_1 = [7, 4, 5, 1, 6, 2, 0, 3]
RECORDED_OTHER_SEED = [2, 4, 7, 5, 0, 6, 3, 1]

sizes = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def flat(order, takes):
    return [row for n in takes for row in order.take(n)]


def test_the_permutations_are_stable():
    """Recorded values: a change would change every resumed run."""
    order = Order(8, seed=0)
    assert [order.take(8), order.take(8)] == [RECORDED_0, RECORDED_1]
    assert Order(8, seed=1).take(8) == RECORDED_OTHER_SEED


def test_an_epoch_is_skipped():
    order = Order(8, seed=0)
    order.skip_epoch()
    assert order.take(3) == RECORDED_0[:3]
    order.skip_epoch()
    order.skip_epoch()
    assert order.epoch == 1.0
    resumed = Order(8, seed=0)
    resumed.load_state(order.state())
    assert order.take(8) == resumed.take(8) == RECORDED_1
    order.skip_epoch()  # after its last row
    order.take(6)
    order.take(4)  # two of these rows may be deferred
    order.skip_epoch()
    assert order.epoch == 4.0


def test_batches_split_the_same_permutation():
    order = Order(8, seed=0)
    assert order.take(3) + order.take(1) + order.take(4) == RECORDED_0


def test_a_repeated_row_is_deferred_to_the_next_batch():
    order = Order(8, seed=0)
    assert order.take(5) == RECORDED_0[:5]
    tail = RECORDED_0[5:]
    new = [row for row in RECORDED_1 if row not in tail]
    deferred = [row for row in RECORDED_1[: RECORDED_1.index(new[1]) + 1] if row in tail]
    assert deferred
    assert order.take(5) == tail + new[:2]
    assert order.state()["deferred"] == deferred
    rest = [row for row in RECORDED_1 if row not in (*new[:2], *deferred)]
    assert order.take(6) == deferred + rest


def test_without_shuffling():
    order = Order(3, shuffle=False, seed=5)
    assert [order.take(2) for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]
    assert order.take(7) == [0, 1, 2, 0, 1, 2, 0]


@given(rows, seeds, st.booleans(), sizes)
def test_every_epoch_contains_each_row_once(rows, seed, shuffle, takes):
    seen = flat(Order(rows, seed=seed, shuffle=shuffle), takes)
    assert len(seen) == sum(takes)
    for start in range(0, len(seen) - rows + 1, rows):
        assert sorted(seen[start : start + rows]) == list(range(rows))


@given(rows, seeds, sizes)
def test_a_batch_repeats_a_row_only_if_it_must(rows, seed, takes):
    order = Order(rows, seed=seed)
    for n in takes:
        assert max(Counter(order.take(n)).values()) == -(-n // rows)


@given(rows, seeds, st.booleans(), sizes, sizes)
def test_resume(rows, seed, shuffle, before, after):
    order = Order(rows, seed=seed, shuffle=shuffle)
    flat(order, before)
    state = json.loads(json.dumps(order.state()))
    resumed = Order(rows, seed=seed, shuffle=shuffle)
    resumed.load_state(state)
    assert resumed.epoch == order.epoch
    assert flat(resumed, after) == flat(order, after)
    assert resumed.state() == order.state()


@given(rows, sizes)
def test_the_epoch_counts_the_rows_taken(rows, takes):
    order = Order(rows)
    assert order.epoch == 0
    for count, n in enumerate(takes):
        order.take(n)
        assert order.epoch == pytest.approx(sum(takes[: count + 1]) / rows)


def test_a_quarter_of_the_second_epoch():
    order = Order(8)
    order.take(10)
    assert order.epoch == 1.25


def test_epochs_and_seeds_differ():
    order = Order(100, seed=3)
    first, second = order.take(100), order.take(100)
    assert len({tuple(first), tuple(second), tuple(Order(100, seed=4).take(100)), tuple(range(100))}) == 4


def test_a_state_is_a_copy():
    order = Order(8, seed=0)
    order.take(5), order.take(5)
    state = order.state()
    copy = json.loads(json.dumps(state))
    order.take(20)
    assert state == copy
    order.load_state(state)
    order.take(20)
    assert state == copy


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "3"])
def test_invalid_numbers(value):
    with pytest.raises(InputError, match="rows must be an integer of at least 1, got"):
        Order(value)
    with pytest.raises(InputError, match="n must be an integer of at least 1, got"):
        Order(3).take(value)


@pytest.mark.parametrize("seed", [-1, 0.5, True, None])
def test_invalid_seeds(seed):
    with pytest.raises(InputError, match="seed must be an integer of at least 0, got"):
        Order(3, seed=seed)


def test_a_state_from_other_data_or_settings():
    order = Order(8, seed=0)
    with pytest.raises(DataError, match="over 9 rows, but there are 8; resume"):
        order.load_state(Order(9).state())
    with pytest.raises(ConfigError, match="made with seed=1, but seed=0 is set"):
        order.load_state(Order(8, seed=1).state())
    with pytest.raises(ConfigError, match="made with shuffle=False, but shuffle=True is set"):
        order.load_state(Order(8, shuffle=False).state())
