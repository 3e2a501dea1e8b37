"""The tree of kept tokens: every place has the token, and the tokens before it, that the tree says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from groupwise.generate.prefix_tree import PrefixTree

SEQUENCES = st.lists(st.integers(0, 2), max_size=12)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int64)


@given(st.lists(st.tuples(SEQUENCES, st.integers(0, 14), st.integers(0, 8)), max_size=25))
def test_the_longest_kept_beginning_is_found_where_it_was_stored(actions):
    """Against the stored beginnings themselves: place → all tokens up to this one."""
    tree, stored, free = PrefixTree(), {}, list(range(1000))
    for ids, own, removed in actions:
        known = max((n for n in range(len(ids) + 1) if tuple(ids[:n]) in {(), *stored.values()}), default=0)
        run, length = tree.find(array(ids))
        assert length == known
        assert [stored[place] for place in tree.places(run).tolist()] == [tuple(ids[: n + 1]) for n in range(length)]
        own = min(own, len(ids))
        places, free = free[:own], free[own:]
        for number, place in enumerate(places):
            stored[place] = tuple(ids[: len(ids) - own + number + 1])
        unused = tree.add(array(ids), array(places)).tolist()
        assert len(unused) == (own if len(ids) - own > known else own - (len(ids) - known))
        gone = tree.remove(removed).tolist() if removed else []
        assert len(gone) >= min(removed, len(stored) - len(unused))
        for place in unused + gone:
            del stored[place]
            free.append(place)
        assert sorted(place for run in tree.runs() for place in run.places.tolist()) == sorted(stored)


def test_what_has_not_been_used_for_longest_goes_first():
    tree = PrefixTree()
    for number, ids in enumerate(([1, 2, 3], [1, 2, 4], [5, 6])):
        tree.add(array(ids), array([10 * number, 10 * number + 1, 10 * number + 2][: len(ids)]))
    tree.find(array([1, 2, 3]))
    assert tree.remove(1).tolist() == [12]  # the 4 of [1, 2, 4], whose beginning was used
    assert tree.remove(1).tolist() == [20, 21]
    assert tree.find(array([1, 2, 3]))[1] == 3


def test_what_is_still_to_be_read_stays():
    tree = PrefixTree()
    tree.add(array([1, 2, 3, 4]), array([0, 1, 2, 3]))
    run, length = tree.find(array([1, 2]))
    run.readers += 1
    assert tree.remove(10).tolist() == [2, 3]
    assert (tree.places(run).tolist(), length) == ([0, 1], 2)
    run.readers -= 1
    assert tree.remove(10).tolist() == [0, 1]
    assert not list(tree.runs())
