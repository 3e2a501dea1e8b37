"""Corrections of the difference between sampler and trainer, against literal versions and through the policy loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core import IMPORTANCE_MODES, importance_weights, policy_loss, rejection_mask
from groupwise.core.importance import REJECTIONS
from groupwise.errors import InputError

TRAINER = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -3.0, -9.0]], dtype=torch.float64)
SAMPLER = torch.tensor([[-1.0, -2.7, -0.4], [-1.2, -1.9, -7.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
# k = e^(trainer − sampler): 1, e^0.7 = 2.0138, e^−0.1 = 0.9048; e^−0.3 = 0.7408, e^−1.1 = 0.3329


def literal(trainer, sampler, mask, mode, low, high):
    """One token after another."""
    weights = torch.ones_like(trainer)
    for row in range(len(trainer)):
        places = [place for place in range(trainer.shape[1]) if mask[row, place]]
        for place in places:
            ratio = math.exp(float(trainer[row, place] - sampler[row, place]))
            if mode.startswith("sequence"):
                ratio = math.prod(math.exp(float(trainer[row, t] - sampler[row, t])) for t in places)
            least, most = 0.0 if low is None else low, math.inf if high is None else high
            if mode.endswith("truncate"):
                ratio = max(least, min(ratio, most))
            elif ratio < least or ratio > most:
                ratio = 0.0
            weights[row, place] = ratio
    return weights


def test_hand_computed():
    capped = importance_weights(TRAINER, SAMPLER, MASK, high=1.5)
    expected = [[1, 1.5, math.exp(-0.1)], [math.exp(-0.3), math.exp(-1.1), 1]]
    torch.testing.assert_close(capped, torch.tensor(expected, dtype=torch.float64))
    icepop = importance_weights(TRAINER, SAMPLER, MASK, mode="token_mask", low=0.5, high=2.0)
    expected = [[1, 0, math.exp(-0.1)], [math.exp(-0.3), 0, 1]]
    torch.testing.assert_close(icepop, torch.tensor(expected, dtype=torch.float64))
    by_sequence = importance_weights(TRAINER, SAMPLER, MASK, mode="sequence_truncate", high=1.2)
    expected = [[1.2, 1.2, 1.2], [math.exp(-1.4), math.exp(-1.4), 1]]
    torch.testing.assert_close(by_sequence, torch.tensor(expected, dtype=torch.float64))
    # the geometric means are e^0.2 = 1.221 and e^−0.7 = 0.497
    assert rejection_mask(TRAINER, SAMPLER, MASK, low=0.5).tolist() == [True, False]
    assert rejection_mask(TRAINER, SAMPLER, MASK, high=1.2).tolist() == [False, True]
    assert rejection_mask(TRAINER, SAMPLER, MASK, low=0.4, high=1.3).tolist() == [True, True]


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
@pytest.mark.parametrize(("low", "high"), [(None, 1.1), (0.8, None), (0.9, 1.1)])
def test_forward_and_gradient_equal_the_literal_version(mode, low, high):
    draw = torch.Generator().manual_seed(3)
    sampler = -torch.rand(5, 7, generator=draw, dtype=torch.float64) * 3
    trainer = (sampler + 0.2 * torch.randn(5, 7, generator=draw, dtype=torch.float64)).requires_grad_()
    mask = torch.arange(7) < torch.tensor([7, 1, 4, 2, 6])[:, None]
    advantages = torch.randn(5, generator=draw, dtype=torch.float64)
    weights = importance_weights(trainer, sampler, mask, mode=mode, low=low, high=high)
    wanted = literal(trainer.detach(), sampler, mask, mode, low, high)
    torch.testing.assert_close(weights, wanted)
    assert not weights.requires_grad
    assert (wanted[mask] != (trainer - sampler).detach().exp()[mask]).any()

    value, _ = policy_loss(trainer, None, advantages, mask, policy_mask=weights)
    by_hand = -(advantages[:, None] * (trainer - trainer.detach()).exp() * wanted)[mask].sum() / mask.sum()
    torch.testing.assert_close(value, by_hand)
    gradients = [torch.autograd.grad(loss, trainer, retain_graph=True)[0] for loss in (value, by_hand)]
    torch.testing.assert_close(*gradients)


def test_a_sequence_without_tokens_is_kept():
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    assert rejection_mask(TRAINER[:1], SAMPLER[:1], nothing, low=0.9, high=1.1).tolist() == [True]
    assert importance_weights(TRAINER[:1], SAMPLER[:1], nothing, mode="sequence_mask", high=1.1).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_a_token_without_a_log_prob_of_the_sampler_changes_nothing(mode):
    """It has the ratio 1: the weight of a token is 1, that of a sequence is the product over the others."""
    unknown = SAMPLER.clone()
    unknown[0, 1] = math.nan
    same = torch.where(unknown.isnan(), TRAINER, SAMPLER)
    weights = importance_weights(TRAINER, unknown, MASK, mode=mode, low=0.5, high=2.0)
    torch.testing.assert_close(weights, importance_weights(TRAINER, same, MASK, mode=mode, low=0.5, high=2.0))
    assert weights.isfinite().all()


@pytest.mark.parametrize("statistic", REJECTIONS)
def test_statistics_leave_out_tokens_without_a_log_prob_of_the_sampler(statistic):
    unknown = SAMPLER.clone()
    unknown[0, 1] = math.nan
    rest = torch.tensor([[True, False, True], [True, True, False]])
    for high in (0.05, 0.3, 0.6, 0.95, 1.1):
        kept = rejection_mask(TRAINER, unknown, MASK, statistic=statistic, high=high)
        assert kept.tolist() == rejection_mask(TRAINER, SAMPLER, rest, statistic=statistic, high=high).tolist()
    first = SAMPLER.clone()
    first[0, 0] = math.nan  # k − log k − 1 of the others: 0.3138 and 0.0048, with the mean 0.1593, over three 0.1062
    if statistic == "k3":
        assert [rejection_mask(TRAINER, first, MASK, statistic="k3", high=h)[0].item() for h in (0.15, 0.17)] == [0, 1]
    nothing = torch.full_like(SAMPLER, math.nan)
    assert rejection_mask(TRAINER, nothing, MASK, statistic=statistic, high=1.5).all()


def test_any_token_asks_only_the_tokens_of_the_mask():
    """Bounds that exclude 1, the ratio of what is not there."""
    low = rejection_mask(SAMPLER + 0.5, SAMPLER, MASK, statistic="any_token", low=1.5, high=1.7)
    high = rejection_mask(SAMPLER - 0.5, SAMPLER, MASK, statistic="any_token", low=0.5, high=0.7)
    assert low.tolist() == high.tolist() == [True, True]


def test_the_trainer_s_own_nan_is_not_hidden():
    bad = TRAINER.clone()
    bad[0, 0] = math.nan
    assert importance_weights(bad, SAMPLER, MASK, high=2.0)[0, 0].isnan()
    assert not rejection_mask(bad, SAMPLER, MASK, high=2.0)[0]


def test_very_different_log_probs_give_finite_weights():
    far = importance_weights(TRAINER, SAMPLER - 1e4, MASK, mode="sequence_truncate")
    assert far[MASK].isfinite().all()
    assert far[0, 0] == pytest.approx(math.exp(20))


def test_bad_bounds_and_modes():
    with pytest.raises(InputError, match="'token_mask'"):
        importance_weights(TRAINER, SAMPLER, MASK, mode="token_masc", high=2.0)
    with pytest.raises(InputError, match=r"low 2.0 is above high 1.0"):
        importance_weights(TRAINER, SAMPLER, MASK, low=2.0, high=1.0)
    with pytest.raises(InputError, match="high"):
        rejection_mask(TRAINER, SAMPLER, MASK, high=0.0)


# --- rejection and normalisation --------------------------------------------------------------------------------------


def literal_rejection(trainer, sampler, mask, statistic, low, high):
    kept = []
    for row in range(len(trainer)):
        places = [place for place in range(trainer.shape[1]) if mask[row, place]]
        ratios = [math.exp(float(trainer[row, place] - sampler[row, place])) for place in places]
        if statistic == "any_token":
            values = ratios
        elif statistic == "k3":
            values = [sum(k - math.log(k) - 1 for k in ratios) / len(ratios)] if ratios else []
        else:
            product = math.prod(ratios)
            values = [product ** (1 / len(ratios)) if statistic == "geometric" and ratios else product]
        kept.append(all((low or 0.0) <= value <= (high or math.inf) for value in values))
    return kept


@pytest.mark.parametrize("statistic", REJECTIONS)
@given(seed=st.integers(0, 10_000), high=st.sampled_from([None, 0.05, 1.0, 1.2, 2.0]), low=st.sampled_from([None, 0.6]))
def test_rejection_equals_the_literal_version(statistic, seed, low, high):
    draw = torch.Generator().manual_seed(seed)
    sampler = -torch.rand(6, 5, generator=draw, dtype=torch.float64) * 3
    trainer = sampler + 0.3 * torch.randn(6, 5, generator=draw, dtype=torch.float64)
    mask = torch.arange(5) < torch.randint(0, 6, (6, 1), generator=draw)
    low = None if statistic == "k3" or (high is not None and high < 0.6) else low
    kept = rejection_mask(trainer, sampler, mask, statistic=statistic, low=low, high=high)
    expected = literal_rejection(trainer, sampler, mask, statistic, low, high)
    empty = (~mask).all(1)  # a sequence without tokens has the ratio 1 and the distance 0
    assert kept[~empty].tolist() == [keep for keep, none in zip(expected, empty.tolist(), strict=True) if not none]


def test_rejection_by_hand():
    """k = 1, 2.0138, 0.9048 in the first sequence and 0.7408, 0.3329 in the second."""
    assert rejection_mask(TRAINER, SAMPLER, MASK, statistic="product", high=1.8).tolist() == [False, True]
    assert rejection_mask(TRAINER, SAMPLER, MASK, statistic="any_token", low=0.5).tolist() == [True, False]
    assert rejection_mask(TRAINER, SAMPLER, MASK, statistic="any_token", high=2.0).tolist() == [False, True]
    # k − log k − 1: 0, 0.3138, 0.0048 (mean 0.106); 0.0408, 0.4329 (mean 0.237)
    assert rejection_mask(TRAINER, SAMPLER, MASK, statistic="k3", high=0.15).tolist() == [True, False]


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_normalised_weights_have_the_mean_1(mode):
    weights = importance_weights(TRAINER, SAMPLER, MASK, mode=mode, low=0.5, high=1.9, normalize=True)
    plain = importance_weights(TRAINER, SAMPLER, MASK, mode=mode, low=0.5, high=1.9)
    counted = plain[:, 0] if mode.startswith("sequence") else plain[MASK]
    torch.testing.assert_close(weights[MASK], plain[MASK] / counted.mean())
    assert (weights[~MASK] == 1).all()


def test_weights_that_are_all_0_stay_0():
    weights = importance_weights(TRAINER, SAMPLER, MASK, mode="token_mask", low=50.0, normalize=True)
    assert weights[MASK].tolist() == [0.0] * 5


def test_bad_rejections():
    with pytest.raises(InputError, match="'geometric'"):
        rejection_mask(TRAINER, SAMPLER, MASK, statistic="geometrik", high=2.0)
    with pytest.raises(InputError, match=r"k3.*high"):
        rejection_mask(TRAINER, SAMPLER, MASK, statistic="k3", low=0.1)
