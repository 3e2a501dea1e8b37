"""Export a trained model as a transformers folder (safetensors, config, tokenizer), atomically.

The model is not changed, nor is its adapter: the weights are copied to the CPU once, and merged and rounded there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from groupwise.distributed.fsdp import full
from groupwise.distributed.ranks import Ranks
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
    weights: Mapping[str, Tensor] | None = None,
    dtype: str | torch.dtype | None = None,
    merge: bool = True,
) -> Path:
    """Write ``model`` to ``folder``, which must not exist yet, and return the folder.

    masters: the model's float32 master weights, or other values by name, written instead of the model's own. ``dtype``
    is float32 by default with masters, else the model's.
    weights: complete and merged ones in ``dtype``, by their names in a checkpoint (see `collect_weights`): for a model
    whose own are sharded.
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
            if weights is not None:
                _write_weights(model, unfinished, weights)
            elif is_lora(model) and not merge:
                _write_adapter(model, unfinished, values, chosen)
            else:
                _write_model(model, unfinished, values, chosen)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(unfinished))
        except (ValueError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{folder} could not be written: {error}") from error
    return folder


@torch.no_grad()
def iter_full_weights(
    model: nn.Module, dtype: torch.dtype | None = None, *, repeat_tied: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model one after another, by their names in a checkpoint, in ``dtype`` and on the model's device.

    dtype: that of the model by default. If its weights are sharded, that is the dtype of the trained slices, float32,
    not what the model computes in. Then all ranks iterate at the same time, and each tensor is gathered on all of them.
    LoRA adapters are merged, computed in float32 and rounded once. Tied weights come once, or with ``repeat_tied``
    under each of their names.
    """
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if hasattr(layer, "merged_adapters")}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if "lora_" in name or (id(value) in seen and not repeat_tied):
            continue
        seen.add(id(value))
        owner, _, kind = name.rpartition(".")
        layer = layers.get(owner.removesuffix(".base_layer"))
        tensor = full(value)
        chosen = dtype if dtype is not None and isinstance(value, nn.Parameter) else tensor.dtype
        if layer is not None and kind == "weight" and not layer.merged:
            tensor = _merged(tensor, layer)
        yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), tensor.to(chosen)


def collect_weights(model: nn.Module, dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
    """All weights of a sharded model for `export_model`, on the CPU of rank 0; none on the other ranks."""
    weights = {}
    for name, tensor in iter_full_weights(model, dtype):
        if ranks.is_main:
            weights[name] = tensor.to(CPU)
    return weights


def _merged(weight: Tensor, layer: Any) -> Tensor:
    """The weight of a layer with its active LoRA adapters added, in float32 or float64."""
    merged = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    for name in layer.active_adapters if not layer.disable_adapters else ():
        if name in layer.lora_A:
            up, down = (full(part[name].weight).to(merged.dtype) for part in (layer.lora_B, layer.lora_A))
            delta = up @ down
            merged += layer.scaling[name] * (delta.T if layer.fan_in_fan_out else delta)
        elif name in getattr(layer, "lora_embedding_A", {}):
            merged += full(layer.get_delta_weight(name)).to(merged.dtype)
    return merged


def _write_model(
    model: PreTrainedModel | AdaptedModel, folder: Path, values: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    # Merging needs more precision than the result; without an adapter nothing is computed.
    working = torch.promote_types(dtype, torch.float32) if is_lora(model) else dtype
    plain: Any = _copy_on_cpu(model, values, working)
    if is_lora(plain):
        plain = plain.merge_and_unload(safe_merge=True)
    set_precision(plain, dtype)
    _save(plain, folder)


def _write_weights(model: PreTrainedModel | AdaptedModel, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the weights as those of a new model of the same kind: a sharded one cannot be copied."""
    inner: Any = model.get_base_model() if is_lora(model) else model
    with torch.device("meta"):
        plain = type(inner)(copy.deepcopy(inner.config))
    plain.load_state_dict(dict(weights), strict=False, assign=True)
    plain.tie_weights()
    if missing := [name for name, parameter in plain.named_parameters() if parameter.is_meta]:
        raise ValueError(f"{missing[0]} has no values")
    plain.generation_config = copy.deepcopy(inner.generation_config)
    _save(plain, folder)


def _save(plain: Any, folder: Path) -> None:
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
