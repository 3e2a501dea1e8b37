"""The policy loss: hand-computed cases, invariances and errors. TRL is compared in test_losses_trl.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core import (
    LOSSES,
    Loss,
    PromptTotals,
    TokenTerm,
    aggregate,
    aggregation_weights,
    kl_estimate,
    log_ratio,
    policy_loss,
    prompt_totals,
)
from groupwise.core.losses import RATIOS
from groupwise.errors import InputError

from .cases import random_batch

NAN = math.nan


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


# Two sequences of 3 and 1 tokens. Ratios 1, 2, 1/2 with A = 1, and 1/2 with A = −2. Clip 0.2:
# token losses −1, −min(2, 1.2) = −1.2, −min(0.5, 0.8) = −0.5; and −min(−1, −1.6) = 1.6.
OLD = tensor([-1.0, -2.0, -1.0], [-3.0, 0.0, 0.0])
NEW = OLD + tensor([0.0, math.log(2), -math.log(2)], [-math.log(2), 0.0, 0.0])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
ADVANTAGES = torch.tensor([1.0, -2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("grpo", (-2.7 / 3 + 1.6) / 2),
        ("bnpo", (-2.7 + 1.6) / 4),
        ("dapo", (-2.7 + 1.6) / 4),
        ("dr_grpo", (-2.7 + 1.6) / (2 * 10)),
    ],
)
def test_by_hand(loss, expected):
    value, stats = policy_loss(NEW, OLD, ADVANTAGES, MASK, loss=loss, max_length=10)
    assert value.item() == pytest.approx(expected)
    assert stats["clip_fraction_high"].item() == pytest.approx(1 / 4)
    assert stats["clip_fraction_low"].item() == pytest.approx(1 / 4)
    assert stats["ratio"].item() == pytest.approx((1 + 2 + 0.5 + 0.5) / 4)
    log2 = math.log(2)
    assert stats["approx_kl"].item() == pytest.approx((0 + (1 - log2) + 2 * (-0.5 + log2)) / 4)


def test_sequence_ratio_by_hand():
    # Mean log-ratios 0 and −log 2: ratios 1 and 1/2, so −1 and 1.6 per token.
    gspo, stats = policy_loss(NEW, OLD, ADVANTAGES, MASK, loss="gspo")
    assert gspo.item() == pytest.approx((-1 + 1.6) / 2)
    assert stats["ratio"].item() == pytest.approx((1 + 0.5) / 2)
    assert stats["clip_fraction_low"].item() == pytest.approx(1 / 2)
    luspo, _ = policy_loss(NEW, OLD, ADVANTAGES, MASK, loss="luspo")
    assert luspo.item() == pytest.approx((3 * -1 + 1.6) / 2)


def test_dual_clip_by_hand():
    # A < 0 and ratio 8: −min(8·−1, 1.2·−1) = 8, clipped to 3 by the dual clip, with zero gradient.
    new = tensor([math.log(8.0)]).requires_grad_()
    old, advantages, mask = torch.zeros(1, 1, dtype=torch.float64), tensor(-1.0), torch.ones(1, 1)
    assert policy_loss(new, old, advantages, mask)[0].item() == pytest.approx(8)
    held, _ = policy_loss(new, old, advantages, mask, dual_clip=3.0)
    assert held.item() == pytest.approx(3)
    assert torch.autograd.grad(held, new)[0].item() == 0


def test_cispo_ceiling_is_absolute_and_5_by_default():
    new = tensor([math.log(8.0)]).requires_grad_()
    old, advantages, mask = torch.zeros(1, 1, dtype=torch.float64), tensor(1.0), torch.ones(1, 1)
    value, stats = policy_loss(new, old, advantages, mask, loss="cispo")
    assert torch.autograd.grad(value, new)[0].item() == pytest.approx(
        -5
    )  # unlike with the clip, the token keeps its gradient
    assert stats["clip_fraction_high"].item() == 1
    value, _ = policy_loss(new, old, advantages, mask, loss="cispo", clip_high=10.0)
    assert torch.autograd.grad(value, new)[0].item() == pytest.approx(-8)
    with pytest.warns(UserWarning, match="absolute ceiling .*did you mean 1.28"):
        policy_loss(new, old, advantages, mask, loss="cispo", clip_high=0.28)


def test_sapo_and_vespo_by_hand():
    new, old, mask = tensor([math.log(2.0)]), torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    sapo, _ = policy_loss(new, old, tensor(-1.0), mask, loss="sapo")
    assert sapo.item() == pytest.approx(4 / 1.05 / (1 + math.exp(-1.05)))
    vespo, _ = policy_loss(new, old, tensor(1.0), mask, loss="vespo")
    assert vespo.item() == pytest.approx(-math.log(2) * math.exp(3 * (1 - 2)) * 2**2)


def literal_product_ratio(batch, keep, *, loss, clip_low, clip_high, dual_clip):
    """Sequence by sequence, and the gradient by hand: r·A where the loss is not clipped, for each of its tokens."""
    total, gradient = 0.0, torch.zeros_like(batch.logps)
    rows = range(len(batch.mask))
    tokens = {row: batch.mask[row].nonzero()[:, 0].tolist() for row in rows}
    for row in rows:
        if not tokens[row] or not keep[row]:
            continue
        log_ratio = sum(float((batch.logps - batch.old_logps)[row, t].detach()) for t in tokens[row])
        clamped = min(max(log_ratio, -20.0), 20.0)
        ratio, advantage = math.exp(clamped), float(batch.advantages[row])
        bounded = min(ratio, dual_clip) if dual_clip else ratio
        unclipped, clipped = bounded * advantage, min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage
        weight = 1 / len(rows) if loss == "grpo" else len(tokens[row]) / batch.tokens
        total -= weight * min(unclipped, clipped)
        inside = 1 - clip_low <= ratio <= 1 + clip_high
        moves = inside or (unclipped < clipped and bounded == ratio)
        if moves and clamped == log_ratio:
            gradient[row, tokens[row]] = -weight * ratio * advantage
    return total, gradient


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
@pytest.mark.parametrize("dual_clip", [None, 2.0])
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.02, 0.3, 8.0]))
def test_product_ratio_against_a_literal_version(loss, dual_clip, seed, spread):
    """π_θ(o)/π_old(o) of the sequence, with masked tokens, a policy mask, both clips, and the clamp at ±20."""
    batch = random_batch(seed, spread=spread)
    keep = torch.rand(len(batch.mask), generator=torch.Generator().manual_seed(seed)) < 0.8
    clip = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    value, stats = policy_loss(
        batch.logps,
        batch.old_logps,
        batch.advantages,
        batch.mask,
        loss=loss,
        ratio="sequence_product",
        policy_mask=keep,
        **clip,
    )
    expected, gradient = literal_product_ratio(batch, keep, loss=loss, **clip)
    assert value.item() == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(torch.autograd.grad(value, batch.logps)[0], gradient)
    sums = torch.where(batch.mask, batch.logps - batch.old_logps, 0.0).sum(-1).clamp(-20, 20)
    assert stats["ratio"].item() == pytest.approx(sums.exp().mean().item())


def test_product_ratio_by_hand():
    """The ratios 1, 2 and 1/2 of the first sequence multiply to 1, the second has one token."""
    value, stats = policy_loss(NEW, OLD, ADVANTAGES, MASK, loss="grpo", ratio="sequence_product")
    assert value.item() == pytest.approx((-1.0 + 1.6) / 2)
    assert stats["ratio"].item() == pytest.approx((1 + 0.5) / 2)
    assert log_ratio(NEW + 8, OLD, MASK, "sequence_product").tolist() == [[20.0], [pytest.approx(8 - math.log(2))]]


def test_custom_loss():
    def squared(tokens, settings):
        return TokenTerm(-tokens.advantages * tokens.log_ratio.exp() ** settings.clip_low)

    value, _ = policy_loss(NEW, OLD, ADVANTAGES, MASK, loss=Loss(squared, "token_mean"), clip_low=2.0)
    assert value.item() == pytest.approx((-1 - 4 - 0.25 + 2 * 0.25) / 4)


def test_custom_loss_gets_zeros_at_masked_positions():
    seen = []

    def look(tokens, settings):
        seen.append(tokens)
        return TokenTerm(tokens.log_ratio.expand_as(tokens.logps))

    keep = torch.tensor([True, False])
    for level in RATIOS:
        policy_loss(NEW, OLD, ADVANTAGES, MASK, loss=Loss(look, "token_mean"), ratio=level, policy_mask=keep)
        tokens = seen.pop()
        assert (tokens.log_ratio[1] == 0).all()
        assert (tokens.logps[1] == 0).all()
        assert (tokens.advantages[1] == 0).all()
        assert tokens.log_ratio.shape == ((2, 3) if level == "token" else (2, 1))


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "sapo"])
def test_ratio_one_gives_the_policy_gradient(loss):
    """On-policy every loss has the gradient of −A·log π, times its weights. (SAPO is compared below.)"""
    batch = random_batch(5)
    value, _ = policy_loss(batch.logps, None, batch.advantages, batch.mask, loss=loss, max_length=16)
    weights = aggregation_weights(batch.mask, LOSSES[loss].aggregation, max_length=16, dtype=torch.float64)
    expected = -weights * batch.advantages.unsqueeze(1)
    if LOSSES[loss].ratios[0] == "sequence":  # the gradient is shared out evenly over a sequence's tokens
        expected = (expected.sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True)) * batch.mask
    torch.testing.assert_close(torch.autograd.grad(value, batch.logps)[0], expected)


def test_ratio_one_gives_the_policy_gradient_for_sapo():
    batch = random_batch(5)
    sapo, _ = policy_loss(batch.logps, None, batch.advantages, batch.mask, loss="sapo")
    grpo, _ = policy_loss(batch.logps, None, batch.advantages, batch.mask, loss="grpo")
    ours, plain = torch.autograd.grad(sapo, batch.logps)[0], torch.autograd.grad(grpo, batch.logps)[0]
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("loss", ["dapo", "dr_grpo", "grpo", "gspo", "luspo", "cispo", "sapo", "vespo", "reinforce"])
@given(seed=st.integers(0, 10_000), data=st.data())
def test_micro_batches_add_up(loss, seed, data):
    batch = random_batch(seed)
    rows = len(batch.logps)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, rows - 1)))))
    settings = {"loss": loss, "max_length": 16}
    keep = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < 0.7
    complete, stats = policy_loss(
        batch.logps, batch.old_logps, batch.advantages, batch.mask, policy_mask=keep, **settings
    )
    parts, part_stats = [], []
    for part in (slice(a, b) for a, b in zip([0, *cuts], [*cuts, rows], strict=True)):
        if part.start >= rows or part.start == part.stop:
            continue
        value, statistics = policy_loss(
            batch.logps[part],
            batch.old_logps[part],
            batch.advantages[part],
            batch.mask[part],
            policy_mask=keep[part],
            total_tokens=batch.tokens,
            total_sequences=torch.tensor(rows),
            **settings,
        )
        parts.append(value)
        part_stats.append(statistics)
    torch.testing.assert_close(sum(parts), complete, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(sum(parts), batch.logps)[0],
        torch.autograd.grad(complete, batch.logps)[0],
        rtol=1e-10,
        atol=1e-12,
    )
    for name, value in stats.items():
        torch.testing.assert_close(sum(part[name] for part in part_stats), value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf])
def test_masked_positions_have_no_effect(loss, poison):
    for seed in range(3):
        batch = random_batch(seed, per_token_advantages=loss != "gspo")
        outside = ~batch.mask
        poisoned = {
            name: torch.where(outside, poison, getattr(batch, name).detach())
            for name in ("logps", "old_logps", "ref_logps")
        }
        advantages = batch.advantages if batch.advantages.dim() == 1 else torch.where(outside, poison, batch.advantages)
        weights = torch.where(outside, poison, 0.5).double()
        logps = poisoned["logps"].requires_grad_()

        def objective(logps, old, ref, advantages, weights, mask=batch.mask):
            value, stats = policy_loss(logps, old, advantages, mask, loss=loss, max_length=16, policy_mask=weights)
            kl = kl_estimate(logps, ref, estimator="unbiased", old_logps=old, mask=mask)
            return value + 0.1 * aggregate(kl, mask, "token_mean"), stats

        clean, clean_stats = objective(
            batch.logps, batch.old_logps, batch.ref_logps, batch.advantages, torch.full_like(weights, 0.5)
        )
        dirty, dirty_stats = objective(logps, poisoned["old_logps"], poisoned["ref_logps"], advantages, weights)
        torch.testing.assert_close(dirty, clean)
        gradient = torch.autograd.grad(dirty, logps)[0]
        torch.testing.assert_close(gradient, torch.autograd.grad(clean, batch.logps)[0])
        assert (gradient[outside] == 0).all()
        torch.testing.assert_close(dirty_stats, clean_stats)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf, -800.0])
def test_masked_sequences_have_no_effect(loss, poison):
    """The policy mask is applied before the exponential: NaN in one completion does not reach the others."""
    logps = torch.tensor([[poison, -1.0], [-1.0, -2.0]], requires_grad=True)
    old, keep = torch.tensor([[-0.1, poison], [-1.1, -1.9]]), torch.tensor([0.0, 1.0])
    value, _ = policy_loss(
        logps, old, torch.tensor([1.0, 1.0]), torch.ones(2, 2), loss=loss, max_length=2, policy_mask=keep
    )
    (gradient,) = torch.autograd.grad(value, logps)
    assert value.isfinite()
    assert (gradient[0] == 0).all()
    alone, _ = policy_loss(
        logps[1:],
        old[1:],
        torch.tensor([1.0]),
        torch.ones(1, 2),
        loss=loss,
        max_length=2,
        total_tokens=4,
        total_sequences=2,
    )
    torch.testing.assert_close(value, alone)


def test_denominators_ignore_policy_masks_unless_asked():
    keep = torch.tensor([True, False])
    kept, _ = policy_loss(NEW, OLD, ADVANTAGES, MASK, policy_mask=keep)
    assert kept.item() == pytest.approx(-2.7 / 4)
    assert policy_loss(NEW, OLD, ADVANTAGES, MASK, policy_mask=keep.view(2, 1))[0] == kept
    divided, _ = policy_loss(NEW, OLD, ADVANTAGES, MASK, policy_mask=keep, denominator="policy_mask")
    assert divided.item() == pytest.approx(-2.7 / 3)
    per_sequence, _ = policy_loss(NEW, OLD, ADVANTAGES, MASK, loss="grpo", policy_mask=keep, denominator="policy_mask")
    assert per_sequence.item() == pytest.approx(-2.7 / 3 / 1)
    local, _ = policy_loss(NEW, OLD, ADVANTAGES, MASK, loss="bnpo", policy_mask=keep, denominator="policy_mask")
    assert local.item() == pytest.approx(-2.7 / 3)
    constant, _ = policy_loss(
        NEW, OLD, ADVANTAGES, MASK, loss="dr_grpo", max_length=10, policy_mask=keep, denominator="policy_mask"
    )
    assert constant.item() == pytest.approx(-2.7 / 10)
    per_token, _ = policy_loss(
        NEW, OLD, ADVANTAGES, MASK, loss="grpo", policy_mask=torch.tensor([[1, 0, 0], [1, 0, 0]])
    )
    assert per_token.item() == pytest.approx((-1 / 3 + 1.6) / 2)


def test_importance_weights_as_policy_mask():
    value, _ = policy_loss(NEW, OLD, ADVANTAGES, MASK, policy_mask=torch.tensor([0.5, 2.0]))
    assert value.item() == pytest.approx((-2.7 * 0.5 + 1.6 * 2) / 4)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_empty_mask_gives_zero_not_nan(loss):
    logps = torch.randn(3, 4, requires_grad=True)
    value, stats = policy_loss(logps, None, torch.ones(3), torch.zeros(3, 4), loss=loss, max_length=4)
    assert value.item() == 0
    assert (torch.autograd.grad(value, logps)[0] == 0).all()
    assert all(number.isfinite() for number in stats.values())


@pytest.mark.parametrize("loss", LOSSES)
def test_bfloat16_inputs_are_reduced_in_float32(loss):
    batch = random_batch(11)
    half = [x.detach().bfloat16() for x in (batch.logps, batch.old_logps, batch.advantages)]
    half[0].requires_grad_()
    value, stats = policy_loss(*half, batch.mask, loss=loss, max_length=16)
    same = [x.detach().float() for x in half]
    expected, _ = policy_loss(*same, batch.mask, loss=loss, max_length=16)
    assert value.dtype == torch.float32
    assert value == expected
    assert stats["ratio"].dtype == torch.float32
    value.backward()
    assert half[0].grad.dtype == torch.bfloat16


def test_log_ratio_is_bounded():
    bounded = log_ratio(tensor([500.0, -500.0]), tensor([0.0, 0.0]), torch.ones(1, 2))
    assert bounded.tolist() == [[20.0, -20.0]]


@given(seed=st.integers(0, 1000), name=st.sampled_from(["sequence_mean", "sequence_sum", "token_mean", "constant"]))
def test_sums_of_aggregation_weights(seed, name):
    mask = random_batch(seed).mask
    weights = aggregation_weights(mask, name, max_length=5, dtype=torch.float64)
    assert (weights[~mask] == 0).all()
    expected = {
        "sequence_mean": 1.0,
        "token_mean": 1.0,
        "sequence_sum": mask.sum().item() / len(mask),
        "constant": mask.sum().item() / len(mask) / 5,
    }
    assert weights.sum().item() == pytest.approx(expected[name])


ONES = torch.ones(2, 3)
MEAN_OR_TOKEN = ("gspo", "luspo", "vespo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "dapoo"}, "unknown loss 'dapoo'; did you mean 'dapo'"),
        ({"ratio": "sentence"}, "unknown ratio 'sentence'"),
        ({"loss": "gspo", "ratio": "token"}, "loss 'gspo' has no token ratio; leave ratio out or use 'sequence'"),
        ({"loss": "vespo", "ratio": "sequence"}, "has no sequence ratio"),
        *(({"loss": loss, "ratio": "sequence_product"}, "has no sequence_product ratio") for loss in MEAN_OR_TOKEN),
        ({"clip_low": -0.1}, "clip_low must be a finite number of at least 0, got -0.1"),
        ({"clip_high": -0.1}, "clip_high must be"),
        ({"clip_low": "0.2"}, "clip_low must be a finite number of at least 0, got '0.2'"),
        ({"logps": [[0.0]], "old_logps": None}, "logps must be a tensor, got list"),
        ({"advantages": 1.0}, "advantages must be a tensor, got float"),
        ({"mask": None}, "mask must be a tensor, got None"),
        ({"clip_low": NAN}, "clip_low must be a finite number of at least 0, got nan"),
        ({"clip_high": math.inf}, "clip_high must be a finite number"),
        ({"dual_clip": 1.0}, "dual_clip must be a finite number above 1, got 1.0"),
        ({"loss": "dr_grpo"}, "needs max_length"),
        ({"loss": "dr_grpo", "max_length": 0}, "max_length must be a finite number of at least 1, got 0"),
        ({"total_tokens": -1}, "total_tokens must be a finite number of at least 0, got -1"),
        ({"loss": "grpo", "total_sequences": -1}, "total_sequences must be"),
        ({"denominator": "mask"}, "unknown denominator 'mask'"),
        ({"loss": "sapo", "sapo_temperatures": (0.0, 1.0)}, "sapo_temperatures must be a finite number above 0"),
        ({"loss": "sapo", "sapo_temperatures": 1.0}, "sapo_temperatures must be two numbers, got 1.0"),
        ({"loss": "vespo", "vespo_positive": (1.0,)}, "vespo_positive must be two numbers"),
        ({"old_logps": torch.ones(2, 4)}, r"old_logps has shape \(2, 4\) but logps has \(2, 3\)"),
        ({"advantages": torch.ones(3)}, r"advantages has shape \(3,\); expected \(2,\) or \(2, 3\)"),
        ({"mask": torch.ones(2)}, r"mask has shape \(2,\); expected \(2, 3\)"),
        ({"policy_mask": torch.ones(3)}, r"policy_mask has shape \(3,\); expected \(2,\), \(2, 1\) or \(2, 3\)"),
        ({"logps": torch.ones(6), "old_logps": None}, r"logps has shape \(6,\); expected \(B, T\)"),
    ],
)
def test_invalid_arguments(arguments, message):
    inputs = {"logps": ONES, "old_logps": ONES, "advantages": torch.ones(2), "mask": ONES, **arguments}
    tensors = [inputs.pop(name) for name in ("logps", "old_logps", "advantages", "mask")]
    with pytest.raises(InputError, match=message):
        policy_loss(*tensors, **inputs)


def test_aggregate_invalid_arguments():
    with pytest.raises(InputError, match="unknown aggregation 'mean'"):
        aggregate(ONES, ONES, "mean")
    with pytest.raises(InputError, match="values has shape"):
        aggregate(torch.ones(2, 2), ONES, "token_mean")
    with pytest.raises(InputError, match=r"expected \(B, T\)"):
        aggregate(torch.ones(2), torch.ones(2), "token_mean")


# --- means over prompts -----------------------------------------------------------------------------------------------


def literal_prompt_mean(values, mask, labels):
    """The mean over the tokens of each prompt's sequences, then over prompts; one without tokens counts as 0."""
    means = []
    for label in dict.fromkeys(labels):
        rows = [row for row, own in enumerate(labels) if own == label]
        tokens = [float(values[row, place]) for row in rows for place in range(mask.shape[1]) if mask[row, place]]
        means.append(sum(tokens) / max(1, len(tokens)))
    return sum(means) / len(means)


