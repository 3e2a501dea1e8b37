"""The share of the weights that a step changes: a learning rate that is lost in rounding changes hardly any."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.model.precision import MasterWeights

TENSORS, VALUES = 64, 128  # of the sample: the most tensors, and values of each


class WeightSample:
    """The same few weights each time, evenly spread over the trained tensors and within each.

    They are read from the masters, which the optimizer updates in float32: what is rounded away there is lost, while
    changes that the model's own bfloat16 copy does not show yet add up in the masters. No random numbers are drawn.
    """

    def __init__(self, masters: MasterWeights) -> None:
        weights = [weight for weight in masters.parameters() if weight.numel() and weight.is_contiguous()]
        self._weights = weights[:: max(1, -(-len(weights) // TENSORS))]

    @torch.no_grad()
    def read(self) -> Tensor | None:
        """A copy of the sample, on the weights' device; None if there is nothing to read."""
        parts = [weight.view(-1)[:: -(-weight.numel() // VALUES)] for weight in self._weights]
        return torch.cat(parts) if parts else None

    def changed_since(self, before: Tensor | None) -> dict[str, float]:
        """The metric ``weights_changed``: the share of the sample that differs from ``before``."""
        after = self.read()
        return {} if before is None or after is None else {"weights_changed": float((before != after).double().mean())}
