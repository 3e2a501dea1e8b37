"""Policy losses against TRL 1.16: loss and gradient within 1e-10 in float64."""

from __future__ import annotations

import pytest
import torch

from groupwise.core import (
    LOSSES,
    aggregate,
    high_entropy_mask,
    kl_estimate,
    log_ratio,
    off_policy_sequence_mask,
    policy_loss,
)

from . import trl_code
from .cases import random_batch

SEEDS = range(5)
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
CLIPS = ({}, {"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 0.05, "clip_high": 0.05}, {"dual_clip": 1.5})
CEILINGS = ({}, {"clip_high": 5.0}, {"clip_high": 1.2}, {"clip_high": 1.0})


def cases():
    for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"):
        for ratio in ("token", "sequence"):
            if loss == "vespo" and ratio == "sequence":
                continue  # TRL refuses it too
            settings = CLIPS if loss in CLIPPED else CEILINGS if loss == "cispo" else ({},)
            for number, clip in enumerate(settings):
                name = "-".join([loss, ratio, *map(str, clip.values())])
                yield pytest.param(loss, ratio, clip, id=name, marks=[pytest.mark.slow] if number > 1 else [])


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, leaf: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(ours, leaf)
    (expected,) = torch.autograd.grad(theirs, leaf)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("per_token_advantages", [False, True], ids=["sequence_adv", "token_adv"])
@pytest.mark.parametrize(("loss", "ratio", "clip"), cases())
def test_loss_and_gradient(loss, ratio, clip, per_token_advantages):
    trl_clip = dict(clip)
    if loss == "cispo":
        trl_clip.setdefault("clip_high", 5.0)
    for seed in SEEDS:
        batch = random_batch(seed, per_token_advantages=per_token_advantages)
        theirs, _ = trl_code.grpo_loss(batch, loss=loss, ratio=ratio, max_length=32, **trl_clip)
        ours, _ = policy_loss(
            batch.logps, batch.old_logps, batch.advantages, batch.mask, loss=loss, ratio=ratio, max_length=32, **clip
        )
        assert_same(ours, theirs, batch.logps)


def test_cases_reach_both_clips():
    """The random cases of the comparison above are clipped on both sides, but not always."""
    low = high = 0.0
    for seed in SEEDS:
        batch = random_batch(seed)
        _, stats = policy_loss(batch.logps, batch.old_logps, batch.advantages, batch.mask)
        low, high = low + stats["clip_fraction_low"], high + stats["clip_fraction_high"]
    assert 0.02 < low / len(SEEDS) < 0.5
    assert 0.02 < high / len(SEEDS) < 0.5


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"gspo", "reinforce"}))
def test_on_policy(loss):
    """Without old log-probs the ratio is 1, and only its gradient matters."""
    for seed in SEEDS:
        batch = random_batch(seed)
        theirs, _ = trl_code.grpo_loss(
            batch, loss=loss, max_length=16, use_old=False, clip_high=5.0 if loss == "cispo" else 0.2
        )
        ours, stats = policy_loss(
            batch.logps, None, batch.advantages, batch.mask, loss=loss, ratio="token", max_length=16
        )
        assert_same(ours, theirs, batch.logps)
        assert stats["ratio"].item() == pytest.approx(1)
        assert stats["approx_kl"].item() == 0


def test_gspo_is_grpo_with_a_sequence_ratio():
    for seed in SEEDS:
        batch = random_batch(seed)
        theirs, _ = trl_code.grpo_loss(batch, loss="grpo", ratio="sequence", clip_low=3e-4, clip_high=4e-4)
        ours, _ = policy_loss(
            batch.logps, batch.old_logps, batch.advantages, batch.mask, loss="gspo", clip_low=3e-4, clip_high=4e-4
        )
        assert_same(ours, theirs, batch.logps)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "cispo", "sapo", "dr_grpo", "bnpo"])