@given(seed=st.integers(0, 10_000), prompts=st.integers(1, 4))
def test_prompt_mean_against_a_literal_version(seed, prompts):
    """The value, and the gradient: each token of a prompt has the weight 1 / (its tokens × prompts)."""
    batch = random_batch(seed)
    labels = torch.randint(0, prompts, (len(batch.mask),), generator=torch.Generator().manual_seed(seed)).tolist()
    totals = prompt_totals(batch.mask, labels)
    values = torch.where(batch.mask, batch.logps, math.nan)
    value = aggregate(values, batch.mask, "prompt_mean", prompts=totals)
    assert value.item() == pytest.approx(literal_prompt_mean(batch.logps.detach(), batch.mask, labels))
    loss, _ = policy_loss(batch.logps, None, batch.advantages, batch.mask, aggregation="prompt_mean", prompts=totals)
    advantages = batch.advantages[:, None].expand(batch.mask.shape)
    assert loss.item() == pytest.approx(-literal_prompt_mean(advantages, batch.mask, labels))
    tokens = torch.tensor([sum(int(batch.mask[i].sum()) for i, own in enumerate(labels) if own == label)
                           for label in labels])  # fmt: skip
    expected = torch.where(batch.mask, -advantages / tokens[:, None] / len(set(labels)), 0.0)
    torch.testing.assert_close(torch.autograd.grad(loss, batch.logps)[0], expected)


