"""A language model and its tokenizer from wherever they are: a folder, a GGUF file, a name, the hub.

Only data is read. Weights come from safetensors (or GGUF); a pickle is refused, because loading one can run any code,
and so is Python code that comes with a model, unless ``trust_remote_code`` asks for it.

Models come back in eval() mode and with every dropout at zero, so that train() mode, which gradient checkpointing
needs, has none either: in reinforcement learning the log-probs of a sample are computed more than once, and with
dropout a ratio that should be 1 would be noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from groupwise.errors import CheckpointError, InputError, check_choice
from groupwise.model import tiny
from groupwise.model.device import resolve_device, resolve_dtype
from groupwise.model.lora import Adapted, LoraSettings, add_lora, load_adapter, tensor_names
from groupwise.model.precision import set_precision
from groupwise.model.source import Source, base_of, find, first_line, is_adapter
from groupwise.rundir import read_json

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
) -> PreTrainedModel | Adapted:
    """A causal language model, in eval() mode, on its device.

    ``source`` is the first of these that it can be: a folder that exists (of a model, or of a LoRA adapter, which is
    put onto its base); a .gguf file; a name of `groupwise.model.weights` such as "smollm2-135m" (fetched once); "tiny",
    the embedded model with the weights of ``seed``; a hub id, "owner/name", at ``revision``.

    ``dtype`` is what the model computes in; "auto" is bfloat16 where the device has it in hardware, else float32.
    ``lora`` adds an adapter, with first values from ``seed``, and freezes the rest.
    The number of CPU threads is left alone; see `set_threads`.
    """
    return _load(source, dtype, device, lora, trust_remote_code, revision, seed)[0]


def load_model_and_tokenizer(
    source: str | Path, *, trust_remote_code: bool = False, revision: str | None = None, **options: Any
) -> tuple[PreTrainedModel | Adapted, PreTrainedTokenizerBase]:
    """A model and its tokenizer; ``options`` are the other ones of `load_model`. A GGUF file is read once for both."""
    defaults: dict[str, Any] = {"dtype": "auto", "device": "auto", "lora": None, "seed": 0}
    for name in options:
        check_choice("option of load", name, defaults)
    shared: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    model, tokenizer = _load(source, **shared, **{**defaults, **options})
    return model, load_tokenizer(source, **shared) if tokenizer is None else tokenizer


def load_tokenizer(
    source: str | Path, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; ``source`` is as in `load_model`. It is returned as its makers saved it."""
    found = find(source, trust_remote_code=trust_remote_code, revision=revision)
    if is_adapter(found.place) and not _has_any(found.place, TOKENIZER_FILES):
        found = base_of(found, trust_remote_code)
    if found.place is None:
        return tiny.tiny_tokenizer()
    if found.place.is_file():
        from groupwise.model.gguf import load_gguf

        return load_gguf(found.place)[1]
    if not _has_any(found.place, TOKENIZER_FILES):
        raise InputError(f"{found.place} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy it there from its base")
    from transformers import AutoTokenizer

    with _explained(found.place, "the tokenizer"):
        return AutoTokenizer.from_pretrained(
            str(found.place), trust_remote_code=trust_remote_code, local_files_only=not trust_remote_code
        )


def _load(
    source: str | Path,
    dtype: str | torch.dtype,
    device: str | torch.device,
    lora: LoraSettings | None,
    trust_remote_code: bool,
    revision: str | None,
    seed: int,
) -> tuple[PreTrainedModel | Adapted, PreTrainedTokenizerBase | None]:
    """The model, and its tokenizer if that came with it."""
    target = resolve_device(device)
    chosen = resolve_dtype(dtype, target)
    found = find(source, trust_remote_code=trust_remote_code, revision=revision, seed=seed)
    if found.place is not None and is_adapter(found.place):
        if lora is not None:
            raise InputError(f"{found.name} is a LoRA adapter already; load it without lora=, or name its base instead")
        base, _ = _read(base_of(found, trust_remote_code), chosen, trust_remote_code)
        model: Any = load_adapter(base, found.place)
        tokenizer = None
    else:
        model, tokenizer = _read(found, chosen, trust_remote_code)
        if lora is not None:
            model = add_lora(model, lora, seed=seed)
            model.peft_config[model.active_adapter].revision = revision
    try:
        return model.to(target), tokenizer
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{found.name} needs {model.get_memory_footprint() / 2**30:.1f} GiB in {chosen}, which {target} has not "
            "free; close what else runs there, or use a smaller model or dtype='bfloat16'"
        ) from error


