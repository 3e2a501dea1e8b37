"""Load GGUF files as ordinary models, with dense weights that can be trained and saved.

A GGUF holds blocks of 4 to 8 bits, which are dequantised once on loading. The values need up to 22 bits of mantissa (a
half-precision scale times a small integer, plus a half-precision offset), so float32 holds them exactly and bfloat16
rounds each by up to 0.4 %; `load_gguf` defaults to float32. transformers 5.22 would keep the blocks quantised, and such
a model can be neither trained nor saved; `GgufConfig` turns that off. Versions without that class always dequantise.

Four things are corrected where a version of transformers does not take them from the file: the special tokens (5.17
uses the wrong EOS for SmolLM2), whether ``<bos>`` is added, how SmolLM's tokenizer splits numbers, and the second EOS
token that some files name.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import mmap
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from groupwise.errors import CheckpointError, InputError, MissingExtraError
from groupwise.rundir.files import atomic_folder
from groupwise.text import error_reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VERSIONS = (2, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Metadata types of fixed size, as struct codes; 8 is a string and 9 an array.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_PATCH_LOCK = threading.Lock()


def load_gguf(path: str | Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model in a GGUF file, with dense weights of ``dtype``, and its tokenizer.

    Peak memory is the model in ``dtype`` plus a few copies of its largest tensor in float32.
    """
    path = Path(path)
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype}; a GGUF file can be loaded in {', '.join(map(str, DTYPES))}")
    check_installed()
    metadata = read_metadata(path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        from transformers import GgufConfig
    except ImportError:
        options: dict[str, Any] = {}
    else:
        options = {"quantization_config": GgufConfig(dequantize=True)}
    where: dict[str, Any] = {"gguf_file": path.name}
    try:
        with _cached_reads():
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **where)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(path.parent), dtype=dtype, output_loading_info=True, **where, **options
            )
    except (ArithmeticError, AttributeError, LookupError, NotImplementedError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is a GGUF file of the architecture {metadata['general.architecture']!r}, which transformers could "
            f"not load: {error_reason(error)}"
        ) from error
    model, info = loaded
    missing = sorted(set(info["missing_keys"]))
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise CheckpointError(
            f"{path} lacks {len(missing)} weights of its model ({shown}), which would be random; use another file"
        )
    _set_special_tokens(model, tokenizer, metadata)
    return model, tokenizer


def convert_gguf(path: str | Path, folder: str | Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model of a GGUF file as a transformers folder (config, safetensors, tokenizer) and return its path.

    The folder is written atomically, with a manifest of hashes.
    """
    folder = Path(folder)
    model, tokenizer = load_gguf(path, dtype)
    with atomic_folder(folder) as unfinished:
        save_folder(model, tokenizer, unfinished)
    return folder


def save_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model and its tokenizer into an existing folder, all weights in one safetensors file."""
    model.save_pretrained(folder, max_shard_size=2**60)
    tokenizer.save_pretrained(folder)


def check_installed() -> None:
    """Raise a MissingExtraError unless the packages that read GGUF files are installed."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("reading a GGUF file", package, "gguf")


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata of a GGUF file, with lists as their lengths. A truncated file is refused.

    Only the header is read. Its sizes are compared with the file's, so that a broken download gives a clear error.
    """
    check_installed()
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    path = Path(path)
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path} is not a GGUF file: it does not start with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Header(data, path)
                metadata, tensors, start = header.read()
                size = len(data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error_reason(error)}") from error
    if not isinstance(metadata.get("general.architecture"), str):
        raise CheckpointError(f"{path} is damaged: its metadata names no architecture")
    for name, elements, kind, offset in tensors:
        try:
            per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged or newer than the installed package gguf: {name} has the unknown type {kind}"
            ) from error
        end = start + offset + elements // per_block * block_bytes
        if end > size:
            raise CheckpointError(
                f"{path} is truncated: it has {size:,} bytes, but {name} ends at byte {end:,}. Download it again"
            )
    return metadata


class _Header:
    """A cursor over the bytes of a GGUF header."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position = data, path, 4

    def read(self) -> tuple[dict[str, Any], list[tuple[str, int, int, int]], int]:
        """The metadata; name, element count, type and offset of each tensor; and the offset of the data."""
        version, tensor_count, metadata_count = self.take("<IQQ")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path} is a GGUF file of version {version}; versions {VERSIONS} can be read")
        metadata = {}
        for _ in range(metadata_count):
            name = self.string()
            metadata[name] = self.value(*self.take("<I"))
        tensors = []
        for _ in range(tensor_count):
            name = self.string()
            (dimensions,) = self.take("<I")
            sizes = self.take(f"<{dimensions}Q")
            kind, offset = self.take("<IQ")
            tensors.append((name, math.prod(sizes), kind, offset))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path} is damaged: its alignment is {alignment!r}")
        return metadata, tensors, -(-self.position // alignment) * alignment

    def take(self, code: str) -> tuple[Any, ...]:
        start = self.skip(struct.calcsize(code))
        return struct.unpack_from(code, self.data, start)

    def skip(self, count: int) -> int:
        """Skip ``count`` bytes; returns their start."""
        start = self.position
        if start + count > len(self.data):
            raise CheckpointError(
                f"{self.path} is truncated: its {len(self.data):,} bytes end inside the header. Download it again"
            )
        self.position += count
        return start

    def string(self) -> str:
        (length,) = self.take("<Q")
        start = self.skip(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _CODES:
            return self.take(f"<{_CODES[kind]}")[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path} is damaged: its metadata has a value of the unknown kind {kind}")
        kind, count = self.take("<IQ")
        if kind in _CODES:
            self.skip(count * struct.calcsize(_CODES[kind]))
        else:
            for _ in range(count):
                self.value(kind)
        return count


@contextmanager
def _cached_reads() -> Iterator[None]:
    """Cache the reader and the name table that transformers builds repeatedly.

    It parses the file for the tokenizer, the config and the weights, which takes 4 s each with a vocabulary of 49
    thousand and 18 s with 262 thousand, and builds the table of all tensor names for every module.
    """
    import gguf

    with _PATCH_LOCK:
        originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
        try:
            for name, function in originals.items():
                setattr(gguf, name, functools.cache(function))
            yield
        finally:
            for name, function in originals.items():
                setattr(gguf, name, function)


def _set_special_tokens(model: PreTrainedModel, tokenizer: Any, metadata: dict[str, Any]) -> None:
    for name, key in SPECIAL_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        token = tokenizer.convert_ids_to_tokens(token_id) if token_id is not None else None
        if token is not None and token != getattr(tokenizer, name):
            setattr(tokenizer, name, token)
    # Without the setting, llama.cpp adds <bos> for a sentencepiece vocabulary only.
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece))
    if add_bos != tokenizer.add_bos_token:
        tokenizer.add_bos_token = add_bos
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        from tokenizers import pre_tokenizers

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ends = [metadata.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")]
    eos_ids = list(dict.fromkeys(end for end in ends if end is not None))
    if eos_ids and model.generation_config is not None:
        model.generation_config.eos_token_id = eos_ids if len(eos_ids) > 1 else eos_ids[0]
