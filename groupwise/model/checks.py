"""What the files of a model claim, checked before anything is built from them.

A config.json is trusted by transformers: with a billion layers it would build for hours, and with wide ones fill the
memory. The weights say how large the model can be, since their headers are checked against the length of their files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import CheckpointError, InputError
from groupwise.rundir import read_json
from groupwise.text import excerpt, one_line

if TYPE_CHECKING:  # the command line checks a model's files before it loads PyTorch
    import torch
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor of a file by its name."""

SETTINGS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
LARGEST_SETTINGS = 2**26  # bytes; those of real models have thousands
LARGEST_TOKENIZER = 2**28  # bytes of tokenizer.json; that of Gemma 3 has 33 million
LONGEST_REASON = 300  # characters of another package's error in a message
PROBE = "What is 2 + 3?\n\tÄ 你好 <s> "  # a text that every tokenizer can encode
# num_hidden_layers, n_layer, num_blocks, …; max_window_layers is the first layer with a sliding window, if there is one
LAYERS = re.compile(r"(^|_)(?<!^max_window_)(layers?|blocks)$")
EXPERTS = re.compile(r"(^|_)experts$")  # num_local_experts, n_routed_experts, …


def check_settings_files(folder: Path) -> None:
    """Raise a CheckpointError for a JSON file of a model folder that is too large or holds no settings."""
    for name in SETTINGS:
        if (path := folder / name).exists():
            read_settings(path)
    if (path := folder / "tokenizer.json").is_file():
        _check_size(path, LARGEST_TOKENIZER)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a JSON file such as config.json or adapter_config.json."""
    if path.is_file():
        _check_size(path, LARGEST_SETTINGS)
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} is damaged: it holds no settings")
    return settings


def _check_size(path: Path, largest: int) -> None:
    if (size := path.stat().st_size) > largest:
        raise CheckpointError(f"{path} has {size / 2**20:,.0f} MiB, more than the {largest / 2**20:,.0f} of any model")


def tensor_shapes(file: Path, remedy: str = "download it again") -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file; raises if the file is not as long as its header says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:  # a RuntimeError of torch if the file is gone
        reason = one_line(str(error))[:LONGEST_REASON]
        raise CheckpointError(f"{file} is damaged or truncated ({reason}); {remedy}") from error


def check_counts(config: Mapping[str, Any], shapes: Shapes, where: str) -> None:
    """Raise a CheckpointError if a config has more layers or experts than its weights can have, or NaN.

    Each layer has a tensor. The experts of a layer have one each, or one whose first dimension is their number.
    """
    largest = max([len(shapes), *(size for shape in shapes.values() for size in shape)])
    for key, value in _settings_in(config):
        if isinstance(value, float) and math.isnan(value):
            raise CheckpointError(f"{where} is damaged: {key} is NaN; download it again")
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        is_layers = LAYERS.search(key) is not None
        if value < 0 and (is_layers or EXPERTS.search(key)):
            raise CheckpointError(f"{where} is damaged: {key} is {value}; download it again")
        if value > (len(shapes) if is_layers else largest) and (is_layers or EXPERTS.search(key)):
            raise CheckpointError(
                f"{where} says {key} = {value:,}, but the weights have only {len(shapes):,} tensors; the two do not "
                "belong together, or the file is damaged: download both again"
            )


def _settings_in(config: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value of nested settings. Not recursive: JSON may be nested as deeply as Python's stack allows."""
    waiting = [config]
    while waiting:
        value = waiting.pop()
        entries = value.items() if isinstance(value, Mapping) else (("", entry) for entry in value)
        for key, entry in entries:
            if isinstance(entry, (Mapping, list, tuple)):
                waiting.append(entry)
            else:
                yield str(key), entry


def check_model_folder(folder: Path, dtype: torch.dtype, kind: str = "AutoModelForSequenceClassification") -> None:
    """Raise for a folder whose config.json does not fit its weights, for a model of another kind than a language model.

    Weights in a pickle have no header to compare with.
    """
    from transformers import AutoConfig

    check_settings_files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes |= tensor_shapes(file)
    if shapes and (folder / "config.json").is_file():
        where = str(folder / "config.json")
        check_counts(read_settings(folder / "config.json"), shapes, where)
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        check_parameters(config, shapes, where, dtype, kind)


def check_parameters(
    config: Any, shapes: Shapes, where: str, dtype: torch.dtype, kind: str = "AutoModelForCausalLM"
) -> str | None:
    """Raise unless the weights have about as many numbers as the model of ``config``, and fit in memory.

    The model is built on torch's meta device, which takes no memory. Returns a sentence about the first tensor whose
    shape differs from the model's, for an error of transformers that does not name it.
    """
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = getattr(transformers, kind).from_config(config)
    if not getattr(config.get_text_config(), "num_hidden_layers", 1):
        raise CheckpointError(f"{where} describes a model without layers; download it again")
    needed = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    count, stored = (sum(map(math.prod, sizes.values())) for sizes in (needed, shapes))
    if count > 2 * stored:
        raise CheckpointError(
            f"{where} describes a model of {count:,} parameters, but the weights have {stored:,}; the two do not "
            "belong together, or a file is damaged: download both again"
        )
    check_memory(count, dtype, where)
    for name, shape in needed.items():
        if (own := shapes.get(name, shape)) != shape:
            return f"the tensor {name} has the shape {own}, but {where} describes {shape}"
    return None


def check_memory(count: int, dtype: torch.dtype, where: str) -> None:
    """Raise an InputError if ``count`` numbers of ``dtype`` do not fit in the memory that is free."""
    from groupwise.model.device import free_memory

    needed, free = count * dtype.itemsize, free_memory("cpu")
    if needed > free:
        raise InputError(
            f"the model of {where} needs {needed / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')}, but only "
            f"{free / 2**30:.1f} GiB of memory are free; use a smaller model, or dtype bfloat16"
        )


def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise a CheckpointError that names the first tensor with NaN or an infinity."""
    import torch

    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        # A sum takes no memory. It may overflow where every number is finite, so it does not decide.
        total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
        if not bool(total.isfinite()) and not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise CheckpointError(
                f"{where}: the tensor {excerpt(name, 120)} has {bad:,} numbers that are NaN or infinite; the weights "
                "are damaged, or training diverged: use another checkpoint, or download them again"
            )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise an error if a tokenizer cannot encode a text and decode it again, or has settings of wrong types."""
    if not isinstance(tokenizer.model_max_length, (int, float)):
        raise InputError(f"model_max_length is {excerpt(tokenizer.model_max_length)}, not a number")
    ids = tokenizer(PROBE)["input_ids"]
    tokenizer.batch_decode([ids], skip_special_tokens=True)
    for name in ("eos_token", "pad_token", "bos_token"):
        if not isinstance(getattr(tokenizer, f"{name}_id"), (int, type(None))):
            raise InputError(f"{name} is no token")
