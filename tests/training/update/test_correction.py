"""What a run reports of the corrections of its sampler: counts that add up over mini-batches of any size."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from groupwise.training.update.correction import correct_sampler, correction_metrics
from tests.training.factories import short_recipe

RATIOS = [[2.0, 1.0, 0.5], [1.0, 1.0, 1.0], [4.0, 1.0, 1.0], [0.25, 0.5, 1.0]]
LENGTHS = torch.tensor([3, 2, 1, 2])
MASK = torch.arange(3) < LENGTHS[:, None]
LOGPS = torch.full((4, 3), -1.0, dtype=torch.float64)
SAMPLER = LOGPS - torch.tensor(RATIOS, dtype=torch.float64).log()
BOUNDS = {"loss.importance_floor": 0.4, "loss.importance_cap": 2.5}


def metrics_of(settings, cuts):
    recipe = short_recipe(settings)
    counts = [correct_sampler(LOGPS[a:b], SAMPLER[a:b], MASK[a:b], recipe)[1] for a, b in pairwise(cuts)]
    return correction_metrics(counts, recipe)


# The tokens have the ratios 2, 1, 0.5; 1, 1; 4; 0.25, 0.5, their sequences 1; 1; 4; 0.125.
@pytest.mark.parametrize("cuts", [[0, 4], [0, 1, 4], [0, 1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize(
    ("mode", "mean", "changed"),
    [
        ("token_truncate", (2 + 1 + 0.5 + 1 + 1 + 2.5 + 0.4 + 0.5) / 8, 2 / 8),
        ("token_mask", (2 + 1 + 0.5 + 1 + 1 + 0 + 0 + 0.5) / 8, 2 / 8),
        ("sequence_truncate", (1 + 1 + 2.5 + 0.4) / 4, 2 / 4),
        ("sequence_mask", (1 + 1 + 0 + 0) / 4, 2 / 4),
    ],
)
def test_means_are_over_tokens_or_over_sequences_of_all_mini_batches(mode, mean, changed, cuts):
    metrics = metrics_of({**BOUNDS, "loss.importance_sampling": mode}, cuts)
    kind = "truncated" if "truncate" in mode else "masked"
    assert metrics == {
        "sampler/importance_mean": pytest.approx(mean),
        f"sampler/importance_{kind}": pytest.approx(changed),
    }


@pytest.mark.parametrize("cuts", [[0, 4], [0, 1, 4]], ids=str)
def test_rejected_sequences(cuts):
    """The third and the fourth, by their geometric means 4 and 0.354; their tokens have the weight 0."""
    metrics = metrics_of({"loss.rejection_low": 0.4, "loss.rejection_high": 3.0}, cuts)
    assert metrics == {"sampler/importance_mean": pytest.approx(5 / 8), "sampler/rejected": 0.5}


def test_a_ratio_at_a_bound_is_not_counted():
    """Equal log-probs have the ratio 1, which is both bounds."""
    recipe = short_recipe({"loss.importance_floor": 1.0, "loss.importance_cap": 1.0})
    weights, counts = correct_sampler(LOGPS, LOGPS.clone(), MASK, recipe)
    assert (weights == 1).all()
    assert (counts.units, counts.outside, counts.weight) == (8, 0, 8.0)


def test_a_token_without_a_log_prob_of_the_sampler_counts_as_1():
    sampler = SAMPLER.clone()
    sampler[2, 0] = math.nan
    recipe = short_recipe(BOUNDS)
    metrics = correction_metrics([correct_sampler(LOGPS, sampler, MASK, recipe)[1]], recipe)
    assert metrics["sampler/importance_mean"] == pytest.approx((2 + 1 + 0.5 + 1 + 1 + 1 + 0.4 + 0.5) / 8)
    assert metrics["sampler/importance_truncated"] == pytest.approx(1 / 8)


def test_without_a_computed_sample_nothing_is_known():
    metrics = correction_metrics([], short_recipe({**BOUNDS, "loss.rejection_low": 0.4}))
    assert all(math.isnan(value) for value in metrics.values())
    assert correction_metrics([], short_recipe()) == {}
