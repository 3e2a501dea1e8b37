"""LoRA: a new adapter changes nothing, the base is the reference, and errors list the choices."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.errors import CheckpointError, InputError, MissingExtraError
from groupwise.model.export import export_model
from groupwise.model.load import load_model
from groupwise.model.lora import LoraSettings, adapter_off, add_lora, is_lora, load_adapter
from groupwise.model.precision import MasterWeights
from groupwise.model.tiny import tiny_model
from tests.weights import smollm2

IDS = torch.tensor([list(b"Which of these?")])


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def adapters(model):
    return {name: weight for name, weight in model.named_parameters() if "lora_" in name}


def trained(model, steps=3, lr=1e-2):
    """The model after some steps of training its adapter to repeat IDS."""
    masters = MasterWeights(model)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        logps = model(IDS).logits[:, :-1].float().log_softmax(-1)
        (-logps.gather(-1, IDS[:, 1:, None]).mean()).backward()
        optimizer.step()
        masters.sync_to_model()
    masters.close()
    return model


def test_a_new_adapter_changes_nothing():
    before = logits(tiny_model())
    model = add_lora(tiny_model(), LoraSettings(rank=4))
    assert torch.equal(logits(model), before)
    assert is_lora(model)
    assert not model.training
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == set(adapters(model))


def test_every_linear_layer_except_the_head_has_one():
    names = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapters(add_lora(tiny_model()))}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("targets", ["v_proj", ["q_proj", "v_proj"], ("layers.0.mlp.up_proj",)])
def test_chosen_layers(targets):
    names = {
        name.split(".lora_")[0].split("model.model.")[1]
        for name in adapters(add_lora(tiny_model(), LoraSettings(targets=targets)))
    }
    wanted = (targets,) if isinstance(targets, str) else targets
    assert names
    assert all(name.endswith(tuple(wanted)) for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_has_the_dtype_of_its_model(dtype):
    model = add_lora(load_model("tiny", dtype=dtype, device="cpu"))
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    masters = MasterWeights(model)
    assert {master.dtype for master in masters.parameters()} == {torch.float32}
    assert set(masters.state_dict()) == set(adapters(model))


def test_the_reference_is_the_base():
    before = logits(tiny_model())
    base = {name: weight.clone() for name, weight in tiny_model().named_parameters()}
    model = trained(add_lora(tiny_model(), LoraSettings(rank=4)))
    adapted = logits(model)
    assert not torch.allclose(adapted, before, atol=1e-2)
    with adapter_off(model):
        assert torch.equal(logits(model), before)
        with adapter_off(model):
            assert torch.equal(logits(model), before)
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), adapted)
    inner = {name.replace(".base_layer", ""): weight for name, weight in model.get_base_model().named_parameters()}
    assert all(torch.equal(inner[name], weight) for name, weight in base.items())


def test_training_continues_after_using_the_reference():
    model = add_lora(tiny_model(), LoraSettings(rank=4))
    with pytest.raises(RuntimeError, match="stop"), adapter_off(model):
        raise RuntimeError("stop")
    assert all(weight.requires_grad for weight in adapters(model).values())
    before = logits(model)
    assert not torch.equal(logits(trained(model)), before)


def test_initial_values_come_from_the_seed():
    def first(seed):
        return torch.cat([weight.flatten() for weight in adapters(add_lora(tiny_model(), seed=seed)).values()])

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one = first(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(first(1), one)
    assert not torch.equal(first(2), one)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8 / 4), (True, 8 / 2)])
def test_scaling(rslora, scale):
    model = add_lora(tiny_model(), LoraSettings(rank=4, alpha=8, rslora=rslora, targets="q_proj"))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.5)
    x = torch.randn(1, 128)
    by_hand = (
        x @ layer.base_layer.weight.T
        + scale * (x @ layer.lora_A["default"].weight.T) @ layer.lora_B["default"].weight.T
    )
    assert torch.allclose(layer(x), by_hand, atol=1e-5)


def test_a_model_without_adapter_has_no_reference():
    with pytest.raises(InputError, match="no LoRA adapter that could be disabled"), adapter_off(tiny_model()):
        pass


def test_a_second_adapter_is_refused():
    with pytest.raises(InputError, match="has a LoRA adapter already"):
        add_lora(add_lora(tiny_model()))


@pytest.mark.parametrize("targets", [("nothing",), ("q_proj", "w_proj")])
def test_a_missing_target(targets):
    with pytest.raises(InputError, match=rf"the model has no layer '{targets[-1]}'.*down_proj.*q_proj.*v_proj"):
        add_lora(tiny_model(), LoraSettings(targets=targets))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_tied_weight_cannot_be_a_target(target):
    with pytest.raises(InputError, match=rf"the LoRA target .*{target} is tied"):
        add_lora(tiny_model(), LoraSettings(targets=("q_proj", target)))


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"rank": 0}, "rank .* at least 1, got 0"),
        ({"rank": 2.5}, "rank .* got 2.5"),
        ({"alpha": 0}, "alpha .* above 0"),
        ({"alpha": float("nan")}, "alpha .* above 0"),
        ({"dropout": 1.0}, "dropout .* below 1"),
        ({"targets": ()}, "targets .* 'all-linear' or names"),
        ({"targets": [1]}, "targets .* 'all-linear' or names"),
    ],
)
def test_invalid_settings(setting, problem):
    with pytest.raises(InputError, match=problem):
        LoraSettings(**setting)


def test_without_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"LoRA needs the package 'peft'.*groupwise\[lora\]"):
        add_lora(tiny_model())
    assert not is_lora(tiny_model())


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = trained(load_model("tiny", seed=3, lora=LoraSettings(rank=4), dtype="float32", device="cpu"))
    return export_model(model, tmp_path_factory.mktemp("lora") / "adapter", merge=False), logits(model)


@pytest.fixture
def saved(exported, tmp_path):
    """The folder of a trained adapter on the tiny model of seed 3, and its logits."""
    return shutil.copytree(exported[0], tmp_path / "adapter"), exported[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_adapter_finds_its_base(saved, dtype):
    folder, expected = saved
    model = load_model(folder, dtype=dtype, device="cpu")
    assert is_lora(model)
    assert not model.training
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == set(adapters(model))
    if dtype == "float32":
        assert torch.equal(logits(model), expected)
    else:
        assert torch.allclose(logits(model), expected, atol=0.1)
    with adapter_off(model):
        assert torch.allclose(logits(model), logits(tiny_model(3)), atol=0.05)


def test_a_saved_adapter_can_be_trained_on(saved):
    folder, expected = saved
    assert not torch.equal(logits(trained(load_model(folder, dtype="float32", device="cpu"))), expected)


def test_lora_on_a_saved_adapter_is_refused(saved):
    with pytest.raises(InputError, match="is a LoRA adapter already; load it without lora="):
        load_model(saved[0], lora=LoraSettings())


def rewrite(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"base_model_name_or_path": None}, "does not name its base model"),
        (
            {"base_model_name_or_path": "/no/such/model"},
            r"is for the model /no/such/model, which was not found: .*If it has moved",
        ),
        ({"peft_type": "IA3"}, "holds a 'IA3' adapter; only LoRA"),
        ({"r": 8}, "does not fit the model tiny:3: .*size mismatch"),
        ({"target_modules": ["no_proj"]}, "does not fit the model tiny:3"),
    ],
)
def test_an_adapter_with_wrong_settings(saved, settings, problem):
    rewrite(saved[0], **settings)
    with pytest.raises((InputError, CheckpointError), match=rf"(?s){problem}"):
        load_model(saved[0])


def test_an_adapter_of_an_adapter(saved, tmp_path):
    folder = saved[0]
    other = export_model(load_model(folder), tmp_path / "other", merge=False)
    rewrite(other, base_model_name_or_path=str(folder))
    with pytest.raises(InputError, match="is for another adapter"):
        load_model(other)


def test_an_incomplete_adapter(saved):
    file = saved[0] / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"lacks 1 of 28 tensors, the first is .*lora_A"):
        load_model(saved[0])
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is damaged"):
        load_model(saved[0])
    file.unlink()
    (saved[0] / "adapter_model.bin").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors.*pickle"):
        load_model(saved[0])


@pytest.mark.slow
def test_an_adapter_for_another_model(saved):
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_adapter(load_model(smollm2(), dtype="float32", device="cpu"), saved[0])


@pytest.mark.slow
def test_an_adapter_on_real_weights(tmp_path):
    """SmolLM2 with an adapter: the reference is the base, and the merged export equals the adapted model."""
    base = load_model(smollm2(), dtype="float32", device="cpu")
    before = logits(base)
    model = trained(add_lora(base, LoraSettings(rank=8, targets=("q_proj", "v_proj", "down_proj"))), steps=2, lr=1e-3)
    adapted = logits(model)
    assert (adapted - before).abs().max() > 1
    with adapter_off(model):
        assert torch.equal(logits(model), before)
    merged = load_model(export_model(model, tmp_path / "merged"), dtype="float32", device="cpu")
    assert not is_lora(merged)
    assert torch.allclose(logits(merged), adapted, atol=1e-3)
    assert torch.equal(logits(model), adapted)  # the export has not changed it
