"""Group-relative advantages: each sample's reward compared with the rewards of its group.

``A_i = (r_i − mean(group)) / (std(group) + eps)``, from DeepSeekMath (arXiv 2402.03300). Three cases differ from the
formula: a NaN reward means "not scored" and is left out, a sample alone in its group gets 0, and a group of equal
rewards gets exactly 0 rather than amplified round-off.

With the scale ``"mean"`` the group's mean takes the place of the standard deviation, ``A_i = (r_i − mean) / (mean +
eps)``: MaxRL (arXiv 2602.02710). For rewards of 0 and 1, n samples and K successes that is n times r_i/K − 1/n, an
estimate of the gradient of log p where GRPO's scale none estimates that of the success rate p.

The scale ``"batch"`` divides by the standard deviation of the batch's rewards (TRL), ``"batch_advantages"`` by that of
its advantages r_i − mean(group) (ScaleRL, arXiv 2510.13786), in which differences between groups do not count.

Computed in float64 on the CPU, so that the result is the same on every device. Rewards whose squares float64 cannot
hold are divided by a power of two first, which changes nothing else: rewards of 1e308 are compared like those of 1.

Groups may be nested, as clusters of similar answers are within a prompt. With ``shrinkage`` κ, κ pseudo-samples with
the mean and variance of the enclosing group are added to each group: 0 adds none, and for large κ the advantages
become those of the enclosing group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from groupwise.core._checks import check_at_least
from groupwise.errors import InputError, check_choice

SCALES = ("group", "batch", "batch_advantages", "mean", "none")
BASELINES = ("mean", "leave_one_out", "none")
LARGE = 2.0**500  # the squares of numbers up to this, and from its inverse on, are exact enough in float64
COMBINATIONS = ("sum_then_normalize", "normalize_then_sum")


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of a batch's N groups, in the order of their labels. NaN rewards are left out."""

    index: Tensor  # (B,) the group of each sample, 0..N-1
    count: Tensor  # (N,) scored samples
    mean: Tensor  # (N,) NaN where nothing was scored
    std: Tensor  # (N,) 0 for fewer than two scored samples; inf if it is beyond the largest float
    equal: Tensor  # (N,) bool: no spread; true for a group of one and for an unscored group

    def of_samples(self) -> GroupStatistics:
        """The statistics of each sample's group, ``(B,)`` each."""
        return GroupStatistics(
            self.index, self.count[self.index], self.mean[self.index], self.std[self.index], self.equal[self.index]
        )


def group_index(groups: int | Tensor | Sequence[Any], size: int) -> tuple[Tensor, int]:
    """The group number of each of ``size`` samples, and the number of groups.

    ``groups`` is an int G for consecutive groups of G samples, or one label per sample in any order: a tensor of
    integers, or a list or NumPy array of hashable labels such as strings.
    """
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise InputError(f"the group size must be at least 1, got {groups}")
        if size % groups:
            raise InputError(f"{size} rewards do not divide into groups of {groups}")
        return torch.arange(size) // groups, size // groups
    if isinstance(groups, Tensor):
        if groups.shape != (size,):
            raise InputError(f"groups has shape {tuple(groups.shape)}; expected one label per reward, ({size},)")
        if groups.is_floating_point() or groups.is_complex():
            raise InputError(f"group labels must be integers, got {groups.dtype}")
        labels, index = torch.unique(groups.detach().cpu(), return_inverse=True)
        return index, len(labels)
    if hasattr(groups, "tolist"):  # a NumPy array, whose labels may be strings
        groups = groups.tolist()
    if not isinstance(groups, Sequence):
        raise InputError(f"groups must be an int or one label per sample, got {groups!r}")
    if len(groups) != size:
        raise InputError(f"{len(groups)} group labels were given for {size} rewards")
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(label, len(numbers)) for label in groups], dtype=torch.long), len(numbers)


def group_statistics(
    rewards: Tensor, groups: int | Tensor | Sequence[Any], *, unbiased: bool = True
) -> GroupStatistics:
    """Count, mean and standard deviation of each group's scored rewards ``(B,)``, in float64 on the CPU."""
    values = _rewards(rewards, columns=False)
    index, number = group_index(groups, len(values))
    unit = _units(values, index, number)
    scaled = _statistics(values / unit[index], index, number, unbiased, _round_off(rewards.dtype))
    return replace(scaled, mean=scaled.mean * unit, std=scaled.std * unit)


