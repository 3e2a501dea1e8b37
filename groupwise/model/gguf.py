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
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from groupwise.errors import CheckpointError, InputError, MissingExtraError
from groupwise.model.checks import check_counts, check_parameters, check_tokenizer
from groupwise.model.gguf_header import Header, read_header
from groupwise.text import error_reason, excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

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
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype}; a GGUF file can be loaded in {', '.join(map(str, DTYPES))}")
    check_installed()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        from transformers import GgufConfig
    except ImportError:
        options: dict[str, Any] = {}
    else:
        options = {"quantization_config": GgufConfig(dequantize=True)}
    # An absolute path: transformers would prefer a file of the same name in the working directory.
    file = Path(path).resolve()
    metadata, shapes = _check_header(file)
    with _cached_reads():
        try:
            config = AutoConfig.from_pretrained(str(file.parent), gguf_file=str(file))
            check_parameters(config, shapes, str(file), dtype)
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=str(file))
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(file.parent), gguf_file=str(file), dtype=dtype, output_loading_info=True, **options
            )
            _set_special_tokens(loaded[0], tokenizer, metadata)
            check_tokenizer(tokenizer)
        except (CheckpointError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # transformers raises anything, and the tokenizers package panics
            architecture = metadata.get("general.architecture")
            raise CheckpointError(
                f"{path} is a GGUF file of the architecture {excerpt(architecture)}, which transformers could not "
                f"load: {error_reason(e)}"
            ) from e
    model, info = loaded
    if missing := sorted(set(info["missing_keys"])):
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise CheckpointError(
            f"{path} lacks {len(missing)} weights of its model ({shown}), which would be random; use another file"
        )
    return model, tokenizer


def check_installed() -> None:
    """Raise a MissingExtraError unless the packages that read GGUF files are installed."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("reading a GGUF file", package, "gguf")


def _check_header(file: Path) -> Header:
    """The header of a GGUF file; raises if the file is damaged or truncated, or claims more layers than it has."""
    try:
        header = read_header(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a readable GGUF file: {error_reason(error)}. If it is damaged, download it again"
        ) from error
    # The names that check_counts knows: llama.block_count is a number of layers.
    renamed = {re.sub(r".*\.(block|expert)_count$", r"\1s", name): value for name, value in header.metadata.items()}
    check_counts(renamed, header.shapes, str(file))
    return header


@contextmanager
def _cached_reads() -> Iterator[None]:
    """Cache the reader and the name table that transformers builds repeatedly.

    It parses the file for the tokenizer, the config and the weights, which takes 4 s each with a vocabulary of 49
    thousand and 18 s with 262 thousand, and builds the table of all tensor names for every module.
    """
    import gguf

    with _PATCH_LOCK:
        originals: dict[str, Any] = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}

        try:
            for name, original in originals.items():
                setattr(gguf, name, functools.cache(original))
            yield
        finally:
            for name, original in originals.items():
                setattr(gguf, name, original)


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
