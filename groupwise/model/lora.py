"""LoRA through PEFT: a small trainable adapter on a frozen base.

The reference policy of a KL term is the base with the adapter disabled (`adapter_off`) and needs no second model. By
default PEFT makes the adapter of a bfloat16 model float32 and converts in every layer; here it has the model's dtype,
and `MasterWeights` holds its float32 masters, as in full fine-tuning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import nn

from groupwise.errors import CheckpointError, InputError, MissingExtraError, check_integer
from groupwise.model.source import ADAPTER_CONFIG, read_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AdaptedModel: TypeAlias = Any
"""PEFT's ``PeftModel`` around a transformers model; PEFT is optional, so its type is not imported."""

ALL_LINEAR = "all-linear"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class LoraSettings:
    """The adapter to add. It adds ``scale · B · A`` to each target layer, with scale = alpha / rank."""

    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float = 32
    """LoRA scaling: the update is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout before the adapter, in train() mode only. It makes log-probs random, so on-policy ratios are not 1."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    """The layers to adapt, by the last part of their names ("q_proj"), or all linear layers except the head."""
    rslora: bool = False
    """Scale by alpha / √rank instead, so that updates do not shrink as the rank grows."""

    def __post_init__(self) -> None:
        check_integer("the rank of a LoRA adapter", self.rank, 1)
        if not self.alpha > 0:
            raise InputError(f"the alpha of a LoRA adapter must be above 0, not {self.alpha!r}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"the dropout of a LoRA adapter must be at least 0 and below 1, not {self.dropout!r}")
        targets = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        if not targets or not all(isinstance(target, str) and target for target in targets):
            raise InputError(f"the targets of a LoRA adapter must be {ALL_LINEAR!r} or names, not {self.targets!r}")
        if self.targets != ALL_LINEAR:
            object.__setattr__(self, "targets", targets)


def add_lora(model: PreTrainedModel, settings: LoraSettings | None = None, *, seed: int = 0) -> AdaptedModel:
    """Freeze ``model`` and add a new adapter, which changes no output yet (B starts at zero).

    The layers of ``model`` are replaced in place. A is drawn from ``seed``; the global random state is not changed.
    """
    peft = _peft()
    settings = settings or LoraSettings()
    if is_lora(model):
        raise InputError("this model has a LoRA adapter already; continue with that one, or export it merged first")
    if settings.targets != ALL_LINEAR:
        _check_targets(model, settings.targets)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=settings.targets if isinstance(settings.targets, str) else list(settings.targets),
        use_rslora=settings.rslora,
        task_type=peft.TaskType.CAUSAL_LM,
    )
    training = model.training
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # PEFT draws on the CPU
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted.train(training)


def load_adapter(model: PreTrainedModel, folder: str | Path) -> AdaptedModel:
    """Put the adapter saved in ``folder`` onto its base, trainable."""
    peft = _peft()
    weights = Path(folder) / ADAPTER_WEIGHTS
    if (kind := read_settings(Path(folder) / ADAPTER_CONFIG).get("peft_type")) != "LORA":
        raise InputError(f"{folder} holds a {kind} adapter; only LoRA can be loaded")
    if not weights.is_file():
        raise CheckpointError(
            f"{folder} has no {ADAPTER_WEIGHTS}. An adapter in a pickle (.bin) is not read, since loading one can run "
            "any code; save it again as safetensors"
        )
    saved = tensor_names(weights)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # checked below
            adapted = peft.PeftModel.from_pretrained(
                model, str(folder), is_trainable=True, autocast_adapter_dtype=False
            )
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"the adapter in {folder} does not fit the model {model.name_or_path}: {error}"
        ) from error
    needed = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if missing := sorted(needed - saved):
        raise CheckpointError(f"{weights} lacks {len(missing)} of {len(needed)} tensors, the first is {missing[0]}")
    return adapted.train(model.training)


def is_lora(model: nn.Module) -> TypeGuard[AdaptedModel]:
    """Whether a model has an adapter. Does not import PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapter within this block: the model is its base, the reference policy. May be nested."""
    if not is_lora(model):
        raise InputError(
            "this model has no LoRA adapter that could be disabled; full fine-tuning needs a separate reference model"
        )
    with model.disable_adapter():
        yield


def _check_targets(model: Any, targets: str | tuple[str, ...]) -> None:
    """Check every target: PEFT raises only if none of them matches."""
    from transformers.pytorch_utils import Conv1D

    def named(name: str, target: str) -> bool:
        return f".{name}".endswith(f".{target}")

    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding, Conv1D))]
    for target in targets:
        if not any(named(name, target) for name in layers):
            names = sorted({name.rsplit(".", 1)[-1] for name in layers})
            raise InputError(f"the model has no layer {target!r}, a LoRA target (there are: {', '.join(names)})")
    if getattr(model.config, "tie_word_embeddings", False):
        tied = (model.get_input_embeddings(), model.get_output_embeddings())
        for name, module in model.named_modules():
            if any(module is end for end in tied) and any(named(name, target) for target in targets):
                raise InputError(
                    f"the LoRA target {name} is tied to the embedding or the head, so its adapter could not be merged; "
                    "choose other targets"
                )


def tensor_names(file: Path) -> set[str]:
    """The tensor names in a safetensors file; raises if the file is shorter than its header says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return set(opened.keys())
    except (SafetensorError, OSError, RuntimeError) as error:  # a RuntimeError of torch if the file is gone
        raise CheckpointError(f"{file} is damaged or truncated ({error}); download it again") from error


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("LoRA", "peft", "lora") from error
    return peft
