"""The objectives of the five designs (docs/sources.md), written out literally, against the core."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.core import (
    aggregate,
    full_kl,
    gae,
    group_advantages,
    kl_estimate,
    off_policy_sequence_mask,
    policy_loss,
    preference_loss,
    validity,
    value_loss,
)

from .cases import random_batch

SEEDS = range(6)


# --- enhanced GRPO for USMLE multiple choice -------------------------------------------------------------------------


def test_advantages_without_scaling():
    """'4 correct out of 16': the baseline is 0.25, and nothing is divided by a standard deviation."""
    rewards = torch.tensor([1.0] * 4 + [0.0] * 12)
    ours = group_advantages(rewards, 16, scale="none")
    assert ours.tolist() == [0.75] * 4 + [-0.25] * 12


def test_full_kl_times_mean_ratio():
    """compute_unbiased_kl: the full KL times the mean of current/reference, with 1e-8 guards."""
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        current = torch.randn(2, 3, 11, generator=generator, dtype=torch.float64, requires_grad=True)
        reference = torch.randn(2, 3, 11, generator=generator, dtype=torch.float64)
        current_probs, reference_probs = current.softmax(-1), reference.softmax(-1)
        importance = current_probs / (reference_probs + 1e-8)
        kl = (current_probs * (torch.log(current_probs + 1e-8) - torch.log(reference_probs + 1e-8))).sum(-1)
        literal = kl * importance.mean(-1)
        ours = full_kl(current, reference, factor="mean_ratio")
        torch.testing.assert_close(ours, literal, rtol=1e-5, atol=1e-6)  # our logarithms need no 1e-8
        torch.testing.assert_close(
            torch.autograd.grad(ours.sum(), current)[0],
            torch.autograd.grad(literal.sum(), current)[0],
            rtol=1e-5,
            atol=1e-6,
        )


def test_reinforce_with_policy_mask_denominator():
    """−(log_probs · advantages · mask).sum() / mask.sum(), with the product of the off-policy and validity masks."""
    answered = torch.tensor([True, True, False, True, True, True])
    lengths = torch.tensor([60, 4, 80, 90, 70, 70])
    compared = 0
    for seed in SEEDS:
        batch = random_batch(seed)
        rows = len(batch.logps)
        facts = {"lengths": lengths[:rows], "has_answer": answered[:rows]}
        log_probs = (batch.logps * batch.mask).sum(-1)
        reference = (batch.ref_logps * batch.mask).sum(-1)
        off_policy = ((log_probs - reference) < 0.5).double()
        sampling = torch.tensor([float(n >= 10 and ok) for n, ok in zip(lengths[:rows], answered[:rows], strict=True)])
        combined = off_policy * sampling
        if combined.sum() == 0:
            continue
        compared += 1
        literal = -(log_probs * batch.advantages * combined).sum() / combined.sum()

        keep = off_policy_sequence_mask(
            batch.logps, batch.ref_logps, None, batch.mask, threshold=0.5, rule="reference_drift"
        ) & validity(**facts, min_length=10)
        ours, _ = policy_loss(
            batch.logps,
            batch.old_logps,
            batch.advantages,
            batch.mask,
            loss="reinforce",
            policy_mask=keep,
            denominator="policy_mask",
        )
        torch.testing.assert_close(ours, literal)
        torch.testing.assert_close(
            torch.autograd.grad(ours, batch.logps)[0], torch.autograd.grad(literal, batch.logps)[0]
        )
    assert compared > 3


# --- the GRPO reference ----------------------------------------------------------------------------------------------


def literal_compute_advantages(rewards, num_generations, scale_rewards):
    grouped = rewards.view(-1, num_generations)
    advantages = rewards - grouped.mean(1).repeat_interleave(num_generations, dim=0)
    if scale_rewards == "group":
        return advantages / (grouped.std(1).repeat_interleave(num_generations, dim=0) + 1e-4)
    if scale_rewards == "batch":
        return advantages / (rewards.std() + 1e-4)
    return advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_by_scale(scale):
    for seed in SEEDS:
        rewards = torch.randn(24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        torch.testing.assert_close(
            group_advantages(rewards, 8, scale=scale), literal_compute_advantages(rewards, 8, scale)
        )


def literal_reference_loss(batch, *, loss_type, level, epsilon, epsilon_high, beta, max_length, items):
    """compute_grpo_loss, token by token."""
    rows, length = batch.logps.shape
    loss = torch.zeros((), dtype=torch.float64)
    counts = [max(1, int(batch.mask[i].sum())) for i in range(rows)]
    for i in range(rows):
        differences = [
            batch.logps[i, t] - batch.old_logps[i, t] if batch.mask[i, t] else torch.zeros(()).double()
            for t in range(length)
        ]
        for t in range(length):
            if not batch.mask[i, t]:
                continue
            weight = differences[t] if level == "token" else sum(differences) / counts[i]
            r = torch.exp(weight)
            clipped = (
                r
                if 1 - epsilon <= r <= 1 + epsilon_high
                else torch.tensor(1 - epsilon if r < 1 else 1 + epsilon_high).double()
            )
            a = batch.advantages[i]
            term = -torch.minimum(r * a, clipped * a)
            d = batch.ref_logps[i, t] - batch.logps[i, t]
            term = term + beta * (torch.exp(d) - d - 1)
            loss = (
                loss
                + {
                    "grpo": term / counts[i] / rows,
                    "bnpo": term / int(batch.mask.sum()),
                    "dr_grpo": term / (rows * max_length),
                    "dapo": term / items,
                }[loss_type]
            )
    return loss


@pytest.mark.parametrize(
    ("loss_type", "level"),
    [
        ("grpo", "sequence"),
        *((loss, "token") for loss in ("grpo", "bnpo", "dr_grpo", "dapo")),
        *(pytest.param(loss, "sequence", marks=pytest.mark.slow) for loss in ("bnpo", "dr_grpo", "dapo")),
    ],
)
def test_clipped_losses_with_k3(loss_type, level):
    from groupwise.core import LOSSES

    for seed in SEEDS:
        batch = random_batch(seed)
        items = batch.tokens + 5
        literal = literal_reference_loss(
            batch,
            loss_type=loss_type,
            level=level,
            epsilon=0.2,
            epsilon_high=0.3,
            beta=0.04,
            max_length=256,
            items=items,
        )
        totals = {"max_length": 256, "total_tokens": items if loss_type == "dapo" else None}
        ours, _ = policy_loss(
            batch.logps,
            batch.old_logps,
            batch.advantages,
            batch.mask,
            loss=loss_type,
            ratio=level,
            clip_low=0.2,
            clip_high=0.3,
            **totals,
        )
        kl = kl_estimate(batch.logps, batch.ref_logps, estimator="k3", mask=batch.mask)
        ours = ours + 0.04 * aggregate(kl, batch.mask, LOSSES[loss_type].aggregation, **totals)
        torch.testing.assert_close(ours, literal)
        torch.testing.assert_close(
            torch.autograd.grad(ours, batch.logps)[0], torch.autograd.grad(literal, batch.logps)[0]
        )


# --- similarity groups -----------------------------------------------------------------------------------------------


def test_advantages_within_clusters():
    """8 responses of one prompt in clusters of 2, 4, 1 and 1: normalised within each, 0 for single ones."""
    rewards = torch.tensor([1.0, 3.0, 2.0, 2.0, 4.0, 8.0, 9.0, 5.0], dtype=torch.float64)
    labels = [f"uid7_{group}" for group in (0, 0, 1, 1, 1, 1, 2, 3)]
    ours = group_advantages(rewards, labels, eps=0.0)
    second = rewards[2:6]
    expected = torch.cat(
        [
            torch.tensor([-1 / math.sqrt(2), 1 / math.sqrt(2)], dtype=torch.float64),
            (second - second.mean()) / second.std(),
            torch.zeros(2, dtype=torch.float64),
        ]
    )
    torch.testing.assert_close(ours, expected)


# --- preference-guided GRPO ------------------------------------------------------------------------------------------


def test_clip_plus_kl_plus_dpo():
    """L = L_clip + w₁·KL + w₂·L_DPO, each term written out, on one batch of groups and one of pairs."""
    w1, w2, beta = 0.04, 0.5, 0.1
    for seed in SEEDS:
        batch, pairs = random_batch(seed), random_batch(seed + 1000)
        rows, _ = batch.logps.shape
        literal = 0
        for i in range(rows):
            tokens = batch.mask[i].nonzero().flatten()
            ratio = (batch.logps[i, tokens] - batch.old_logps[i, tokens]).exp()
            a = batch.advantages[i]
            clip = torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
            d = batch.ref_logps[i, tokens] - batch.logps[i, tokens]
            literal = literal + (-clip + w1 * (d.exp() - d - 1)).mean() / rows
        chosen, rejected = pairs.logps[:, 0], pairs.logps[:, -1]
        ref_chosen, ref_rejected = pairs.ref_logps[:, 0], pairs.ref_logps[:, -1]
        margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        literal = literal - w2 * torch.log(1 / (1 + torch.exp(-margin))).mean()

        clipped, _ = policy_loss(batch.logps, batch.old_logps, batch.advantages, batch.mask, loss="grpo")
        kl = aggregate(kl_estimate(batch.logps, batch.ref_logps, mask=batch.mask), batch.mask, "sequence_mean")
        dpo, _ = preference_loss(chosen, rejected, ref_chosen, ref_rejected, beta=beta)
        ours = clipped + w1 * kl + w2 * dpo
        torch.testing.assert_close(ours, literal)
        for mine, other in zip(
            torch.autograd.grad(ours, (batch.logps, pairs.logps)),
            torch.autograd.grad(literal, (batch.logps, pairs.logps)),
            strict=True,
        ):
            torch.testing.assert_close(mine, other)


# --- GRPO against PPO on Gymnasium -----------------------------------------------------------------------------------


def test_grpo_over_episodes():
    """J = 1/G Σ_i 1/T_i Σ_t min(…) over episodes of one start, with the population std, is the loss "grpo"."""
    for seed in SEEDS:
        batch = random_batch(seed)
        episodes, _ = batch.logps.shape
        returns = torch.randn(episodes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        mean = sum(returns) / episodes
        std = torch.sqrt(sum((r - mean) ** 2 for r in returns) / episodes)
        literal = 0
        for i in range(episodes):
            advantage = (returns[i] - mean) / (std + 1e-8)
            steps = int(batch.mask[i].sum())
            total = 0
            for t in range(steps):
                ratio = torch.exp(batch.logps[i, t] - batch.old_logps[i, t])
                total = total + torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            literal = literal - total / steps / episodes
        advantages = group_advantages(returns, episodes, unbiased=False, eps=1e-8)
        ours, _ = policy_loss(batch.logps, batch.old_logps, advantages, batch.mask, loss="grpo")
        torch.testing.assert_close(ours, literal)
        torch.testing.assert_close(
            torch.autograd.grad(ours, batch.logps)[0], torch.autograd.grad(literal, batch.logps)[0]
        )


def test_episodes_one_by_one():
    """Two groups of two episodes: the losses of single episodes add up to the loss of the batch."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 7, 1, 5]
    new = [torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_() for n in lengths]
    old = [x.detach() + 0.3 * torch.randn(len(x), generator=generator, dtype=torch.float64) for x in new]
    returns = torch.tensor([3.0, 7.0, 1.0, 5.0], dtype=torch.float64)
    advantages = group_advantages(returns, 2, unbiased=False)
    parts = [
        policy_loss(x[None], y[None], a[None], torch.ones(1, len(x)), loss="grpo", total_sequences=4)[0]
        for x, y, a in zip(new, old, advantages, strict=True)
    ]
    padded = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (new, old)]
    mask = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)
    batched, _ = policy_loss(*padded, advantages, mask, loss="grpo")
    torch.testing.assert_close(sum(parts), batched)
    for mine, other in zip(torch.autograd.grad(sum(parts), new), torch.autograd.grad(batched, new), strict=True):
        torch.testing.assert_close(mine, other)