@pytest.mark.parametrize("accumulation", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_of_several_micro_batches(loss, accumulation):
    """TRL's scaling for gradient accumulation equals ours with the totals of the mini-batch."""
    for seed in SEEDS:
        batch = random_batch(seed)
        rows = len(batch.logps)
        total_tokens = batch.tokens + 17
        theirs, _ = trl_code.grpo_loss(
            batch,
            loss=loss,
            max_length=16,
            accumulation=accumulation,
            total_tokens=total_tokens,
            clip_high=5.0 if loss == "cispo" else 0.2,
        )
        ours, _ = policy_loss(
            batch.logps,
            batch.old_logps,
            batch.advantages,
            batch.mask,
            loss=loss,
            max_length=16,
            total_tokens=total_tokens,
            total_sequences=rows * accumulation,
        )
        assert_same(ours, theirs, batch.logps)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "luspo"])
@pytest.mark.parametrize("per_token_advantages", [False, True])
def test_off_policy_mask_leaves_the_kl_term_alone(loss, per_token_advantages):
    dropped = 0
    for seed in SEEDS:
        batch = random_batch(seed, per_token_advantages=per_token_advantages)
        theirs, _ = trl_code.grpo_loss(batch, loss=loss, threshold=0.05, beta=0.3, max_length=16)
        keep = off_policy_sequence_mask(batch.logps, batch.old_logps, batch.advantages, batch.mask, threshold=0.05)
        dropped += int((~keep).sum())
        ours, _ = policy_loss(
            batch.logps,
            batch.old_logps,
            batch.advantages,
            batch.mask,
            loss=loss,
            ratio="token",
            max_length=16,
            policy_mask=keep,
        )
        kl = kl_estimate(batch.logps, batch.ref_logps, mask=batch.mask)
        ours = ours + 0.3 * aggregate(kl, batch.mask, LOSSES[loss].aggregation, max_length=16)
        assert_same(ours, theirs, batch.logps)
    assert dropped > 0


def test_off_policy_mask():
    for seed in range(300):
        batch = random_batch(seed)
        theirs = trl_code.off_policy_mask(batch.advantages.unsqueeze(1), batch.logps, batch.old_logps, batch.mask, 0.03)
        ours = off_policy_sequence_mask(batch.logps, batch.old_logps, batch.advantages, batch.mask, threshold=0.03)
        assert torch.equal(ours, theirs.squeeze(1).bool())


@pytest.mark.parametrize("top_fraction", [0.2, 0.5, 0.9])
def test_entropy_mask(top_fraction):
    for seed in SEEDS:
        batch = random_batch(seed)
        entropy = torch.rand(batch.logps.shape, generator=torch.Generator().manual_seed(seed))  # float32, as theirs
        theirs, _ = trl_code.grpo_loss(batch, loss="dapo", entropy=entropy, top_fraction=top_fraction)
        keep = high_entropy_mask(entropy, batch.mask, top_fraction=top_fraction)
        assert keep.any()
        ours, _ = policy_loss(batch.logps, batch.old_logps, batch.advantages, batch.mask, policy_mask=keep)
        assert_same(ours, theirs, batch.logps)


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"gspo", "reinforce"}))
@pytest.mark.parametrize("bias_corrected", [False, True], ids=["k3", "unbiased"])
def test_kl_term(loss, bias_corrected):
    """Policy loss plus β times the aggregated KL is TRL's loss, for k3 and for DeepSeek-V3.2's estimator."""
    for seed in SEEDS:
        batch = random_batch(seed)
        theirs, metrics = trl_code.grpo_loss(
            batch,
            loss=loss,
            beta=0.04,
            bias_corrected=bias_corrected,
            max_length=16,
            clip_high=5.0 if loss == "cispo" else 0.2,
        )
        ours, _ = policy_loss(
            batch.logps, batch.old_logps, batch.advantages, batch.mask, loss=loss, ratio="token", max_length=16
        )
        kl = kl_estimate(
            batch.logps,
            batch.ref_logps,
            estimator="unbiased" if bias_corrected else "k3",
            old_logps=batch.old_logps,
            mask=batch.mask,
        )
        ours = ours + 0.04 * aggregate(kl, batch.mask, LOSSES[loss].aggregation, max_length=16)
        assert_same(ours, theirs, batch.logps)
        assert aggregate(kl, batch.mask, "token_mean").item() == pytest.approx(metrics["kl"][0], abs=1e-12)


