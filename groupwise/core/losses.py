"""The policy loss: a ratio, a loss per token, and a weight per token.

``loss = Σ_t weight_t · mask_t · token_loss(ratio_t, A_t)``. A named loss (`LOSSES`) is a token loss and an aggregation:
GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783) and DAPO (2503.14476) differ in the aggregation only. One deviation from
the papers: log-ratios are clamped to ±20, so that a very unlikely token gives a large finite number rather than
inf · 0 = NaN in the backward pass.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.core._checks import (
    check_above,
    check_at_least,
    check_mask,
    check_same_shape,
    check_tensors,
    not_none,
    working,
)
from groupwise.core.aggregation import PromptTotals, aggregation_weights
from groupwise.core.masks import DivergenceLimit
from groupwise.errors import InputError, check_choice

MAX_LOG_RATIO = 20.0
VESPO_LOG_FLOOR = math.log(1e-8)
RATIOS = ("token", "sequence", "sequence_product")
DENOMINATORS = ("completion_mask", "policy_mask")


def log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """log(π_θ / π_old) per token ``(B, T)``, or one per sequence ``(B, 1)``; 0 where masked.

    ``"sequence"`` is the mean over a sequence's tokens (GSPO), ``"sequence_product"`` their sum: the ratio of the
    probabilities of the sequence.
    """
    check_choice("ratio", level, RATIOS)
    check_same_shape(logps=logps, old_logps=old_logps)
    mask = check_mask("mask", mask, logps.shape)
    difference = torch.where(mask, working(logps) - working(old_logps), 0.0)
    if level != "token":
        difference = difference.sum(-1, keepdim=True)
    if level == "sequence":
        difference = difference / mask.sum(-1, keepdim=True).clamp(min=1)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class Tokens(NamedTuple):
    """The inputs of a token loss. Masked positions are 0."""

    log_ratio: Tensor  # (B, T), or (B, 1) with a sequence ratio
    logps: Tensor  # (B, T)
    advantages: Tensor  # (B, T)
    token_log_ratio: Tensor  # (B, T), also with a sequence ratio; detached


class TokenTerm(NamedTuple):
    """A loss per token, and the tokens clipped from below and from above (None: this loss does not clip)."""

    values: Tensor  # (B, T)
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None


@dataclass(frozen=True)
class LossSettings:
    """The settings of token losses. The ratio's upper bound is 1 + clip_high, or clip_high itself for CISPO."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    vespo_negative: tuple[float, float] = (3.0, 2.0)


TokenLoss = Callable[[Tokens, LossSettings], TokenTerm]


def clipped_loss(tokens: Tokens, settings: LossSettings) -> TokenTerm:
    """PPO's −min(r·A, clip(r)·A) (arXiv 1707.06347). ``dual_clip`` bounds r·A where A < 0 (arXiv 1912.09729)."""
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    unclipped = ratio if settings.dual_clip is None else ratio.clamp(max=settings.dual_clip)
    values = -torch.min(unclipped * advantages, ratio.clamp(low, high) * advantages)
    return TokenTerm(values, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0))


def reinforce_loss(tokens: Tokens, settings: LossSettings) -> TokenTerm:
    """−A·log π: the plain policy gradient, without a ratio."""
    return TokenTerm(-tokens.advantages * tokens.logps)


def cispo_loss(tokens: Tokens, settings: LossSettings) -> TokenTerm:
    """CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is capped and detached, so every token keeps its gradient."""
    ratio = tokens.log_ratio.detach().exp()
    values = -ratio.clamp(max=settings.clip_high) * tokens.advantages * tokens.logps
    return TokenTerm(values, None, (ratio > settings.clip_high).expand_as(values))


def sapo_loss(tokens: Tokens, settings: LossSettings) -> TokenTerm:
    """SAPO: a sigmoid gate around r = 1 instead of the clip, steeper for negative advantages."""
    positive, negative = settings.sapo_temperatures
    slope = _by_sign(tokens.advantages > 0, positive, negative, tokens.log_ratio)
    gate = torch.sigmoid(slope * torch.expm1(tokens.log_ratio)) * 4 / slope
    return TokenTerm(-gate * tokens.advantages)


def vespo_loss(tokens: Tokens, settings: LossSettings) -> TokenTerm:
    """VESPO: −φ(w)·A·log π, with w the ratio of the sequence and φ(w) = w^k · e^{λ(1−w)}, detached."""
    with torch.no_grad():
        log_w = tokens.token_log_ratio.sum(-1, keepdim=True).clamp(VESPO_LOG_FLOOR, MAX_LOG_RATIO)
        gains = tokens.advantages >= 0
        k = _by_sign(gains, settings.vespo_positive[0], settings.vespo_negative[0], log_w)
        rate = _by_sign(gains, settings.vespo_positive[1], settings.vespo_negative[1], log_w)
        phi = torch.exp(rate + k * log_w - rate * log_w.exp())
    return TokenTerm(-phi * tokens.advantages * tokens.logps)


