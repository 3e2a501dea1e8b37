"""Generalized advantage estimation (arXiv 1506.02438) and the critic's loss, for PPO.

``δ_t = r_t + γ V(s_{t+1}) − V(s_t)`` and ``A_t = Σ_k (γλ)^k δ_{t+k}``. A *terminated* episode has no value after its
end; the last step of a *truncated* one (a time limit) bootstraps from the value of the state it reached. Both end the
sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.core._checks import check_at_least, check_mask, check_same_shape, check_share, not_none, working
from groupwise.errors import InputError


def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    next_values: Tensor | None = None,
    last_values: Tensor | float | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (advantage + value), each shaped as ``rewards``: ``(T,)`` or ``(T, N)``, time first.

    values: V(s_t). terminated, truncated: whether step t ended the episode, with Gymnasium's meaning of the two.
    next_values: V of the state that step t led to; at a truncation, of the final observation rather than of the next
        episode's first. By default the next row of ``values``, with ``last_values`` after the last row; a truncation
        before the last step is then an error.
    mask: steps that exist. Others (padding, or the reset step of a vectorised environment) get 0 and end the sum.
    """
    check_share("gamma", gamma, "[0, 1]")
    check_share("lam", lam, "[0, 1]")
    check_same_shape(rewards=rewards, values=values, **not_none(next_values=next_values))
    if rewards.dim() not in (1, 2) or not rewards.numel():
        raise InputError(f"rewards has shape {tuple(rewards.shape)}; expected (T,) or (T, N), T at least 1")
    terminated = check_mask("terminated", terminated, rewards.shape)
    truncated = check_mask("truncated", truncated, rewards.shape)
    present = torch.ones_like(terminated) if mask is None else check_mask("mask", mask, rewards.shape)
    rewards, values = working(rewards.detach()), working(values.detach())
    if next_values is None:
        next_values = _shifted(values, terminated, truncated & present, last_values)
    # torch.where rather than a product: the value after the end may be NaN.
    ahead = torch.where(terminated | ~present, 0.0, working(next_values.detach()))
    delta = torch.where(present, rewards + gamma * ahead - values, 0.0)
    goes_on = present & ~(terminated | truncated)
    advantages = _discounted_sum(delta, gamma * lam * goes_on.to(delta.dtype))
    return advantages, torch.where(present, advantages + values, 0.0)


def value_loss(
    values: Tensor, returns: Tensor, *, old_values: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """The critic's mean squared error, ``mean((V(s) − R)²)``; with ``clip``, PPO's clipped form.

    Clipped: the larger of the errors of V and of V clamped to ``old_values`` ± clip.
    """
    check_same_shape(values=values, returns=returns, **not_none(old_values=old_values))
    values, returns = working(values), working(returns.detach())
    error = (values - returns).square()
    if clip is not None:
        check_at_least("clip", clip, 0.0)
        if old_values is None:
            raise InputError("clipping the value loss needs old_values: the values when the data was collected")
        old = working(old_values.detach())
        error = torch.max(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    return error.mean()


def _shifted(values: Tensor, terminated: Tensor, truncated: Tensor, last_values: Tensor | float | None) -> Tensor:
    if bool((truncated & ~terminated)[:-1].any()):
        step = (truncated & ~terminated)[:-1].nonzero()[0].tolist()
        raise InputError(
            f"step {step} was truncated, so the next row of values belongs to another episode: give next_values, "
            "with the value of the last observation at each truncation"
        )
    if last_values is None:
        if not bool(terminated[-1].all()):
            raise InputError("the last step did not terminate: give last_values (or next_values) to bootstrap from")
        last_values = 0.0
    last = torch.as_tensor(last_values, dtype=values.dtype, device=values.device).detach().expand(values.shape[1:])
    return torch.cat([values[1:], last.unsqueeze(0)])


def _discounted_sum(x: Tensor, decay: Tensor) -> Tensor:
    """y_t = x_t + decay_t · y_{t+1} over the first dimension, in ⌈log₂ T⌉ vectorised steps instead of T.

    After the step of stride k, y_t holds the sum over the next 2k terms and decay_t the product of as many decays.
    """
    stride = 1
    while stride < len(x):
        x = torch.cat([x[:-stride] + decay[:-stride] * x[stride:], x[-stride:]])
        decay = torch.cat([decay[:-stride] * decay[stride:], torch.zeros_like(decay[-stride:])])
        stride *= 2
    return x
