"""Embedders: the two of the catalogue with their real weights, and small sentence-transformers models."""

from __future__ import annotations

import http.server
import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional

from groupwise.errors import CheckpointError, ConfigError, InputError
from groupwise.grouping.embed import Embedder, check_embedder, load_embedder
from groupwise.model.catalogue import WORDLLAMA
from tests.hub import Hub
from tests.weights import make_wheel, minilm, only_from, wordllama

CPU = {"device": "cpu", "dtype": "float32"}
WORDS = "the heart attack of a dragon größer 日本語 🙂 </s> <unk> 12345 'tis \n\n \t x"
ODD = ["", " ", "\n", "</s>", "a", "日本語", "\ufeff", "\x00", "a" * 2000]


def sentences(number: int, longest: int = 60) -> list[str]:
    draw, words = random.Random(0), WORDS.split(" ")
    return [" ".join(draw.choices(words, k=draw.randint(1, longest))) for _ in range(number)]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(functional.cosine_similarity(a, b, dim=0))


@pytest.fixture(scope="module")
def static():
    wordllama()
    return load_embedder("wordllama", **CPU)


@pytest.fixture(scope="module")
def small():
    minilm()
    return load_embedder("minilm", **CPU, batch_size=4)


@pytest.fixture
def model_folder(tmp_path):
    """A one-layer BERT with the tokenizer, pooling and normalisation of MiniLM."""
    from transformers import BertConfig, BertModel

    folder = shutil.copytree(minilm(), tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors"))
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    (folder / "1_Pooling/config.json").write_text(json.dumps({**pooling, "word_embedding_dimension": 16}))
    config = BertConfig(
        vocab_size=30_522, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).half().save_pretrained(folder)
    return folder


# --- wordllama -------------------------------------------------------------------------------------------------------


def test_wordllama_is_the_mean_of_its_token_vectors(static):
    folder = wordllama()
    with safe_open(folder / "l2_supercat_256.safetensors", framework="np") as file:
        table = file.get_tensor("embedding.weight").astype(np.float64)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [*ODD, *sentences(100)]
    expected = np.zeros((len(texts), 256))
    for text, vector in zip(texts, expected, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for token in ids:
            vector += table[token] / len(ids)
    vectors = static.encode(texts)
    assert (vectors.shape, vectors.dtype, vectors.device.type) == ((len(texts), 256), torch.float32, "cpu")
    torch.testing.assert_close(vectors.double(), torch.from_numpy(expected), rtol=0, atol=2e-6)
    assert static.width == 256
    assert (vectors[0] == 0).all()


def test_wordllama_equals_the_wordllama_package(static):
    """Numbers 0, 1, 100 and 255, and the sum of the absolute values, from embed() of wordllama 0.4.0.post1."""
    for text, some, total in [
        ("A heart attack.", [0.00469970703, -0.487498283, -0.11807251, 0.166931152], 66.33354187),
        ("</s> größer 🙂", [-0.0685153529, 0.0738593191, 0.0877685547, 0.0372678973], 26.05979919),
    ]:
        vectors = static.encode([text])[0]
        torch.testing.assert_close(vectors[[0, 1, 100, 255]], torch.tensor(some), rtol=1e-6, atol=0)
        assert float(vectors.abs().sum()) == pytest.approx(total, rel=1e-6)


def test_wordllama_does_not_depend_on_batches_or_order(static):
    texts = [*ODD, *sentences(50)]
    other = load_embedder("wordllama", batch_size=3, cache=0)
    assert torch.equal(other.encode(texts[::-1]).flip(0), static.encode(texts))
    assert torch.equal(other.encode([""] * 7), torch.zeros(7, 256))


@pytest.mark.slow
def test_wordllama_is_downloaded_on_first_use(tmp_path, monkeypatch, caplog):
    """From a local package index with a wheel of the same files."""
    folder, index = wordllama(), tmp_path / "index"
    contents = {file.pieces[0][1]: (folder / file.name).read_bytes() for file in WORDLLAMA.files}
    make_wheel(index, "wordllama", contents, version="0.4.0.post1", tag="cp312-cp312-manylinux2014_x86_64")
    for name, value in {**only_from(index), "GROUPWISE_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    check_embedder("wordllama")
    assert not (tmp_path / "cache").exists()
    with caplog.at_level(logging.WARNING, "groupwise"):
        first = load_embedder("wordllama").encode(["a text"])
    assert caplog.messages == ["downloading wordllama from the package index, 19 MB"]
    copy = shutil.copytree(tmp_path / "cache/models/wordllama", tmp_path / "copy")  # a copy of the folder works too
    assert torch.equal(load_embedder(str(copy)).encode(["a text"]), first)


def test_damaged_table(tmp_path):
    folder = shutil.copytree(wordllama(), tmp_path / "table")
    table = folder / "l2_supercat_256.safetensors"
    content_before = table.read_bytes()
    for content, message in [
        (content_before[:-2], r"l2_supercat_256.safetensors could not be loaded: .*; get it again"),
        (b"", r"l2_supercat_256.safetensors could not be loaded: .*; get it again"),
        ({"other": torch.zeros(2, 2)}, "holds no table of numbers called embedding.weight"),
        ({"embedding.weight": torch.zeros(8)}, "holds no table of numbers called embedding.weight"),
        ({"embedding.weight": torch.zeros(31_999, 4)}, "tokenizer has 32,000 tokens, but its table has 31,999 rows"),
    ]:
        table.unlink()
        if isinstance(content, bytes):
            table.write_bytes(content)
        else:
            save_file(content, table)
        with pytest.raises(CheckpointError, match=message):
            load_embedder(str(folder))
    table.write_bytes(content_before)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer.json could not be loaded: .*; get it again"):
        load_embedder(str(folder))


# --- sentence-transformers -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_minilm_equals_sentence_transformers(small):
    from sentence_transformers import SentenceTransformer

    texts = [*ODD, *sentences(8), "word " * 500]
    expected = SentenceTransformer(str(minilm()), device="cpu").encode(texts, batch_size=4, show_progress_bar=False)
    vectors = small.encode(texts)
    assert (vectors.shape, vectors.dtype, small.width) == ((len(texts), 384), torch.float32, 384)
    torch.testing.assert_close(vectors, torch.from_numpy(expected), rtol=0, atol=1e-6)
    assert not vectors.is_inference()  # callers may write into it


@pytest.mark.slow
def test_minilm_hardly_depends_on_batches_and_order(small):
    texts = sentences(8)
    other = load_embedder("minilm", **CPU, batch_size=3, cache=0)
    torch.testing.assert_close(other.encode(texts[::-1]).flip(0), small.encode(texts), rtol=0, atol=1e-5)


@pytest.mark.parametrize("embedder", ["static", pytest.param("small", marks=pytest.mark.slow)])
def test_similar_meanings_are_nearer(embedder, request):
    embedder = request.getfixturevalue(embedder)
    attack, infarction, dragon = embedder.encode(
        ["The patient had a heart attack.", "It was a myocardial infarction.", "A dragon sleeps on its gold."]
    )
    assert cosine(attack, infarction) > cosine(attack, dragon) + 0.15


@pytest.mark.slow
def test_sentence_transformers_folder(model_folder, monkeypatch, capfd):
    """Weights are stored in float16 and used in float32."""
    from transformers import AutoTokenizer, BertModel

    texts = ["a dragon", "two dragons and their gold", ""]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = BertModel.from_pretrained(model_folder, dtype=torch.float32).eval()
    expected = []
    with torch.no_grad():
        for text in texts:
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            expected.append(states.mean(dim=0) / states.mean(dim=0).norm())
    capfd.readouterr()
    monkeypatch.chdir(model_folder.parent)
    embedder = load_embedder("made", device="cpu")
    torch.testing.assert_close(embedder.encode(texts), torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert (embedder.name, embedder.width) == ("made", 16)
    half = load_embedder(str(model_folder), device="cpu", dtype="bfloat16").encode(texts)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, torch.stack(expected), rtol=0, atol=0.02)
    assert not torch.equal(half, torch.stack(expected))
    assert capfd.readouterr() == ("", "")  # no progress bars


@pytest.mark.slow
def test_nan_vectors_of_a_sentence_transformer(model_folder):
    from transformers import AutoTokenizer, BertModel

    model = BertModel.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[AutoTokenizer.from_pretrained(model_folder).vocab["dragon"]] = torch.nan
    model.save_pretrained(model_folder)
    embedder = load_embedder(str(model_folder), **CPU)
    good = embedder.encode(["gold"])
    with pytest.raises(ConfigError, match=r"returned NaN or inf for the text 'a dragon and (again ){11}a'…; set "):
        embedder.encode(["gold", "silver", "a dragon and " + "again " * 50])
    assert torch.equal(embedder.encode(["gold"]), good)


# --- the cache -------------------------------------------------------------------------------------------------------


def lengths(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[float(len(text)), float(sum(map(ord, text)))] for text in texts])


calls = st.lists(st.lists(st.sampled_from(["", "a", "b", "c", "dd", "\ud800", "\udfff"]), max_size=6), max_size=8)


@given(calls=calls, size=st.integers(0, 5))
def test_cache_keeps_the_texts_used_last(calls, size):
    asked, kept = [], []
    embedder = Embedder("toy", 2, lambda texts: asked.append(texts) or lengths(texts), cache=size)
    for texts in calls:
        asked.clear()
        vectors = embedder.encode(texts)
        valid = [text.replace("\ud800", "\ufffd").replace("\udfff", "\ufffd") for text in texts]
        new = [text for text in dict.fromkeys(valid) if text not in kept]
        assert asked == ([new] if new else [])
        assert torch.equal(vectors, lengths(valid).reshape(-1, 2))
        for text in valid:
            kept = [*(other for other in kept if other != text), text]
        kept = kept[len(kept) - size :] if len(kept) > size else kept


def test_cached_vectors_are_copies():
    embedder = Embedder("toy", 2, lambda texts: lengths(texts).double(), cache=3)
    embedder.encode([str(number) for number in range(100)])
    assert [row.untyped_storage().nbytes() for row in embedder._vectors.values()] == [8, 8, 8]
    vectors = embedder.encode(["99", "99"])
    vectors.zero_()
    assert torch.equal(embedder.encode(["99"]), lengths(["99"]))


@pytest.mark.parametrize("embedder", ["static", pytest.param("small", marks=pytest.mark.slow)])
def test_surrogates_are_joined_or_replaced(embedder, request):
    embedder = request.getfixturevalue(embedder)
    alone, replaced, pair, joined = embedder.encode(["a \ud800", "a \ufffd", "\ud83d\ude42 b", "🙂 b"])
    assert torch.equal(alone, replaced)
    assert torch.equal(pair, joined)
    assert embedder.encode([]).shape == (0, embedder.width)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("a text", "texts must be a list of texts, got 'a text'"),
        (None, "texts must be a list of texts, got None"),
        ({"a"}, "texts must be a list of texts, got {'a'}"),
        (["a", None], r"texts must be a list of texts, got \['a', None\]"),
        ([b"a"], r"texts must be a list of texts, got \[b'a'\]"),
    ],
)
def test_invalid_texts(texts, message):
    with pytest.raises(InputError, match=message):
        Embedder("toy", 2, lengths).encode(texts)


