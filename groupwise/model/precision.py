"""Float32 master weights for a model that computes in a lower precision.

A bfloat16 number has 8 significant bits: between 0.0625 and 0.125 neighbours are 0.00049 apart, so an AdamW update of
1e-6 is rounded away every time and the weight never moves. Here the optimizer updates a float32 copy, in which small
updates add up, and the model computes with the rounded copy.

This costs 4 bytes per trainable weight for the copy and 4 for its gradient, which replaces the low-precision one.
float16 weights are accepted, but the loss is not scaled; bfloat16 has the range of float32 and needs no scaling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from groupwise.errors import CheckpointError, InputError, NotFiniteError

PRECISIONS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def set_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters of a model, but not its buffers.

    ``model.to(dtype)`` would also convert the rotary frequencies, and in bfloat16 those misplace distant positions.
    `from_pretrained` keeps them in float32 too.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def name_not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter or buffer that holds NaN or an infinity; None if there is none."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not tensor.is_meta and not bool(tensor.isfinite().all()):
            return name
    return None


def _check_trainable(name: str, parameter: nn.Parameter) -> None:
    if parameter.is_meta:
        raise InputError(f"the parameter {name} has no values yet (device meta); load the weights first")
    if parameter.dtype not in PRECISIONS:
        raise InputError(
            f"the parameter {name} is {parameter.dtype}, which cannot be trained (allowed: bfloat16, float16, "
            "float32, float64); load the model with one of them"
        )


class MasterWeights:
    """The float32 weights that an optimizer updates, kept in sync with the model.

    ::

        masters = MasterWeights(model)
        optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-6)
        for batch in batches:
            loss(model, batch).backward()  # gradients add up in the masters, in float32
        optimizer.step()
        masters.sync_to_model()  # the model computes with the updated weights
        optimizer.zero_grad()

    Only parameters with ``requires_grad`` have masters; a weight that two modules share has one. A float32 or float64
    parameter is its own master, so a float32 model trains exactly as it would without this class.

    Move the model to its device and add its adapter before creating the masters. Until `close`, the ``.grad`` of a
    low-precision parameter is always None.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._masters: dict[str, nn.Parameter] = {}
        self._copied: list[tuple[nn.Parameter, nn.Parameter]] = []  # (in the model, its float32 master)
        self._hooks: list[RemovableHandle] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                _check_trainable(name, parameter)
                self._masters[name] = self._master_of(name, parameter)
        if not self._masters:
            raise InputError("the model has no trainable parameter: requires_grad is False for all of them")

    def _master_of(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype.itemsize >= 4:
            return parameter
        master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))

        def take_gradient(parameter: Tensor) -> None:
            """Add the parameter's gradient to its master's, in float32, and free the original."""
            if parameter.grad is None:
                return
            if master.grad is None:
                master.grad = parameter.grad.to(torch.float32)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        take_gradient(parameter)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(take_gradient))  # type: ignore[no-untyped-call]
        self._copied.append((parameter, master))
        return master

    def parameters(self) -> Iterator[nn.Parameter]:
        """The masters, for an optimizer or for clipping."""
        yield from self._masters.values()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The masters under their parameters' names in the model."""
        yield from self._masters.items()

    @torch.no_grad()
    def sync_to_model(self) -> None:
        """Write the masters into the model's parameters, rounded to nearest.

        The storage stays the same, so captured CUDA graphs and views see the new weights.
        """
        if self._copied:
            parameters, masters = zip(*self._copied, strict=True)
            torch._foreach_copy_(parameters, masters)

    def check_finite(self, what: str, remedy: str) -> None:
        """Raise an error if a weight is NaN, infinite, or beyond the dtype that the model computes in."""
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        limit = min(torch.finfo(parameter.dtype).max for parameter in trained)
        if (found := self._too_large(limit)) is not None:
            name, size = found
            raise NotFiniteError(
                f"{what} gave the weight {name} the size {size:g}, beyond the model's {limit:g}; nothing of it "
                f"is saved. {remedy}, and resume from the last checkpoint"
            )

    def _too_large(self, limit: float) -> tuple[str, float] | None:
        """The first weight that is NaN or larger than ``limit``, and its size."""
        masters = {name: master.detach() for name, master in self._masters.items() if master.numel()}
        if not masters or float(torch.nn.utils.get_total_norm(list(masters.values()), math.inf)) <= limit:
            return None
        sizes = ((name, float(master.abs().max())) for name, master in masters.items())
        return next((name, size) for name, size in sizes if not size <= limit)

    # A master may be a part of its weight, if several processes divide them (`ShardedMasters`). Here it is all of it.

    def own_part(self, name: str, complete: Tensor) -> Tensor:
        """The part of a tensor, of the shape of a weight, that belongs to the master of this process."""
        return complete

    def complete(self, name: str, own: Tensor) -> Tensor:
        """The tensor of which all processes gave their parts."""
        return own

    def collect(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Complete tensors by name, to save them; only one process gets them."""
        return dict(own)

    def reduce_gradients(self) -> None:
        """Add up the gradients of all processes. Call it once after the backward passes, before reading a gradient."""

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for master in self._masters.values():
            master.grad = None

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of all numbers of such tensors as the masters, or of their gradients."""
        return torch.nn.utils.get_total_norm(list(tensors))

    def clip_gradient(self, max_norm: float | None) -> float:
        """Clip the gradient to this norm, unless it is not finite; returns the norm before."""
        norm = self.norm([master.grad for master in self.parameters() if master.grad is not None])
        if max_norm is not None and bool(norm.isfinite()):
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters()), max_norm, norm)
        return float(norm)

    def dot(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
        return sum(float((a * b).sum()) for a, b in zip(first, second, strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """The complete masters by name (see `collect`). They may not be copies: save them before the next step."""
        return self.collect({name: master.detach() for name, master in self._masters.items()})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the masters from ``state`` and sync the model. If anything does not fit, nothing is changed."""
        problems = [f"{name} is missing" for name in self._masters.keys() - state.keys()]
        problems += [f"{name} is not a trainable parameter here" for name in state.keys() - self._masters.keys()]
        weights = dict(self.model.named_parameters())
        for name in self._masters.keys() & state.keys():
            here, there = (
                (tuple(weights[name].shape), self._masters[name].dtype),
                (tuple(state[name].shape), state[name].dtype),
            )
            if here != there:
                problems.append(f"{name} is {there[1]} {there[0]} instead of {here[1]} {here[0]}")
        if problems:
            shown = "; ".join(sorted(problems)[:5])
            raise CheckpointError(f"these {len(problems)} master weights do not fit the model: {shown}")
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(self.own_part(name, state[name]))
        self.sync_to_model()

    def close(self) -> None:
        """Stop collecting the model's gradients. The masters keep their values."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
