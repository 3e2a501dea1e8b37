"""The actors: a distribution over actions for each state.

Discrete actions have a categorical distribution, whose logits are the outputs of the network. Continuous actions have
a diagonal Gaussian one: its means are the outputs, and its standard deviations are weights that do not depend on the
state. A Gaussian action is not squashed. The environment clips it to its box (`SeededGymEnv`), and the log-probability
is that of the action before clipping: then it and the entropy have their exact, simple form, and the gradient is
unbiased, because to the policy the clipping is a part of the environment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.control.utils import MLP, AnyArray, Shape

Array = TypeVar("Array", AnyArray, Tensor)


class CategoricalPolicy(MLP):
    """The outputs of the network are the logits of the actions."""

    def draw(self, logits: AnyArray, generator: np.random.Generator | None) -> tuple[AnyArray, AnyArray]:
        """An action for each row of outputs, ``(B,)``, and its log-probability; the likeliest without a generator."""
        logps = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        # the Gumbel-max trick
        actions = (logps if generator is None else logps + generator.gumbel(size=logps.shape)).argmax(-1)
        return actions, logps[np.arange(len(actions)), actions]

    def evaluate(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probabilities of actions, and the mean entropy of the policy."""
        all_logps = self(states).log_softmax(-1)
        entropy = -(all_logps.exp() * all_logps).sum(-1).mean()
        return all_logps.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropy


class GaussianPolicy(MLP):
    """The outputs of the network are the means of the actions; their standard deviations are learned weights."""

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int] = (64, 64), gain: float = 1.0) -> None:
        super().__init__(inputs, outputs, hidden, gain)
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def draw(self, means: AnyArray, generator: np.random.Generator | None) -> tuple[AnyArray, AnyArray]:
        """An action for each row of outputs, ``(B, dimensions)``, and its log-density; the mean without a generator."""
        log_std = self.log_std.detach().numpy()
        actions = means
        if generator is not None:
            noise = np.exp(log_std) * generator.standard_normal(means.shape)
            actions = (means + noise).astype(means.dtype)
        return actions, gaussian_logps(actions, means, log_std, np.exp(log_std))

    def evaluate(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The log-densities of actions, and the entropy of the policy."""
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return gaussian_logps(actions, self(states), self.log_std, self.log_std.exp()), entropy


Policy = CategoricalPolicy | GaussianPolicy


def gaussian_logps(actions: Array, means: Array, log_std: Array, std: Array) -> Array:
    """log π(a) = −Σ ½((a − μ)/σ)² + log σ + ½ log 2π, over the last dimension."""
    logps: Array = -(0.5 * ((actions - means) / std) ** 2 + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)
    return logps


def make_policy(shape: Shape, hidden: Sequence[int]) -> Policy:
    """A new policy for the actions of an environment: nearly uniform, or with means near 0."""
    kind = GaussianPolicy if shape.continuous else CategoricalPolicy
    return kind(shape.observation, shape.actions, hidden, gain=0.01)
