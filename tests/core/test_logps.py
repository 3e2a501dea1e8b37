"""`selective_logps` equals the plain log-softmax in value and gradient, for any chunk size."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core import KeptSets, logps_from_logits, selective_logps
from groupwise.core import logps as logps_module
from groupwise.errors import InputError


class Case:
    def __init__(self, seed, shape=(3, 5), width=6, vocabulary=17, dtype=torch.float64):
        self.generator = torch.Generator().manual_seed(seed)

        def randn(*size):
            return torch.randn(*size, generator=self.generator, dtype=torch.float64).to(dtype).requires_grad_()

        self.hidden, self.weight, self.bias = randn(*shape, width), randn(vocabulary, width), randn(vocabulary)
        self.ids = torch.randint(vocabulary, shape, generator=self.generator)
        self.up = [torch.randn(shape, generator=self.generator, dtype=torch.float64) for _ in range(2)]

    def kept_mask(self):
        kept = torch.rand(*self.ids.shape, len(self.weight), generator=self.generator) < 0.4
        return kept.scatter(-1, self.ids.unsqueeze(-1), True)

    @property
    def leaves(self):
        return self.hidden, self.weight, self.bias


def plain(case, *, softcap=None, scale=1.0, temperature=1.0, kept=None, bias=True):
    """The literal computation, with the (B, T, V) logits in memory."""
    logits = case.hidden @ case.weight.T
    logits = (logits + case.bias if bias else logits) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    if kept is not None:
        logits = logits.masked_fill(~kept, -math.inf)
    logps = logits.log_softmax(-1)
    terms = logps.exp() * logps.masked_fill(logps == -math.inf, 0.0)
    return logps.gather(-1, case.ids.unsqueeze(-1)).squeeze(-1), -terms.sum(-1)


def objective(case, logps, entropy):
    """Different upstream gradients at each position, for log-probs and entropies."""
    return (logps * case.up[0]).sum() + (0 if entropy is None else (entropy * case.up[1]).sum())


# The functions for torch.compile are run uncompiled here, and compiled in tests/gpu.
BOTH_WAYS = pytest.mark.parametrize(
    "functions",
    [
        pytest.param(logps_module._IN_STEPS, id="in_steps"),
        pytest.param((logps_module._forward_in_one_pass, logps_module._backward_in_one_pass), id="in_one_pass"),
    ],
)


@contextmanager
def chunks_by(functions, keep=True):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logps_module, "KEPT_BYTES", 2**40 if keep else 0)
        patch.setattr(logps_module, "_chunk_functions", lambda *_: functions)
        yield


@BOTH_WAYS
@given(
    seed=st.integers(0, 10_000),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    scale=st.sampled_from([1.0, 0.25]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    with_kept=st.sampled_from([None, "mask", "sets"]),
    with_entropy=st.booleans(),
    with_bias=st.booleans(),
    chunk_size=st.sampled_from([None, 1, 4, 15]),
    keep=st.booleans(),
)
def test_equals_the_plain_computation(
    functions, seed, softcap, scale, temperature, with_kept, with_entropy, with_bias, chunk_size, keep
):
    """Both if the backward pass finds the logits kept and if it recomputes them."""
    with chunks_by(functions, keep):
        case = Case(seed)
        mask = case.kept_mask() if with_kept else None
        kept = mask
        if with_kept == "sets":
            kept = KeptSets.from_logits(torch.where(mask, 0.0, -math.inf))
        settings = {"softcap": softcap, "scale": scale, "temperature": temperature}
        result = selective_logps(
            case.hidden,
            case.weight,
            case.ids,
            bias=case.bias if with_bias else None,
            kept=kept,
            with_entropy=with_entropy,
            chunk_size=chunk_size,
            **settings,
        )
        logps, entropy = result if with_entropy else (result, None)
        expected, expected_entropy = plain(case, kept=mask, bias=with_bias, **settings)
        torch.testing.assert_close(logps, expected, rtol=1e-11, atol=1e-11)
        if with_entropy:
            torch.testing.assert_close(entropy, expected_entropy, rtol=1e-11, atol=1e-11)
        leaves = case.leaves if with_bias else case.leaves[:2]
        ours = torch.autograd.grad(objective(case, logps, entropy), leaves)
        theirs = torch.autograd.grad(objective(case, expected, expected_entropy if with_entropy else None), leaves)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@BOTH_WAYS
def test_gradcheck(functions):
    with chunks_by(functions):
        case = Case(1, shape=(4,), vocabulary=5)

        def function(hidden, weight, bias):
            return selective_logps(
                hidden, weight, case.ids, bias=bias, softcap=3.0, temperature=0.8, with_entropy=True, chunk_size=3
            )

        assert torch.autograd.gradcheck(function, case.leaves)


def test_only_the_entropy_or_only_the_logps_used():
    case = Case(2)
    logps, entropy = selective_logps(case.hidden, case.weight, case.ids, with_entropy=True)
    expected, expected_entropy = plain(case, bias=False)
    for mine, other in ((logps, expected), (entropy, expected_entropy)):
        gradient = torch.autograd.grad(mine.sum(), case.hidden, retain_graph=True)[0]
        torch.testing.assert_close(gradient, torch.autograd.grad(other.sum(), case.hidden, retain_graph=True)[0])


def test_a_frozen_head_gets_no_gradient():
    case = Case(3)
    weight = case.weight.detach()
    logps = selective_logps(case.hidden, weight, case.ids)
    logps.sum().backward()
    assert case.hidden.grad is not None
    assert weight.grad is None


@BOTH_WAYS
def test_a_token_outside_its_kept_set(functions):
    """Its log-prob is −inf, and no NaN reaches the gradients of the others."""
    with chunks_by(functions):
        case = Case(4)
        kept = case.kept_mask()
        kept[0, 0, case.ids[0, 0]] = False
        logps, entropy = selective_logps(case.hidden, case.weight, case.ids, kept=kept, with_entropy=True)
        assert logps[0, 0] == -math.inf
        assert logps.flatten()[1:].isfinite().all()
        gradient = torch.autograd.grad(logps.sum() + entropy[1].sum(), case.hidden)[0]
        assert gradient.isfinite().all()
        assert (gradient[0, 0] == 0).all()


def test_an_empty_kept_set_means_no_filter():
    case = Case(5)
    nothing = torch.zeros(*case.ids.shape, len(case.weight), dtype=torch.bool)
    plain_logps = selective_logps(case.hidden, case.weight, case.ids)
    assert torch.equal(selective_logps(case.hidden, case.weight, case.ids, kept=nothing), plain_logps)
    sets = KeptSets(torch.zeros(0, dtype=torch.int32), torch.zeros(16, dtype=torch.int64))
    assert torch.equal(selective_logps(case.hidden, case.weight, case.ids, kept=sets), plain_logps)


@BOTH_WAYS
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16(functions, weight_dtype):
    """The head's product is in bfloat16, everything after it in float32."""
    with chunks_by(functions):
        case = Case(6, shape=(40,), width=32, vocabulary=50, dtype=torch.bfloat16)
        weight = case.weight.detach().to(weight_dtype).requires_grad_()
        logps = selective_logps(case.hidden, weight, case.ids, chunk_size=7)
        assert logps.dtype == torch.float32
        logits = (case.hidden @ case.weight.T).float()
        expected = logits.log_softmax(-1).gather(-1, case.ids.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
        ours = torch.autograd.grad(logps.sum(), (case.hidden, weight))
        assert [gradient.dtype for gradient in ours] == [torch.bfloat16, weight_dtype]
        exact = [leaf.detach().double().requires_grad_() for leaf in (case.hidden, case.weight)]
        precise = (exact[0] @ exact[1].T).log_softmax(-1).gather(-1, case.ids.unsqueeze(-1)).sum()
        for mine, other in zip(ours, torch.autograd.grad(precise, exact), strict=True):
            assert (mine.double() - other).norm() < 0.02 * other.norm()


def test_autocast():
    """Under autocast the product is in autocast's dtype, also in the backward pass, wherever that is called."""
    case = Case(7, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps = selective_logps(case.hidden, case.weight, case.ids)
        inside = torch.autograd.grad(logps.sum(), case.leaves[:2], retain_graph=True)
    outside = torch.autograd.grad(logps.sum(), case.leaves[:2])
    half = selective_logps(case.hidden.bfloat16(), case.weight, case.ids)
    assert torch.equal(logps, half)
    assert not torch.equal(logps, selective_logps(case.hidden, case.weight, case.ids))
    for one, other in zip(inside, outside, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == torch.float32
    full = selective_logps(case.hidden, case.weight, case.ids)
    outside = torch.autograd.grad(full.sum(), case.leaves[:2], retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(full.sum(), case.leaves[:2])
    for one, other in zip(inside, outside, strict=True):
        assert torch.equal(one, other)


def test_logits_are_never_in_memory_at_once():
    """No tensor of N × V numbers is made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.numbers = max(self.numbers, tensor.numel())
            return result

    case = Case(8, shape=(64, 8), width=4, vocabulary=100)
    with Largest() as largest:
        logps, entropy = selective_logps(case.hidden, case.weight, case.ids, with_entropy=True, chunk_size=10)
        (logps.sum() + entropy.sum()).backward()
    assert largest.numbers <= 64 * 8 * 4  # the hidden states; the logits would be 64 · 8 · 100
    with Largest() as largest:
        plain(case)[0].sum().backward()
    assert largest.numbers == 64 * 8 * 100


def test_fallback_without_a_compiler(monkeypatch):
    """A machine with a GPU but without a compiler warns once and uses the plain functions."""

    def broken(*_):
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(logps_module, "_compiled", None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: broken)
    monkeypatch.setattr(logps_module, "COMPILE_FROM", 0)
    case = Case(10)
    expected = selective_logps(case.hidden, case.weight, case.ids)
    meta = torch.empty(1, 1, device="meta")
    cuda = type("OnGpu", (), {"device": torch.device("cuda"), "__len__": lambda self: 1})()
    forward, _ = logps_module._chunk_functions(cuda, meta)
    raw = (case.hidden @ case.weight.T).detach().reshape(15, -1)
    with pytest.warns(UserWarning, match="torch.compile does not work here.*Failed to find C compiler$"):
        result = forward(raw, None, None, case.ids.reshape(15, 1), (1.0, None, 1.0), False)
    torch.testing.assert_close(result[0], expected.detach().flatten())
    assert logps_module._chunk_functions(cuda, meta) == logps_module._IN_STEPS


def test_no_rows():
    case = Case(9, shape=(0,))
    logps = selective_logps(case.hidden, case.weight, case.ids)
    assert logps.shape == (0,)
    logps.sum().backward()
    assert (case.weight.grad == 0).all()


def test_from_logits():
    logits = torch.tensor([[1.0, 2.0, -math.inf]], requires_grad=True)
    logps, entropy = logps_from_logits(logits, torch.tensor([1]), temperature=0.5, with_entropy=True)
    p = 1 / (1 + math.exp(-2))
    assert logps.item() == pytest.approx(math.log(p))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    assert torch.autograd.grad(entropy.sum(), logits)[0].isfinite().all()


HIDDEN, WEIGHT, IDS = torch.randn(2, 3), torch.randn(5, 3), torch.tensor([0, 4])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: selective_logps(HIDDEN, WEIGHT[:, :2], IDS), r"expected \(…, D\) and \(V, D\)"),
        (lambda: selective_logps(HIDDEN, WEIGHT, IDS[:1]), r"ids has shape \(1,\)"),
        (lambda: selective_logps(HIDDEN, WEIGHT, torch.tensor([0, 5])), "id 5 is outside the vocabulary of 5"),
        (lambda: selective_logps(HIDDEN, WEIGHT, torch.tensor([0, -100])), "id -100 is outside the vocabulary of 5"),
        (lambda: selective_logps(HIDDEN, WEIGHT, IDS.float()), "ids must be integers, got torch.float32"),
        (lambda: selective_logps(HIDDEN, WEIGHT, IDS, bias=torch.ones(4)), r"bias has shape \(4,\)"),
        (lambda: selective_logps(HIDDEN, WEIGHT, IDS, temperature=0.0), "temperature must be"),
        (lambda: selective_logps(HIDDEN, WEIGHT, IDS, softcap=-1.0), "softcap must be"),
        (lambda: selective_logps(HIDDEN, WEIGHT, IDS, scale=0.0), "scale must be"),
        (lambda: selective_logps(HIDDEN, WEIGHT, IDS, chunk_size=0), "chunk_size must be"),
        (lambda: selective_logps(HIDDEN, WEIGHT, IDS, kept=torch.ones(2, 4)), "kept has shape"),
        (
            lambda: selective_logps(HIDDEN, WEIGHT, IDS, kept=KeptSets(torch.zeros(0), torch.zeros(2))),
            "1 kept sets were given for 2 positions",
        ),
        (lambda: logps_from_logits(WEIGHT, IDS), "ids has shape"),
        (lambda: logps_from_logits(WEIGHT, torch.zeros(5).long(), temperature=-1.0), "temperature must be"),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()
