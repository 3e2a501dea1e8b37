"""LoRA through PEFT: a small trainable adapter on a frozen base, so that the reference policy costs no second model.

The reference of a KL term is the base with the adapter switched off (`adapter_off`). PEFT would make the adapter of a
bfloat16 model float32 and convert back and forth in every layer; here the adapter has the model's own precision, and
`groupwise.model.precision.MasterWeights` keeps its float32 masters, as it does for a model that is trained whole.
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

from groupwise.errors import CheckpointError, InputError, MissingExtraError
from groupwise.rundir import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Adapted: TypeAlias = Any
"""PEFT's ``PeftModel`` around a transformers model. PEFT is imported only by who uses it, so its types are not here."""

ALL_LINEAR = "all-linear"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class LoraSettings:
    """What adapter to add. Its update is ``scale · B · A`` for each chosen layer, with scale alpha / rank."""

    rank: int = 16
    """The width of the adapter: A has this many rows, B this many columns."""
    alpha: float = 32
    """How loudly the adapter speaks, relative to its rank."""
    dropout: float = 0.0
    """Dropout in front of the adapter, active only while the model is in train() mode. With any, the same tokens get
    different log-probs from one pass to the next, and ratios are no longer 1 on policy."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    """The layers that get an adapter, by the last part of their name ("q_proj"), or all linear ones but the head."""
    rslora: bool = False
    """Scale by alpha / √rank instead, so that the size of an update does not shrink as the rank grows."""

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise InputError(f"the rank of a LoRA adapter must be a whole number from 1, not {self.rank!r}")
        if not self.alpha > 0:
            raise InputError(f"the alpha of a LoRA adapter must be above 0, not {self.alpha!r}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"the dropout of a LoRA adapter must be at least 0 and below 1, not {self.dropout!r}")
        if isinstance(self.targets, str):
            if self.targets != ALL_LINEAR:
                object.__setattr__(self, "targets", (self.targets,))
        elif not self.targets or not all(isinstance(target, str) and target for target in self.targets):
            raise InputError(f"the targets of a LoRA adapter must be {ALL_LINEAR!r} or names, not {self.targets!r}")
        else:
            object.__setattr__(self, "targets", tuple(self.targets))


def add_lora(model: PreTrainedModel, settings: LoraSettings | None = None, *, seed: int = 0) -> Adapted:
    """Freeze ``model`` and give it a new adapter, which changes nothing yet (B starts at zero).

    The layers of ``model`` are replaced in place. The first values of A come from ``seed``; the global random state is
    left alone.
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
        torch.default_generator.manual_seed(seed)  # PEFT draws on the CPU and moves the result
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted.train(training)


def load_adapter(model: PreTrainedModel, folder: str | Path) -> Adapted:
    """Put the adapter that is saved in ``folder`` onto its base, ready to be trained on."""
    peft = _peft()
    folder = Path(folder)
    weights = folder / ADAPTER_WEIGHTS
    if adapter_facts(folder).get("peft_type") != "LORA":
        raise InputError(f"{folder} holds a {adapter_facts(folder).get('peft_type')} adapter; only LoRA can be loaded")
    if not weights.is_file():
        raise CheckpointError(
            f"{folder} has no {ADAPTER_WEIGHTS}. An adapter in a pickle (.bin) is not read, since loading one can run "
            "any code; save it anew as safetensors"
        )
    there = tensor_names(weights)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # an error below
            adapted = peft.PeftModel.from_pretrained(
                model, str(folder), is_trainable=True, autocast_adapter_dtype=False
            )
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"the adapter in {folder} does not fit the model {model.name_or_path}: {error}"
        ) from error
    needed = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if missing := sorted(needed - there):
        raise CheckpointError(f"{weights} lacks {len(missing)} of {len(needed)} tensors, the first is {missing[0]}")
    return adapted.train(model.training)


def adapter_facts(folder: str | Path) -> dict[str, Any]:
    """What the adapter_config.json in ``folder`` says."""
    facts = read_json(Path(folder) / ADAPTER_CONFIG)
    if not isinstance(facts, dict):
        raise CheckpointError(f"{Path(folder) / ADAPTER_CONFIG} is damaged: it holds no settings")
    return facts


def is_lora(model: nn.Module) -> TypeGuard[Adapted]:
    """Whether a model carries an adapter. Costs no import of PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, with its adapter in place where it has one."""
    return model.get_base_model() if is_lora(model) else model  # type: ignore[return-value]


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Within this block the model is its base: the reference policy. May be nested."""
    if not is_lora(model):
        raise InputError(
            "this model has no LoRA adapter that could be switched off; a model that is trained whole needs a "
            "reference of its own"
        )
    with model.disable_adapter():
        yield


def _check_targets(model: Any, targets: str | tuple[str, ...]) -> None:
    """PEFT complains only if no name at all matches; one slip among several would go unnoticed."""
    from transformers.pytorch_utils import Conv1D

    def named(name: str, target: str) -> bool:
        return name == target or name.endswith(f".{target}")

    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding, Conv1D))]
    for target in targets:
        if not any(named(name, target) for name in layers):
            there = sorted({name.rsplit(".", 1)[-1] for name in layers})
            raise InputError(
                f"no layer of the model is called {target!r}, a LoRA target (there are: {', '.join(there)})"
            )
    if getattr(model.config, "tie_word_embeddings", False):
        tied = [
            module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None
        ]
        for name, module in model.named_modules():
            if any(module is end for end in tied) and any(named(name, target) for target in targets):
                raise InputError(
                    f"the LoRA target {name} shares its weight with the other end of the model, so its adapter could "
                    "not be merged; choose other targets"
                )


def tensor_names(file: Path) -> set[str]:
    """The names in a safetensors file, once its header agrees with its length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or cut short ({error}); get it again") from error


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("LoRA", "peft", "lora") from error
    return peft
