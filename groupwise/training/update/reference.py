"""The reference policy of a KL term: a second set of the trainable weights, not a second model.

For its log-probs the reference's tensors are put in the place of the policy's for the length of a block. So one model,
one compilation and one cache serve both; with LoRA the second set is a frozen adapter of a few megabytes. A refresh
copies the policy into the reference in place, or moves it a part of the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from groupwise.errors import CheckpointError, InputError
from groupwise.model.precision import MasterWeights


class Reference:
    """Made from the policy as it is now. ``refreshes`` counts how often it has been moved since.

    ``mixes``: it will be moved in parts, so its exact values are kept in the masters' precision; small moves would
    be rounded away in bfloat16.
    """

    def __init__(self, masters: MasterWeights, *, mixes: bool = False) -> None:
        self.masters = masters
        self.refreshes = 0
        self._parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in masters.model.named_parameters() if parameter.requires_grad
        }
        self._weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._exact = {name: value.clone() for name, value in masters.state_dict().items()} if mixes else None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this block the model is the reference. No gradient may be taken through it."""
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self._weights[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]

    def own(self, parameter: Tensor) -> Tensor:
        """The reference's values of one of the model's parameters; the parameter itself where it is not trained."""
        names = (name for name, trained in self._parameters.items() if trained is parameter)
        return self._weights.get(next(names, ""), parameter)

    @torch.no_grad()
    def refresh(self, mix: float = 1.0) -> None:
        """Move the reference to the policy, or ``mix`` of the way there."""
        if mix != 1.0 and self._exact is None:
            raise InputError(f"a reference that is to move {mix:g} of the way must be made with mixes=True")
        policy = self.masters.state_dict()
        if self._exact is not None:
            for name, value in self._exact.items():
                value.lerp_(policy[name], mix)
            policy = self._exact
        for name, weight in self._weights.items():
            weight.copy_(policy[name])
        self.refreshes += 1

    def state_dict(self) -> dict[str, Tensor]:
        return self._weights if self._exact is None else self._exact

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], refreshes: int) -> None:
        """Take the reference from a checkpoint, bit for bit."""
        own = self.state_dict()
        for name in sorted(weights.keys() | own.keys()):
            here, there = own.get(name), weights.get(name)
            if here is None or there is None or here.dtype != there.dtype or here.shape != there.shape:
                raise CheckpointError(f"the reference in the checkpoint does not fit the model: {name} differs")
        for name, value in own.items():
            value.copy_(weights[name])
            self._weights[name].copy_(value)
        self.refreshes = refreshes
