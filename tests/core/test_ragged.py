"""Ragged rows against plain lists of lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.ragged import Ragged, RaggedGroups
from groupwise.errors import InputError

LISTS = st.lists(st.lists(st.integers(-5, 99), max_size=5), max_size=8)
GROUPS = st.lists(LISTS, max_size=5)


def chosen_from(draw: st.DataObject, count: int) -> list[int]:
    """Some numbers below ``count``, in any order, perhaps several times."""
    return draw.draw(st.lists(st.integers(0, count - 1), max_size=10) if count else st.just([]))


@given(LISTS, st.data())
def test_a_ragged_is_its_list_of_rows(rows, data):
    ragged = Ragged.of(rows)
    assert (len(ragged), ragged.tolist(), ragged.sizes) == (len(rows), rows, [len(row) for row in rows])
    assert [row.tolist() for row in ragged] == rows
    assert [ragged[number].tolist() for number in range(-len(rows), len(rows))] == rows * 2
    assert ragged.longest == max(map(len, rows), default=0)
    first, last, step = data.draw(st.tuples(st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([None, 1, 2, -1])))
    assert ragged[first:last:step].tolist() == rows[first:last:step]
    numbers = chosen_from(data, len(rows))
    assert ragged.take(numbers).tolist() == [rows[number] for number in numbers]
    assert ragged.take(torch.tensor(numbers, dtype=torch.long)).tolist() == [rows[number] for number in numbers]
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    wanted = [row for row, take in zip(rows, mask, strict=True) if take]
    assert ragged.take(torch.tensor(mask, dtype=torch.bool)).tolist() == wanted
    assert ragged.values[ragged.positions(numbers)].tolist() == [value for number in numbers for value in rows[number]]
    width = ragged.longest
    assert ragged.padded().tolist() == [row + [0] * (width - len(row)) for row in rows]
    assert ragged.mask.tolist() == [[True] * len(row) + [False] * (width - len(row)) for row in rows]
    assert Ragged.from_padded(ragged.padded(), ragged.lengths).tolist() == rows


@given(GROUPS)
def test_parts_are_joined_and_split_again(parts):
    joined = Ragged.join([Ragged.of(part) for part in parts])
    assert joined.tolist() == [row for part in parts for row in part]
    assert [part.tolist() for part in joined.split([len(part) for part in parts])] == parts


@given(GROUPS, st.data())
def test_groups_are_their_lists_of_rows(lists, data):
    groups = RaggedGroups.of(lists)
    assert (len(groups), groups.tolist()) == (len(lists), lists)
    assert [group.tolist() for group in groups] == lists
    assert [groups[number].tolist() for number in range(-len(lists), len(lists))] == lists * 2
    assert RaggedGroups.of([Ragged.of(rows) for rows in lists]).tolist() == lists
    first, last, step = data.draw(st.tuples(st.integers(-6, 6), st.integers(-6, 6), st.sampled_from([None, 2, -1])))
    assert groups[first:last:step].tolist() == lists[first:last:step]
    numbers = chosen_from(data, len(lists))
    assert groups.take(numbers).tolist() == [lists[number] for number in numbers]
    assert groups.group_of.tolist() == [number for number, rows in enumerate(lists) for _ in rows]
    assert groups.totals.tolist() == [sum(map(len, rows)) for rows in lists]
    assert groups.longest.tolist() == [max(map(len, rows), default=0) for rows in lists]
    short = [[len(row) < 3 for row in rows] for rows in lists]
    flags = torch.tensor([flag for group in short for flag in group], dtype=torch.bool)
    assert groups.sum(flags).tolist() == [sum(group) for group in short]
    assert groups.regroup([len(groups.rows)]).tolist() == [groups.rows.tolist()]
    rows = chosen_from(data, len(groups.rows))
    assert groups.choose(rows, [len(rows)]).tolist() == [[groups.rows[row].tolist() for row in rows]]


def test_rows_are_views_that_share_the_values():
    ragged = Ragged.of([torch.tensor([1.5, 2.5]), torch.tensor([3.5])])
    ragged.values[2] = 7.0
    assert ragged[1].tolist() == ragged[1:][0].tolist() == list(ragged)[1].tolist() == [7.0]
    assert Ragged.of(ragged) is ragged
    assert RaggedGroups.of(groups := RaggedGroups(ragged, [2])) is groups
    with pytest.raises(IndexError):
        ragged[2]


@pytest.mark.parametrize("lengths", [[1], [1, 3], [4, -1]])
def test_lengths_that_do_not_fit_the_values(lengths):
    with pytest.raises(InputError, match="must sum to their 3 values"):
        Ragged(torch.arange(3), lengths)


def test_groups_that_do_not_fit_the_rows():
    ragged = Ragged(torch.arange(3), [1, 2])
    with pytest.raises(InputError, match="must sum to their 2 rows"):
        RaggedGroups(ragged, [1])
    with pytest.raises(InputError, match="2 rows cannot be split"):
        ragged.split([1, 2])
    with pytest.raises(InputError, match="one dimension"):
        Ragged(torch.zeros(2, 2), [2, 2])
