"""A conversation as prompt, sampled and given tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.conversations import Conversation, GivenTokens, SampledTurn
from groupwise.errors import InputError


def test_two_turns_by_hand():
    conversation = Conversation([1, 2])
    assert conversation.ids == [1, 2]
    conversation.add_sampled([3, 4], [-0.5, -0.25])
    conversation.add_given([5])
    conversation.add_sampled((6,))
    assert conversation.prompt_ids == (1, 2)
    assert conversation.segments == (SampledTurn((3, 4), (-0.5, -0.25)), GivenTokens((5,)), SampledTurn((6,)))
    assert conversation.turns == (SampledTurn((3, 4), (-0.5, -0.25)), SampledTurn((6,)))
    assert [segment.kind for segment in conversation.segments] == ["sampled", "given", "sampled"]
    assert conversation.ids == [1, 2, 3, 4, 5, 6]
    assert conversation.completion_ids == [3, 4, 5, 6]
    assert conversation.completion_mask == [True, True, False, True]
    assert conversation.logps[:2] == [-0.5, -0.25]
    assert all(map(math.isnan, conversation.logps[2:]))
    assert len(conversation) == 6


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=4))))
def test_what_was_appended_stays(pieces):
    conversation = Conversation([1])
    expected, mask = [], []
    last_sampled = False
    for is_sampled, ids in pieces:
        before = conversation.segments
        if is_sampled and last_sampled:
            with pytest.raises(InputError, match="follows another"):
                conversation.add_sampled(ids)
            continue
        (conversation.add_sampled if is_sampled else conversation.add_given)(ids)
        last_sampled = is_sampled
        expected += ids
        mask += [is_sampled] * len(ids)
        assert conversation.segments[:-1] == before
    assert conversation.completion_ids == expected
    assert conversation.completion_mask == mask
    assert len(conversation) == 1 + len(expected) == 1 + len(conversation.logps)


def test_invalid_pieces():
    with pytest.raises(InputError, match="prompt"):
        Conversation([])
    with pytest.raises(InputError, match="at least one token"):
        Conversation([1]).add_sampled([])
    with pytest.raises(InputError, match="2 tokens has 1 log-probs"):
        Conversation([1]).add_sampled([1, 2], [-0.5])
    conversation = Conversation([1])
    conversation.add_given([])
    assert conversation.segments == ()