def _by_sign(positive: Tensor, if_positive: float, otherwise: float, like: Tensor) -> Tensor:
    """One of two numbers by a mask, in the dtype of ``like`` (torch.where on Python numbers gives float32)."""
    return torch.where(positive, like.new_full((), if_positive), like.new_full((), otherwise))


@dataclass(frozen=True)
class Loss:
    """A named loss: its token loss and aggregation.

    ``ratios`` are the levels it is defined for, its default first. ``ceiling`` is set where ``clip_high`` is an
    absolute ceiling on the ratio rather than a distance from 1, and is then its default.
    """

    token_loss: TokenLoss
    aggregation: str
    ratios: tuple[str, ...] = RATIOS
    ceiling: float | None = None


LOSSES: dict[str, Loss] = {
    "grpo": Loss(clipped_loss, "sequence_mean"),
    "bnpo": Loss(clipped_loss, "local_token_mean"),
    "dr_grpo": Loss(clipped_loss, "constant"),
    "dapo": Loss(clipped_loss, "token_mean"),
    "gspo": Loss(clipped_loss, "sequence_mean", ("sequence",)),
    "luspo": Loss(clipped_loss, "sequence_sum", ("sequence", "token")),
    "cispo": Loss(cispo_loss, "token_mean", ceiling=5.0),
    "sapo": Loss(sapo_loss, "sequence_mean"),
    "vespo": Loss(vespo_loss, "token_mean", ("token",)),
    "reinforce": Loss(reinforce_loss, "sequence_sum"),
}