def group_advantages(
    rewards: Tensor,
    groups: int | Tensor | Sequence[Any],
    *,
    scale: str = "group",
    eps: float = 1e-4,
    unbiased: bool = True,
    baseline: str = "mean",
    weights: Tensor | Sequence[float] | None = None,
    combine: str = "sum_then_normalize",
    within: Sequence[int | Tensor | Sequence[Any]] = (),
    shrinkage: float = 0.0,
) -> Tensor:
    """The advantage of each sample ``(B,)``, from its reward and those of its group.

    rewards: ``(B,)``, or ``(B, K)`` for K reward functions. NaN means 'not scored'.
    groups: an int G for consecutive groups of G, or one label per sample in any order (groups of any size).
    scale: divide by the standard deviation of the ``"group"`` or of the ``"batch"``, by that of the advantages of the
        batch (``"batch_advantages"``), by the group's ``"mean"``, or by nothing (``"none"``). ``"mean"`` is for rewards
        of at least 0, and with several of them for their sum.
    eps: added to the standard deviation or mean.
    unbiased: divide the squared deviations by n − 1 (DeepSeekMath, TRL) rather than by n.
    baseline: what is subtracted: the group's ``"mean"``, the mean of the others (``"leave_one_out"``) or ``"none"``.
        With ``"none"``, a group without spread (equal rewards, or one sample) keeps its rewards undivided.
    weights: one weight per reward function; 1 by default.
    combine: with several reward functions, ``"sum_then_normalize"`` the weighted sum, or ``"normalize_then_sum"``
        each by itself and then, as GDPO does, divide the weighted sum by its standard deviation over the batch
        (unless ``scale="none"``). A function that did not score a sample contributes nothing to it.
    within: the enclosing groups, largest first, each in the form of ``groups``.
    shrinkage: the number of pseudo-samples that a group takes from the enclosing one, so that a sample alone in its
        group gets an advantage too. For the baseline ``"mean"`` only.
    """
    check_choice("scale", scale, SCALES)
    check_choice("baseline", baseline, BASELINES)
    check_choice("combine", combine, COMBINATIONS)
    check_at_least("eps", eps, 0.0)
    check_at_least("shrinkage", shrinkage, 0.0)
    if scale == "mean" and combine != "sum_then_normalize":
        raise InputError("the scale 'mean' needs combine 'sum_then_normalize': it is the mean of the summed rewards")
    if shrinkage and baseline != "mean":
        raise InputError(f"shrinkage moves a group's mean, so it needs the baseline 'mean', not {baseline!r}")
    table = _rewards(rewards, columns=True)  # (B, K)
    levels = [group_index(level, len(table)) for level in ((*within, groups) if shrinkage else (groups,))]
    for (outer, _), (inner, _) in pairwise(levels):
        if not lies_within(inner, outer):
            raise InputError("a group spans several of the groups given in within; each must lie inside one of them")
    factors = _weights(weights, table.shape[1])
    scored = ~table.isnan().all(dim=1)
    round_off = _round_off(rewards.dtype)

    def normalise(values: Tensor) -> Tensor:
        index, number = levels[0] if not scale.startswith("batch") else (torch.zeros_like(levels[0][0]), 1)
        unit = _units(values, index, number)[index]
        values = values / unit
        groups = _shrunk_statistics(values, levels, shrinkage, unbiased, round_off)
        advantages = values
        if baseline != "none":
            advantages = values - groups.mean
            if baseline == "leave_one_out":  # r − mean of the others = (r − mean) · n / (n − 1)
                advantages = advantages * (groups.count.double() / (groups.count - 1).clamp(min=1))
            advantages = torch.where(groups.equal, 0.0, advantages)
        undivided = advantages * unit
        if scale == "group":
            advantages = torch.where(groups.equal, undivided, advantages / (groups.std + eps / unit))
        elif scale == "mean":
            _check_not_negative(values)
            divisor = groups.mean + eps / unit
            advantages = torch.where(divisor > 0, advantages / divisor, 0.0)
        elif scale.startswith("batch"):
            divided_by = values if scale == "batch" else torch.where(values.isnan(), torch.nan, advantages)
            batch = _statistics(divided_by, torch.zeros_like(groups.index), 1, unbiased, round_off)
            advantages = undivided if bool(batch.equal) else advantages / (batch.std + eps / unit)
        else:
            advantages = undivided
        return torch.where(values.isnan(), 0.0, advantages)

    if combine == "sum_then_normalize":
        total = (table * factors).nansum(dim=1)
        _check_finite("the weighted sum of the rewards", total)
        advantages = normalise(torch.where(scored, total, torch.nan))
    else:
        advantages = sum(
            (factor * normalise(column) for factor, column in zip(factors, table.unbind(1), strict=True)),
            start=torch.zeros(len(table), dtype=torch.float64),
        )
        spread = advantages[scored]
        if scale != "none" and len(spread) > 1 and bool(spread.std() > 0):
            advantages = advantages / (spread.std(unbiased=unbiased) + eps)
    dtype = rewards.dtype if rewards.dtype in (torch.float32, torch.float64) else torch.float32
    _check_finite("the advantage", advantages.to(dtype))
    return advantages.to(device=rewards.device, dtype=dtype)


