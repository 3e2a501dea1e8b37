"""Export a trained model as a transformers folder (safetensors, config, tokenizer), atomically.

The model is not changed, nor is its adapter: the weights are copied to the CPU once, and merged and rounded there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from groupwise.errors import CheckpointError, InputError
from groupwise.model.device import resolve_dtype
from groupwise.model.load import without_progress_bars
from groupwise.model.lora import AdaptedModel, is_lora
from groupwise.model.precision import MasterWeights, set_precision
from groupwise.rundir import atomic_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CPU = torch.device("cpu")


def export_model(
    model: PreTrainedModel | AdaptedModel,
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    masters: MasterWeights | Mapping[str, Tensor] | None = None,
    dtype: str | torch.dtype | None = None,
    merge: bool = True,
) -> Path:
    """Write ``model`` to ``folder``, which must not exist yet, and return the folder.

    masters: the model's float32 master weights, or other values by name, written instead of the model's own. ``dtype``
    is float32 by default with masters, else the model's.
    merge: merge a LoRA adapter into its base, computed in float32 and rounded once, so that the folder needs no PEFT;
    otherwise write the adapter only, as a PEFT folder. In bfloat16 the rounding also affects the adapter's small
    changes: use float32 where that matters.
    """
    folder = Path(folder)
    if isinstance(masters, MasterWeights) and masters.model is not model:
        raise InputError("these master weights belong to another model; export the model they were made from")
    values = masters.state_dict() if isinstance(masters, MasterWeights) else masters or {}
    if not merge and not is_lora(model):
        raise InputError("merge=False exports the adapter only, but this model has none; leave merge out")
    default = torch.float32 if masters is not None else model.dtype
    chosen = default if dtype is None else resolve_dtype(dtype, CPU)
    with atomic_folder(folder) as unfinished, without_progress_bars():
        try:
            if is_lora(model) and not merge:
                _write_adapter(model, unfinished, values, chosen)
            else:
                _write_model(model, unfinished, values, chosen)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(unfinished))
        except (ValueError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{folder} could not be written: {error}") from error
    return folder


def _write_model(
    model: PreTrainedModel | AdaptedModel, folder: Path, values: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    # Merging needs more precision than the result; without an adapter nothing is computed.
    working = torch.promote_types(dtype, torch.float32) if is_lora(model) else dtype
    plain: Any = _copy_on_cpu(model, values, working)
    if is_lora(plain):
        plain = plain.merge_and_unload(safe_merge=True)
    set_precision(plain, dtype)
    # The attention implementation is a choice of this process, not part of the weights.
    plain.config._attn_implementation = None
    if plain.generation_config is not None:
        try:
            plain.generation_config.validate(strict=True)
        except ValueError:  # transformers loads a config with a temperature but no do_sample, and refuses to save it
            plain.generation_config.do_sample = True
    plain.save_pretrained(str(folder))


def _write_adapter(model: AdaptedModel, folder: Path, values: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    state = {**model.state_dict(), **values}
    adapter = {name: value.to(dtype) if "lora_" in name else value for name, value in state.items()}
    # With save_embedding_layers PEFT would look for the base on the hub.
    model.save_pretrained(str(folder), state_dict=adapter, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # an empty template


def _copy_on_cpu(
    model: PreTrainedModel | AdaptedModel, values: Mapping[str, Tensor], dtype: torch.dtype
) -> PreTrainedModel | AdaptedModel:
    """A copy of the model with its weights on the CPU in ``dtype``, without a second copy on the device.

    Deepcopy takes the CPU copies from its memo. Buffers keep their dtype: rotary frequencies are float32 in a bfloat16
    model.
    """
    memo: dict[int, object] = {}
    for name, parameter in model.named_parameters():
        value = values.get(name, parameter.detach())
        memo[id(parameter)] = nn.Parameter(_cpu_copy(value, dtype), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = _cpu_copy(buffer.detach(), buffer.dtype)
    return copy.deepcopy(model, memo)


def _cpu_copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(device=CPU, dtype=dtype if value.is_floating_point() else value.dtype, copy=True)
