"""The core gives the same values, gradients and dtypes on a CUDA device as on the CPU."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from groupwise import core
from groupwise.core import logps as logps_module

from ..core.cases import random_batch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _needs_a_device():
    if not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device; without one run `make test`")


def on(device, *tensors, dtype=None):
    moved = []
    for tensor in tensors:
        tensor = tensor.detach().to(device)
        moved.append(tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
    return moved


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", core.LOSSES)
def test_policy_loss(loss, dtype):
    for seed in range(10):
        batch = random_batch(seed)
        results = []
        for device in ("cpu", CUDA):
            logps, old, ref, advantages, mask = on(device, *batch, dtype=dtype)
            logps.requires_grad_()
            keep = core.off_policy_sequence_mask(logps, old, advantages, mask, threshold=0.1)
            value, stats = core.policy_loss(
                logps, old, advantages, mask, loss=loss, max_length=16, policy_mask=keep, total_tokens=mask.sum()
            )
            kl = core.kl_estimate(logps, ref, estimator="unbiased", old_logps=old, mask=mask)
            value = value + 0.1 * core.aggregate(kl, mask, "token_mean")
            value.backward()
            assert value.device.type == torch.device(device).type
            results.append((value.detach().cpu(), logps.grad.cpu(), {name: x.cpu() for name, x in stats.items()}))
        torch.testing.assert_close(results[0], results[1])


def test_policy_loss_never_waits_for_the_device():
    """The loss reads no value on the host, so the GPU is never synchronized."""
    batch = random_batch(4)
    logps, old, ref, advantages, mask = on(CUDA, *batch, dtype=torch.float32)
    logps.requires_grad_()
    keep = torch.ones(len(logps), device=CUDA)
    total = mask.sum()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, it warns
        torch.cuda.set_sync_debug_mode("error")
    try:
        for loss in core.LOSSES:
            value, _ = core.policy_loss(
                logps, old, advantages, mask, loss=loss, max_length=16, policy_mask=keep, total_tokens=total
            )
            kl = core.kl_estimate(logps, ref, estimator="unbiased", old_logps=old, mask=mask)
            (value + core.aggregate(kl, mask, "token_mean")).backward()
        core.off_policy_sequence_mask(logps, old, advantages, mask, threshold=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_advantages_are_identical_bit_for_bit():
    rewards = torch.randn(4096)
    rewards[torch.rand(4096) < 0.1] = math.nan
    labels = torch.randint(0, 700, (4096,))
    for scale in ("group", "batch", "batch_advantages", "none"):
        ours = core.group_advantages(rewards.to(CUDA), labels.to(CUDA), scale=scale)
        assert ours.is_cuda
        assert torch.equal(ours.cpu(), core.group_advantages(rewards, labels, scale=scale))


@pytest.mark.parametrize("order", ["transformers", "vllm", "mlx_lm"])
def test_filters(order):
    logits = torch.randn(64, 5000, dtype=torch.float64)
    settings = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "order": order}
    there, here = core.filter_logits(logits.to(CUDA), **settings), core.filter_logits(logits, **settings)
    torch.testing.assert_close(there.cpu(), here)
    sets = core.KeptSets.from_logits(there)
    assert torch.equal(sets.ids.cpu(), core.KeptSets.from_logits(here).ids)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_selective_logps(dtype, kept, softcap, compiled, monkeypatch):
    monkeypatch.setattr(logps_module, "COMPILE_FROM", 0 if compiled else math.inf)
    hidden, weight = torch.randn(300, 64), torch.randn(1000, 64) * 0.2
    hidden, weight = (x.to(CUDA, dtype).requires_grad_() for x in (hidden, weight))
    ids = torch.randint(1000, (300,), device=CUDA)
    mask = (torch.rand(300, 1000, device=CUDA) < 0.1).scatter(1, ids[:, None], True) if kept else None
    sets = core.KeptSets.from_logits(torch.where(mask, 0.0, -math.inf)) if kept else None
    logps, entropy = core.selective_logps(
        hidden, weight, ids, softcap=softcap, temperature=0.8, kept=sets, with_entropy=True, chunk_size=70
    )
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / 0.8
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    all_logps = logits.log_softmax(-1)
    expected = all_logps.gather(1, ids[:, None]).squeeze(1)
    expected_entropy = -(all_logps.exp() * all_logps.masked_fill(all_logps == -math.inf, 0.0)).sum(-1)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 0.06}[dtype]
    torch.testing.assert_close(logps.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=tolerance)
    up = torch.linspace(-1, 1, 300, device=CUDA)
    ours = torch.autograd.grad(((logps + 0.3 * entropy) * up).sum(), (hidden, weight))
    theirs = torch.autograd.grad(((expected + 0.3 * expected_entropy) * up).sum(), exact)
    relative = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.02}[dtype]
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.double() - other).norm() < relative * other.norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_head(dtype, compiled, monkeypatch):
    """Log-probs and the exact KL of half-precision states without rounded logits, and their gradients."""
    monkeypatch.setattr(logps_module, "COMPILE_FROM", 0 if compiled else math.inf)
    hidden, weight = (torch.randn(n, 64, device=CUDA).to(dtype).requires_grad_() for n in (300, 1000))
    reference = [(x + 0.05 * torch.randn_like(x)).detach() for x in (hidden, weight)]
    ids = torch.randint(1000, (300,), device=CUDA)
    logps, entropy = core.selective_logps(hidden, weight, ids, with_entropy=True, chunk_size=70, float32=True)
    kl = core.full_kl_from_hidden(hidden, weight, *reference, chunk_size=70, float32=True)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected, expected_entropy = core.selective_logps(*exact, ids, with_entropy=True)
    expected_kl = core.full_kl_from_hidden(*exact, *(x.double() for x in reference))
    pairs = ((logps, expected), (entropy, expected_entropy), (kl, expected_kl))
    for mine, other in pairs:
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=2e-4)
    up = torch.linspace(-1, 1, 300, device=CUDA)
    for mine, other in pairs:
        ours = torch.autograd.grad((mine * up).sum(), (hidden, weight), retain_graph=True)
        theirs = torch.autograd.grad((other * up).sum(), exact, retain_graph=True)
        for one, two in zip(ours, theirs, strict=True):
            assert (one.double() - two).norm() < 0.02 * two.norm()


def test_selective_logps_under_autocast():
    hidden, weight = (torch.randn(50, 32, device=CUDA).requires_grad_() for _ in range(2))
    ids = torch.randint(50, (50,), device=CUDA)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logps = core.selective_logps(hidden, weight, ids)
    assert torch.equal(logps, core.selective_logps(hidden.bfloat16(), weight, ids))
    logps.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_the_rest():
    batch = random_batch(6)
    logps, old, ref, _, mask = on(CUDA, *batch)
    rows, length = mask.shape
    logits, reference = torch.randn(2, rows, length, 40, dtype=torch.float64)
    torch.testing.assert_close(
        core.full_kl(logits.to(CUDA), reference.to(CUDA), mask=mask).cpu(),
        core.full_kl(logits, reference, mask=batch.mask),
    )
    entropy = torch.rand(rows, length)
    assert torch.equal(
        core.high_entropy_mask(entropy.to(CUDA), mask, top_fraction=0.3).cpu(),
        core.high_entropy_mask(entropy, batch.mask, top_fraction=0.3),
    )
    none = torch.zeros(rows, length, dtype=torch.bool)
    there = core.gae(logps, old, none.to(CUDA), none.to(CUDA), next_values=ref)
    here = core.gae(batch.logps, batch.old_logps, none, none, next_values=batch.ref_logps)
    torch.testing.assert_close([x.cpu() for x in there], list(here))
    pairs = [torch.randn(8, dtype=torch.float64) for _ in range(4)]
    lengths = torch.randint(1, 9, (8,))
    for kind in core.KINDS:
        settings = {"kind": kind, "label_smoothing": 0.1 if kind in ("exo_pair", "robust") else 0.0}
        there, _ = core.preference_loss(
            *(x.to(CUDA) for x in pairs),
            chosen_lengths=lengths.to(CUDA),
            rejected_lengths=lengths.to(CUDA),
            **settings,
        )
        here, _ = core.preference_loss(*pairs, chosen_lengths=lengths, rejected_lengths=lengths, **settings)
        torch.testing.assert_close(there.cpu(), here)
    ids = torch.randint(0, 5, (6, 9))
    assert torch.equal(core.completion_mask(ids.to(CUDA), [1, 2]).cpu(), core.completion_mask(ids, [1, 2]))
    assert torch.equal(core.truncated(ids.to(CUDA), [1, 2]).cpu(), core.truncated(ids, [1, 2]))
