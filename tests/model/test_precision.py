"""Float32 masters: small updates add up in a bfloat16 model; a float32 model trains as without them."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from groupwise.errors import CheckpointError, InputError
from groupwise.model.load import load_model
from groupwise.model.precision import MasterWeights
from groupwise.model.tiny import tiny_model
from groupwise.rundir import write_safetensors
from tests.weights import smollm2

IDS = torch.tensor([list(b"Group-relative")])


def loss_of(model, ids=IDS):
    logps = model(ids).logits[:, :-1].float().log_softmax(-1)
    return -logps.gather(-1, ids[:, 1:, None]).mean()


def train(model, weights, steps, sync_to_model=lambda: None, lr=1e-6, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        sync_to_model()
    return optimizer


def snapshot(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def changed(model, before):
    """The share of trainable weights whose bits differ."""
    pairs = [(weight, before[name]) for name, weight in model.named_parameters() if weight.requires_grad]
    return sum((new != old).sum().item() for new, old in pairs) / sum(new.numel() for new, _ in pairs)


@pytest.mark.slow
def test_a_learning_rate_of_1e_6_moves_real_weights_with_masters_and_not_without():
    """SmolLM2-135M's last two layers (7.08 million weights) in bfloat16, 20 steps of AdamW at 1e-6.

    The gradient is that of a sentence, computed once in float32 and used for both as that of a linear loss: twenty
    passes would take minutes on a CPU without bfloat16 instructions.

    In plain bfloat16, 0.21 % of the weights have changed after 20 steps, those close to zero. With masters every
    master has moved by 1e-6 after one step, and 3.6 % of the rounded weights after 20.
    """
    folder = smollm2()
    model = load_model(folder, dtype="float32", device="cpu").requires_grad_(False)
    layers = model.model.layers[-2:].requires_grad_(True)
    loss_of(model, torch.tensor([[504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30]])).backward()
    gradients = [weight.grad.bfloat16() for weight in layers.parameters()]
    layers = layers.to(torch.bfloat16)
    layers.zero_grad()
    before = snapshot(layers)

    def step(weights, optimizer):
        optimizer.zero_grad()
        sum((weight * gradient).sum() for weight, gradient in zip(weights, gradients, strict=True)).backward()
        optimizer.step()

    plain = copy.deepcopy(layers)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6, weight_decay=0.0)
    for _ in range(20):
        step(plain.parameters(), optimizer)
    lost = changed(plain, before)

    masters = MasterWeights(layers)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-6, weight_decay=0.0)
    step(layers.parameters(), optimizer)
    moves = torch.cat([(master - before[name]).abs().flatten() for name, master in masters.named_parameters()])
    for _ in range(19):
        step(layers.parameters(), optimizer)
    masters.sync_to_model()
    kept = changed(layers, before)
    once = (moves > 0).double().mean().item()
    print(f"changed: plain {lost:.2%}, with masters {kept:.2%}; after one step {once:.2%} of the masters")
    assert once > 0.99
    assert moves.median().item() == pytest.approx(1e-6, rel=0.02)
    assert lost < 0.005
    assert kept > 0.03


def test_small_steps_add_up():
    """300 steps of 1e-6 in one direction are 3e-4, more than the spacing of bfloat16 at 0.06 (2.4e-4)."""
    plain = nn.Parameter(torch.full((8,), 0.06, dtype=torch.bfloat16))
    start = plain.detach().clone()
    optimizer = torch.optim.AdamW([plain], lr=1e-6, weight_decay=0.0)
    layer = nn.Linear(8, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(0.06)
    masters = MasterWeights(layer)
    stepper = torch.optim.AdamW(masters.parameters(), lr=1e-6, weight_decay=0.0)
    for _ in range(300):
        plain.grad = torch.ones_like(plain)
        optimizer.step()
        stepper.zero_grad()
        layer(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        stepper.step()
        masters.sync_to_model()
    assert torch.equal(plain.detach(), start)
    master = next(masters.parameters())
    assert torch.allclose(master, start.float() - 300e-6, rtol=0, atol=2e-6)
    assert torch.equal(layer.weight, master.bfloat16())
    assert (layer.weight < start).all()


def test_micro_batches_add_up_in_float32():
    """64 small gradients after a large one: bfloat16 would lose all of them."""
    layer = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    plain = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    masters = MasterWeights(layer)
    for size in [1.0] + [2**-10] * 64:
        for module in (layer, plain):
            module(torch.full((1, 4), size, dtype=torch.bfloat16)).sum().backward()
        assert layer.weight.grad is None
    (master,) = masters.parameters()
    assert master.grad.dtype == torch.float32
    assert torch.equal(master.grad, torch.full((1, 4), 1 + 64 * 2**-10))
    assert torch.equal(plain.weight.grad, torch.ones(1, 4, dtype=torch.bfloat16))


def test_gradients_of_a_model_are_the_sum_of_its_parts():
    parts = [torch.tensor([list(text)]) for text in (b"one question", b"and another", b"a third one")]
    model = load_model("tiny", dtype="bfloat16", device="cpu")
    singles = []
    for part in parts:
        model.zero_grad()
        loss_of(model, part).backward()
        singles.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    model.zero_grad()
    masters = MasterWeights(model)
    for part in parts:
        loss_of(model, part).backward()
    for name, master in masters.named_parameters():
        first, second, third = (single[name].float() for single in singles)
        assert torch.equal(master.grad, (first + second) + third)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_a_full_precision_model_trains_as_without(dtype):
    plain, mastered = load_model("tiny", dtype=dtype, device="cpu"), load_model("tiny", dtype=dtype, device="cpu")
    train(plain, plain.parameters(), 3, lr=1e-3)
    masters = MasterWeights(mastered)
    assert all(master is weight for master, weight in zip(masters.parameters(), mastered.parameters(), strict=True))
    train(mastered, masters.parameters(), 3, masters.sync_to_model, lr=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), mastered.parameters(), strict=True))


def test_masters_follow_float32_training_closely():
    """After three steps at 1e-3, bfloat16 with masters is close to float32."""
    exact, rounded = tiny_model(), load_model("tiny", dtype="bfloat16", device="cpu")
    train(exact, exact.parameters(), 3, lr=1e-3)
    masters = MasterWeights(rounded)
    train(rounded, masters.parameters(), 3, masters.sync_to_model, lr=1e-3)
    assert loss_of(rounded).item() == pytest.approx(loss_of(exact).item(), rel=0.02)


def test_shared_weights_count_once():
    model = load_model("tiny", dtype="bfloat16", device="cpu")
    masters = MasterWeights(model)
    names = [name for name, _ in masters.named_parameters()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert sum(master.numel() for master in masters.parameters()) == model.num_parameters()


def test_frozen_weights_have_no_masters():
    model = load_model("tiny", dtype="bfloat16", device="cpu").requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    masters = MasterWeights(model)
    assert {name.rsplit(".", 2)[1] for name, _ in masters.named_parameters()} == {"gate_proj", "up_proj", "down_proj"}
    before = snapshot(model)
    train(model, masters.parameters(), 1, masters.sync_to_model, lr=1e-2)
    after = snapshot(model)
    assert {name for name in after if not torch.equal(after[name], before[name])} == set(masters.state_dict())


def test_sync_keeps_the_storage():
    """A captured CUDA graph reads the new weights."""
    model = load_model("tiny", dtype="bfloat16", device="cpu")
    addresses = [weight.data_ptr() for weight in model.parameters()]
    view = model.model.norm.weight.detach()[:3]
    masters = MasterWeights(model)
    with torch.no_grad():
        for master in masters.parameters():
            master.fill_(0.3)
    assert not torch.equal(view, torch.full((3,), 0.3).bfloat16())
    masters.sync_to_model()
    assert torch.equal(view, torch.full((3,), 0.3).bfloat16())
    assert [weight.data_ptr() for weight in model.parameters()] == addresses
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_an_existing_gradient_is_moved_to_the_master():
    layer = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    layer.weight.grad = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    masters = MasterWeights(layer)
    assert layer.weight.grad is None
    assert next(masters.parameters()).grad.tolist() == [[1.0, 2.0]]


def test_after_close_gradients_are_ordinary():
    layer = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    masters = MasterWeights(layer)
    layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is None
    masters.close()
    layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0, 1.0]]
    assert next(masters.parameters()).grad.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_resuming_is_exact(tmp_path, dtype):
    unbroken = load_model("tiny", dtype=dtype, device="cpu")
    masters = MasterWeights(unbroken)
    optimizer = train(unbroken, masters.parameters(), 3, masters.sync_to_model, lr=1e-4)
    write_safetensors(tmp_path / "masters.safetensors", masters.state_dict())
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    train(unbroken, (), 3, masters.sync_to_model, optimizer=optimizer)

    resumed = load_model("tiny", dtype=dtype, device="cpu", seed=9)
    again = MasterWeights(resumed)
    again.load_state_dict(load_file(tmp_path / "masters.safetensors"))
    optimizer = torch.optim.AdamW(again.parameters(), lr=1.0)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train(resumed, (), 3, again.sync_to_model, optimizer=optimizer)
    for (name, a), (other, b) in zip(masters.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(unbroken.parameters(), resumed.parameters(), strict=True))


def test_loading_syncs_the_model():
    source, target = (load_model("tiny", dtype="bfloat16", device="cpu", seed=seed) for seed in (1, 2))
    MasterWeights(target).load_state_dict(MasterWeights(source).state_dict())
    assert torch.equal(source(IDS).logits, target(IDS).logits)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state: state.pop("weight"), "weight is missing"),
        (lambda state: state.update(wheight=torch.ones(1)), "wheight is not a trainable parameter here"),
        (lambda state: state.update(weight=torch.ones(2, 2)), r"weight is .* \(2, 2\) instead of .* \(1, 2\)"),
        (
            lambda state: state.update(weight=torch.ones(1, 2).bfloat16()),
            r"weight is torch.bfloat16 \(1, 2\) instead of torch.float32",
        ),
    ],
)
def test_masters_that_do_not_fit_change_nothing(change, problem):
    layer = nn.Linear(2, 1, dtype=torch.bfloat16)
    masters = MasterWeights(layer)
    state = {name: torch.full_like(value, 7.0) for name, value in masters.state_dict().items()}
    change(state)
    before = {name: value.clone() for name, value in masters.state_dict().items()}
    with pytest.raises(CheckpointError, match=problem):
        masters.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in masters.state_dict().items())
    assert torch.equal(layer.weight.detach().float(), before["weight"])


def test_many_problems_are_counted():
    masters = MasterWeights(load_model("tiny", dtype="bfloat16", device="cpu"))
    with pytest.raises(CheckpointError, match=r"these 20 master weights do not fit the model: .* is missing; "):
        masters.load_state_dict({})


def test_models_that_cannot_be_trained():
    with pytest.raises(InputError, match="no trainable parameter"):
        MasterWeights(tiny_model().requires_grad_(False))
    with pytest.raises(InputError, match=r"the parameter weight is torch.complex64, which cannot be trained"):
        MasterWeights(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(InputError, match="the parameter weight has no values yet"):
        MasterWeights(nn.Linear(2, 2, device="meta"))
