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

from groupwise.distributed.fsdp import full, local
from groupwise.errors import CheckpointError, InputError
from groupwise.model.precision import MasterWeights
from groupwise.model.sharded_masters import FsdpMasters


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
        self._weights = {name: self._copy(parameter) for name, parameter in self._parameters.items()}
        self._exact: dict[str, Tensor] | None = None  # of the shape of the masters
        if mixes:
            self._exact = {name: master.detach().clone() for name, master in masters.named_parameters()}

    def _copy(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach().clone()

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
            if self._exact is not None:
                self._exact[name].lerp_(master, mix)
            self._weights[name].copy_(self._moved(name))
        self.refreshes += 1

    def _moved(self, name: str) -> Tensor:
        """The values of one of the weights after a refresh."""
        if self._exact is None:
            return self._parameters[name].detach()
        return self.masters.complete(name, self._exact[name])

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
            if here is None or saved is None or dtype != saved.dtype or self._parameters[name].shape != saved.shape:
                raise CheckpointError(f"the reference in the checkpoint does not fit the model: {name} differs")
        for name, weight in self._weights.items():
            weight.copy_(self._own(name, weights[name]))
            if name in exact:
                exact[name].copy_(self.masters.own_part(name, weights[name]))
        self.refreshes = refreshes

    def _own(self, name: str, complete: Tensor) -> Tensor:
        return complete


class FsdpReference(Reference):
    """The reference of a model whose weights are sharded: this rank's slices, in the dtype that the model computes in.

    FSDP gathers a parameter from the memory of its slices, so their values are replaced there, not the tensors.
    """

    def __init__(self, masters: FsdpMasters, *, mixes: bool = False) -> None:
        self._dtype = masters.dtype
        super().__init__(masters, mixes=mixes)
        self.masters: FsdpMasters = masters

    def _copy(self, parameter: nn.Parameter) -> Tensor:
        return local(parameter).to(self._dtype, copy=True)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        policy = {name: local(parameter).clone() for name, parameter in self._parameters.items()}
        try:
            self._replace(self._weights)
            yield
        finally:
            self._replace(policy)

    def _replace(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local(parameter).copy_(values[name])

    def weight_of(self, parameter: Tensor) -> Tensor:
        for name, trained in self._parameters.items():
            if trained is parameter:
                return self.masters.complete(name, self._weights[name])
        return full(parameter).to(self._dtype)

    def _moved(self, name: str) -> Tensor:
        return local(self._parameters[name]) if self._exact is None else self._exact[name]

    def _own(self, name: str, complete: Tensor) -> Tensor:
        return self.masters.own_part(name, complete)

    def slices(self) -> dict[str, Tensor]:
        """This rank's part of the reference, by name; call `restored` if it was changed."""
        return self._weights if self._exact is None else self._exact

    def restored(self, refreshes: int) -> None:
        """The `slices` were read from a checkpoint."""
        for name, weight in self._weights.items():
            weight.copy_(self.slices()[name])
        self.refreshes = refreshes

    def state_dict(self) -> dict[str, Tensor]:
        return self.masters.collect(self.slices())


def make_reference(masters: MasterWeights, *, mixes: bool) -> Reference:
    """A copy of the current policy, divided among the ranks if the policy's weights are."""
    if isinstance(masters, FsdpMasters):
        return FsdpReference(masters, mixes=mixes)
    return Reference(masters, mixes=mixes)
