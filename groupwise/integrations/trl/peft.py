"""`peft_config` and `PeftModel` as the settings of [model.lora]."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import ArgumentTypeError, ConfigError, MissingExtraError, is_installed
from groupwise.model.lora import adapter_settings, is_lora
from groupwise.text import excerpt

SUPPORTED = "r, lora_alpha, lora_dropout, use_rslora, and target_modules with what selects among them"
# Options of a new adapter that only select layers: these are given to the recipe by their full names.
SELECTING = ("exclude_modules", "layers_to_transform", "layers_pattern")
# Options of LoraConfig with which an adapter is more, or less, than B · A on some layers, and their harmless values.
DEFAULTS: dict[str, Any] = {
    "bias": "none",
    "lora_bias": False,
    "use_dora": False,
    "use_qalora": False,
    "modules_to_save": None,
    "exclude_modules": None,
    "layers_to_transform": None,
    "layers_pattern": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "target_parameters": None,
    "layer_replication": None,
    "megatron_config": None,
    "fan_in_fan_out": False,
}
INITIAL = (True, False, "gaussian", None)  # of init_lora_weights; others change the base model
INITIALISED_BY_PEFT = (False, "gaussian")  # these are not settings of a recipe


def lora_settings(model: Any, peft_config: Any) -> dict[str, Any] | None:
    """The settings of [model.lora]: of ``peft_config``, or of the adapter that the model has; None without either."""
    if peft_config is None:
        if not is_lora(model):
            return None
        config = model.peft_config[model.active_adapter]
        if len(model.peft_config) > 1:
            raise ConfigError(
                f"the model has {len(model.peft_config)} adapters; keep the one to train, delete the rest"
            )
        _check(config)
        found = adapter_settings(model)
        targets: Any = found.targets if isinstance(found.targets, str) else list(found.targets)
        return _settings(found.rank, found.alpha, found.dropout, targets, found.rslora)
    if not is_installed("peft"):
        raise MissingExtraError("peft_config", "peft", "lora")
    if is_lora(model):
        raise ConfigError("the model is a PeftModel already; pass it without peft_config, or merge its adapter first")
    _check(peft_config, resolved=SELECTING)
    if peft_config.init_lora_weights not in INITIAL:
        raise ConfigError(
            f"peft_config: init_lora_weights = {excerpt(peft_config.init_lora_weights)} is not supported, because it "
            "changes the base model; leave it out"
        )
    targets = peft_config.target_modules
    if targets is None:
        targets = _default_targets(model)
    is_pattern = isinstance(targets, str) and targets != "all-linear"
    selects = any(getattr(peft_config, name, None) not in (None, [], set(), "") for name in SELECTING)
    if is_pattern or selects:
        targets = _selected_layers(model, peft_config, targets)
    names = targets if isinstance(targets, str) else _existing(model, sorted(targets))
    return _settings(peft_config.r, peft_config.lora_alpha, peft_config.lora_dropout, names, peft_config.use_rslora)


def add_by_peft(model: Any, config: Any, settings: Mapping[str, Any], *, beta: float) -> Any:
    """The model with the adapter of `lora_settings`, whose weights PEFT draws as ``init_lora_weights`` says."""
    import peft

    if beta and config.init_lora_weights is False:
        raise ConfigError(
            "peft_config: init_lora_weights = False with beta is not supported: the reference would be the adapter as "
            "it starts, where in TRL it is the base model; leave it out"
        )
    adapter = peft.LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=settings["dropout"],
        target_modules=settings["targets"],
        use_rslora=settings["rslora"],
        init_lora_weights=config.init_lora_weights,
        task_type=peft.TaskType.CAUSAL_LM,
    )
    return peft.get_peft_model(model, adapter, autocast_adapter_dtype=False)


def _settings(rank: int, alpha: float, dropout: float, targets: Any, rslora: bool) -> dict[str, Any]:
    return {"rank": rank, "alpha": float(alpha), "dropout": float(dropout), "targets": targets, "rslora": rslora}


def _selected_layers(model: Any, config: Any, targets: Any) -> list[str]:
    """The full names of the layers that PEFT would adapt, where ``targets`` is a pattern or not all of them are."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from torch.nn import Embedding, Linear
    from transformers.pytorch_utils import Conv1D

    layers = {name: part for name, part in model.named_modules() if isinstance(part, (Linear, Embedding, Conv1D))}
    if targets == "all-linear":
        head = model.get_output_embeddings()
        linear = (name for name, part in layers.items() if part is not head and not isinstance(part, Embedding))
        targets = {name.rpartition(".")[2] for name in linear}
    config = copy.copy(config)
    config.target_modules = targets
    selected = [name for name in layers if check_target_module_exists(config, name)]
    if not selected:
        raise ConfigError(
            f"peft_config: target_modules = {excerpt(targets)} selects no layer, with its exclude_modules and "
            f"layers_to_transform; the model has, for example, {', '.join(list(layers)[1:3])}"
        )
    return selected


def _existing(model: Any, targets: list[str]) -> list[str]:
    """The targets that the model has, as in PEFT, which lets others pass; all of them if it has none, for the error."""
    layers = [f".{name}" for name, _ in model.named_modules()]
    return [target for target in targets if any(name.endswith(f".{target}") for name in layers)] or targets


def _check(config: Any, resolved: Sequence[str] = ()) -> None:
    """Refuse what is not supported; the options in ``resolved`` are."""
    kind = getattr(config, "peft_type", None)
    if kind is None or str(getattr(kind, "value", kind)) != "LORA":
        raise ArgumentTypeError(f"peft_config is a {type(config).__name__}; only peft.LoraConfig is supported")
    for name, default in DEFAULTS.items():
        value = getattr(config, name, default)
        if value != default and value and name not in resolved:
            raise ConfigError(
                f"peft_config: {name} = {excerpt(value)} is not supported; of a LoraConfig, {SUPPORTED} are"
            )


def _default_targets(model: Any) -> list[str]:
    """The layers that PEFT adapts in this architecture if no others are named."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS

    kind = model.config.model_type
    if kind not in DEFAULT_TARGETS:
        raise ConfigError(
            f"peft_config names no target_modules, and PEFT has none for {kind!r}; set target_modules='all-linear'"
        )
    return sorted(DEFAULT_TARGETS[kind])
