"""Models that claim more than they are: refused before anything is built, with a sentence."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.errors import CheckpointError, GroupwiseError, InputError
from groupwise.generate import Engine, Sampling
from groupwise.model import checks, load_model, load_tokenizer, prepare
from groupwise.model.checks import check_finite, check_memory
from groupwise.model.export import export_model
from groupwise.model.lora import LoraSettings, add_lora, load_adapter
from groupwise.model.tiny import tiny_model, tiny_tokenizer

WEIGHTS = "model.safetensors"
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return export_model(tiny_model(), tmp_path_factory.mktemp("model") / "tiny", tokenizer=tiny_tokenizer())


@pytest.fixture
def folder(tmp_path, original):
    return Path(shutil.copytree(original, tmp_path / "model"))


def rewrite(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1,000,000,000, but the weights have only 20 tensors"),
        ({"text_config": {"n_layer": 10**9}}, "n_layer = 1,000,000,000"),
        ({"num_local_experts": 10**9}, "num_local_experts = 1,000,000,000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 0}, "without layers"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        (
            {"hidden_size": 65536, "intermediate_size": 2**18},
            r"a model of [\d,]+ parameters, but the weights have 279,552",
        ),
        ({"vocab_size": 10**12}, "parameters, but the weights have 279,552"),
        ({"vocab_size": 300}, r"embed_tokens.weight has the shape \(259, 128\), but .* describes \(300, 128\)"),
        ({"num_attention_heads": 3}, "config.json|heads|shape"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ({"architectures": 5}, "architectures is 5"),
        ({"architectures": [5]}, "architectures is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "could not be loaded"),
    ],
)
def test_a_config_that_its_weights_do_not_fit(folder, settings, problem):
    rewrite(folder / "config.json", **settings)
    with pytest.raises((CheckpointError, InputError), match=problem):
        load_model(folder)


def test_a_window_may_start_after_the_last_layer(folder):
    """Qwen's max_window_layers is 28 by default, also for a model of two layers."""
    rewrite(folder / "config.json", max_window_layers=10**9)
    load_model(folder)


@pytest.mark.parametrize("name", checks.SETTINGS)
@pytest.mark.parametrize("content", [f'{{"a": {DEEP}}}', "[1]", "5", '{"a":', "\udcff\udcfe"])
def test_a_settings_file_that_holds_no_settings_is_named(folder, name, content):
    (folder / name).write_bytes(content.encode(errors="surrogateescape"))
    load = load_model if name == "config.json" else load_tokenizer
    with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
        load(folder)


def test_a_file_larger_than_any_model_has_is_not_read(folder):
    with open(folder / "tokenizer.json", "r+b") as file:
        file.truncate(2**40)  # takes no space
    with pytest.raises(CheckpointError, match=r"tokenizer.json has 1,048,576 MiB"):
        load_tokenizer(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(folder, value):
    weights = load_file(folder / WEIGHTS)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight' has 1 numbers that are NaN"):
        load_model(folder)


def test_large_weights_are_finite():
    check_finite({"a": torch.full((4,), 3e38), "b": torch.full((4,), 6e4, dtype=torch.float16)}, "x")


def test_a_model_larger_than_the_memory(monkeypatch):
    monkeypatch.setattr("groupwise.model.device.free_memory", lambda device: 2**30)
    check_memory(2**28, torch.float32, "x")
    with pytest.raises(InputError, match=r"needs 1\.5 GiB in float32, but only 1\.0 GiB"):
        check_memory(3 * 2**27, torch.float32, "x")


@pytest.mark.parametrize("name", ["../model/m.safetensors", "/etc/passwd", "a/b", 5, [1], "a\0b", "x" * 300, ".."])
def test_an_index_names_only_files_of_its_folder(folder, name):
    names = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "m.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names a file that is not in its folder"):
        load_model(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 9) + b'{"a": [[[', b"x" * 100],
)
def test_a_file_of_weights_that_is_none(folder, content):
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        load_model(folder)


@pytest.mark.parametrize("settings", [{"model_max_length": "x"}, {"model_input_names": 5}])
def test_a_tokenizer_with_settings_of_wrong_types(folder, settings):
    rewrite(folder / "tokenizer_config.json", **settings)
    with pytest.raises(CheckpointError, match="could not be loaded"):
        load_tokenizer(folder)


@pytest.mark.parametrize("value", [True, 1.5, "</s>", {"a": 1}, ["x"], 10**9, -1])
def test_an_eos_that_is_no_token(folder, value):
    rewrite(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(GroupwiseError, match=r"eos_token_id|EOS|could not be loaded"):
        Engine(prepare(load_model(folder))).generate([[1, 2]], 1, Sampling(max_new_tokens=1))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"r": 10**12}, "the rank is 1,000,000,000,000"),
        ({"r": "x"}, "rank of a LoRA adapter must be an integer"),
        ({"rank_pattern": {"q_proj": 10**9}}, "the rank is"),
        ({"target_modules": "(a+)+$"}, "regular expression"),
        ({"target_modules": ".*.*.*.*.*x"}, "regular expression"),
        ({"exclude_modules": 5}, "no text"),
        ({"layer_replication": [[0, 10**9]]}, "layer_replication"),
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "megatron_config"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
)
def test_an_adapter_that_does_more_than_load(tmp_path, settings, problem):
    adapter = export_model(add_lora(tiny_model(), LoraSettings(rank=2)), tmp_path / "adapter", merge=False)
    rewrite(adapter / "adapter_config.json", **settings)
    with pytest.raises((CheckpointError, InputError), match=problem):
        load_adapter(tiny_model(), adapter)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LIMITED = """
import resource, sys
from groupwise.cli import main
import groupwise.model.handle, groupwise.training.preflight, transformers  # so that only the model counts
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
for folder in sys.argv[1:]:
    for command in (["sample", folder, "a"], ["check", "quiz", "--data.chat", "true", "--model.source", folder]):
        assert main(command) == 2, command
"""


@pytest.mark.slow
def test_commands_end_within_a_gigabyte(tmp_path, original):
    cases = [
        ("config.json", {"num_hidden_layers": 10**9}),
        ("config.json", {"hidden_size": 2**40}),
        ("config.json", {"vocab_size": 10**12}),
        ("tokenizer_config.json", {"chat_template": "{{ 'a' * 10**10 }}"}),
        ("tokenizer_config.json", {"chat_template": LOOP}),
    ]
    folders = []
    for number, (file, values) in enumerate(cases):
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        (folder / "chat_template.jinja").unlink()
        rewrite(folder / file, **values)
        folders.append(folder)
    done = subprocess.run([sys.executable, "-c", LIMITED, *folders], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert done.stderr.count("groupwise: ") == 2 * len(cases)


def test_reward_models_and_embedders_with_a_billion_layers(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    from groupwise.errors import ConfigError
    from groupwise.grouping.embed import load_embedder
    from groupwise.rewards.reward_model import reward_model

    settings = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=1
    )
    for kind, name in ((BertForSequenceClassification, "reward"), (BertModel, "embedder")):
        kind(settings).save_pretrained(tmp_path / name)
        rewrite(tmp_path / name / "config.json", num_hidden_layers=10**9)
    with pytest.raises(ConfigError, match="num_hidden_layers = 1,000,000,000"):
        reward_model(model=str(tmp_path / "reward"), device="cpu")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "embedder" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="num_hidden_layers = 1,000,000,000"):
        load_embedder(str(tmp_path / "embedder"), device="cpu")
