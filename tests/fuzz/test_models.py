"""Model folders with something wrong in one of their files, and adapters."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.data.prompts import PromptBuilder
from groupwise.generate import Engine, Sampling
from groupwise.model import load_model, load_tokenizer, prepare
from groupwise.model.checks import tensor_shapes
from groupwise.model.export import export_model
from groupwise.model.lora import LoraSettings, add_lora, load_adapter
from groupwise.model.tiny import tiny_model, tiny_tokenizer
from tests.fuzz import accepted, many
from tests.fuzz.mutate import as_json, damaged, mutated

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and PEFT warn about odd settings
JSON = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(50)
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(tiny_model(), tmp_path_factory.mktemp("model") / "tiny", tokenizer=tiny_tokenizer())


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = add_lora(tiny_model(), LoraSettings(rank=2))
    return export_model(model, tmp_path_factory.mktemp("model") / "adapter", merge=False)


def use(folder: Path) -> None:
    """Load a model and sample from it, as `groupwise sample` does."""
    model = load_model(folder)
    tokenizer = load_tokenizer(folder)
    prompts = PromptBuilder(tokenizer).build([{"prompt": "ab"}])
    Engine(prepare(model)).generate([prompt.ids for prompt in prompts], 1, Sampling(max_new_tokens=2))


def changed(folder: Path, file: str, content: bytes, call: Any, border: str) -> None:
    """Call ``call`` with a copy of the folder in which one file has another content."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        copy.mkdir()
        for path in folder.iterdir():
            if path.name != file:
                (copy / path.name).symlink_to(path)
        (copy / file).write_bytes(content)
        accepted(border, lambda: call(copy))


@given(st.data())
def test_settings_of_models(folder, data):
    file = data.draw(st.sampled_from(JSON[:2]))
    content = as_json(data.draw(mutated(json.loads((folder / file).read_bytes()))))
    changed(folder, file, content, use, "model folders: settings")


@many(3)
@given(st.data())
def test_tokenizers(folder, data):
    file = data.draw(st.sampled_from(JSON[2:]))
    content = as_json(data.draw(mutated(json.loads((folder / file).read_bytes()))))

    def encode(copy: Path) -> None:
        tokenizer = load_tokenizer(copy)
        PromptBuilder(tokenizer, chat=False).build([{"prompt": "aa  b\n"}])

    changed(folder, file, content, encode, "model folders: tokenizers")


@many(2)
@given(st.data())
def test_damaged_json(folder, data):
    file = data.draw(st.sampled_from(JSON))
    content = data.draw(damaged((folder / file).read_bytes()[:4000]))
    changed(folder, file, content, load_model if file in JSON[:2] else load_tokenizer, "model folders: damaged JSON")


@many(8)
@given(st.data())
def test_headers_of_weights(folder, data):
    raw = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    if data.draw(st.booleans()):
        header = as_json(data.draw(mutated(json.loads(raw[8 : 8 + length]))))
        content = struct.pack("<Q", len(header)) + header + raw[8 + length :]
    else:
        content = data.draw(damaged(raw, head=length + 8))
    changed(folder, "model.safetensors", content, lambda copy: tensor_shapes(copy / "model.safetensors"), "safetensors")


@given(st.data())
def test_damaged_weights(folder, data):
    content = data.draw(damaged((folder / "model.safetensors").read_bytes()))
    changed(folder, "model.safetensors", content, load_model, "model folders: damaged weights")


@given(st.data())
def test_indexes_of_weights(folder, data):
    names = tensor_shapes(folder / "model.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
    content = as_json(data.draw(mutated(index)))
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        shutil.copytree(folder, copy)
        (copy / "model.safetensors").rename(copy / "model-1.safetensors")
        (copy / INDEX).write_bytes(content)
        accepted("model folders: indexes", lambda: load_model(copy))


@given(st.data())
def test_settings_of_adapters(adapter, data):
    settings = json.loads((adapter / "adapter_config.json").read_bytes())
    content = as_json(data.draw(mutated(settings)))
    changed(adapter, "adapter_config.json", content, partial(load_adapter, tiny_model()), "adapters")


@given(st.data())
def test_damaged_adapters(adapter, data):
    content = data.draw(damaged((adapter / "adapter_model.safetensors").read_bytes(), head=2000))
    load = partial(load_adapter, tiny_model())
    changed(adapter, "adapter_model.safetensors", content, load, "adapters: damaged")


def test_the_folder_itself_is_accepted(folder, adapter):
    use(folder)
    assert load_adapter(tiny_model(), adapter) is not None
    assert isinstance(load_model(adapter).get_input_embeddings().weight, torch.Tensor)
