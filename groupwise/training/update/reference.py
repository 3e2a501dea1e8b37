"""The reference policy: a second set of the trainable weights, not a second model.

To compute its log-probs, the reference's tensors replace the policy's for the duration of a block. So one model, one
compilation and one cache serve both; with LoRA the second set is a frozen adapter of a few megabytes. A refresh copies
the policy into the reference in place, or moves it part of the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from groupwise.errors import CheckpointError, InputError
from groupwise.model.precision import MasterWeights


class Reference:
    """A copy of the current policy. ``refreshes`` counts its updates since.

    ``mixes``: it will be moved part of the way, so its values are kept in the masters' precision; bfloat16 would round
    small moves away.
    """

    def __init__(self, masters: MasterWeights, *, mixes: bool = False) -> None:
        self.masters = masters
        self.refreshes = 0
        self._parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in masters.model.named_parameters() if parameter.requires_grad
        }
        self._weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._exact: dict[str, Tensor] | None = None  # of the shape of the masters
        if mixes:
            self._exact = {name: master.detach().clone() for name, master in masters.named_parameters()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this block the model is the reference. Do not take gradients through it."""
        policy = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self._weights[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = policy[name]

    def weight_of(self, parameter: Tensor) -> Tensor:
        """The reference's values of one of the model's parameters; the parameter itself if it is not trained."""
        names = (name for name, trained in self._parameters.items() if trained is parameter)
        return self._weights.get(next(names, ""), parameter)

    @torch.no_grad()
    def refresh(self, mix: float = 1.0) -> None:
        """Move the reference to the policy, or ``mix`` of the way there."""
        if mix != 1.0 and self._exact is None:
            raise InputError(f"to move the reference {mix:g} of the way, create it with mixes=True")
        for name, master in self.masters.named_parameters():
            value = self._parameters[name].detach()
            if self._exact is not None:
                value = self.masters.complete(name, self._exact[name].lerp_(master, mix))
            self._weights[name].copy_(value)
        self.refreshes += 1

    def state_dict(self) -> dict[str, Tensor]:
        """The reference by name, complete (see `MasterWeights.collect`)."""
        return self._weights if self._exact is None else self.masters.collect(self._exact)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], refreshes: int) -> None:
        """Restore the reference from a checkpoint."""
        exact = self._exact or {}
        for name in sorted(weights.keys() | self._weights.keys()):
            here, saved = self._weights.get(name), weights.get(name)
            dtype = exact[name].dtype if name in exact else None if here is None else here.dtype
            if here is None or saved is None or dtype != saved.dtype or here.shape != saved.shape:
                raise CheckpointError(f"the reference in the checkpoint does not fit the model: {name} differs")
        for name, weight in self._weights.items():
            weight.copy_(weights[name])
            if name in exact:
                exact[name].copy_(self.masters.own_part(name, weights[name]))
        self.refreshes = refreshes
