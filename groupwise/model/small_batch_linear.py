"""Linear layers for the few rows of a decoding step on a CPU.

OpenBLAS, which multiplies where there is no MKL, is a tenth to a quarter faster at a few dozen rows if the weights come
first: (W · xᵀ)ᵀ in place of x · Wᵀ. The numbers are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

FEWEST, MOST = 8, 256  # rows between which it pays
OPEN_BLAS = "BLAS_INFO=open" in torch.__config__.show()


def few_rows_product(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows`` ``(n, D)`` · ``weight``ᵀ ``(D, V)``, the other way round where that is faster."""
    if OPEN_BLAS and rows.device.type == "cpu" and rows.dim() == 2 and FEWEST <= len(rows) <= MOST:
        return torch.mm(weight, rows.T).T.contiguous()
    return rows @ weight.T


@contextmanager
def few_rows_layers(model: nn.Module) -> Iterator[None]:
    """Within this block the model's linear layers multiply in that way. There are no gradients through it."""
    layers = [module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module)]
    if not OPEN_BLAS or not layers or layers[0].weight.device.type != "cpu":
        yield
        return
    try:
        for layer in layers:
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    found = few_rows_product(x.reshape(-1, x.shape[-1]), layer.weight)
    if layer.bias is not None:
        found = found + layer.bias
    return found.view(*x.shape[:-1], -1)