def test_known_difference_kl_with_a_sequence_ratio():
    """TRL then corrects k3 by the sequence's ratio; ours by the token's, as DeepSeek-V3.2 does."""
    for seed in SEEDS:
        batch = random_batch(seed)
        theirs, _ = trl_code.grpo_loss(batch, loss="grpo", ratio="sequence", beta=0.04, bias_corrected=True)
        ours, _ = policy_loss(batch.logps, batch.old_logps, batch.advantages, batch.mask, loss="gspo")
        ratio = log_ratio(batch.logps, batch.old_logps, batch.mask, "sequence").exp()
        kl = kl_estimate(batch.logps, batch.ref_logps, mask=batch.mask) * ratio
        by_token = kl_estimate(
            batch.logps, batch.ref_logps, estimator="unbiased", old_logps=batch.old_logps, mask=batch.mask
        )
        assert batch.tokens == len(batch.logps) or not torch.allclose(kl, by_token)
        ours = ours + 0.04 * aggregate(kl, batch.mask, "sequence_mean")
        assert_same(ours, theirs, batch.logps)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_clip_statistics(ratio):
    for seed in SEEDS:
        batch = random_batch(seed)
        _, metrics = trl_code.grpo_loss(batch, loss="dapo", ratio=ratio)
        _, stats = policy_loss(batch.logps, batch.old_logps, batch.advantages, batch.mask, ratio=ratio)
        assert stats["clip_fraction_low"].item() == pytest.approx(metrics["clip_ratio/low_mean"][0], abs=1e-6)
        assert stats["clip_fraction_high"].item() == pytest.approx(metrics["clip_ratio/high_mean"][0], abs=1e-6)


def test_known_differences_from_trl():
    batch = random_batch(3)
    # Log-ratios are clamped to ±20: where TRL's gradient is inf · 0 = NaN, ours is finite.
    far = batch._replace(old_logps=batch.logps.detach() - 800, advantages=torch.ones_like(batch.advantages))
    theirs, _ = trl_code.grpo_loss(far, loss="dapo")
    assert torch.autograd.grad(theirs, far.logps)[0].isnan().any()
    ours, _ = policy_loss(far.logps, far.old_logps, far.advantages, far.mask)
    assert torch.autograd.grad(ours, far.logps)[0].isfinite().all()
    # NaN outside the completion: TRL multiplies by the mask, and NaN · 0 is NaN.
    dirty = batch._replace(mask=torch.zeros_like(batch.mask), old_logps=torch.full_like(batch.old_logps, torch.nan))
    dirty.mask[:, 0] = True
    dirty.old_logps[:, 0] = batch.old_logps[:, 0]
    assert dirty.mask.shape[1] > 1
    assert trl_code.grpo_loss(dirty, loss="dapo")[0].isnan()
    assert policy_loss(dirty.logps, dirty.old_logps, dirty.advantages, dirty.mask)[0].isfinite()
    # A token without a valid sampler log-prob counts as 0 in TRL's mean; ours leaves it out.
    logps, old = torch.zeros(1, 2), torch.tensor([[0.3, torch.nan]])
    args = (torch.tensor([[-1.0]]), logps, old, torch.ones(1, 2), 0.2)
    assert trl_code.off_policy_mask(*args).item() == 1
    assert not off_policy_sequence_mask(logps, old, torch.tensor([-1.0]), torch.ones(1, 2), threshold=0.2)
    # 'luspo' has the sequence ratio of its paper; TRL's default is the token ratio, with a warning.
    ours, _ = policy_loss(batch.logps, batch.old_logps, batch.advantages, batch.mask, loss="luspo")
    theirs, _ = trl_code.grpo_loss(batch, loss="luspo", ratio="sequence")
    torch.testing.assert_close(ours, theirs)
