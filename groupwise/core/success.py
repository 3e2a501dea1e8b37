"""What follows from the share of a group's samples that succeed: advantages of pass@k, and a penalty on length.

pass@k (Chen et al., "Pass@k Training", arXiv 2508.10751): the reward of k samples is 1 if one of them succeeds, and a
sample's advantage is the mean over all sets of k samples of its group that contain it. With n samples of which f fail,
the mean reward of a set is R = 1 − C(f, k) / C(n, k), its standard deviation σ = √(R·(1 − R)), and

    A = (1 − R) / σ of a success,    A = (1 − R − C(f − 1, k − 1) / C(n − 1, k − 1)) / σ of a failure.

k = 1 is GRPO with the standard deviation of n. Two deviations: ``eps`` is added to σ, and a group with fewer than k
scored samples uses their number as k.

The length penalty is ALP's (arXiv 2506.05256): β · length · max(p, 1/n) is subtracted, with p the share of the group's
n samples that succeed, so that easy prompts are answered more briefly. Here the length is a share of ``max_length``.

Computed in float64 on the CPU, as all advantages are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.core._checks import check_at_least, check_tensors, is_number
from groupwise.core.advantages import group_index
from groupwise.errors import InputError, check_choice, check_integer

SCALES = ("group", "none")


def pass_at_k_advantages(
    rewards: Tensor,
    groups: int | Tensor | Sequence[Any],
    k: int,
    *,
    threshold: float = 0.5,
    scale: str = "group",
    eps: float = 1e-4,
) -> Tensor:
    """The advantage ``(B,)`` of each sample for pass@k; 0 if any k samples of its group have a success, or none has.

    rewards: ``(B,)``; a sample succeeds from ``threshold`` on, NaN is 'not scored'. groups: as in `group_advantages`.
    scale: divide by σ (``"group"``), or not (``"none"``).
    """
    check_integer("k", k, 1)
    check_choice("scale", scale, SCALES)
    check_at_least("eps", eps, 0.0)
    index, scored, failed = _counts(rewards, groups, threshold)
    successes, failures, sigma = [], [], []
    for n, f in zip(scored.tolist(), failed.tolist(), strict=True):
        size = min(k, n)
        all_fail = math.comb(f, size) / math.comb(n, size) if n else 1.0
        with_failure = math.comb(f - 1, size - 1) / math.comb(n - 1, size - 1) if f else 0.0
        successes.append(all_fail)
        failures.append(all_fail - with_failure)
        sigma.append(math.sqrt(all_fail * (1 - all_fail)))
    passed = torch.where(_passes(rewards, threshold), _of(successes, index), _of(failures, index))
    if scale == "group":
        divisor = _of(sigma, index)
        passed = torch.where(divisor > 0, passed / (divisor + eps), 0.0)
    advantages = torch.where(rewards.isnan().cpu(), 0.0, passed)
    dtype = rewards.dtype if rewards.dtype in (torch.float32, torch.float64) else torch.float32
    return advantages.to(device=rewards.device, dtype=dtype)


def adaptive_length_penalty(
    rewards: Tensor,
    lengths: Tensor,
    groups: int | Tensor | Sequence[Any],
    *,
    max_length: int,
    threshold: float = 0.5,
) -> Tensor:
    """What to add to the rewards ``(B,)``: −(length / max_length) · max(p, 1/n), NaN where a sample was not scored.

    It is between −1, a completion of max_length in a group where all succeed, and 0. Multiply it by a weight.
    """
    check_integer("max_length", max_length, 1)
    check_tensors(lengths=lengths)
    if lengths.shape != rewards.shape:
        raise InputError(f"lengths has shape {tuple(lengths.shape)}; expected one per reward, {tuple(rewards.shape)}")
    index, scored, failed = _counts(rewards, groups, threshold)
    rate = torch.maximum(scored - failed, torch.ones_like(scored)) / scored  # max(p, 1/n)
    penalty = -(lengths.detach().cpu().double() / max_length) * rate[index]
    return torch.where(rewards.isnan().cpu(), math.nan, penalty).to(rewards.device)


def _counts(rewards: Tensor, groups: int | Tensor | Sequence[Any], threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """The group of each sample ``(B,)``, and of each group the scored samples and those that fail, ``(N,)``."""
    check_tensors(rewards=rewards)
    if rewards.dim() != 1 or not len(rewards):
        raise InputError(f"rewards has shape {tuple(rewards.shape)}; expected (B,) with at least one sample")
    if not is_number(threshold):
        raise InputError(f"threshold must be a finite number, got {threshold!r}")
    index, number = group_index(groups, len(rewards))
    is_scored = ~rewards.isnan().cpu()
    failed = is_scored & ~_passes(rewards, threshold)
    return (
        index,
        torch.bincount(index[is_scored], minlength=number),
        torch.bincount(index[failed], minlength=number),
    )


def _passes(rewards: Tensor, threshold: float) -> Tensor:
    return rewards.detach().cpu() >= threshold


def _of(values: Sequence[float], index: Tensor) -> Tensor:
    """The number of each sample's group."""
    return torch.tensor(values, dtype=torch.float64)[index]
