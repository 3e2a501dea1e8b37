"""Preference pairs read back from rollouts, and the words in which two answers differ."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.analysis import pairs
from groupwise.analysis.pairs import pairs_of, word_differences
from groupwise.training.preference.group_pairs import build_group_pairs


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans()), min_size=2, max_size=24),
    st.integers(1, 3),
    st.sampled_from([0.0, 1.0]),
)
def test_pairs_are_those_of_training(samples, per_group, min_margin):
    """Groups, rewards (with ties), which samples are allowed."""
    groups, rewards, allowed = map(list, zip(*samples, strict=True))
    made = build_group_pairs(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups),
        torch.tensor(groups),
        [torch.tensor([number % 3]) for number in range(len(samples))],  # some answers are the same
        torch.tensor(allowed),
        per_group=per_group,
        min_margin=min_margin,
    )
    rows = [
        {"prompt_number": group, "group": group, "sample": number, "reward": float(reward), "pair": role}
        for number, (group, reward, role) in enumerate(zip(groups, rewards, made.roles(len(samples)), strict=True))
    ]
    found = {(pair.chosen["sample"], pair.rejected["sample"]) for pair in pairs_of(rows)}
    assert found == set(zip(made.chosen.tolist(), made.rejected.tolist(), strict=True))


def test_pairs_by_the_reward_that_ranked_them():
    rows = [
        {"prompt_number": 0, "group": 0, "sample": number, "reward": 0.0, "reward/style": style, "pair": role}
        for number, (style, role) in enumerate([(1.0, "chosen"), (3.0, "chosen"), (0.5, "rejected"), (0.0, "rejected")])
    ]
    found = [(pair.chosen["sample"], pair.rejected["sample"], pair.margin) for pair in pairs_of(rows, "style")]
    assert found == [(1, 3, 3.0), (0, 2, 0.5)]
    assert pairs_of([{"prompt_number": 0, "group": 0, "sample": 0, "reward": 1.0}]) == []  # a run without pairs


def test_words_that_differ():
    one, other = word_differences("the answer is 12.", "the answer is 9.\nSure")
    assert one == [("the answer is ", False), ("12.", True)]
    assert other == [("the answer is ", False), ("9.\nSure", True)]
    one, other = word_differences("add the two", "add  the two")  # only white space
    assert one == [("add the two", False)]
    assert other == [("add  the two", False)]
    one, other = word_differences("a x b", "c x d")  # one word between differences is no common part
    assert one == [("a x b", True)]
    assert other == [("c x d", True)]
    assert word_differences("", "new") == ([], [("new", True)])


@given(st.text("ab .\n", max_size=40), st.text("ab .\n", max_size=40))
def test_the_parts_are_the_texts(one, other):
    sides = word_differences(one, other)
    assert tuple("".join(text for text, _ in side) for side in sides) == (one, other)
    shared = [[word for text, differs in side if not differs for word in text.split()] for side in sides]
    assert shared[0] == shared[1]
    if one == other:
        assert not any(differs for side in sides for _, differs in side)


def test_long_texts_are_not_compared(monkeypatch):
    monkeypatch.setattr(pairs, "MAX_WORDS", 3)
    assert word_differences("a b c d", "a b c e") == ([("a b c d", True)], [("a b c e", True)])
    assert word_differences("a b c d", "a b c d") == ([("a b c d", False)], [("a b c d", False)])


@pytest.mark.parametrize("pair", ["chosen", "rejected"])
def test_a_role_without_its_counterpart_is_no_pair(pair):
    assert pairs_of([{"prompt_number": 0, "group": 0, "sample": 0, "reward": 1.0, "pair": pair}]) == []
