"""Exported folders: transformers loads the trained model from them."""

from __future__ import annotations

import json
import resource
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from groupwise.errors import CheckpointError, InputError, RunDirError
from groupwise.model.export import export_model, iter_full_weights
from groupwise.model.handle import prepare
from groupwise.model.load import load_model, load_model_and_tokenizer
from groupwise.model.lora import LoraSettings, add_lora, is_lora
from groupwise.model.precision import MasterWeights
from groupwise.model.tiny import tiny_model, tiny_tokenizer
from groupwise.rundir import verify_manifest
from tests.weights import smollm2

IDS = torch.tensor([list(b"as it was")])


def tiny(dtype=torch.float32, seed=0):
    return load_model("tiny", dtype=dtype, device="cpu", seed=seed)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def moved(model, by=1e-4):
    """Masters that differ from the model's weights, often by less than bfloat16 can represent."""
    masters = MasterWeights(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for master in masters.parameters():
            master.add_(torch.randn(master.shape, generator=generator), alpha=by)
    masters.sync_to_model()
    return masters


def adapted(dtype=torch.float32, **settings):
    """A tiny model with an adapter that changes its outputs."""
    model = add_lora(tiny(dtype), LoraSettings(rank=4, **settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_a_model_round_trips(tmp_path, dtype):
    model = tiny(dtype, seed=2)
    folder = export_model(model, tmp_path / "out", tokenizer=tiny_tokenizer())
    again = plain(folder)
    assert again.dtype == dtype
    assert torch.equal(logits(again), logits(model))
    assert AutoTokenizer.from_pretrained(folder)("größer").input_ids == list("größer".encode())
    assert again.generation_config.eos_token_id == 258
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    } <= set(verify_manifest(folder)["files"])


def test_a_chosen_precision(tmp_path):
    model = tiny_model()
    again = plain(export_model(model, tmp_path / "out", dtype="bfloat16"))
    assert again.dtype == torch.bfloat16
    assert same(dict(again.named_parameters()), {n: w.bfloat16() for n, w in model.named_parameters()})
    assert model.dtype == torch.float32


def test_masters_are_written_exactly(tmp_path):
    model = tiny(torch.bfloat16)
    masters = moved(model)
    before = state(model)
    again = plain(export_model(model, tmp_path / "exact", masters=masters))
    assert again.dtype == torch.float32
    assert same(dict(again.named_parameters()), masters.state_dict())
    assert not torch.equal(again.model.norm.weight, model.model.norm.weight.float())
    rounded = plain(export_model(model, tmp_path / "rounded", masters=masters, dtype="bfloat16"))
    assert torch.equal(logits(rounded), logits(model))
    assert same(state(model), before)


def test_weights_without_masters_are_those_of_the_model(tmp_path):
    """Partial fine-tuning: the rest has no masters and is written from the model."""
    model = tiny(torch.bfloat16).requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    masters = moved(model)
    again = dict(plain(export_model(model, tmp_path / "out", masters=masters)).named_parameters())
    master_values = masters.state_dict()
    for name, weight in model.named_parameters():
        assert torch.equal(again[name], master_values[name] if name in master_values else weight.float())


def test_masters_of_another_model(tmp_path):
    with pytest.raises(InputError, match="belong to another model"):
        export_model(tiny_model(), tmp_path / "out", masters=MasterWeights(tiny_model()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings", [{"rslora": True}, pytest.param({"targets": ("q_proj", "down_proj")}, marks=pytest.mark.slow)]
)
def test_a_merged_model_needs_no_peft(tmp_path, settings):
    model = adapted(**settings)
    before, expected = state(model), logits(model)
    again = plain(export_model(model, tmp_path / "out"))
    assert type(again) is LlamaForCausalLM
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert not any("lora" in name for name in again.state_dict())
    assert (expected - logits(tiny_model())).abs().max() > 0.1
    assert torch.allclose(logits(again), expected, atol=1e-5)
    assert same(state(model), before)
    assert is_lora(model)
    assert torch.equal(logits(model), expected)


def test_merging_by_hand(tmp_path):
    """W + alpha / rank · B · A, computed in float32 from the bfloat16 parts and rounded once."""
    model = adapted(torch.bfloat16, alpha=8)
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    merged = layer.base_layer.weight.float() + 8 / 4 * (b @ a)
    unrounded = plain(export_model(model, tmp_path / "float32", dtype="float32"))
    assert torch.allclose(unrounded.model.layers[0].mlp.up_proj.weight, merged, rtol=0, atol=1e-8)
    rounded = plain(export_model(model, tmp_path / "bfloat16"))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(
        rounded.model.layers[0].mlp.up_proj.weight, unrounded.model.layers[0].mlp.up_proj.weight.bfloat16()
    )


def test_merging_with_masters(tmp_path):
    model = adapted(torch.bfloat16)
    masters = moved(model)
    again = plain(export_model(model, tmp_path / "out", masters=masters))
    layer = model.get_base_model().model.layers[1].self_attn.o_proj
    master_values = masters.state_dict()
    a, b = (master_values[f"base_model.model.model.layers.1.self_attn.o_proj.lora_{x}.default.weight"] for x in "AB")
    merged = layer.base_layer.weight.float() + 2 * 32 / 4 / 2 * (b @ a)
    assert again.dtype == torch.float32
    assert torch.allclose(again.model.layers[1].self_attn.o_proj.weight, merged, rtol=0, atol=1e-7)


def test_the_adapter_only(tmp_path):
    model = adapted(torch.bfloat16)
    masters = moved(model)
    folder = export_model(model, tmp_path / "exact", masters=masters, merge=False, tokenizer=tiny_tokenizer())
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == len(masters.state_dict())
    for name, master in masters.named_parameters():
        assert torch.equal(tensors[name.replace(".default", "")], master)
    assert "README.md" not in {path.name for path in folder.iterdir()}
    again, tokenizer = load_model_and_tokenizer(folder, dtype="bfloat16", device="cpu")
    assert torch.equal(logits(again), logits(model))
    assert tokenizer("a").input_ids == [97]
    asis = load_file(export_model(model, tmp_path / "asis", merge=False) / "adapter_model.safetensors")
    assert {value.dtype for value in asis.values()} == {torch.bfloat16}


def test_no_adapter_to_export(tmp_path):
    with pytest.raises(InputError, match=r"merge=False exports the adapter only, but this model has none"):
        export_model(tiny_model(), tmp_path / "out", merge=False)


def test_the_attention_implementation_is_not_exported(tmp_path):
    model = tiny_model()
    prepare(model)
    model.generation_config.max_new_tokens = 7
    folder = export_model(model, tmp_path / "out", tokenizer=tiny_tokenizer())
    for path in folder.glob("*.json"):
        assert "groupwise" not in path.read_text()
    assert model.config._attn_implementation == "groupwise"
    assert plain(folder).config._attn_implementation != "groupwise"
    assert plain(folder).generation_config.max_new_tokens == 7


def test_no_local_path_is_written(tmp_path):
    first = export_model(tiny_model(), tmp_path / "first", tokenizer=tiny_tokenizer())
    second = export_model(
        *[load_model_and_tokenizer(first)[0]], tmp_path / "second", tokenizer=load_model_and_tokenizer(first)[1]
    )
    for path in second.glob("*.json"):
        assert str(tmp_path) not in path.read_text()


def test_an_invalid_generation_config_is_repaired(tmp_path):
    model = tiny_model()
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.6
    again = plain(export_model(model, tmp_path / "out"))
    assert again.generation_config.temperature == 0.6
    assert model.generation_config.do_sample is False


def test_untied_embeddings(tmp_path):
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = add_lora(LlamaForCausalLM(config).eval(), LoraSettings(rank=2, targets=("lm_head", "q_proj")))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    again = plain(export_model(model, tmp_path / "out"))
    assert torch.allclose(logits(again), logits(model), atol=1e-5)


def test_a_folder_is_never_overwritten(tmp_path):
    folder = export_model(tiny_model(1), tmp_path / "out")
    with pytest.raises(RunDirError, match="exists already"):
        export_model(tiny_model(2), folder)
    assert torch.equal(logits(plain(folder)), logits(tiny_model(1)))


def test_an_unknown_precision(tmp_path):
    with pytest.raises(InputError, match="unknown dtype 'bf16'"):
        export_model(tiny_model(), tmp_path / "out", dtype="bf16")
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_with_nan_is_not_merged(tmp_path):
    model = adapted()
    with torch.no_grad():
        next(weight for name, weight in model.named_parameters() if "lora_B" in name)[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"could not be written: NaNs detected"):
        export_model(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path):
    """A limit on the file size simulates it: the weights do not fit, the config does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"out could not be written: .*untouched; make room"):
            export_model(tiny_model(), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_real_weights(tmp_path):
    """SmolLM2 after one step with masters: the folder holds the float32 masters."""
    model, tokenizer = load_model_and_tokenizer(smollm2(), dtype="float32", device="cpu")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    masters = MasterWeights(model)
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(masters.parameters(), lr=1e-2).step()
    folder = export_model(model, tmp_path / "out", tokenizer=tokenizer, masters=masters)
    again, loaded = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert loaded("The capital of France is").input_ids == ids[0].tolist()
    assert loaded.chat_template == tokenizer.chat_template
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert load_model(folder, device="cpu", dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("rslora", [False, True])
def test_full_weights_are_those_of_the_exported_folder_with_the_adapter_merged(tmp_path, rslora):
    model = adapted(rslora=rslora)
    written = load_file(export_model(model, tmp_path / "out") / "model.safetensors")
    for source in (model, prepare(model).model):  # the PEFT model, and the model inside it
        weights = dict(iter_full_weights(source))
        assert weights.keys() == written.keys()  # the tied head comes once
        for name, value in weights.items():
            torch.testing.assert_close(value, written[name], rtol=1e-6, atol=1e-7)


def test_full_weights_of_a_plain_model_share_its_memory():
    model = tiny(torch.bfloat16)
    weights = dict(iter_full_weights(model))
    assert set(weights) == {name for name, _ in model.named_parameters()}
    assert set(dict(iter_full_weights(model, repeat_tied=True))) == {*weights, "lm_head.weight"}
    assert all(weights[name].data_ptr() == value.data_ptr() for name, value in model.named_parameters())
