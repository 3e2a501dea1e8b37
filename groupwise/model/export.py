"""A trained model as the folder that everybody can load: safetensors, config, tokenizer; whole or absent.

Exporting leaves the model as it is, also one with an adapter: the weights are copied to the CPU, one copy in all, and
merged and rounded there.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from groupwise.errors import CheckpointError, InputError
from groupwise.model.device import resolve_dtype
from groupwise.model.load import without_progress_bars
from groupwise.model.lora import Adapted, is_lora
from groupwise.model.precision import MasterWeights, set_precision
from groupwise.rundir import atomic_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CPU = torch.device("cpu")


def export_model(
    model: PreTrainedModel | Adapted,
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    masters: MasterWeights | None = None,
    dtype: str | torch.dtype | None = None,
    merge: bool = True,
) -> Path:
    """Write ``model`` as a transformers folder, which must not exist yet; the folder.

    ``masters`` are the model's float32 master weights: their values are written instead of the rounded ones, in float32
    unless ``dtype`` says otherwise. Without them the weights have the model's own precision. A LoRA adapter is merged
    into its base, in float32 or better and rounded once, so that the folder needs no PEFT; with ``merge=False`` the
    adapter alone is written, as a PEFT folder. Rounding a merged model to bfloat16 rounds the adapter's small changes
    too: choose float32 where that matters.
    """
    folder = Path(folder)
    if masters is not None and masters.model is not model:
        raise InputError("these master weights belong to another model; export the model they were made from")
    if not merge and not is_lora(model):
        raise InputError("merge=False exports the adapter alone, but this model has none; leave merge out")
    kept = torch.float32 if masters is not None else model.dtype
    chosen = kept if dtype is None else resolve_dtype(dtype, CPU)
    with atomic_folder(folder) as unfinished, without_progress_bars():
        try:
            if is_lora(model) and not merge:
                _write_adapter(model, unfinished, masters, chosen)
            else:
                _write_whole(model, unfinished, masters, chosen)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(unfinished))
        except (ValueError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{folder} could not be written: {error}") from error
    return folder


def _write_whole(
    model: PreTrainedModel | Adapted, folder: Path, masters: MasterWeights | None, dtype: torch.dtype
) -> None:
    # Merging needs more digits than the result keeps; without an adapter nothing is computed, so nothing is lost.
    working = torch.promote_types(dtype, torch.float32) if is_lora(model) else dtype
    plain: Any = _copy_on_cpu(model, masters, working)
    if is_lora(plain):
        plain = plain.merge_and_unload(safe_merge=True)
    set_precision(plain, dtype)
    # The copy's settings are its own: another attention function was a matter of this process, not of the weights.
    plain.config._attn_implementation = None
    _repair_generation_config(plain)
    plain.save_pretrained(str(folder))


def _write_adapter(model: Adapted, folder: Path, masters: MasterWeights | None, dtype: torch.dtype) -> None:
    state = {**model.state_dict(), **(masters.state_dict() if masters is not None else {})}
    adapter = {name: value.to(dtype) if "lora_" in name else value for name, value in state.items()}
    # Asked to look after the embedding layers, PEFT would look for the base on the hub.
    model.save_pretrained(str(folder), state_dict=adapter, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a form to be filled in


def _copy_on_cpu(
    model: PreTrainedModel | Adapted, masters: MasterWeights | None, dtype: torch.dtype
) -> PreTrainedModel | Adapted:
    """A copy of the model whose weights are on the CPU in ``dtype``; the device never holds a second one.

    Deepcopy takes from its memo whatever it finds there, so the weights go straight into their new place. Buffers keep
    their precision: rotary frequencies, for one, are float32 in a bfloat16 model.
    """
    exact = masters.state_dict() if masters is not None else {}
    memo: dict[int, object] = {}
    for name, parameter in model.named_parameters():
        value = exact.get(name, parameter.detach())
        memo[id(parameter)] = nn.Parameter(_cpu_copy(value, dtype), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = _cpu_copy(buffer.detach(), buffer.dtype)
    return copy.deepcopy(model, memo)


def _cpu_copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(device=CPU, dtype=dtype if value.is_floating_point() else value.dtype, copy=True)


def _repair_generation_config(model: Any) -> None:
    """Make the generation settings ones that transformers agrees to save.

    It reads files that set a temperature without turning sampling on, and refuses to write them.
    """
    config = model.generation_config
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
