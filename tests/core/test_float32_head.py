"""Logits in float32 from half-precision states: exact values, the gradient, and what rounding them would cost."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.core import KeptSets, full_kl_from_hidden, selective_logps
from groupwise.core import logps as logps_module
from groupwise.core.logps import float32_product

ROWS, WIDTH, VOCABULARY = 40, 32, 60
SETTINGS = [
    {},
    {"softcap": 20.0, "scale": 0.5},
    {"temperature": 0.7, "bias": True},
    {"kept": True, "chunk_size": 7},
]


def make_head(dtype, seed=0):
    """States and weights whose logits are as large as a language model's, about 20."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH, generator=generator) * 2
    weight, bias = torch.randn(VOCABULARY, WIDTH, generator=generator), torch.randn(VOCABULARY, generator=generator)
    ids = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    kept = (torch.rand(ROWS, VOCABULARY, generator=generator) < 0.3).scatter(1, ids[:, None], True)
    return [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)], ids, kept


def exact_logps(leaves, ids, kept=None, softcap=None, scale=1.0, temperature=1.0, bias=False, **_):
    hidden, weight, offsets = (x.detach().double().requires_grad_() for x in leaves)
    logits = hidden @ weight.T
    logits = (logits + offsets if bias else logits) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logits = (logits / temperature).masked_fill(~kept, -math.inf) if kept is not None else logits / temperature
    return logits.log_softmax(-1).gather(1, ids[:, None]).squeeze(1), (hidden, weight)


def largest(values):
    return float(values.detach().abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("keep", [True, False], ids=["kept products", "computed again"])
def test_selective_logps(settings, dtype, keep, monkeypatch):
    monkeypatch.setattr(logps_module, "KEPT_BYTES", 2**40 if keep else 0)
    leaves, ids, kept = make_head(dtype)
    kept = kept if settings.get("kept") else None
    exact, exact_leaves = exact_logps(leaves, ids, **{**settings, "kept": kept})
    options = {**settings, "bias": leaves[2] if settings.get("bias") else None, "with_entropy": True}
    options["kept"] = None if kept is None else KeptSets.from_logits(torch.where(kept, 0.0, -math.inf))
    rounded, _ = selective_logps(leaves[0], leaves[1], ids, **options)
    logps, _ = selective_logps(leaves[0], leaves[1], ids, float32=True, **options)
    assert logps.dtype == torch.float32
    error = largest(logps - exact)
    assert error < 2e-5
    assert largest(rounded - exact) > 100 * error
    up = torch.linspace(-1, 1, ROWS)
    ours = torch.autograd.grad((logps * up).sum(), leaves[:2])
    theirs = torch.autograd.grad((exact * up).sum(), exact_leaves)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - other).norm()) < 0.01 * float(other.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_not_changed(dtype):
    leaves, ids, _ = make_head(dtype)
    results = [selective_logps(leaves[0], leaves[1], ids, float32=float32) for float32 in (False, True)]
    assert torch.equal(*results)
    gradients = [torch.autograd.grad(result.sum(), leaves[:2]) for result in results]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert float32_product(leaves[0], leaves[1]).dtype == dtype


@pytest.mark.parametrize("factor", ["none", "mean_ratio"])
def test_exact_kl(factor):
    leaves, _, _ = make_head(torch.bfloat16)
    (ref_hidden, ref_weight, _), _, _ = make_head(torch.bfloat16, seed=1)
    mixed = [0.9 * own + 0.1 * other for own, other in zip(leaves, (ref_hidden, ref_weight), strict=False)]
    ref_hidden, ref_weight = (x.detach() for x in mixed)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves[:2]]
    exact = full_kl_from_hidden(*exact_leaves, ref_hidden.double(), ref_weight.double(), factor=factor)
    kl = full_kl_from_hidden(*leaves[:2], ref_hidden, ref_weight, factor=factor, float32=True, chunk_size=9)
    rounded = full_kl_from_hidden(*leaves[:2], ref_hidden, ref_weight, factor=factor)
    error = largest(kl - exact)
    assert error < 1e-4 * largest(exact)
    assert largest(rounded - exact) > 100 * error
    ours, theirs = torch.autograd.grad(kl.mean(), leaves[:2]), torch.autograd.grad(exact.mean(), exact_leaves)
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine.double() - other).norm()) < 0.02 * float(other.norm())


def test_log_probs_of_nearly_equal_states_differ_less():
    """Two ways to compute the same states differ in their last bits. Rounded logits turn some of that into whole steps
    of bfloat16, which is 0.125 between 16 and 32."""
    leaves, ids, _ = make_head(torch.bfloat16)
    hidden, weight = leaves[0].detach(), leaves[1].detach()
    generator = torch.Generator().manual_seed(3)
    changed = torch.rand(hidden.shape, generator=generator) < 0.02
    other = torch.where(changed, hidden * (1 + 2**-7), hidden)
    assert 0 < int((other != hidden).sum()) < 0.05 * hidden.numel()
    squares = {}
    for float32 in (False, True):
        one, two = (selective_logps(states, weight, ids, float32=float32) for states in (hidden, other))
        squares[float32] = float((one - two).square().mean())
    assert squares[True] < 0.5 * squares[False]
