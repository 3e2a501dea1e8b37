"""GGUF files with wrong counts, types, lengths and offsets."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import CheckpointError
from groupwise.model.gguf import _check_header, load_gguf
from tests.fuzz import accepted, many, tried
from tests.fuzz.mutate import damaged
from tests.model.test_gguf import tiny_llama, write_gguf

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers about odd settings
SCALARS = {0: "B", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 12: "d"}


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama())
    return path.read_bytes()


@pytest.fixture(scope="module")
def header_length(valid: bytes) -> int:
    return valid.index(b"token_embd.weight") + 2000


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


@st.composite
def entries(draw: st.DrawFn) -> bytes:
    """A metadata entry: any name, any type, and a value that may not fit."""
    name = draw(st.sampled_from(["general.architecture", "llama.block_count", "general.alignment", "x", "é", ""]))
    kind = draw(st.sampled_from([*SCALARS, 8, 9, 9, 13, 255, 2**31]))
    number = draw(st.sampled_from([0, 1, 2, 3, 32, 2**16, 2**31, 2**63]))
    if kind in SCALARS:
        value = struct.pack(f"<{SCALARS[kind]}", number % 2 if kind in (0, 7) else number % 2**31)
    elif kind == 8:
        value = draw(st.sampled_from([text("llama"), text("gpt2"), struct.pack("<Q", number)]))
    else:
        value = struct.pack("<IQ", draw(st.sampled_from([0, 4, 8, 9, 99])), number) + draw(st.binary(max_size=24))
        value *= draw(st.sampled_from([1, 1, 30]))  # lists in lists
    return text(name) + struct.pack("<I", kind) + value


@many(15)
@given(st.lists(entries(), max_size=4), st.integers(0, 3), st.sampled_from([0, 1, 2**63]), st.binary(max_size=80))
def test_headers_made_of_parts(tmp_path_factory, parts, wrong, tensors, rest):
    data = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(parts) + wrong // 3) + b"".join(parts) + rest
    path = tmp_path_factory.getbasetemp() / "parts.gguf"
    path.write_bytes(data)
    accepted("GGUF headers", lambda: _check_header(path))


@many(10)
@given(st.data())
def test_damaged_headers(tmp_path_factory, valid, header_length, data):
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data.draw(damaged(valid, head=header_length)))
    accepted("GGUF headers", lambda: _check_header(path))


@pytest.mark.slow
@given(st.data())
def test_damaged_files(tmp_path_factory, valid, header_length, data):
    path = tmp_path_factory.getbasetemp() / "loaded.gguf"
    path.write_bytes(data.draw(damaged(valid, head=header_length)))
    accepted("GGUF files", lambda: load_gguf(path))


def test_every_shorter_file_is_refused(tmp_path, valid, header_length):
    path = Path(tmp_path / "short.gguf")
    for length in (*range(0, header_length, 11), len(valid) - 1):
        path.write_bytes(valid[:length])
        tried("GGUF headers")
        with pytest.raises(CheckpointError, match="not a readable GGUF file"):
            _check_header(path)
    path.write_bytes(valid)
    assert _check_header(path).metadata["general.architecture"] == "llama"