def test_ppo_with_gae():
    """E[min(…)] − c₁·(V − R)² + c₂·S over flat steps: one row of T steps, GAE advantages, and the critic's loss."""
    generator = torch.Generator().manual_seed(3)
    steps = 20

    def randn():
        return torch.randn(steps, generator=generator, dtype=torch.float64)

    rewards, values, logps = randn(), randn().requires_grad_(), randn().requires_grad_()
    old = logps.detach() + 0.3 * randn()
    none = torch.zeros(steps, dtype=torch.bool)
    advantages, returns = gae(rewards, values, none, none, last_values=0.5, gamma=0.99, lam=0.95)
    deltas = [(rewards[t] + 0.99 * (values[t + 1] if t + 1 < steps else 0.5) - values[t]).item() for t in range(steps)]
    for t in range(steps):
        assert advantages[t].item() == pytest.approx(sum((0.99 * 0.95) ** k * deltas[t + k] for k in range(steps - t)))
    ratio = (logps - old).exp()
    literal = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    literal = literal + 0.5 * ((values - returns) ** 2).mean()
    ours, _ = policy_loss(logps[None], old[None], advantages[None], torch.ones(1, steps), loss="bnpo")
    ours = ours + 0.5 * value_loss(values, returns)
    torch.testing.assert_close(ours, literal)
    for mine, other in zip(
        torch.autograd.grad(ours, (logps, values)), torch.autograd.grad(literal, (logps, values)), strict=True
    ):
        torch.testing.assert_close(mine, other)