def test_model_with_the_wrong_width():
    with pytest.raises(ConfigError, match=r"toy returned a tensor of shape \(2, 2\) for 2 texts, expected \(2, 3\)"):
        Embedder("toy", 3, lengths).encode(["a", "b"])


def test_model_that_returns_nan():
    embedder = Embedder(
        "toy", 1, lambda texts: torch.tensor([[float("nan" if "x" in text else "1")] for text in texts])
    )
    with pytest.raises(ConfigError, match=r"toy returned NaN or inf for the text 'ax'; set grouping.dtype"):
        embedder.encode(["a", "ax"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"cache": -1}, "cache must be an integer of at least 0, got -1"),
        ({"cache": 1.5}, "cache must be an integer of at least 0, got 1.5"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(InputError, match=message):
        load_embedder("wordllama", **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("minilmm", r"no embedder called 'minilmm'; did you mean 'minilm'\? \(available: minilm, wordllama"),
        ("WordLLama", "did you mean 'wordllama'"),
        ("xyz", r"no embedder called 'xyz' \(available"),
        ("x" * 5000, "File name too long"),
        ("smollm2-135m", "smollm2-135m is a language model, not an embedder. Set grouping.embedder to"),
        ("./nowhere", "there is no folder nowhere for the embedder .*Set grouping.embedder to 'minilm' or 'wordllama'"),
        ("a/b/c", "there is no folder a/b/c for the embedder"),
        ("file.txt", "the embedder file.txt is a file"),
        ("empty", "empty is not the folder of an embedder: it has no modules.json"),
        ("", "name must be a string, got ''"),
        (None, "name must be a string, got None"),
        ("custom", r"the embedder in custom needs custom code \(custom_code.Model\), which is not run"),
    ],
)
@pytest.mark.parametrize("check", [check_embedder, load_embedder], ids=["check", "load"])
def test_unavailable_embedders(name, message, check, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom/modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "custom_code.Model"}]')
    (tmp_path / "custom/custom_code.py").write_text("raise SystemExit")
    with pytest.raises(ConfigError, match=message):
        check(name)


