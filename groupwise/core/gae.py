"""Generalized advantage estimation (arXiv 1506.02438) and the critic's loss, for PPO.

``δ_t = r_t + γ V(s_{t+1}) − V(s_t)`` and ``A_t = Σ_k (γλ)^k δ_{t+k}``. A *terminated* episode has no value after its
end; the last step of a *truncated* one (a time limit) bootstraps from the value of the state it reached. Both end the
sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.core._checks import check_mask, check_same_shape, check_share, check_tensors, shape_of, working
from groupwise.errors import InputError


def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    next_values: Tensor,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (advantage + value), each shaped as ``rewards``: ``(T,)`` or ``(T, N)``, time first.

    values: V(s_t). terminated, truncated: whether step t ended the episode, with Gymnasium's meaning of the two.
    next_values: V of the state that step t led to; at a truncation, of the final observation rather than of the next
        episode's first. After a termination it is not read.
    """
    check_share("gamma", gamma, "[0, 1]")
    check_share("lam", lam, "[0, 1]")
    check_tensors(rewards=rewards)
    if rewards.dim() not in (1, 2) or not rewards.numel():
        raise InputError(f"rewards has shape {shape_of(rewards)}; expected (T,) or (T, N), T at least 1")
    check_same_shape(rewards=rewards, values=values, next_values=next_values)
    terminated = check_mask("terminated", terminated, rewards.shape)
    truncated = check_mask("truncated", truncated, rewards.shape)
    rewards, values = working(rewards.detach()), working(values.detach())
    # torch.where rather than a product: the value after the end may be NaN.
    ahead = torch.where(terminated, 0.0, working(next_values.detach()))
    delta = rewards + gamma * ahead - values
    goes_on = ~(terminated | truncated)
    advantages = _discounted_sum(delta, gamma * lam * goes_on.to(delta.dtype))
    return advantages, advantages + values


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """The critic's mean squared error, ``mean((V(s) − R)²)``."""
    check_same_shape(values=values, returns=returns)
    return (working(values) - working(returns.detach())).square().mean()


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
