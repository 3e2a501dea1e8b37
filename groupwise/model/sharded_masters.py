"""Master weights and optimizer state divided among the ranks of a run (ZeRO stage 1, arXiv 1910.02054).

Every rank holds all weights of the model and computes with them, but keeps the master and the optimizer's state of only
one slice of each: 12 bytes per weight become 12 / N. AdamW computes each number by itself, so that slices of a flat
tensor are stepped as the complete one would be. In an update the gradients of all ranks are summed, each rank gets the
sum of its slices, steps them, and all slices are joined in the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from groupwise.distributed.ranks import Ranks
from groupwise.model.precision import MasterWeights


def make_masters(model: nn.Module, ranks: Ranks) -> MasterWeights:
    """The masters of a model that all ranks hold."""
    return MasterWeights(model) if ranks.size == 1 else ShardedMasters(model, ranks)


class ShardedMasters(MasterWeights):
    """This rank's slices of the masters. Calls that exchange tensors are made on all ranks, in the same order."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.ranks = ranks
        self._parameters: dict[str, nn.Parameter] = {}
        self._gradients: dict[str, Tensor] = {}  # of low-precision parameters, complete, in float32
        super().__init__(model)

    def _master_of(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        self._parameters[name] = parameter
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        own = self.own_part(name, parameter.detach())
        if parameter.dtype.itemsize >= 4:
            return nn.Parameter(own)  # in the parameter's memory

        def take_gradient(parameter: Tensor) -> None:
            """Add the parameter's gradient in float32, and free the original."""
            if parameter.grad is None:
                return
            if name in self._gradients:
                self._gradients[name].add_(parameter.grad)
            else:
                self._gradients[name] = parameter.grad.to(torch.float32)
            parameter.grad = None

        take_gradient(parameter)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(take_gradient))  # type: ignore[no-untyped-call]
        return nn.Parameter(own.to(torch.float32, copy=True))

    def _part_length(self, name: str) -> int:
        """The length of a rank's slice of a parameter; the last ones may be shorter, or empty."""
        return math.ceil(self._parameters[name].numel() / self.ranks.size)

    def own_part(self, name: str, complete: Tensor) -> Tensor:
        length = self._part_length(name)
        return complete.reshape(-1)[self.ranks.rank * length :][:length]

    @torch.no_grad()
    def complete(self, name: str, own: Tensor) -> Tensor:
        parameter, length = self._parameters[name], self._part_length(name)
        joined = self.ranks.join_parts(pad(own.detach(), (0, length - len(own))))
        return joined[: parameter.numel()].view(parameter.shape)

    def collect(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Complete tensors on rank 0, on the CPU; none on the others."""
        collected = {}
        for name, part in own.items():
            tensor = self.complete(name, part)
            if self.ranks.is_main:
                collected[name] = tensor.cpu()
        return collected

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        gradients = {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}
        gradients |= self._gradients
        present = set().union(*self.ranks.gather(list(gradients)))
        for name, master in self._masters.items():
            if name not in present:
                continue
            parameter, length = self._parameters[name], self._part_length(name)
            gradient = gradients.pop(name, None)
            if gradient is None:  # this rank had no sample
                gradient = torch.zeros(parameter.shape, dtype=master.dtype, device=master.device)
            flat = pad(gradient.reshape(-1), (0, self.ranks.size * length - gradient.numel()))
            parameter.grad = gradient = None
            self._gradients.pop(name, None)
            master.grad = self.ranks.sum_part(flat)[: len(master)]

    def zero_grad(self) -> None:
        super().zero_grad()
        self._gradients.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        norm = super().norm(tensors)
        return norm.new_tensor(math.hypot(*self.ranks.gather(float(norm))))

    def dot(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
        return float(sum(self.ranks.gather(super().dot(first, second))))

    @torch.no_grad()
    def sync_to_model(self) -> None:
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            parameter.copy_(self.complete(name, master.to(parameter.dtype)))

    def _too_large(self, limit: float) -> tuple[str, float] | None:
        found = [entry for entry in self.ranks.gather(super()._too_large(limit)) if entry is not None]
        return tuple(found[0]) if found else None