@pytest.mark.slow
def test_damaged_folder(model_folder):
    check_embedder(str(model_folder))
    weights = model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"the embedder in .*made could not be loaded: .+"):
        load_embedder(str(model_folder), **CPU)
    for content, message in (("[1]", "damaged: it does not list modules with their types"), ("[", "no valid JSON")):
        (model_folder / "modules.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            check_embedder(str(model_folder))


def test_without_sentence_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    remedy = r"pip install 'groupwise\[embed\]'. Or set grouping.embedder to 'wordllama'"
    for name in ("minilm", "BAAI/bge-m3"):
        for ask in (check_embedder, load_embedder):
            with pytest.raises(ConfigError, match=rf"{name} needs sentence-transformers, which is missing. .*{remedy}"):
                ask(name)
    check_embedder("wordllama")
    wordllama()
    assert load_embedder("wordllama").encode(["a"]).shape == (1, 256)


# --- the hub ---------------------------------------------------------------------------------------------------------


def test_the_hub_cannot_be_reached():
    """conftest.py keeps the tests offline."""
    check_embedder("BAAI/bge-m3")
    with pytest.raises(
        ConfigError,
        match=r"bge-m3 .* cannot be downloaded from the hub: .*Set grouping.embedder to 'minilm' or 'wordllama', which "
        r"`groupwise models fetch` gets.*hf download BAAI/bge-m3 --local-dir FOLDER",
    ):
        load_embedder("BAAI/bge-m3")
    with pytest.raises(ConfigError, match="cannot be downloaded from the hub: Repo id must"):
        load_embedder("-a/b c")


CLIENT = """
import json, sys
from groupwise.errors import ConfigError
from groupwise.grouping.embed import embedder_folder
for name in sys.argv[1:]:
    try:
        print(json.dumps(str(embedder_folder(name))))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('the trap has sprung')",)


@pytest.mark.slow
def test_embedder_on_the_hub(model_folder, tmp_path):
    """Only pickled weights; code, another pickle and another copy of the weights are not downloaded."""
    from transformers import BertModel

    expected = load_embedder(str(model_folder), **CPU).encode(["two dragons"])
    weights = BertModel.from_pretrained(model_folder, dtype=torch.float32).state_dict()
    torch.save(weights, model_folder / "pytorch_model.bin")
    (model_folder / "model.safetensors").unlink()
    (model_folder / "custom.py").write_text("raise SystemExit")
    (model_folder / "sparse_linear.pt").write_bytes(pickle.dumps(Trap()))
    (model_folder / "onnx").mkdir()
    (model_folder / "onnx/config.json").write_text("{}")
    handler = type("ThisHub", (Hub,), {"folder": model_folder, "requested": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", CLIENT, "org/model", "org/nothing", "org/gated"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    finally:
        server.shutdown()
        server.server_close()
    folder, unknown, gated = map(json.loads, done.stdout.splitlines())
    torch.testing.assert_close(load_embedder(folder, **CPU).encode(["two dragons"]), expected)
    assert "does not exist or is private" in unknown
    assert "accept its terms" in gated
    assert {"modules.json", "1_Pooling/config.json", "tokenizer.json", "pytorch_model.bin"} <= set(handler.requested)
    assert not {"custom.py", "sparse_linear.pt", "onnx/config.json"} & set(handler.requested)
    assert "downloading org/model from the hub" in done.stderr
