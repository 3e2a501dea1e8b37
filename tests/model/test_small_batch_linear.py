"""Small-batch products equal the usual ones, and a model is restored afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from groupwise.model import small_batch_linear
from groupwise.model.small_batch_linear import MAX_ROWS, MIN_ROWS, small_batch_linears, small_batch_matmul


@pytest.fixture(autouse=True)
def _as_with_openblas(monkeypatch):
    monkeypatch.setattr(small_batch_linear, "OPEN_BLAS", True)


@pytest.mark.parametrize("rows", [1, MIN_ROWS - 1, MIN_ROWS, 33, MAX_ROWS, MAX_ROWS + 1])
def test_product(rows):
    x, weight = torch.randn(rows, 24, dtype=torch.float64), torch.randn(50, 24, dtype=torch.float64)
    product = small_batch_matmul(x, weight)
    assert product.is_contiguous()
    torch.testing.assert_close(product, x @ weight.T, rtol=1e-12, atol=1e-12)


def test_more_dimensions_use_the_usual_product():
    x, weight = torch.randn(3, 20, 24), torch.randn(50, 24)
    assert torch.equal(small_batch_matmul(x, weight), x @ weight.T)


@pytest.mark.parametrize("shape", [(16, 12), (2, 8, 12), (16, 1, 12), (3, 12)])
def test_layers(shape):
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7, bias=False)).double()
    x = torch.randn(shape, dtype=torch.float64)
    wanted = model(x)
    calls = []
    with small_batch_linears(model), torch.no_grad():
        assert all("forward" in vars(layer) for layer in (model[0], model[2]))
        torch.testing.assert_close(model(x), wanted, rtol=1e-12, atol=1e-12)
        with small_batch_linears(model):  # nested
            calls.append(model(x))
        assert "forward" in vars(model[0])
    torch.testing.assert_close(calls[0], wanted, rtol=1e-12, atol=1e-12)
    assert not any("forward" in vars(layer) for layer in model)


def test_layers_are_restored_after_an_error():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(RuntimeError), small_batch_linears(model):
        model(torch.randn(9, 5))
    assert "forward" not in vars(model[0])


def test_nothing_happens_without_openblas(monkeypatch):
    monkeypatch.setattr(small_batch_linear, "OPEN_BLAS", False)
    model = nn.Linear(4, 4)
    with small_batch_linears(model):
        assert "forward" not in vars(model)
