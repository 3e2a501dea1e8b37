"""LoRA through PEFT: a small trainable adapter on a frozen base.

The reference policy of a KL term is the base with the adapter disabled (`adapter_off`) and needs no second model. By
default PEFT makes the adapter of a bfloat16 model float32 and converts in every layer; here it has the model's dtype,
and `MasterWeights` holds its float32 masters, as in full fine-tuning.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import nn

from groupwise.errors import CheckpointError, InputError, MissingExtraError, check_integer
from groupwise.model.checks import LONGEST_REASON, Shapes, check_finite, read_settings, tensor_shapes
from groupwise.model.source import ADAPTER_CONFIG
from groupwise.text import excerpt, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AdaptedModel: TypeAlias = Any
"""PEFT's ``PeftModel`` around a transformers model; PEFT is optional, so its type is not imported."""

ALL_LINEAR = "all-linear"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Settings of PEFT that import a module, copy layers or compute on the base model.
UNSUPPORTED = ("megatron_config", "layer_replication", "loftq_config", "eva_config", "corda_config", "lora_ga_config")
LONGEST_PATTERN, MOST_REPEATS = 1000, 4  # of a regular expression that selects layers


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


def adapter_settings(model: AdaptedModel) -> LoraSettings:
    """The settings of the active adapter of a model, as far as `LoraSettings` has them."""
    config = model.peft_config[model.active_adapter]
    targets = config.target_modules
    return LoraSettings(
        config.r,
        config.lora_alpha,
        config.lora_dropout,
        targets if isinstance(targets, str) else tuple(sorted(targets)),
        config.use_rslora,
    )


def set_adapter_dropout(model: AdaptedModel, settings: LoraSettings) -> AdaptedModel:
    """Give the layers of an adapter its dropout again, after that of the base model was removed."""
    for name, module in model.named_modules():
        if ".lora_dropout." in name and isinstance(module, nn.Dropout):
            module.p = settings.dropout
    return model


def load_adapter(model: PreTrainedModel, folder: str | Path) -> AdaptedModel:
    """Put the adapter saved in ``folder`` onto its base, trainable."""
    peft = _peft()
    weights = Path(folder) / ADAPTER_WEIGHTS
    settings = read_settings(Path(folder) / ADAPTER_CONFIG)
    if (kind := settings.get("peft_type")) != "LORA":
        raise InputError(f"{folder} holds a {excerpt(kind)} adapter; only LoRA can be loaded")
    if not weights.is_file():
        raise CheckpointError(
            f"{folder} has no {ADAPTER_WEIGHTS}. An adapter in a pickle (.bin) is not read, since loading one can run "
            "any code; save it again as safetensors"
        )
    shapes = tensor_shapes(weights)
    _check_settings(settings, shapes, Path(folder) / ADAPTER_CONFIG)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # checked below
            adapted = peft.PeftModel.from_pretrained(
                model, str(folder), is_trainable=True, autocast_adapter_dtype=False
            )
    except Exception as error:  # PEFT raises anything for settings of wrong types
        reason = one_line(str(error))[:LONGEST_REASON]
        raise CheckpointError(
            f"the adapter in {folder} does not fit the model {model.name_or_path}: {reason}"
        ) from error
    state = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    if missing := sorted(set(state) - set(shapes)):
        raise CheckpointError(f"{weights} lacks {len(missing)} of {len(state)} tensors, the first is {missing[0]}")
    check_finite(state, str(weights))
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


def _check_settings(settings: Mapping[str, Any], shapes: Shapes, where: Path) -> None:
    """Raise for settings of a saved adapter that would do more than load its weights, or fill the memory."""
    if foreign := [name for name in UNSUPPORTED if settings.get(name)]:
        raise InputError(f"{where} sets {foreign[0]}, which groupwise does not support; use another adapter")
    if settings.get("init_lora_weights") not in (None, True, False, "gaussian"):
        raise InputError(
            f"{where} sets init_lora_weights = {excerpt(settings['init_lora_weights'])}, which changes the base model; "
            "convert the adapter to plain LoRA first, with PEFT's save_pretrained"
        )
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    ranks = settings.get("rank_pattern") or {}
    for rank in (settings.get("r"), *(ranks.values() if isinstance(ranks, Mapping) else ())):
        check_integer(f"{where}: the rank of a LoRA adapter", rank, 1, CheckpointError)
        if rank > largest:
            raise CheckpointError(f"{where} says that the rank is {rank:,}, but no tensor of its weights is that large")
    patterns: list[Any] = [settings.get(name) for name in ("target_modules", "exclude_modules", "layers_pattern")]
    patterns = [entry for value in patterns for entry in (value if isinstance(value, list) else [value])]
    for table in (ranks, settings.get("alpha_pattern") or {}):
        patterns += table if isinstance(table, Mapping) else [table]
    for pattern in patterns:
        if pattern is not None and not _is_fast_pattern(pattern):
            raise CheckpointError(
                f"{where} selects layers with {excerpt(pattern)}, which is no text, or a regular expression that may "
                "take for ever; write the names of the layers"
            )


def _is_fast_pattern(pattern: Any) -> bool:
    """Whether a regular expression needs little time on any name: few repetitions, and none inside another."""
    if not isinstance(pattern, str) or len(pattern) > LONGEST_PATTERN:
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    repeats = re.findall(r"(?<!\\)(?:[*+]|\{\d*,\d*\})", pattern)
    return len(repeats) <= MOST_REPEATS and not re.search(r"\)(?:[*+]|\{\d*,?\d*\})", pattern)


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


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("LoRA", "peft", "lora") from error
    return peft