def _read(
    found: Source, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    tokenizer = None
    if found.place is None:
        model: Any = tiny.tiny_model(found.seed)
    elif found.place.is_file():
        from groupwise.model import gguf

        model, tokenizer = gguf.load_gguf(found.place, dtype if dtype in gguf.DTYPES else torch.float32)
    else:
        model = _read_folder(found.place, dtype, trust_remote_code)
    model.name_or_path = found.name
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # handed to the attention function in train() mode
    set_precision(model, dtype)
    return model.eval(), tokenizer


def _read_folder(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_config(folder, trust_remote_code)
    _check_weights(folder)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": not trust_remote_code}
    with _explained(folder, "the model"), without_progress_bars():
        config = AutoConfig.from_pretrained(str(folder), **options)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
        model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"the weights in {folder} lack {len(missing)} tensors that its config.json asks for, so the model would "
            f"start from random numbers there; the first is {missing[0]}"
        )
    return model  # type: ignore[no-any-return]


def _check_config(folder: Path, trust_remote_code: bool) -> None:
    """Refuse what is no causal language model, or none that can be trained, before any weight is read."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if not (folder / "config.json").is_file():
        inside = sorted(
            path.name for path in folder.iterdir() if path.suffix == ".gguf" or (path / "config.json").is_file()
        )
        hint = f"; did you mean {folder / inside[0]}?" if inside else ""
        raise InputError(f"{folder} has no config.json, so it is not the folder of a model{hint}")
    facts = read_json(folder / "config.json")
    if not isinstance(facts, dict):
        raise CheckpointError(f"{folder / 'config.json'} is damaged: it holds no settings")
    kind = facts.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if not facts.get("auto_map"):
            raise InputError(
                f"{folder} holds a model of the type {kind!r}, which this version of transformers does not know; a "
                "newer one may"
            )
        if not trust_remote_code:
            raise InputError(
                f"{folder} holds a model of the type {kind!r}, which comes with Python code of its own. It is not run "
                "unless you ask for it: read it, then pass trust_remote_code=True"
            )
        return
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], ())
    known = {made.__name__ for made in (causal if isinstance(causal, tuple) else (causal,))}
    made = facts.get("architectures") or sorted(known)
    if known.isdisjoint(made) and not (trust_remote_code and facts.get("auto_map")):
        raise InputError(
            f"{folder} holds a {', '.join(made) or kind}, which does not continue a text token by token: it is not a "
            "causal language model (those are usually called …ForCausalLM)"
        )
    if packed := facts.get("quantization_config"):
        how = packed.get("quant_method") if isinstance(packed, dict) else packed
        raise InputError(
            f"the weights in {folder} are quantised ({how}) and cannot be trained; use the model they were made from"
        )


def _check_weights(folder: Path) -> None:
    """Every safetensors file that is needed is there and as long as its header says."""
    needed = {WEIGHTS}
    if not (folder / WEIGHTS).exists() and (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise CheckpointError(f"{folder / INDEX} is damaged: it has no weight_map")
        needed = set(index["weight_map"].values())
    elif not (folder / WEIGHTS).exists() and _has_any(folder, PICKLES):
        raise InputError(
            f"{folder} has its weights in a pickle ({', '.join(PICKLES)}), which is not read: loading one can run any "
            "code. Take a version with safetensors, or convert it where you trust it: load it with transformers and "
            "call save_pretrained"
        )
    for name in sorted(needed):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}, so the weights are not all there; get it again")
        tensor_names(folder / name)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars for files that are read or written within seconds."""
    from transformers.utils import logging as bars_of_transformers

    bars: Any = bars_of_transformers  # its functions have no types
    if not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()


@contextmanager
def _explained(folder: Path, what: str) -> Iterator[None]:
    """Whatever transformers finds wrong with a folder, as one error that names it."""
    try:
        yield
    except Exception as error:  # the tokenizers package raises nothing more specific
        raise CheckpointError(f"{what} in {folder} could not be loaded: {first_line(error)}") from error


def _has_any(folder: Path | None, patterns: Iterable[str]) -> bool:
    return folder is not None and any(True for pattern in patterns for _ in folder.glob(pattern))
