"""GGUF files, written by the tests from models with known outputs."""

from __future__ import annotations

import importlib.util
import shutil

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from groupwise.errors import CheckpointError, InputError, MissingExtraError
from groupwise.model.export import export_model
from groupwise.model.gguf import _check_header, load_gguf
from groupwise.model.weights import fetch
from groupwise.rundir import verify_manifest

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "Ġ 1", "a b", "Â ½", "Ġ Â"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(TOKENS), max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rows for rotary positions."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, *, kind="F32", without=(), architecture="llama", **tokenizer):
    """Write a Llama as a GGUF file with matrices of ``kind``; further keywords are tokenizer settings."""
    config = model.config
    settings = {"pre": "smollm", "bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 2, **tokenizer}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(settings.pop("pre"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(MERGES)
    writer.add_chat_template(TEMPLATE)
    for key, value in settings.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    values = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" or name in without:
            continue
        value = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            value = permuted(value, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        stored = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
        blocks = gguf.quantize(value, stored)
        writer.add_tensor(gguf_name(name), blocks, raw_dtype=stored)
        values[name] = gguf.dequantize(blocks, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture(scope="module")
def original():
    return tiny_llama()


@pytest.fixture(scope="module")
def plain(tmp_path_factory, original):
    path = tmp_path_factory.mktemp("gguf") / "plain.gguf"
    write_gguf(path, original)
    return path


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(12)[None] % model.config.vocab_size).logits


def test_the_outputs_are_those_of_the_original(plain, original):
    model, _ = load_gguf(plain)
    assert model.dtype == torch.float32
    torch.testing.assert_close(logits_of(model), logits_of(original), rtol=0, atol=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("Q4_1", torch.float32),
        ("Q8_0", torch.bfloat16),
        pytest.param("F16", torch.float32, marks=pytest.mark.slow),
        pytest.param("Q4_1", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_blocks_are_dequantised_exactly_and_rounded_once(tmp_path, original, kind, dtype):
    stored = write_gguf(tmp_path / "x.gguf", original, kind=kind)
    model, _ = load_gguf(tmp_path / "x.gguf", dtype)
    state = model.state_dict()
    for name, value in stored.items():
        got = state[name]
        if "q_proj" in name or "k_proj" in name:
            heads = 4 if "q_proj" in name else 2
            got = torch.from_numpy(permuted(got.float().numpy(), heads)).to(dtype)
        assert got.dtype == dtype
        assert torch.equal(got, torch.from_numpy(value.copy()).to(dtype)), name
    assert not torch.equal(
        state["model.layers.0.mlp.up_proj.weight"].float(), original.model.layers[0].mlp.up_proj.weight
    )


def test_it_can_be_trained_and_saved(tmp_path, original):
    """transformers refuses both for a quantised model."""
    write_gguf(tmp_path / "x.gguf", original, kind="Q8_0")
    model, _ = load_gguf(tmp_path / "x.gguf")
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")
    before = logits_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(12)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    after = logits_of(model)
    assert not torch.equal(before, after)
    model.save_pretrained(tmp_path / "trained")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "trained")), after)


def test_the_folder_holds_the_same_model(tmp_path, plain, original):
    exported, direct = load_gguf(plain)
    folder = export_model(exported, tmp_path / "folder", tokenizer=direct)
    verify_manifest(folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "chat_template.jinja", "config.json", "generation_config.json", "manifest.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits_of(model), logits_of(original))
    assert "quantization" not in (folder / "config.json").read_text()
    saved = AutoTokenizer.from_pretrained(folder)
    for text in ("", "ab 112 <|im_end|>", "tab\tünï 🙂\n\n  x", "½ ½"):
        assert saved(text).input_ids == direct(text).input_ids
        assert saved.decode(saved(text).input_ids) == text


def test_special_tokens(plain):
    model, tokenizer = load_gguf(plain)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert model.generation_config.eos_token_id == 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == (
        "<|im_start|>user\nab<|im_end|>\n"
    )
    assert tokenizer.tokenize("<|im_start|>ab") == ["<|im_start|>", "ab"]


@pytest.mark.parametrize("add", [True, *(pytest.param(add, marks=pytest.mark.slow) for add in (False, None))])
def test_bos_is_added_if_the_file_says_so(tmp_path, original, add):
    write_gguf(tmp_path / "x.gguf", original, **({} if add is None else {"add_bos_token": add}))
    _, direct = load_gguf(tmp_path / "x.gguf")
    direct.save_pretrained(tmp_path / "folder")
    expected = [1] if add else []
    for tokenizer in (direct, AutoTokenizer.from_pretrained(tmp_path / "folder")):
        assert tokenizer("ab").input_ids == [*expected, TOKENS.index("ab")]
        assert tokenizer("ab", add_special_tokens=False).input_ids == [TOKENS.index("ab")]


def test_both_eos_tokens_of_a_file_are_used(tmp_path, original):
    write_gguf(tmp_path / "x.gguf", original, eot_token_id=0)
    folder = export_model(load_gguf(tmp_path / "x.gguf")[0], tmp_path / "folder")
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == [2, 0]


def test_numbers_are_split_into_digits_for_smollm(tmp_path, original):
    """SmolLM's tokenizer splits digits before merging: "12" and " 1" are not merged."""
    write_gguf(tmp_path / "smollm.gguf", original)
    write_gguf(tmp_path / "other.gguf", original, pre="gpt-2")
    _, smollm = load_gguf(tmp_path / "smollm.gguf")
    _, other = load_gguf(tmp_path / "other.gguf")
    assert smollm.tokenize("12 1 ½") == ["1", "2", "Ġ", "1", "Ġ", "Â½"]
    assert other.tokenize("12 1") == ["12", "Ġ1"]


def test_a_file_that_is_not_gguf(tmp_path):
    for content in (b"", b"GGU", b"PK\x03\x04 a zip archive"):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x.gguf is not a readable GGUF file: .*download it again"):
            load_gguf(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"none.gguf is not a readable GGUF file: No such file"):
        load_gguf(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="is not a readable GGUF file: Is a directory"):
        load_gguf(tmp_path)


def test_a_truncated_file(tmp_path, plain):
    data = plain.read_bytes()
    header = gguf.GGUFReader(plain).data_offset
    cuts = [4, 10, 24, 30, 100, 1000, header // 2, header - 1, header, header + 1, len(data) // 2, len(data) - 100]
    for cut in cuts:
        (tmp_path / "x.gguf").write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"is not a readable GGUF file: it is truncated.*download it again"):
            load_gguf(tmp_path / "x.gguf")


@pytest.mark.slow
def test_a_damaged_header_gives_a_clear_error(tmp_path, plain):
    """With any byte of the header changed, the result is metadata or a CheckpointError."""
    data = plain.read_bytes()
    header = gguf.GGUFReader(plain).data_offset
    refused = 0
    for position in [*range(4, 200), *range(200, header, 37)]:
        changed = bytearray(data)
        changed[position] ^= 0xFF
        (tmp_path / "x.gguf").write_bytes(changed)
        try:
            _check_header(tmp_path / "x.gguf")
        except CheckpointError:
            refused += 1
    assert refused > 50


def test_a_file_of_the_same_name_in_the_working_directory_is_not_used(tmp_path, plain, original, monkeypatch):
    other = tiny_llama()
    with torch.no_grad():
        other.model.norm.weight.fill_(2.0)
    write_gguf(tmp_path / plain.name, other)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(logits_of(load_gguf(plain)[0]), logits_of(original))


def test_other_versions(tmp_path, plain):
    data = bytearray(plain.read_bytes())
    data[4] = 9
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match="version 9"):
        load_gguf(tmp_path / "x.gguf")


def test_missing_weights_are_an_error(tmp_path, original):
    write_gguf(tmp_path / "x.gguf", original, without={"model.layers.1.mlp.up_proj.weight"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights of its model \(model.layers.1.mlp.up_proj"):
        load_gguf(tmp_path / "x.gguf")


@pytest.mark.slow
def test_an_unknown_architecture(tmp_path, original):
    write_gguf(tmp_path / "x.gguf", original, architecture="gpt5")
    with pytest.raises(CheckpointError, match="of the architecture 'gpt5', which transformers could not load"):
        load_gguf(tmp_path / "x.gguf")


def test_an_impossible_dtype(plain):
    with pytest.raises(InputError, match=r"dtype is torch.int8; a GGUF file can be loaded in torch.float32"):
        load_gguf(plain, torch.int8)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_the_packages_it_needs(plain, monkeypatch, tmp_path, package):
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else real(name))
    message = rf"reading a GGUF file needs the package '{package}'; install it with: pip install 'groupwise\[gguf\]'"
    with pytest.raises(MissingExtraError, match=message):
        load_gguf(plain)
    with pytest.raises(MissingExtraError, match=message):
        fetch("smollm2-135m", cache=tmp_path)  # before anything is downloaded
    assert not (tmp_path / "downloads").exists()


def test_the_gguf_package_is_restored(plain, tmp_path, original):
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    load_gguf(plain)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == (reader, names)
    # A replaced file is read again.
    path = tmp_path / "x.gguf"
    shutil.copyfile(plain, path)
    load_gguf(path)
    path.unlink()
    other = tiny_llama()
    with torch.no_grad():
        other.model.norm.weight.fill_(2.0)
    write_gguf(path, other)
    assert load_gguf(path)[0].model.norm.weight.eq(2.0).all()
