"""DPPO's limit: against a literal version of the paper's objective, by hand, and in its limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core import DivergenceLimit, policy_loss
from groupwise.core.masks import DIVERGENCES
from groupwise.errors import InputError

from .cases import random_batch


def literal(batch, kind, threshold, ceiling):
    """−Σ mask · min(r, ceiling) · A · log π over all tokens, and its gradient, token by token."""
    total, gradient, masked = 0.0, torch.zeros_like(batch.logps), {-1: 0, 1: 0}
    for row, place in batch.mask.nonzero().tolist():
        new, old = float(batch.logps[row, place].detach()), float(batch.old_logps[row, place])
        policy, sampler, advantage = math.exp(new), math.exp(old), float(batch.advantages[row])
        distance = abs(policy - sampler)
        if kind == "kl":
            rest = math.log((1 - sampler + 1e-8) / (1 - policy + 1e-8))
            distance = sampler * (old - new) + (1 - sampler) * rest
        further = (advantage > 0 and policy > sampler) or (advantage < 0 and policy < sampler)
        if distance > threshold and further:
            masked[1 if advantage > 0 else -1] += 1
            continue
        factor = min(policy / sampler, ceiling) * advantage / batch.tokens
        total -= factor * (new if math.isfinite(ceiling) else 1.0)
        gradient[row, place] = -factor
    return total, gradient, masked


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize(("loss", "clip", "ceiling"), [("dapo", {}, math.inf), ("cispo", {"clip_high": 1.3}, 1.3)])
@given(seed=st.integers(0, 10_000), threshold=st.sampled_from([0.005, 0.03, 0.2]))
def test_equals_the_literal_version(kind, loss, clip, ceiling, seed, threshold):
    """A clipped loss becomes −r·A without its clip, CISPO keeps its ceiling; forward, gradient and shares."""
    batch = random_batch(seed)
    old = batch.old_logps.clamp(max=-1e-3)
    batch = batch._replace(logps=batch.logps.detach().clamp(max=-1e-3).requires_grad_(), old_logps=old)
    limit = DivergenceLimit(old, kind, threshold)
    value, stats = policy_loss(batch.logps, old, batch.advantages, batch.mask, loss=loss, divergence=limit, **clip)
    expected, gradient, masked = literal(batch, kind, threshold, ceiling)
    assert value.item() == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(torch.autograd.grad(value, batch.logps)[0], gradient)
    assert stats["clip_fraction_low"].item() == pytest.approx(masked[-1] / batch.tokens)
    assert stats["clip_fraction_high"].item() == pytest.approx(masked[1] / batch.tokens)


def test_by_hand():
    """0.5 → 0.7 with A > 0 has TV 0.2 and KL 0.5·log(0.5/0.7) + 0.5·log(0.5/0.3) = 0.0872; a rare token that becomes
    ten times as likely has TV 0.009, far from any limit, where a ratio of 10 is clipped."""
    sampler = torch.tensor([[0.5, 0.001, 0.5, 0.5]], dtype=torch.float64).log()
    policy = torch.tensor([[0.7, 0.01, 0.3, 0.7]], dtype=torch.float64).log()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)

    def exceeded(kind, threshold=None):
        low, high = DivergenceLimit(sampler, kind, threshold).exceeded(policy, advantages, mask)
        return low[0].tolist(), high[0].tolist()

    both = [False, False, True, False], [True, False, False, False]  # the last one moves back
    assert exceeded("tv") == exceeded("kl") == both
    nothing = [False] * 4, [False] * 4
    assert exceeded("tv", 0.21) == exceeded("kl", 0.09) == nothing
    assert exceeded("kl", 0.087) == both


@given(seed=st.integers(0, 10_000))
def test_without_a_distance_it_is_grpo(seed):
    """On-policy nothing is masked, and with a limit of 1 nothing ever is: −r·A without a clip."""
    batch = random_batch(seed)
    batch = batch._replace(old_logps=batch.old_logps.clamp(max=0.0))
    arguments = (batch.advantages, batch.mask)
    on_policy = DivergenceLimit(batch.logps.detach())
    plain, _ = policy_loss(batch.logps, None, *arguments)
    limited, _ = policy_loss(batch.logps, None, *arguments, divergence=on_policy)
    assert limited.item() == plain.item()
    gradients = [torch.autograd.grad(value, batch.logps)[0] for value in (plain, limited)]
    assert torch.equal(*gradients)
    wide = DivergenceLimit(batch.old_logps, "tv", 1.0)
    unlimited, stats = policy_loss(batch.logps, batch.old_logps, *arguments, divergence=wide)
    unclipped, _ = policy_loss(batch.logps, batch.old_logps, *arguments, clip_low=1e6, clip_high=1e6)
    assert unlimited.item() == pytest.approx(unclipped.item())
    assert stats["clip_fraction_low"] == stats["clip_fraction_high"] == 0


def test_a_token_without_a_sampler_log_prob_is_not_masked():
    nan = torch.full((1, 2), math.nan)
    low, high = DivergenceLimit(nan).exceeded(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert not low.any()
    assert not high.any()


def test_only_tokens_of_the_mask_are_named():
    far, advantages = torch.full((1, 2), -5.0), torch.tensor([[-1.0, -1.0]])
    low, _ = DivergenceLimit(torch.zeros(1, 2)).exceeded(far, advantages, torch.tensor([[True, False]]))
    assert low.tolist() == [[True, False]]


def test_certain_tokens_have_a_finite_divergence():
    certain = torch.zeros(1, 1)  # probability 1
    low, _ = DivergenceLimit(certain, "kl").exceeded(
        torch.tensor([[-5.0]]), -torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    )
    assert low.all()


def test_errors():
    batch = random_batch(3)
    arguments = (batch.logps, batch.old_logps, batch.advantages, batch.mask)
    with pytest.raises(InputError, match="'tv'"):
        policy_loss(*arguments, divergence=DivergenceLimit(batch.old_logps, "tw"))
    with pytest.raises(InputError, match="threshold"):
        policy_loss(*arguments, divergence=DivergenceLimit(batch.old_logps, "tv", 0.0))
    with pytest.raises(InputError, match="ratio 'token'"):
        policy_loss(*arguments, loss="gspo", divergence=DivergenceLimit(batch.old_logps))
    with pytest.raises(InputError, match="sampler_logps"):
        policy_loss(*arguments, divergence=DivergenceLimit(batch.old_logps[:, :0]))