def _shrunk_statistics(
    values: Tensor, levels: Sequence[tuple[Tensor, int]], shrinkage: float, unbiased: bool, round_off: float
) -> GroupStatistics:
    """Each sample's group statistics, shrunk towards those of the enclosing groups, the largest first.

    A group of n with mean m and squared deviations S, in one with mean M and variance V, gets the mean
    (n·m + κ·M) / (n + κ) and the variance (S + κ·V) / (n − 1 + κ). ``equal`` is that of the largest group.
    """
    largest, *inner = (_statistics(values, index, number, unbiased, round_off) for index, number in levels)
    outer = largest.of_samples()
    if not inner:
        return outer
    mean, variance = outer.mean, outer.std**2
    for groups in inner:
        count, squares = groups.count, groups.std**2 * (groups.count - int(unbiased)).clamp(min=1)
        total = torch.where(count > 0, groups.mean * count, 0.0)
        mean = (total[groups.index] + shrinkage * mean) / (count[groups.index] + shrinkage)
        freedom = (count - int(unbiased)).clamp(min=0)[groups.index] + shrinkage
        variance = (squares[groups.index] + shrinkage * variance) / freedom
    return replace(outer, mean=mean, std=variance.sqrt())


def lies_within(groups: Tensor, larger: Tensor) -> bool:
    """Whether each group lies inside one of the larger groups; both are group numbers per sample, ``(B,)``."""
    pairs: Tensor = torch.unique(torch.stack([groups, larger]), dim=1)
    return pairs.shape[1] == len(torch.unique(groups))


def _statistics(values: Tensor, index: Tensor, number: int, unbiased: bool, round_off: float) -> GroupStatistics:
    is_scored = ~values.isnan()
    rewards, where = values[is_scored], index[is_scored]
    count = torch.bincount(where, minlength=number)

    def total(x: Tensor) -> Tensor:
        return torch.zeros(number, dtype=torch.float64).index_add(0, where, x)

    def extreme(x: Tensor, reduce: str) -> Tensor:
        return torch.zeros(number, dtype=torch.float64).scatter_reduce(0, where, x, reduce, include_self=False)

    mean = total(rewards) / count  # 0 / 0 = NaN: nothing was scored
    squares = total((rewards - mean[where]) ** 2)
    std = (squares / (count - int(unbiased)).clamp(min=1)).sqrt()
    largest = extreme(rewards.abs(), "amax")
    equal = extreme(rewards, "amax") - extreme(rewards, "amin") <= round_off * largest
    return GroupStatistics(index, count, mean, torch.where(equal, 0.0, std), equal)


def _units(values: Tensor, index: Tensor, number: int) -> Tensor:
    """What each group's values are divided by, ``(N,)``: 1, or a power of two if their squares are beyond float64."""
    sizes = torch.zeros(number, dtype=torch.float64).scatter_reduce(0, index, values.abs().nan_to_num(), "amax")
    extreme = (sizes > LARGE) | ((sizes > 0) & (sizes < 1 / LARGE))
    return torch.where(extreme, (torch.frexp(sizes).exponent.double() - 1).clamp(min=-1022).exp2(), 1.0)


def _check_not_negative(values: Tensor) -> None:
    if bool((values < 0).any()):
        where = int((values < 0).nonzero()[0])
        raise InputError(
            f"the reward of sample {where} is negative; the scale 'mean' (MaxRL) divides by the group's mean, so it "
            "needs rewards of at least 0"
        )


def _check_finite(what: str, values: Tensor) -> None:
    """Raise an error for the first value that is NaN or infinite."""
    if not bool(values.isfinite().all()):
        where = int((~values.isfinite()).nonzero()[0])
        raise InputError(
            f"{what} of sample {where} is {values[where].item()}: the rewards or their weights are too large; lower "
            "them, or divide by the standard deviation (scale 'group' or 'batch')"
        )


def _round_off(dtype: torch.dtype) -> float:
    """The relative difference below which rewards of one group are equal up to round-off.

    Two units in the last place: the error of summing a few reward functions in another order.
    """
    return 2 * torch.finfo(dtype).eps if dtype in (torch.float32, torch.float64) else 0.0


def _rewards(rewards: Tensor, columns: bool) -> Tensor:
    if not isinstance(rewards, Tensor):
        raise InputError(f"rewards must be a tensor, got {type(rewards).__name__}")
    if rewards.dim() not in ((1, 2) if columns else (1,)) or not rewards.numel():
        expected = "(B,) or (B, K)" if columns else "(B,)"
        raise InputError(f"rewards has shape {tuple(rewards.shape)}; expected {expected} with at least one sample")
    values = rewards.detach().to(device="cpu", dtype=torch.float64)
    infinite = values.isinf()
    if bool(infinite.any()):
        where = infinite.nonzero()[0].tolist()
        raise InputError(f"the reward at {where} is {values[tuple(where)].item()}; use NaN for 'not scored'")
    return values.unsqueeze(1) if columns and values.dim() == 1 else values


def _weights(weights: Tensor | Sequence[float] | None, number: int) -> Tensor:
    if weights is None:
        return torch.ones(number, dtype=torch.float64)
    try:
        factors = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"weights must be one number per reward function, got {weights!r}") from error
    if factors.shape != (number,):
        raise InputError(
            f"weights has shape {tuple(factors.shape)}; expected one weight per reward function, ({number},)"
        )
    if not bool(factors.isfinite().all()):
        raise InputError(f"reward weights must be finite, got {factors.tolist()}")
    return factors
