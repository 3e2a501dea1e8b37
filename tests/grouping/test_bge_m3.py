"""The code path of the default embedder, BAAI/bge-m3, with a tiny model in its format."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from groupwise.config import GroupingSection
from groupwise.grouping.embed import load_embedder
from groupwise.grouping.grouper import LocalGrouper
from groupwise.grouping.workers import RayGrouper
from tests.grouping.bge_m3 import TOKENS, WIDTH, save_tiny_bge_m3
from tests.hub import Hub

pytestmark = pytest.mark.slow

LETTERS = TOKENS - 3  # of a text without spaces that fills the input: <s>, the mark of a word's start, and </s>


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_bge_m3(tmp_path_factory.mktemp("bge") / "bge-m3")


def cls_vector(folder, text):
    """The normalised last hidden state of <s>, computed by transformers for one text, without padding."""
    from transformers import AutoTokenizer, XLMRobertaConfig, XLMRobertaModel

    model = XLMRobertaModel(XLMRobertaConfig.from_pretrained(folder)).eval()
    model.load_state_dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
    ids = AutoTokenizer.from_pretrained(folder)(text, truncation=True, max_length=TOKENS, return_tensors="pt")
    with torch.no_grad():
        state = model(**ids).last_hidden_state[0, 0]
    return state / state.norm()


def test_vectors_are_normalised_states_of_the_first_token(folder):
    """In batches, with padding."""
    texts = ["a short text", "x", "a longer text " * 40, "12, 13; and 14?", ""]
    embedder = load_embedder(str(folder), device="cpu", batch_size=2)
    assert embedder.width == WIDTH
    expected = torch.stack([cls_vector(folder, text) for text in texts])
    torch.testing.assert_close(embedder.encode(texts), expected, atol=1e-5, rtol=0)


def test_8192_tokens_are_read(folder):
    """The last letter that fits matters, the next one does not."""
    full = "ab" * (LETTERS // 2) + "a"
    texts = [full, full[:-1] + "z", full + "z"]
    vectors = load_embedder(str(folder), device="cpu", batch_size=1).encode(texts)
    torch.testing.assert_close(vectors[0], cls_vector(folder, full), atol=1e-5, rtol=0)
    assert float((vectors[1] - vectors[0]).abs().max()) > 1e-4
    torch.testing.assert_close(vectors[2], vectors[0], atol=1e-6, rtol=0)


def test_workers(folder):
    """Each worker loads the model; one answer fills the input."""
    texts = [["a cat", "a cat.", "9 8 7 6 5", "9 8 7 6"], ["to be", "ab" * LETTERS, "to be?", "??!!"], ["x"] * 4]
    settings = GroupingSection(embedder=str(folder), device="cpu", batch_size=2)
    expected = LocalGrouper(settings).group(texts)
    assert int(expected.labels.max()) > 0
    said = []
    with RayGrouper(settings, 2, said.append) as grouper:
        result = grouper.group(texts)
    assert f"[SimilarityGrouperWorker] Loading model: {folder}" in said
    assert torch.equal(result.labels, expected.labels)
    torch.testing.assert_close(result.scores, expected.scores, atol=1e-5, rtol=0)


CLIENT = """
import json
from groupwise.config import GroupingSection
from groupwise.grouping.embed import load_embedder
print(json.dumps(load_embedder(GroupingSection().embedder, device="cpu").encode(["two dragons"]).tolist()))
"""


def test_by_its_name_on_the_hub(folder, tmp_path):
    """The default of grouping.embedder, from a local hub that has the other files of the real one too."""
    for name in ("colbert_linear.pt", "sparse_linear.pt", "onnx/model.onnx", "onnx/config.json", "imgs/bm25.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not needed")
    handler = type("ThisHub", (Hub,), {"name": "BAAI/bge-m3", "folder": folder, "requested": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT], env=environment, capture_output=True, text=True, check=True
        )
    finally:
        server.shutdown()
        server.server_close()
    vectors = torch.tensor(json.loads(done.stdout))
    torch.testing.assert_close(vectors[0], cls_vector(folder, "two dragons"), atol=1e-5, rtol=0)
    assert "downloading BAAI/bge-m3 from the hub" in done.stderr
    assert {"modules.json", "1_Pooling/config.json", "pytorch_model.bin"} <= set(handler.requested)
    assert not any(name.endswith(("linear.pt", ".onnx", ".jpg")) for name in handler.requested)
    assert "onnx/config.json" not in handler.requested