def policy_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss: str | Loss = "dapo",
    aggregation: str | None = None,
    ratio: str | None = None,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    max_length: int | None = None,
    total_tokens: int | Tensor | None = None,
    total_sequences: int | Tensor | None = None,
    prompts: PromptTotals | None = None,
    local_lengths: Tensor | None = None,
    policy_mask: Tensor | None = None,
    denominator: str = "completion_mask",
    divergence: DivergenceLimit | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    vespo_positive: tuple[float, float] = (2.0, 3.0),
    vespo_negative: tuple[float, float] = (3.0, 2.0),
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise, and its statistics.

    logps, old_logps: ``(B, T)`` under the current policy and under the one that sampled. Without old_logps the batch is
        on-policy: the ratio is 1, and only its gradient matters.
    advantages: ``(B,)`` or ``(B, T)``. mask: ``(B, T)``, the completion mask, which defines every denominator.
    loss: a name in `LOSSES`, or a custom `Loss`. aggregation: one of `aggregation_weights` in place of the loss's own.
    ratio: a level of `log_ratio`; by default "sequence" for gspo and luspo, else "token".
    clip_low, clip_high: the ratio is clipped to [1 − low, 1 + high]; high defaults to low. For ``cispo``, clip_high is
        an absolute ceiling on the ratio, 5 by default.
    dual_clip: a ceiling (above 1) on the ratio where the advantage is negative, for the losses that clip.
    max_length: the constant that ``dr_grpo`` divides by.
    total_tokens, total_sequences, local_lengths: of the mini-batch, where this is a micro-batch. See
        `aggregation_weights`.
    prompts: for the aggregation ``"prompt_mean"``.
    policy_mask: ``(B,)``, ``(B, 1)`` or ``(B, T)``: the product of off-policy, validity and entropy masks, or
        importance weights. It multiplies the loss per token. Denominators ignore it, unless denominator is
        ``"policy_mask"``, which divides by what it keeps.
    divergence: a limit to the distance from the sampler (DPPO), which takes the place of the clip: tokens beyond it
        that would move further away add nothing, and clip_low and clip_high have no effect, except as a ceiling. As
        with the clip, denominators ignore it. For a ratio per token.
    sapo_temperatures: for positive and negative advantages. vespo_positive, vespo_negative: (k, λ) for each sign.

    The statistics are detached scalars: ``clip_fraction_low``, ``clip_fraction_high``, the mean ``ratio``, and
    ``approx_kl`` (the k3 estimate of KL(π_old ‖ π_θ)). Each is a mean over tokens, or over sequences with a sequence
    ratio; with totals given, those of the micro-batches add up to the mini-batch's. With ``divergence``, the clip
    fractions count what it masks.
    """
    if not isinstance(loss, Loss):
        check_choice("loss", loss, LOSSES)
    record = loss if isinstance(loss, Loss) else LOSSES[loss]
    level = record.ratios[0] if ratio is None else ratio
    check_choice("ratio", level, RATIOS)
    if level not in record.ratios:
        raise InputError(f"loss {loss!r} has no {level} ratio; leave ratio out or use {record.ratios[0]!r}")
    if clip_high is None:
        clip_high = clip_low if record.ceiling is None else record.ceiling
    settings = LossSettings(clip_low, clip_high, dual_clip, sapo_temperatures, vespo_positive, vespo_negative)
    _check_settings(settings, record)
    check_choice("denominator", denominator, DENOMINATORS)
    aggregation = aggregation or record.aggregation
    if aggregation == "prompt_mean" and denominator != "completion_mask":
        raise InputError("the aggregation 'prompt_mean' divides by the tokens of completions: use 'completion_mask'")
    if divergence is not None:
        if level != "token":
            raise InputError(f"a divergence limits tokens, so it needs the ratio 'token', not {level!r}")
        if record.ceiling is None:
            settings = replace(settings, clip_low=math.inf, clip_high=math.inf)
    check_tensors(logps=logps, advantages=advantages, **not_none(old_logps=old_logps, policy_mask=policy_mask))
    if logps.dim() != 2:
        raise InputError(f"logps has shape {tuple(logps.shape)}; expected (B, T)")
    if old_logps is None:
        old_logps = logps.detach()
    check_same_shape(logps=logps, old_logps=old_logps)
    mask = check_mask("mask", mask, logps.shape)
    policy_weights = _policy_weights(policy_mask, mask, working(logps).dtype)  # (B, T)
    active = mask if policy_weights is None else mask & (policy_weights != 0)

    token_log_ratio = log_ratio(logps, old_logps, mask)
    level_log_ratio = token_log_ratio if level == "token" else log_ratio(logps, old_logps, mask, level)
    # Masked positions are zeroed before the exponential, so that an overflow there has no effect.
    ratio_active = active if level == "token" else active.any(-1, keepdim=True)
    tokens = Tokens(
        log_ratio=torch.where(ratio_active, level_log_ratio, 0.0),
        logps=torch.where(active, working(logps), 0.0),
        advantages=torch.where(active, _advantages(advantages, logps), 0.0),
        token_log_ratio=token_log_ratio.detach(),
    )
    term = record.token_loss(tokens, settings)
    if divergence is not None:
        low, high = divergence.exceeded(tokens.logps, tokens.advantages, active)
        term = TokenTerm(torch.where(low | high, 0.0, term.values), low, high)
    weights = aggregation_weights(
        mask if denominator == "completion_mask" else active,
        aggregation,
        max_length=max_length,
        total_tokens=total_tokens,
        total_sequences=total_sequences,
        prompts=prompts,
        sequences=None if denominator == "completion_mask" else active.any(-1).sum(),
        local_lengths=local_lengths,
        dtype=term.values.dtype,
    )
    if policy_weights is not None:
        weights = weights * policy_weights
    value = (torch.where(active, term.values, 0.0) * weights).sum()
    means = aggregation_weights(
        mask,
        "token_mean" if level == "token" else "sequence_mean",
        total_tokens=total_tokens,
        total_sequences=total_sequences if denominator == "completion_mask" else None,
        dtype=term.values.dtype,
    )
    return value, _statistics(term, level_log_ratio.detach(), token_log_ratio.detach(), means)


@torch.no_grad()
def _statistics(term: TokenTerm, log_ratios: Tensor, token_log_ratios: Tensor, means: Tensor) -> dict[str, Tensor]:
    def mean(x: Tensor | None) -> Tensor:
        return means.new_zeros(()) if x is None else (x.to(means.dtype) * means).sum()

    return {
        "clip_fraction_low": mean(term.clipped_low),
        "clip_fraction_high": mean(term.clipped_high),
        "ratio": mean(log_ratios.exp()),
        "approx_kl": mean(torch.expm1(token_log_ratios) - token_log_ratios),
    }


def _check_settings(settings: LossSettings, record: Loss) -> None:
    check_at_least("clip_low", settings.clip_low, 0.0)
    check_at_least("clip_high", settings.clip_high, 0.0)
    if record.ceiling is not None and settings.clip_high < 1:
        warnings.warn(
            f"clip_high is an absolute ceiling on the ratio for this loss: {settings.clip_high:g} caps even "
            f"on-policy tokens (did you mean {1 + settings.clip_high:g}?)",
            stacklevel=3,
        )
    if settings.dual_clip is not None:
        check_above("dual_clip", settings.dual_clip, 1.0)
    for name in ("sapo_temperatures", "vespo_positive", "vespo_negative"):
        pair = getattr(settings, name)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(f"{name} must be two numbers, got {pair!r}")
        for number in pair:
            check_above(name, number, 0.0)


def _advantages(advantages: Tensor, logps: Tensor) -> Tensor:
    if advantages.shape == logps.shape[:1]:
        advantages = advantages.unsqueeze(1)
    elif advantages.shape != logps.shape:
        rows, length = logps.shape
        raise InputError(f"advantages has shape {tuple(advantages.shape)}; expected ({rows},) or ({rows}, {length})")
    return advantages.detach().to(working(logps).dtype).expand(logps.shape)


def _policy_weights(policy_mask: Tensor | None, mask: Tensor, dtype: torch.dtype) -> Tensor | None:
    if policy_mask is None:
        return None
    rows, length = mask.shape
    if policy_mask.shape == (rows,):
        policy_mask = policy_mask.unsqueeze(1)
    elif policy_mask.shape not in ((rows, 1), (rows, length)):
        raise InputError(
            f"policy_mask has shape {tuple(policy_mask.shape)}; expected ({rows},), ({rows}, 1) or ({rows}, {length})"
        )
    return torch.where(mask, policy_mask.detach().to(dtype), 0.0)
