"""Masks, computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.core import (
    completion_mask,
    high_entropy_mask,
    off_policy_sequence_mask,
    truncated,
    validity,
    validity_reasons,
)
from groupwise.errors import InputError

IDS = torch.tensor([[5, 2, 2, 7], [5, 6, 7, 8], [2, 5, 5, 5], [5, 5, 5, 3]])


def test_completion_up_to_and_including_the_first_eos():
    assert completion_mask(IDS, 2).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert completion_mask(IDS, [2, 7]).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    lengths = torch.tensor([1, 3, 4, 4])
    assert completion_mask(IDS, 2, lengths=lengths).sum(-1).tolist() == [1, 3, 1, 4]


def test_truncated():
    assert truncated(IDS, [2, 3]).tolist() == [False, True, False, False]
    assert truncated(IDS, []).tolist() == [True] * 4
    assert truncated(IDS, [2, 3], lengths=torch.tensor([1, 4, 1, 4])).tolist() == [True, True, False, False]


def test_v32_rule():
    """Dropped iff A < 0 and the mean of log π_old − log π_θ is above the threshold."""
    old = torch.zeros(5, 2)
    logps = torch.tensor([[-0.4, -0.8], [-0.4, -0.8], [-0.4, -0.6], [-0.9, math.nan], [0.9, 0.9]])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0, -1.0])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0], [1, 1]])
    keep = off_policy_sequence_mask(logps, old, advantages, mask, threshold=0.5)
    assert keep.tolist() == [False, True, True, False, True]
    # Exactly at the threshold stays; an advantage of 0 stays.
    edge = torch.tensor([[-0.5, -0.5]])
    assert off_policy_sequence_mask(edge, old[:1], torch.tensor([-1.0]), mask[:1], threshold=0.5)
    assert off_policy_sequence_mask(edge * 9, old[:1], torch.tensor([0.0]), mask[:1], threshold=0.5)


def test_v32_rule_ignores_tokens_without_log_probs():
    old, logps = torch.tensor([[0.6, math.nan], [math.nan, math.nan]]), torch.zeros(2, 2)
    keep = off_policy_sequence_mask(logps, old, torch.tensor([-1.0, -1.0]), torch.ones(2, 2), threshold=0.5)
    assert keep.tolist() == [False, True]


def test_v32_rule_per_token():
    advantages = torch.tensor([[-1.0, 1.0], [-1.0, -1.0]])
    keep = off_policy_sequence_mask(
        torch.tensor([[-1.0, -1.0], [0.0, 0.0]]), torch.zeros(2, 2), advantages, torch.ones(2, 2), threshold=0.5
    )
    assert keep.tolist() == [[False, True], [True, True]]


def test_reference_drift_rule():
    """Kept iff the sequence's log-prob exceeds the reference's by less than the threshold, for any advantage."""
    logps, reference = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, 9.0]]), torch.full((3, 2), -1.5)
    reference[1] = -1.2
    keep = off_policy_sequence_mask(
        logps, reference, None, torch.tensor([[1, 1], [1, 1], [1, 0]]), threshold=0.5, rule="reference_drift"
    )
    assert keep.tolist() == [False, True, False]  # differences 1.0, 0.4 and exactly 0.5


def test_validity():
    facts = {
        "lengths": torch.tensor([9, 10, 50, 50]),
        "has_answer": torch.tensor([True, True, False, True]),
        "repetition": torch.tensor([0.0, 0.1, 0.2, 0.9]),
    }
    assert validity(**facts, min_length=10).tolist() == [False, True, False, False]
    reasons = validity_reasons(**facts, min_length=10)
    assert {name: failed.nonzero().flatten().tolist() for name, failed in reasons.items()} == {
        "too_short": [0],
        "no_answer": [2],
        "repetitive": [3],
    }
    assert validity(repetition=torch.tensor([True, False])).tolist() == [False, True]


def test_high_entropy():
    entropy = torch.tensor([[0.1, 0.9, 0.5], [0.7, math.nan, 99.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert high_entropy_mask(entropy, mask, top_fraction=0.5).int().tolist() == [[0, 1, 0], [1, 0, 0]]
    assert high_entropy_mask(entropy, mask, top_fraction=1.0).int().tolist() == mask.tolist()
    assert high_entropy_mask(entropy, mask, top_fraction=0.01).sum() == 1
    assert not high_entropy_mask(entropy, torch.zeros(2, 3), top_fraction=0.5).any()


@pytest.mark.parametrize("top_fraction", [0.1, 0.2, 0.37, 0.8])
def test_high_entropy_bound_is_the_quantile(top_fraction):
    entropy = torch.rand(13, 17, dtype=torch.float64)
    keep = high_entropy_mask(entropy, torch.ones(13, 17), top_fraction=top_fraction)
    assert torch.equal(keep, entropy >= torch.quantile(entropy.flatten(), 1 - top_fraction))


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: completion_mask(torch.ones(3), 1), r"ids has shape \(3,\); expected \(B, T\)"),
        (lambda: completion_mask(IDS, 1, lengths=torch.ones(3)), r"lengths has shape \(3,\); expected \(4,\)"),
        (lambda: off_policy_sequence_mask(ONES, ONES, ONES, ONES, threshold=1, rule="v3"), "did you mean 'v3.2'"),
        (lambda: off_policy_sequence_mask(ONES, ONES, None, ONES, threshold=1), "needs advantages"),
        (lambda: off_policy_sequence_mask(ONES, ONES, torch.ones(3), ONES, threshold=1), "advantages has shape"),
        (lambda: off_policy_sequence_mask(ONES, ONES[:1], ONES, ONES, threshold=1), "old_logps has shape"),
        (lambda: off_policy_sequence_mask(ONES, ONES, ONES, ONES, threshold=None), "threshold must be a finite number"),
        (lambda: completion_mask(IDS, None), "eos_ids must be a token id or several, got None"),
        (lambda: completion_mask(IDS, ["</s>"]), "eos_ids must be a token id or several"),
        (lambda: validity(), "at least one of"),
        (lambda: validity(lengths=torch.ones(2), has_answer=torch.ones(3)), "one value per sample"),
        (lambda: validity(lengths=ONES), "one value per sample"),
        (lambda: validity(lengths=torch.ones(2), min_length=-1), "min_length must be"),
        (lambda: high_entropy_mask(ONES, ONES, top_fraction=0), r"top_fraction must be in \(0, 1\], got 0"),
        (lambda: high_entropy_mask(ONES, ONES[:1], top_fraction=0.5), "mask has shape"),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()
