"""Load a language model and its tokenizer from a folder, a GGUF file, a known name or the hub.

Only data is read: weights come from safetensors or GGUF. Pickles are refused, because loading one can run any code, and
so is a model's own Python code unless ``trust_remote_code`` is set.

Models are returned in eval() mode with all dropout set to zero, so that train() mode, which gradient checkpointing
needs, has none either: with dropout, on-policy ratios would not be 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from groupwise.distributed.fsdp import is_sharded
from groupwise.errors import CheckpointError, InputError
from groupwise.model import tiny
from groupwise.model.checks import (
    LONGEST_REASON,
    check_counts,
    check_finite,
    check_parameters,
    check_settings_files,
    check_tokenizer,
    read_settings,
    tensor_shapes,
)
from groupwise.model.device import resolve_device, resolve_dtype
from groupwise.model.lora import (
    AdaptedModel,
    LoraSettings,
    adapter_settings,
    add_lora,
    is_lora,
    load_adapter,
    set_adapter_dropout,
)
from groupwise.model.precision import set_precision
from groupwise.model.source import Source, base_of, is_adapter, resolve_source
from groupwise.paths import is_file
from groupwise.rundir import read_json
from groupwise.text import excerpt, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")


def load_model(
    source: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    lora: LoraSettings | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    seed: int = 0,
) -> PreTrainedModel | AdaptedModel:
    """Load a causal language model, in eval() mode, onto its device.

    source: an existing folder (of a model, or of a LoRA adapter, which is put onto its base); a .gguf file; a name of
    `groupwise.model.weights` such as "smollm2-135m" (fetched once); "tiny", the built-in model with the weights of
    ``seed``; or a hub id, "owner/name", at ``revision``. The first that matches is used.
    dtype: what the model computes in; "auto" is bfloat16 where the device supports it in hardware, else float32.
    lora: adds an adapter, initialised from ``seed``, and freezes the rest.

    The number of CPU threads is not changed; see `set_threads`.
    """
    return _load(source, trust_remote_code, revision, dtype=dtype, device=device, lora=lora, seed=seed)[0]


def load_model_and_tokenizer(
    source: str | Path, *, trust_remote_code: bool = False, revision: str | None = None, **options: Any
) -> tuple[PreTrainedModel | AdaptedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer; ``options`` are those of `load_model`. A GGUF file is read once for both."""
    shared: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    model, tokenizer = _load(source, **shared, **options)
    return model, load_tokenizer(source, **shared) if tokenizer is None else tokenizer


def adopt_model(
    model: Any,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    lora: LoraSettings | None = None,
    seed: int = 0,
) -> PreTrainedModel | AdaptedModel:
    """Prepare a model that is loaded already, as `load_model` would: on its device, in eval() mode, without dropout.

    The model itself is changed and trained, not a copy. With "auto" it keeps its dtype, and its device if that is not
    the CPU. If it has an adapter with the settings ``lora``, the adapter keeps its dropout.
    """
    from transformers import PreTrainedModel

    inner = model.get_base_model() if is_lora(model) else model
    if not isinstance(inner, PreTrainedModel):
        raise InputError(
            "a model is given as a name, a folder, a hub id or a loaded causal language model of transformers, not as "
            f"an object of type {type(model).__name__}"
        )
    if getattr(inner.config, "quantization_config", None) is not None:
        raise InputError("the weights of this model are quantised and cannot be trained; load the original model")
    devices = set(getattr(inner, "hf_device_map", {}).values())
    if any(map(is_sharded, inner.parameters())):
        raise InputError(
            "the weights of this model are divided among processes already (tensor parallel or FSDP); load it without "
            "tp_plan and distributed_config, and use model.sharding = 'weights'"
        )
    if len(devices) > 1:
        raise InputError(f"the model is spread over {len(devices)} devices; load it onto one, without device_map")
    if lora is not None and inner is not model and lora != adapter_settings(model):
        raise InputError("this model has a LoRA adapter already; leave model.lora out")
    target = inner.device if device == "auto" and inner.device.type != "cpu" else resolve_device(device)
    chosen = resolve_dtype(inner.dtype if dtype == "auto" else dtype, target)
    _remove_dropout(model)
    if lora is not None:
        model = set_adapter_dropout(model, lora) if is_lora(model) else add_lora(model, lora, seed=seed)
    set_precision(model, chosen)
    return model.eval().to(target)


