"""Weights divided among the ranks with PyTorch's FSDP2: for models that do not fit on one device.

Each rank holds a slice of every parameter. A layer's weights are gathered before it runs and freed after, in the
forward and in the backward pass. A trained parameter is float32 (or float64), so its slice is its own master; it is
gathered in the model's dtype, and its gradients are summed in float32.

Every forward and backward pass is a collective: all ranks must run the same number of them, see `most`.

FSDP2 averages gradients, while the losses of groupwise add up over the ranks. A sum needs two calls on every module:
``set_gradient_divide_factor(1.0)`` alone asks for a scaled sum, which gloo rejects and NCCL computes wrongly in
bfloat16, and ``set_force_sum_reduction_for_comms(True)`` alone still divides by the number of ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from groupwise.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_Result = TypeVar("_Result")


class _Root(nn.Module):
    """The outermost FSDP module. Its forward pass is any function that uses the model's weights: groupwise runs the
    trunk and applies the head's weight itself, so no method of the model is the forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], _Result]) -> _Result:
        return function()


class ShardedWeights:
    """The weights of ``model``, divided among the ranks of ``mesh``. ``layers`` are gathered one at a time.

    The model may be on the CPU: it moves to the mesh's device layer by layer, so that no device holds all of it. Its
    trainable parameters become float32, unless they are float64; ``dtype`` is what it computes in.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], ranks: Ranks, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.ranks = ranks
        self.dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        wide = torch.promote_types(self.dtype, torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=wide, cast_forward_inputs=False)
        self.root = _Root(model)
        self.modules: list[Any] = [*layers, self.root]
        for module in self.modules:
            for parameter in module.parameters():
                if parameter.requires_grad and not is_sharded(parameter):
                    parameter.data = parameter.data.to(wide)
            # With FSDP's default the outermost weights stay gathered after a pass without gradients, and the next
            # passes would use them even after an update.
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.run(lambda: None)  # FSDP allocates its slices in the first pass

    def run(self, function: Callable[[], _Result]) -> _Result:
        """The result of ``function``, which runs the model; the weights outside of the layers are gathered for it."""
        result: _Result = self.root(function)
        return result

    def most(self, passes: int) -> int:
        """The largest number of passes of any rank; a rank with fewer runs some without samples."""
        numbers: list[int] = self.ranks.gather(passes)
        return max(numbers)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within this block each rank has all weights, in ``dtype``, and may run the model as often as it wants.

        All ranks enter and leave it together. Do not take gradients in it.
        """
        hooks = [(module, module._forward_pre_hooks, module._forward_hooks) for module in self.modules]
        try:
            for module in self.modules:
                module.unshard()
                module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
            yield
        finally:
            for module, before, after in hooks:
                module._forward_pre_hooks, module._forward_hooks = before, after
                module.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds only a slice of a tensor."""
    return hasattr(tensor, "placements")  # a DTensor; importing its class takes a second


def local(tensor: Tensor) -> Tensor:
    """This rank's slice, which shares its memory with the tensor; an ordinary tensor as it is."""
    detached: Any = tensor.detach()
    return detached.to_local() if is_sharded(tensor) else detached  # type: ignore[no-any-return]


def full(tensor: Tensor) -> Tensor:
    """The complete tensor, gathered from all ranks; an ordinary tensor as it is."""
    detached: Any = tensor.detach()
    return detached.full_tensor() if is_sharded(tensor) else detached  # type: ignore[no-any-return]


def sharded_like(values: Tensor, tensor: Any) -> Tensor:
    """This rank's ``values`` as its slice of a tensor that is divided like ``tensor``; as they are if it is not."""
    if not is_sharded(tensor):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