@given(seed=st.integers(0, 10_000), cut=st.integers(0, 6))
def test_prompt_mean_in_micro_batches_and_in_its_limits(seed, cut):
    """Micro-batches add up, also where a prompt is split; one prompt is DAPO's mean, prompts of one sequence GRPO's."""
    batch = random_batch(seed)
    rows = len(batch.mask)
    arguments = (batch.logps, batch.old_logps, batch.advantages, batch.mask)
    totals = prompt_totals(batch.mask, [row // 2 for row in range(rows)])
    all_at_once, _ = policy_loss(*arguments, aggregation="prompt_mean", prompts=totals)
    parts = [slice(0, min(cut, rows)), slice(min(cut, rows), rows)]
    shares = [
        policy_loss(
            *(values[part] for values in arguments),
            aggregation="prompt_mean",
            prompts=PromptTotals(totals.tokens[part], totals.prompts),
        )[0]
        for part in parts
    ]
    torch.testing.assert_close(torch.stack(shares).sum(), all_at_once)
    one, _ = policy_loss(*arguments, aggregation="prompt_mean", prompts=prompt_totals(batch.mask, rows))
    torch.testing.assert_close(one, policy_loss(*arguments, loss="dapo")[0])
    each, _ = policy_loss(*arguments, aggregation="prompt_mean", prompts=prompt_totals(batch.mask, 1))
    torch.testing.assert_close(each, policy_loss(*arguments, loss="grpo")[0])


def test_any_aggregation_can_replace_that_of_a_loss():
    for name, loss in LOSSES.items():
        if loss.token_loss is LOSSES["grpo"].token_loss and loss.ratios == RATIOS:
            replaced, _ = policy_loss(NEW, OLD, ADVANTAGES, MASK, loss=name, aggregation="sequence_mean")
            assert torch.equal(replaced, policy_loss(NEW, OLD, ADVANTAGES, MASK, loss="grpo")[0])


def test_prompt_mean_errors():
    with pytest.raises(InputError, match="prompt_totals"):
        aggregation_weights(MASK, "prompt_mean")
    with pytest.raises(InputError, match=r"expected one number per row, \(2,\)"):
        aggregation_weights(MASK, "prompt_mean", prompts=PromptTotals(torch.ones(3), 1))
    totals = prompt_totals(MASK, 1)
    with pytest.raises(InputError, match="completion_mask"):
        policy_loss(NEW, OLD, ADVANTAGES, MASK, aggregation="prompt_mean", prompts=totals, denominator="policy_mask")
    with pytest.raises(InputError, match="'prompt_mean'"):
        policy_loss(NEW, OLD, ADVANTAGES, MASK, aggregation="promptmean")