def load_tokenizer(
    source: str | Path, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, unchanged; ``source`` is as in `load_model`."""
    location = resolve_source(source, trust_remote_code=trust_remote_code, revision=revision)
    if is_adapter(location.path) and not _has_any(location.path, TOKENIZER_FILES):
        location = base_of(location, trust_remote_code)
    if location.path is None:
        return tiny.tiny_tokenizer()
    if location.path.is_file():
        from groupwise.model.gguf import load_gguf

        return load_gguf(location.path)[1]
    if location.path.exists() and not _has_any(location.path, TOKENIZER_FILES):
        raise InputError(
            f"{location.path} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy it from the base model"
        )
    from transformers import AutoTokenizer

    with _deletion_reported(location.path), _as_checkpoint_error(location.path, "the tokenizer"):
        check_settings_files(location.path)
        tokenizer = AutoTokenizer.from_pretrained(
            str(location.path), trust_remote_code=trust_remote_code, local_files_only=not trust_remote_code
        )
        check_tokenizer(tokenizer)
        return tokenizer


def _load(
    source: str | Path,
    trust_remote_code: bool,
    revision: str | None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    lora: LoraSettings | None = None,
    seed: int = 0,
) -> tuple[PreTrainedModel | AdaptedModel, PreTrainedTokenizerBase | None]:
    """The model, and its tokenizer if it was loaded too."""
    target = resolve_device(device)
    chosen = resolve_dtype(dtype, target)
    location = resolve_source(source, trust_remote_code=trust_remote_code, revision=revision, seed=seed)
    if location.path is not None and is_adapter(location.path):
        if lora is not None:
            raise InputError(
                f"{location.name} is a LoRA adapter already; load it without lora=, or load its base instead"
            )
        base, _ = _read(base_of(location, trust_remote_code), chosen, trust_remote_code)
        with _deletion_reported(location.path):
            model: Any = load_adapter(base, location.path)
        tokenizer = None
    else:
        with _deletion_reported(location.path):
            model, tokenizer = _read(location, chosen, trust_remote_code)
        if lora is not None:
            model = add_lora(model, lora, seed=seed)
            model.peft_config[model.active_adapter].revision = revision
    try:
        return model.to(target), tokenizer
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{location.name} needs {model.get_memory_footprint() / 2**30:.1f} GiB in {chosen}, more than {target} has "
            "free; stop other processes there, or use a smaller model or dtype='bfloat16'"
        ) from error


def _read(
    location: Source, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    tokenizer = None
    if location.path is None:
        model: Any = tiny.tiny_model(location.seed)
    elif location.path.is_file():
        from groupwise.model import gguf

        model, tokenizer = gguf.load_gguf(location.path, dtype if dtype in gguf.DTYPES else torch.float32)
    else:
        model = _read_folder(location.path, dtype, trust_remote_code)
    if location.path is not None:
        check_finite(dict(model.named_parameters()), str(location.path))
    model.name_or_path = location.name
    _remove_dropout(model)
    set_precision(model, dtype)
    return model.eval(), tokenizer


def _remove_dropout(model: nn.Module) -> None:
    module: Any
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # passed to the attention function in train() mode


def _read_folder(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    config_file = folder / "config.json"
    check_settings_files(folder)
    _check_config(folder, trust_remote_code)
    shapes = _check_weights(folder)
    check_counts(read_settings(config_file), shapes, str(config_file))
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": not trust_remote_code}
    with _as_checkpoint_error(folder, "the model"), without_progress_bars():
        config = AutoConfig.from_pretrained(str(folder), **options)
        other_shape = None
        if not trust_remote_code:
            other_shape = check_parameters(config, shapes, str(config_file), dtype)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
        except RuntimeError as error:
            if other_shape is None:
                raise
            raise CheckpointError(f"the model in {folder} could not be loaded: {other_shape}") from error
        model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"the weights in {folder} lack {len(missing)} tensors that its config.json requires; they would be random. "
            f"The first is {missing[0]}"
        )
    return model  # type: ignore[no-any-return]


def _check_config(folder: Path, trust_remote_code: bool) -> None:
    """Refuse what is not a trainable causal language model, before any weight is read."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if not is_file(folder / "config.json"):
        inside = sorted(
            path.name for path in folder.iterdir() if path.suffix == ".gguf" or (path / "config.json").is_file()
        )
        hint = f"; did you mean {folder / inside[0]}?" if inside else ""
        raise InputError(f"{folder} has no config.json, so it is not a model folder{hint}")
    config = read_settings(folder / "config.json")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if config.get("auto_map") and trust_remote_code:
            return
        hint = "a newer one may"
        if config.get("auto_map"):
            hint = (
                "it comes with its own Python code, which is run only if you allow it: review it, then pass "
                "trust_remote_code=True"
            )
        raise InputError(
            f"{folder} holds a model of the type {kind!r}, which this version of transformers does not know; {hint}"
        )
    mapped: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], ())
    causal = {cls.__name__ for cls in (mapped if isinstance(mapped, tuple) else (mapped,))}
    architectures = config.get("architectures") or sorted(causal)
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"{folder / 'config.json'} is damaged: architectures is {excerpt(architectures)}")
    if causal.isdisjoint(architectures) and not (trust_remote_code and config.get("auto_map")):
        raise InputError(
            f"{folder} holds a {', '.join(architectures) or kind}, which is not a causal language model (those are "
            "usually called …ForCausalLM)"
        )
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise InputError(
            f"the weights in {folder} are quantised ({method}) and cannot be trained; use the original model"
        )


