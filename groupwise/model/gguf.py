"""GGUF files as ordinary models: dense weights that can be trained and saved.

A GGUF holds blocks of 4 to 8 bits. Every block is multiplied out once, on loading. What comes out needs up to 22 bits
of mantissa (a half-precision scale times a small integer, plus a half-precision offset), so float32 keeps every value
and bfloat16 rounds each by up to 0.4 %; `load_gguf` therefore defaults to float32. transformers 5.22 would keep the
blocks packed, which can neither be trained nor saved; `GgufConfig` says no to that. A version without that class knows
nothing but unpacking.

Four things are set right where a version of transformers does not take them from the file: the special tokens (5.17
ends SmolLM2's texts with the wrong one), whether ``<bos>`` is put in front of a text, how SmolLM's vocabulary cuts
numbers, and the second end token that some files name.
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

# The kinds of metadata values that have a fixed size, as struct codes; 8 is a string and 9 an array.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_ONE_AT_A_TIME = threading.Lock()


def load_gguf(path: str | Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model in a GGUF file, with dense weights of ``dtype``, and its tokenizer.

    The weights are ordinary parameters: they can be trained and saved. Peak memory is the model in ``dtype`` plus its
    largest tensor a few times over in float32.
    """
    path = Path(path)
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype}; a GGUF file can be unpacked to {', '.join(map(str, DTYPES))}")
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
        with _reading_once():
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **where)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(path.parent), dtype=dtype, output_loading_info=True, **where, **options
            )
    except (ArithmeticError, AttributeError, LookupError, NotImplementedError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is a GGUF file of the architecture {metadata['general.architecture']!r}, which transformers could "
            f"not load: {error_reason(error)}"
        ) from error
    model, report = loaded
    absent = sorted(set(report["missing_keys"]))
    if absent:
        shown = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
        raise CheckpointError(
            f"{path} lacks {len(absent)} weights of the model it describes ({shown}); they would be random numbers. "
            "Use another file"
        )
    _set_special_tokens(model, tokenizer, metadata)
    return model, tokenizer


def convert_gguf(path: str | Path, folder: str | Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model of a GGUF file as a transformers folder (config, safetensors, tokenizer); the folder's path.

    The folder appears whole, with a manifest of hashes, or not at all.
    """
    folder = Path(folder)
    model, tokenizer = load_gguf(path, dtype)
    with atomic_folder(folder) as unfinished:
        save_folder(model, tokenizer, unfinished)
    return folder


def save_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Put what transformers needs to load a model into an existing folder, all weights in one safetensors file."""
    model.save_pretrained(folder, max_shard_size=2**60)
    tokenizer.save_pretrained(folder)


def check_installed() -> None:
    """Raise a MissingExtraError unless all is there that reading a GGUF file takes."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("reading a GGUF file", package, "gguf")


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata of a GGUF file; long lists as their length. A file that is cut short is refused.

    Only the header is read. The sizes it states are compared with the size of the file, so that a broken download is
    found here and not as an obscure error of an array's shape.
    """
    check_installed()
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    path = Path(path)
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path} is not a GGUF file: it does not start with the letters GGUF")
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
                f"{path} is cut short: it has {size:,} bytes, but {name} ends at byte {end:,}. Get the file again"
            )
    return metadata


class _Header:
    """A cursor over the bytes of a GGUF header."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position = data, path, 4

    def read(self) -> tuple[dict[str, Any], list[tuple[str, int, int, int]], int]:
        """The metadata; name, element count, type and offset of each tensor; and where the data starts."""
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
        """Move on by ``count`` bytes; where they start."""
        start = self.position
        if start + count > len(self.data):
            raise CheckpointError(
                f"{self.path} is cut short: its {len(self.data):,} bytes end inside the header. Get the file again"
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
def _reading_once() -> Iterator[None]:
    """Let transformers do once what it does three times, or once for each part of the model.

    It parses the file for the tokenizer, for the config and for the weights, 4 s each with a vocabulary of 49 thousand
    and 18 s with one of 262 thousand, and makes the table of all tensor names anew for every module.
    """
    import gguf

    with _ONE_AT_A_TIME:
        before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
        try:
            for name, function in before.items():
                setattr(gguf, name, functools.cache(function))
            yield
        finally:
            for name, function in before.items():
                setattr(gguf, name, function)


def _set_special_tokens(model: PreTrainedModel, tokenizer: Any, metadata: dict[str, Any]) -> None:
    for name, key in SPECIAL_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        token = tokenizer.convert_ids_to_tokens(token_id) if token_id is not None else None
        if token is not None and token != getattr(tokenizer, name):
            setattr(tokenizer, name, token)
    # Where a file does not say, llama.cpp puts <bos> before the text of a sentencepiece vocabulary and no other.
    of_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", of_sentencepiece))
    if add_bos != tokenizer.add_bos_token:
        tokenizer.add_bos_token = add_bos
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        from tokenizers import pre_tokenizers

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ends = [metadata.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")]
    known = list(dict.fromkeys(end for end in ends if end is not None))
    if known and model.generation_config is not None:
        model.generation_config.eos_token_id = known if len(known) > 1 else known[0]
