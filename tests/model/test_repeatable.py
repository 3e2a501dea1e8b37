"""A gradient has the same bits every time, also with several threads: a resumed run depends on it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.model.handle import prepare
from groupwise.model.logprobs import _take, completion_logps
from tests.model.models import SIZE

REPETITIONS = [2, pytest.param(30, marks=pytest.mark.slow)]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("repetitions", REPETITIONS)
def test_the_gradient_of_packed_logps_has_the_same_bits_each_time(two_threads, repetitions):
    """Forty first tokens share one position, and the model is wide enough to use both threads."""
    shape = {"hidden_size": 512, "intermediate_size": 16, "num_hidden_layers": 1}
    handle = prepare(LlamaForCausalLM(LlamaConfig(**{**SIZE, **shape})).eval())
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(SIZE["vocab_size"], (3,), generator=generator)
    answers = [torch.randint(SIZE["vocab_size"], (3,), generator=generator) for _ in range(40)]
    weights = torch.randn(40, 3, generator=generator)

    def gradient():
        handle.model.zero_grad()
        (completion_logps(handle, [prompt], [answers]).logps * weights).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in handle.model.parameters()])

    first = gradient()
    assert float(first.norm()) > 0
    assert all(torch.equal(gradient(), first) for _ in range(repetitions))


@pytest.mark.parametrize("repetitions", REPETITIONS)
def test_taking_hidden_states_sums_their_gradients_in_order(two_threads, repetitions):
    hidden = torch.randn(4, 128, requires_grad=True)
    positions = torch.randint(4, (600,))
    weights = torch.randn(600, 128)
    assert torch.equal(_take(hidden, positions), hidden[positions])

    def gradient():
        return torch.autograd.grad((_take(hidden, positions) * weights).sum(), hidden)[0]

    first = gradient()
    wanted = torch.zeros(4, 128, dtype=torch.float64).index_add(0, positions, weights.double())
    torch.testing.assert_close(first.double(), wanted, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(gradient(), first) for _ in range(repetitions))
