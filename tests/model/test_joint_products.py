"""One product for several weights: the same results, and the same parameters for everything else."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.generate import Engine, Sampling
from groupwise.model.export import export_model
from groupwise.model.handle import prepare
from groupwise.model.joint_products import JointProducts
from groupwise.model.logprobs import completion_logps
from groupwise.model.lora import LoraSettings, add_lora
from groupwise.model.precision import MasterWeights, set_precision
from tests.model.models import ARCHITECTURES, quick, random_groups, tiny

PROMPTS, COMPLETIONS = random_groups([5, 9, 3], [[4, 2], [1], [6, 6]])
SAMPLING = Sampling(max_new_tokens=8, seed=3)


class Products(TorchDispatchMode):
    """Counts matrix products with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear)
        return function(*args, **(kwargs or {}))


def intact(joint: JointProducts) -> int:
    return sum(group.intact() for group in joint.groups)


@pytest.mark.parametrize("name", quick(ARCHITECTURES, "llama_all_heads", "qwen3", "gemma2"))
def test_joint_products_equal_separate_ones(name):
    model = tiny(name)
    state = copy.deepcopy(model.state_dict())
    wanted = Engine(tiny(name)).generate(PROMPTS, 3, SAMPLING)
    engine = Engine(model, joint_products=True)
    got = engine.generate(PROMPTS, 3, SAMPLING)
    assert intact(engine._joint_products) == 6  # two groups in each of three layers
    assert torch.equal(got.ids, wanted.ids)
    torch.testing.assert_close(got.logps, wanted.logps, rtol=0, atol=2e-6)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any("joint" in key for module in model.modules() for key in vars(module))


@torch.no_grad()
def test_four_products_per_layer_instead_of_seven():
    model = tiny("llama")
    joint = JointProducts(model)
    ids = torch.arange(4)[None]
    with Products() as separate:
        wanted = model(ids).logits
    with joint.active(), Products() as together:
        got = model(ids).logits
    assert (separate.count, together.count) == (3 * 7 + 1, 3 * 4 + 1)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(model(ids).logits, wanted)


@torch.no_grad()
def test_a_layer_with_another_input_computes_its_own_product():
    layers = nn.ModuleDict({name: nn.Linear(6, width) for name, width in (("gate_proj", 3), ("up_proj", 4))})
    joint = JointProducts(layers)
    x, other = torch.randn(2, 5, 6)
    wanted = layers["gate_proj"](x), layers["up_proj"](other), layers["up_proj"](x)
    with joint.active():
        got = layers["gate_proj"](x), layers["up_proj"](other), layers["up_proj"](x)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def train(model: nn.Module, generate: bool) -> dict[str, Tensor]:
    """Three steps of AdamW, with sampling in between."""
    handle = prepare(model, compile=False)
    engine = Engine(handle, joint_products=True) if generate else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        completion_logps(handle, PROMPTS, COMPLETIONS).logps.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if engine is not None:
            got = engine.generate(PROMPTS, 2, SAMPLING)
            assert intact(engine._joint_products) == 6
            assert torch.equal(got.ids, Engine(copy.deepcopy(model)).generate(PROMPTS, 2, SAMPLING).ids)
    return dict(model.named_parameters())


def test_training_updates_the_joint_weights():
    wanted, got = train(tiny("llama"), generate=False), train(tiny("llama"), generate=True)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_master_weights_are_synced_into_the_joint_weights():
    model = tiny("llama", torch.float32)
    set_precision(model, torch.bfloat16)
    engine = Engine(prepare(model, compile=False), joint_products=True)
    before = engine.generate(PROMPTS, 2, SAMPLING)
    with closing(MasterWeights(model)) as masters:
        for parameter in masters.parameters():
            parameter.data.mul_(1.5)
        masters.sync_to_model()
    after = engine.generate(PROMPTS, 2, SAMPLING)
    assert intact(engine._joint_products) == 6
    assert not torch.equal(before.logps, after.logps)
    joint = engine._joint_products.groups[0]
    assert torch.equal(joint.weight, torch.cat([layer.weight.detach() for layer in joint.layers]))


def test_an_export_has_each_weight_under_its_name(tmp_path):
    model = tiny("qwen2", torch.float32)
    export_model(model, tmp_path / "before")
    JointProducts(model)
    export_model(model, tmp_path / "after")
    model.save_pretrained(tmp_path / "transformers")
    wanted = load_file(tmp_path / "before" / "model.safetensors")
    for folder in ("after", "transformers"):
        got = load_file(tmp_path / folder / "model.safetensors")
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_layers_with_an_adapter_are_left_alone():
    adapted = add_lora(tiny("llama"), LoraSettings(rank=2, targets="q_proj"))
    joint = JointProducts(adapted)
    assert [len(group.layers) for group in joint.groups] == [2, 2, 2]  # gate and up


@torch.no_grad()
def test_an_adapter_that_is_added_later_works():
    model = tiny("llama")
    JointProducts(model)  # joined, but no longer in use
    adapted = add_lora(model, LoraSettings(rank=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    wanted = Engine(prepare(copy.deepcopy(adapted))).generate(PROMPTS, 2, SAMPLING)
    got = Engine(prepare(adapted), joint_products=True).generate(PROMPTS, 2, SAMPLING)
    assert torch.equal(got.ids, wanted.ids)


@torch.no_grad()
@pytest.mark.parametrize("damage", ["dtype", "replaced", "layer", "wrapped"])
def test_weights_that_were_replaced_are_computed_layer_by_layer(damage):
    model = tiny("llama", torch.float32)
    joint = JointProducts(model)
    attention = model.model.layers[0].self_attn
    if damage == "dtype":
        model.double()
    elif damage == "replaced":
        attention.k_proj.weight.data = torch.randn_like(attention.k_proj.weight)
    elif damage == "layer":
        attention.k_proj.weight = nn.Parameter(torch.randn_like(attention.k_proj.weight))
    else:
        forward = attention.k_proj.forward
        attention.k_proj.forward = lambda x: 2 * forward(x)
    assert intact(joint) == (0 if damage == "dtype" else 5)
    wanted = model(torch.arange(5)[None]).logits
    with joint.active():
        torch.testing.assert_close(model(torch.arange(5)[None]).logits, wanted)


def test_engines_of_one_model_share_the_joint_weights():
    model = tiny("llama_all_heads")
    first, second = JointProducts(model), JointProducts(model)
    assert intact(first) == intact(second) == 6
    for one, other in zip(first.groups, second.groups, strict=True):
        assert one.weight.data_ptr() == other.weight.data_ptr()
        assert (one.bias is None) == (other.bias is None) == (len(one.layers) == 2)
        assert torch.equal(one.weight, torch.cat([layer.weight for layer in one.layers]))


def test_shared_weights_are_left_alone():
    model = tiny("llama")
    first, second = (layer.mlp for layer in model.model.layers[:2])
    second.gate_proj.weight = first.gate_proj.weight
    assert len(JointProducts(model).groups) == 4
    assert first.gate_proj.weight is second.gate_proj.weight


@pytest.mark.slow
def test_compiled_layers_use_joint_products():
    model = tiny("llama", torch.float32)
    wanted = Engine(prepare(copy.deepcopy(model), compile=False)).generate(PROMPTS, 2, SAMPLING)
    handle = prepare(model, compile=True)
    got = Engine(handle, joint_products=True).generate(PROMPTS, 2, SAMPLING)
    assert handle.compiled is not None
    assert handle.compiled.calls  # no layer failed to compile
    assert torch.equal(got.ids, wanted.ids)
