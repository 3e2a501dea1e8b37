"""Preference losses against TRL 1.16: loss, gradient and statistics within 1e-10 in float64."""

from __future__ import annotations

import pytest
import torch

from groupwise.core import KINDS, preference_loss
from groupwise.core.preference import SMOOTHED_KINDS

from . import trl_code
from .cases import ragged_mask

SEEDS = range(8)


class Pairs:
    """Token log-probs of N pairs, the chosen answers first; TRL takes tokens, ours their sums."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        number = int(torch.randint(1, 8, (), generator=generator))
        self.mask = ragged_mask(2 * number, 9, generator)
        logps = -torch.rand(2 * number, 9, generator=generator, dtype=torch.float64)
        self.token_logps = torch.where(self.mask, logps, 0.0).requires_grad_()
        reference = self.token_logps.detach().sum(-1) + torch.randn(2 * number, generator=generator).double() * 2
        self.ref_chosen, self.ref_rejected = reference.chunk(2)
        self.lengths = self.mask.sum(-1).chunk(2)

    def ours(self, **settings):
        chosen, rejected = self.token_logps.sum(-1).chunk(2)
        return preference_loss(
            chosen,
            rejected,
            self.ref_chosen,
            self.ref_rejected,
            chosen_lengths=self.lengths[0],
            rejected_lengths=self.lengths[1],
            **settings,
        )

    def theirs(self, kinds, weights, beta, label_smoothing):
        return trl_code.dpo_loss(
            self.token_logps,
            self.mask,
            self.ref_chosen,
            self.ref_rejected,
            kinds=kinds,
            weights=weights,
            beta=beta,
            label_smoothing=label_smoothing,
        )


def assert_same(pairs, ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    (gradient,) = torch.autograd.grad(ours, pairs.token_logps)
    (expected,) = torch.autograd.grad(theirs, pairs.token_logps)
    # TRL masks padding first, so only real tokens are compared.
    torch.testing.assert_close(gradient[pairs.mask], expected[pairs.mask], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("beta", [0.1, pytest.param(0.7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind, beta):
    smoothing = 0.1 if kind in SMOOTHED_KINDS else 0.0
    for seed in SEEDS:
        pairs = Pairs(seed)
        ours, stats = pairs.ours(kind=kind, beta=beta, label_smoothing=smoothing)
        theirs, metrics = pairs.theirs([kind], [1.0], beta, smoothing)
        assert_same(pairs, ours, theirs)
        assert stats["accuracy"].item() == pytest.approx(metrics["rewards/accuracies"][0], abs=1e-6)
        assert stats["margin"].item() == pytest.approx(metrics["rewards/margins"][0], abs=1e-12)
        assert stats["chosen_reward"].item() == pytest.approx(metrics["rewards/chosen"][0], abs=1e-12)
        assert stats["rejected_reward"].item() == pytest.approx(metrics["rewards/rejected"][0], abs=1e-12)


def test_every_kind_of_trl_exists():
    with pytest.raises(ValueError, match="Unknown loss type") as error:
        Pairs(0).theirs(["no such kind"], [1.0], 0.1, 0.0)
    listed = set(str(error.value).split("one of [")[1].rstrip("]").replace("'", "").split(", "))
    assert listed == set(KINDS)


def test_several_kinds_with_weights():
    """The combination used by MPO."""
    kinds, weights = ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]
    for seed in SEEDS:
        pairs = Pairs(seed)
        ours, _ = pairs.ours(kind=kinds, weights=weights, beta=0.1)
        theirs, _ = pairs.theirs(kinds, weights, 0.1, 0.0)
        assert_same(pairs, ours, theirs)
