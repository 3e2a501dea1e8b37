"""Preference losses by hand. TRL is compared in test_preference_trl.py."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.core import KINDS, preference_loss
from groupwise.core.preference import BATCH_KINDS
from groupwise.errors import InputError


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


# Log-ratios 1 and −2 in the first pair, −1 and 1 in the second.
PAIRS = (tensor(-4.0, -6.0), tensor(-7.0, -4.0), tensor(-5.0, -5.0), tensor(-5.0, -5.0))


def softplus(x):
    return math.log1p(math.exp(x))


def test_sigmoid_by_hand():
    loss, stats = preference_loss(*PAIRS, beta=0.5)
    assert loss.item() == pytest.approx((softplus(-1.5) + softplus(1.0)) / 2)
    assert stats["accuracy"].item() == 0.5
    assert stats["margin"].item() == pytest.approx((1.5 - 1.0) / 2)
    assert stats["chosen_reward"].item() == 0
    assert stats["rejected_reward"].item() == pytest.approx(-0.25)


def test_hinge_and_ipo_by_hand():
    assert preference_loss(*PAIRS, beta=0.5, kind="hinge")[0].item() == pytest.approx((0 + 2) / 2)
    loss, _ = preference_loss(
        *PAIRS, beta=0.5, kind="ipo", chosen_lengths=torch.tensor([2, 1]), rejected_lengths=torch.tensor([4, 2])
    )
    assert loss.item() == pytest.approx(((0.5 + 0.5 - 1) ** 2 + (-1 - 0.5 - 1) ** 2) / 2)


def test_gradient_of_dpo():
    """β·σ(−margin), with opposite signs for chosen and rejected."""
    chosen, rejected = (x.clone().requires_grad_() for x in PAIRS[:2])
    loss, _ = preference_loss(chosen, rejected, *PAIRS[2:], beta=0.5)
    up, down = torch.autograd.grad(loss, (chosen, rejected))
    expected = -0.5 * torch.sigmoid(tensor(-1.5, 1.0)) / 2
    torch.testing.assert_close(up, expected)
    torch.testing.assert_close(down, -expected)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - BATCH_KINDS))
def test_micro_batches_add_up(kind):
    settings = {"kind": kind, "total_pairs": 5}
    if kind == "exo_pair":
        settings["label_smoothing"] = 0.01
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(4)]
    lengths = [torch.randint(1, 9, (5,), generator=generator) for _ in range(2)]

    def part(where):
        return preference_loss(
            *(x[where] for x in tensors),
            chosen_lengths=lengths[0][where],
            rejected_lengths=lengths[1][where],
            **settings,
        )

    complete, stats = part(slice(0, 5))
    first, first_stats = part(slice(0, 2))
    rest, rest_stats = part(slice(2, 5))
    torch.testing.assert_close(first + rest, complete)
    for name in stats:
        torch.testing.assert_close(first_stats[name] + rest_stats[name], stats[name])


def test_label_smoothing_without_effect_warns():
    with pytest.warns(UserWarning, match="label_smoothing has no effect on .*'sigmoid'.* use kind='robust'"):
        preference_loss(*PAIRS, label_smoothing=0.1)


def test_bfloat16():
    half = [x.bfloat16() for x in PAIRS]
    loss, _ = preference_loss(*half)
    assert loss.dtype == torch.float32
    assert loss == preference_loss(*(x.float() for x in half))[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "sigmoidal"}, "did you mean 'sigmoid'"),
        ({"kind": []}, "at least one kind"),
        ({"kind": ["sigmoid", "hinge"], "weights": [1.0]}, "1 weights .* were given for 2 kinds"),
        ({"weights": 2.0}, "weights must be a list .*, got 2.0"),
        ({"weights": [math.inf]}, "weights must be .* finite"),
        ({"beta": 0.0}, "beta must be a finite number above 0, got 0.0"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
        ({"kind": "robust", "label_smoothing": 0.5}, "below 0.5, got 0.5"),
        ({"kind": "exo_pair"}, "needs label_smoothing above 0"),
        ({"kind": "ipo"}, "needs chosen_lengths and rejected_lengths"),
        ({"kind": "sigmoid_norm", "chosen_lengths": torch.ones(2)}, "needs chosen_lengths and rejected_lengths"),
        ({"kind": "sft"}, "needs chosen_lengths"),
        ({"kind": "discopop", "discopop_tau": 0.0}, "discopop_tau must be"),
        ({"total_pairs": -1}, "total_pairs must be"),
        ({"chosen_lengths": torch.ones(3)}, "chosen_lengths has shape"),
    ],
)
def test_invalid_arguments(settings, message):
    with pytest.raises(InputError, match=message):
        preference_loss(*PAIRS, **settings)


def test_invalid_shapes():
    with pytest.raises(InputError, match="ref_rejected has shape"):
        preference_loss(*PAIRS[:3], PAIRS[3][:1])
    with pytest.raises(InputError, match="at least one pair"):
        preference_loss(*(x[:0] for x in PAIRS))
