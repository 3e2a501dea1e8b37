"""The tokens of a conversation: which were sampled, and which have to be computed."""

from __future__ import annotations

import pytest
import torch

from groupwise.core.sequences import TokenSequence, join_segments
from groupwise.errors import InputError


def test_segments_are_joined_in_order():
    sequence = join_segments([([5, 6], True), (torch.tensor([7, 8, 9]), False), ([4], True), ([3], False)])
    assert sequence.ids.tolist() == [5, 6, 7, 8, 9, 4, 3]
    assert sequence.sampled.tolist() == [True, True, False, False, False, True, False]
    assert len(sequence) == 7


def test_the_completion_has_only_sampled_tokens():
    sequence = join_segments([([5, 6], True), ([7], False), ([4], True), ([3, 2], False)])
    assert sequence.completion.tolist() == [5, 6, 4]
    assert sequence.places.tolist() == [0, 1, 3]


def test_the_context_ends_before_the_last_sampled_token():
    assert join_segments([([5, 6], True), ([7], False), ([4], True), ([3], False)]).context.tolist() == [5, 6, 7]
    assert join_segments([([5], True)]).context.tolist() == []


def test_a_sequence_without_sampled_tokens_is_refused():
    with pytest.raises(InputError, match="no sampled token"):
        join_segments([([1, 2], False)])
    with pytest.raises(InputError, match="no sampled token"):
        join_segments([])


@pytest.mark.parametrize("mask", [torch.ones(2), torch.ones(3).bool(), torch.ones(1, 2).bool()])
def test_a_mask_of_another_kind_is_refused(mask):
    with pytest.raises(InputError, match="mask"):
        TokenSequence(torch.tensor([1, 2]), mask)
