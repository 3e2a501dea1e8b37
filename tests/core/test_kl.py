"""KL estimates and the exact KL: by hand, against torch, and their bias."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.core import full_kl, full_kl_from_hidden, kl_estimate
from groupwise.errors import InputError


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_by_hand():
    logps, ref = tensor([math.log(0.5)]), tensor([math.log(0.25)])  # d = −log 2
    log2 = math.log(2)
    assert kl_estimate(logps, ref, estimator="k1").item() == pytest.approx(log2)
    assert kl_estimate(logps, ref, estimator="k2").item() == pytest.approx(log2**2 / 2)
    assert kl_estimate(logps, ref, estimator="k3").item() == pytest.approx(0.5 + log2 - 1)
    assert kl_estimate(logps, ref).item() == pytest.approx(0.5 + log2 - 1)  # k3 is the default
    old = tensor([math.log(0.125)])  # ratio 4
    assert kl_estimate(logps, ref, estimator="unbiased", old_logps=old).item() == pytest.approx(4 * (log2 - 0.5))
    assert kl_estimate(logps, ref, estimator="unbiased").item() == pytest.approx(log2 - 0.5)


def distributions(seed=0, vocabulary=6):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(vocabulary, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("on_policy", [True, False])
def test_unbiased_in_value_and_gradient(on_policy):
    """The expectation of DeepSeek-V3.2's estimator is the exact KL, in value and gradient.

    k3 is biased in both off-policy, and on-policy in its gradient, which is that of the reverse KL.
    """
    policy, reference, sampler = distributions()
    policy.requires_grad_()
    logps, ref = policy.log_softmax(-1), reference.log_softmax(-1)
    old = logps.detach() if on_policy else sampler.log_softmax(-1)
    exact = full_kl(policy, reference)
    expected = torch.autograd.grad(exact, policy)[0]

    def expectation(estimate):
        value = (old.exp() * estimate).sum()
        return value, torch.autograd.grad(value, policy, retain_graph=True)[0]

    value, gradient = expectation(kl_estimate(logps, ref, estimator="unbiased", old_logps=old))
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(gradient, expected)
    k3, k3_gradient = expectation(kl_estimate(logps, ref, estimator="k3"))
    assert torch.allclose(k3, exact) == on_policy
    assert not torch.allclose(k3_gradient, expected)
    k1, _ = expectation(kl_estimate(logps, ref, estimator="k1"))
    assert torch.allclose(k1, exact) == on_policy


def test_masked_positions_are_zero_with_zero_gradient():
    logps = tensor([-1.0, math.nan]).requires_grad_()
    for estimator in ("k1", "k2", "k3", "unbiased"):
        kl = kl_estimate(logps, tensor([-2.0, math.inf]), estimator=estimator, mask=torch.tensor([[1, 0]]))
        assert kl[0, 1] == 0
        gradient = torch.autograd.grad(kl.sum(), logps)[0]
        assert gradient[0, 1] == 0
        assert gradient.isfinite().all()


def test_differences_are_bounded():
    logps = tensor([-900.0]).requires_grad_()
    kl = kl_estimate(logps, tensor([-0.1]))
    assert kl.item() == pytest.approx(math.exp(20) - 21)
    assert torch.autograd.grad(kl.sum(), logps)[0].isfinite().all()


def test_bfloat16():
    logps, ref = torch.randn(2, 3).bfloat16(), torch.randn(2, 3).bfloat16()
    assert torch.equal(kl_estimate(logps, ref), kl_estimate(logps.float(), ref.float()))


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 100])
def test_full_kl_equals_torch(chunk_size):
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    ours = full_kl(logits, reference, chunk_size=chunk_size)
    plain = torch.nn.functional.kl_div(
        reference.detach().log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    gradient, none = torch.autograd.grad(ours.sum(), (logits, reference), allow_unused=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum(), logits)[0], rtol=1e-12, atol=1e-12)
    assert none is None  # no gradient for the reference


def test_full_with_impossible_tokens():
    """A token with probability 0 under both models adds 0; under the reference alone, the KL is infinite."""
    logits = tensor([1.0, 2.0, -math.inf]).requires_grad_()
    reference = tensor([2.0, 1.0, -math.inf])
    kl = full_kl(logits, reference)
    torch.testing.assert_close(kl, full_kl(logits[:, :2], reference[:, :2]))
    assert torch.autograd.grad(kl.sum(), logits)[0].isfinite().all()
    assert full_kl(tensor([1.0, 2.0]), tensor([1.0, -math.inf])).item() == math.inf


def test_full_with_a_mask():
    logits, reference = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    logits[0, 1] = math.nan
    logits.requires_grad_()
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    kl = full_kl(logits, reference, mask=mask)
    assert kl.shape == (2, 3)
    assert (kl[mask == 0] == 0).all()
    assert (torch.autograd.grad(kl.sum(), logits)[0][mask == 0] == 0).all()
    torch.testing.assert_close(kl[1, 2], full_kl(logits[1, 2], reference[1, 2]))
    assert full_kl(logits, reference, mask=torch.zeros(2, 3)).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("factor", ["none", "mean_ratio"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_full_from_hidden_states(factor, softcap):
    generator = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias = (randn(*shape).requires_grad_() for shape in ((2, 3, 4), (9, 4), (9,)))
    ref_hidden, ref_weight = randn(2, 3, 5), randn(9, 5)
    ours = full_kl_from_hidden(
        hidden,
        weight,
        ref_hidden,
        ref_weight,
        bias=bias,
        temperature=0.7,
        scale=0.5,
        softcap=softcap,
        factor=factor,
        chunk_size=2,
    )

    def head(h, w, b):
        logits = (h @ w.T + b) * 0.5
        return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7

    plain = full_kl(head(hidden, weight, bias), head(ref_hidden, ref_weight, 0.0), factor=factor)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for mine, other in zip(
        torch.autograd.grad(ours.sum(), (hidden, weight, bias)),
        torch.autograd.grad(plain.sum(), (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kl_estimate(x, x, estimator="k4"), "unknown estimator 'k4'"),
        (lambda x: kl_estimate(x, None), "ref_logps must be a tensor, got None"),
        (lambda x: kl_estimate(x, x[:1]), "ref_logps has shape"),
        (lambda x: kl_estimate(x, x, old_logps=x[:1]), "old_logps has shape"),
        (lambda x: kl_estimate(x, x, mask=x[:1]), "mask has shape"),
        (lambda x: full_kl(x, x[:, :2]), "ref_logits has shape"),
        (lambda x: full_kl(x, x, factor="ratio"), "unknown factor 'ratio'"),
        (lambda x: full_kl(x, x, chunk_size=0), "chunk_size must be an integer of at least 1, got 0"),
        (lambda x: full_kl(x, x, mask=x), "mask has shape"),
        (lambda x: full_kl_from_hidden(x, x, x[:1], x), "must agree"),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call(torch.ones(3, 4))