def _check_weights(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors; raises unless all safetensors files exist and are as long as their headers say."""
    needed = {WEIGHTS}
    if not (folder / WEIGHTS).exists() and (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise CheckpointError(f"{folder / INDEX} is damaged: it has no weight_map")
        names = list(index["weight_map"].values())
        if foreign := [name for name in names if not _is_file_name(name)]:
            raise CheckpointError(f"{folder / INDEX} names a file that is not in its folder: {excerpt(foreign[0])}")
        needed = set(names)
    elif not (folder / WEIGHTS).exists() and _has_any(folder, PICKLES):
        raise InputError(
            f"{folder} has its weights in a pickle ({', '.join(PICKLES)}), which is not read: loading one can run any "
            "code. Use a version with safetensors, or, if you trust it, load it with transformers and call "
            "save_pretrained"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for name in sorted(needed):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}, so its weights are incomplete; download it again")
        shapes |= tensor_shapes(folder / name)
    return shapes


def _is_file_name(name: Any) -> bool:
    """Whether a name is that of a file in the folder itself, not a path to elsewhere."""
    return isinstance(name, str) and name != ".." and len(name) < 256 and "\0" not in name and Path(name).name == name


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars within this block."""
    from transformers.utils import logging

    bars: Any = logging  # untyped
    enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            bars.enable_progress_bar()


@contextmanager
def _as_checkpoint_error(folder: Path, what: str) -> Iterator[None]:
    """Turn any error of transformers into one that names the folder."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except MemoryError as error:
        raise CheckpointError(f"{what} in {folder} could not be loaded: it needs more memory than there is") from error
    except BaseException as error:  # the tokenizers package raises nothing more specific, and panics
        reason = one_line(str(error))[:LONGEST_REASON].rstrip(".") or type(error).__name__
        raise CheckpointError(f"{what} in {folder} could not be loaded: {reason}") from error


@contextmanager
def _deletion_reported(path: Path | None) -> Iterator[None]:
    """If a model was deleted while it was read, the error says that: a run deletes its older checkpoints."""
    try:
        yield
    except Exception as error:  # safetensors and torch raise several kinds if a file is gone
        if path is None or (path.exists() and not isinstance(error, FileNotFoundError)):
            raise
        raise CheckpointError(
            f"{path} was deleted while it was read; a run keeps its last checkpoints and the best one "
            "(run.keep_checkpoints): read a newer one, or the model/ of a finished run"
        ) from error


def _has_any(folder: Path | None, patterns: Iterable[str]) -> bool:
    return folder is not None and any(True for pattern in patterns for _ in folder.glob(pattern))
