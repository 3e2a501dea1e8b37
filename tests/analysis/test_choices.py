"""Which choice paid, against numbers computed by hand and against a literal decomposition of the squares."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.analysis.choices import forks_by_share
from groupwise.analysis.tree import build_tree


def tree_of(texts, advantages):
    samples = [{"sample": number, "advantage": value} for number, value in enumerate(advantages)]
    return build_tree([[(letter, letter) for letter in text] for text in texts], samples)


def test_shares_by_hand():
    # Mean 0. First letter: a has mean 1.5, b has -1.5: 4 · 1.5² = 9 of 4 + 1 + 1 + 4 = 10. Then 0.5 in each half.
    forks = forks_by_share(tree_of(["ax", "ay", "bx", "by"], [2, 1, -1, -2]), {0: 2, 1: 1, 2: -1, 3: -2})
    assert [fork.before for fork in forks] == ["", "a", "b"]
    assert [fork.share for fork in forks] == pytest.approx([0.9, 0.05, 0.05])
    assert [[branch.text for branch in fork.branches] for fork in forks] == [["a", "b"], ["x", "y"], ["x", "y"]]


def test_an_answer_that_ends_where_others_go_on_is_a_branch():
    (fork,) = forks_by_share(tree_of(["a", "ab"], [1, -1]), {0: 1, 1: -1})
    assert fork.before == "a"
    assert fork.share == pytest.approx(1)
    assert [(branch.text, branch.samples) for branch in fork.branches] == [("", [0]), ("b", [1])]


def test_equal_advantages_have_no_decisive_fork():
    assert forks_by_share(tree_of(["a", "b"], [0.5, 0.5]), {0: 0.5, 1: 0.5}) == []
    assert forks_by_share(tree_of(["a", "a"], [1, -1]), {0: 1, 1: -1}) == []  # identical answers: no fork


values = st.integers(-8, 8).map(lambda number: number / 4)


@given(st.lists(st.tuples(st.text("ab", max_size=5), values), min_size=1, max_size=10))
def test_shares_and_what_is_left_within_identical_answers_are_everything(samples):
    texts, advantages = zip(*samples, strict=True)
    forks = forks_by_share(tree_of(texts, advantages), dict(enumerate(advantages)))
    mean = math.fsum(advantages) / len(advantages)
    total = math.fsum((value - mean) ** 2 for value in advantages)
    within = 0.0
    for text in set(texts):
        same = [value for other, value in samples if other == text]
        within += math.fsum((value - math.fsum(same) / len(same)) ** 2 for value in same)
    if total == 0:
        assert forks == []
    else:
        assert math.fsum(fork.share for fork in forks) == pytest.approx(1 - within / total, abs=1e-9)
