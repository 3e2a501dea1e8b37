"""One matrix product instead of several where linear layers have the same input: query, key and value; gate and up.

With the few rows of a decode step a product takes about as long as reading its weights, and a small one does not keep a
GPU busy. The weights of a group become views of one tensor, so that there is one copy of them: an optimizer, a state
dict or an export sees the same parameters under the same names as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.model.small_batch_linear import small_batch_linear

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # by their names in transformers' models


class JointProducts:
    """Joins the weights of a model's groups. Within `active` the first layer of a group computes the others' products.

    A group is left as it is unless all of its layers are plain ``nn.Linear`` with complete weights that nothing else
    shares; so those with adapters, quantised or sharded weights are. A group whose weights are replaced later, rather
    than changed in place, is computed layer by layer from then on.
    """

    def __init__(self, model: nn.Module) -> None:
        uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        self.groups: list[JointGroup] = []
        for parent in model.modules():
            for names in GROUPS:
                layers: list[Any] = [getattr(parent, name, None) for name in names]
                if _can_join(layers) and all(uses[id(p)] == 1 for layer in layers for p in layer.parameters()):
                    self.groups.append(JointGroup(layers))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this block the groups are computed together. No gradients flow through it."""
        groups = [group for group in self.groups if group.intact()]
        try:
            for group in groups:
                group.install()
            yield
        finally:
            for group in groups:
                group.remove()


class JointGroup:
    """Linear layers whose weights and biases are views of one tensor each."""

    @torch.no_grad()
    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.weight = _join([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else _join([layer.bias for layer in layers])

    def intact(self) -> bool:
        """Whether the layers are as they were, and their weights still the joint ones."""
        starts = [0, *accumulate(self.sizes)]
        for layer, start in zip(self.layers, starts, strict=False):
            if type(layer) is not nn.Linear or "forward" in vars(layer):
                return False
            for parameter, joint in ((layer.weight, self.weight), (layer.bias, self.bias)):
                if (parameter is None) != (joint is None):
                    return False
                if joint is not None and not _is_view(parameter, joint[start : start + layer.out_features]):
                    return False
        return True

    def install(self) -> None:
        first, *others = self.layers
        vars(first).update(joint_weight=self.weight, joint_bias=self.bias, joint_sizes=self.sizes, joint_others=others)
        first.__class__ = _First
        for layer in others:
            layer.__class__ = _Other
            vars(layer)["joint_result"] = None

    def remove(self) -> None:
        for layer in self.layers:
            layer.__class__ = nn.Linear
            for name in [name for name in vars(layer) if name.startswith("joint_")]:
                del vars(layer)[name]


class _First(nn.Linear):
    """Computes the products of its group, and leaves the others' for them."""

    joint_weight: Tensor
    joint_bias: Tensor | None
    joint_sizes: list[int]
    joint_others: list[_Other]

    def forward(self, x: Tensor) -> Tensor:
        product = small_batch_linear(x, self.joint_weight, self.joint_bias)
        own, *rest = torch.split(product, self.joint_sizes, -1)
        for layer, result in zip(self.joint_others, rest, strict=True):
            layer.joint_result = (x, result)
        return own


class _Other(nn.Linear):
    """Takes its product from the first layer of the group if that had the same input."""

    joint_result: tuple[Tensor, Tensor] | None

    def forward(self, x: Tensor) -> Tensor:
        found, self.joint_result = self.joint_result, None
        if found is not None and found[0] is x:
            return found[1]
        return small_batch_linear(x, self.weight, self.bias)


def _can_join(layers: Sequence[Any]) -> bool:
    if not all(type(layer) is nn.Linear and "forward" not in vars(layer) for layer in layers):
        return False
    if len({(layer.in_features, layer.bias is None) for layer in layers}) > 1:
        return False
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    if any(type(parameter.data) is not Tensor or parameter.is_meta for parameter in parameters):
        return False
    return len({(parameter.dtype, parameter.device) for parameter in parameters}) == 1


def _join(parameters: Sequence[Tensor]) -> Tensor:
    """A tensor of all rows of the parameters, which become views of it, unless they are already."""
    first, lengths = parameters[0].detach(), [len(parameter) for parameter in parameters]
    storage = first.untyped_storage()
    end = (first.storage_offset() + sum(lengths) * first[0].numel()) * first.itemsize
    if first.is_contiguous() and end <= storage.nbytes():
        joint = first.as_strided((sum(lengths), *first.shape[1:]), first.stride())
        if all(_is_view(*pair) for pair in zip(parameters, torch.split(joint, lengths), strict=True)):
            return joint
    joint = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(joint, lengths), strict=True):
        parameter.data = part
    return joint


def _is_view(parameter: Tensor, part: Tensor) -> bool:
    same = (parameter.data_ptr(), parameter.dtype, parameter.device) == (part.data_ptr(), part.dtype, part.device)
    return same and parameter.shape == part.shape and parameter.is_contiguous()
