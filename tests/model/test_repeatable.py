"""The same gradient has the same bits every time, with several threads too: what a resumed run stands on."""

from __future__ import annotations

import pytest
import torch

import groupwise.model.logprobs as logprobs
from groupwise.model import load_model
from groupwise.model.logprobs import completion_logps
from groupwise.model.prepared import prepare

REPETITIONS = 30


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def gradients(prepared):
    """Of log-probs whose first tokens all come from one position: sixteen gradients are added there."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(256, (length,), generator=generator) for length in (9, 30)]
    completions = [[torch.randint(256, (12,), generator=generator) for _ in range(16)] for _ in prompts]
    found = completion_logps(prepared, prompts, completions)
    model = prepared.model
    model.zero_grad()
    (found.logps * torch.linspace(-1, 2, found.logps.numel()).view_as(found.logps)).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_the_gradient_has_the_same_bits_each_time(two_threads):
    prepared = prepare(load_model("tiny", dtype="float32", device="cpu"))
    first = gradients(prepared)
    assert float(first.norm()) > 0
    assert all(torch.equal(gradients(prepared), first) for _ in range(REPETITIONS))


def test_the_hidden_states_are_chosen_by_a_way_that_adds_in_order():
    """On a CPU by index_select; indexing would add gradients of one position in any order of the threads."""
    hidden = torch.randn(5, 3, requires_grad=True)
    positions = torch.tensor([4, 0, 4, 4])
    found = logprobs._at(hidden, positions)
    assert torch.equal(found, hidden[positions])
    assert "IndexSelect" in type(found.grad_fn).__name__
