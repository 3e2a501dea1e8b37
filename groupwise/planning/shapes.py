"""Shapes of decoder models: numbers from which parameters, bytes and operations are counted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError, did_you_mean
from groupwise.paths import FOLDER, kind_of, path_reason, user_path

HALF = 2  # bytes of a bfloat16 number


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder of Llama's kind: grouped-query attention, gated MLP, RMS norms."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2  # of a layer, each with one number per hidden unit

    @property
    def layer_matrices(self) -> int:
        """Weights of one layer's matrices."""
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        small = self.norms * self.hidden
        small += (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        small += 2 * self.head_dim if self.qk_norm else 0
        embeddings = self.head_weights * (1 if self.tied else 2)
        return self.layers * (self.layer_matrices + small) + self.hidden + embeddings

    @property
    def size(self) -> str:
        """The number of parameters, as it is written."""
        for unit, scale in (("B", 1e9), ("M", 1e6)):
            if self.parameters >= scale:
                return f"{self.parameters / scale:.3g} {unit}"
        return f"{self.parameters:,}"

    @property
    def tensors(self) -> int:
        """The number of parameter tensors."""
        per_layer = 7 + self.norms + 3 * self.qkv_bias + 2 * self.qk_norm
        return self.layers * per_layer + 2 + (not self.tied)

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * HALF

    @property
    def activation_bytes(self) -> int:
        """Per token of a forward pass that keeps everything, as `model.packing.activation_bytes` counts them."""
        return self.layers * (7 * self.hidden + 3 * self.intermediate) * HALF

    @property
    def checkpoint_bytes(self) -> int:
        """Per token with gradient checkpointing: the input of each layer."""
        return self.layers * self.hidden * HALF

    def lora_weights(self, rank: int) -> int:
        """Weights of an adapter on all linear layers: rank × (inputs + outputs) of each."""
        attention, cached_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = 2 * (self.hidden + attention) + 2 * (self.hidden + cached_width) + 3 * (self.hidden + self.intermediate)
        return self.layers * rank * sides


# From the config.json of each model on the hub (the id beside it).
SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, tied=True),  # HuggingFaceTB/SmolLM2-135M
        ModelShape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, tied=True, qkv_bias=True),  # Qwen/Qwen2.5-0.5B
        ModelShape("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 128, 151936, tied=True, qkv_bias=True),  # Qwen/Qwen2.5-1.5B
        ModelShape("qwen2.5-3b", 36, 2048, 11008, 16, 2, 128, 151936, tied=True, qkv_bias=True),  # Qwen/Qwen2.5-3B
        ModelShape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, qkv_bias=True),  # Qwen/Qwen2.5-7B
        ModelShape("qwen2.5-14b", 48, 5120, 13824, 40, 8, 128, 152064, qkv_bias=True),  # Qwen/Qwen2.5-14B
        ModelShape("qwen2.5-32b", 64, 5120, 27648, 40, 8, 128, 152064, qkv_bias=True),  # Qwen/Qwen2.5-32B
        ModelShape("qwen2.5-72b", 80, 8192, 29568, 64, 8, 128, 152064, qkv_bias=True),  # Qwen/Qwen2.5-72B
        ModelShape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, qk_norm=True),  # Qwen/Qwen3-8B
        ModelShape("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936, qk_norm=True),  # Qwen/Qwen3-32B
        ModelShape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, tied=True),  # meta-llama/Llama-3.2-1B
        ModelShape("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, tied=True),  # meta-llama/Llama-3.2-3B
        ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256),  # meta-llama/Llama-3.1-8B
        ModelShape("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256),  # meta-llama/Llama-3.1-70B
    )
}
TINY = ModelShape("tiny", 2, 128, 192, 4, 2, 32, 259, tied=True)  # model/tiny.py
CODER = ModelShape("qwen2.5-coder-1.5b", 28, 1536, 8960, 12, 2, 128, 151936, qkv_bias=True)  # head stored untied
GEMMA = ModelShape("gemma3-270m", 18, 640, 2048, 4, 1, 256, 262144, tied=True, qk_norm=True, norms=4)
CATALOGUE_SHAPES = {"tiny": TINY, "smollm2-135m": SHAPES["smollm2-135m"], CODER.name: CODER, GEMMA.name: GEMMA}


def named_shape(name: str) -> ModelShape:
    """The shape of this name, or a `ConfigError`."""
    known = SHAPES | CATALOGUE_SHAPES
    shape = known.get(name.lower())
    if shape is None:
        raise ConfigError(
            f"there is no model shape {name!r}{did_you_mean(name.lower(), list(known))} (known: {', '.join(known)}); "
            "for another model, set model.source to a folder that holds its config.json, no weights needed"
        )
    return shape


def shape_of_source(source: str) -> ModelShape:
    """The shape of a recipe's ``model.source``: a folder with a config.json, a known name, or a hub id that is known.

    Nothing is fetched and no weights are read.
    """
    folder = user_path(source)
    if kind_of(folder) == FOLDER:
        return shape_of_folder(folder)
    if source.partition(":")[0] in CATALOGUE_SHAPES:
        return CATALOGUE_SHAPES[source.partition(":")[0]]
    name = re.sub(r"-(instruct|base|chat|it)$", "", source.rpartition("/")[2].lower()).replace("meta-", "")
    if "/" in source and name in SHAPES:
        return SHAPES[name]
    raise ConfigError(
        f"the shape of model.source {source!r} is not known here, and nothing is downloaded for a plan; give "
        f"--model-shape ({', '.join(SHAPES)}), or set model.source to a folder that holds its config.json"
    )


def shape_of_folder(folder: Path) -> ModelShape:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = path_reason(error) if isinstance(error, OSError) else f"it is not JSON ({error})"
        raise ConfigError(f"{path} cannot be read: {reason}; a model's folder holds its config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a model's configuration: it holds no table")
    return shape_of_config(config, folder.resolve().name, str(path))


def shape_of_config(config: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """The shape that a config.json of transformers describes."""
    config = config.get("text_config") or config
    experts = next((key for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), None)
    if experts is not None:
        raise ConfigError(
            f"{where}: a mixture of experts ({experts} {config[experts]}) cannot be planned, only dense models"
        )

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key) or default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{where}: {key} must be a positive integer, got {config.get(key)!r}")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    kind = str(config.get("model_type", ""))
    return ModelShape(
        name=name,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        intermediate=number("intermediate_size", 4 * hidden),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", max(1, hidden // heads)),
        vocabulary=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
        qk_norm=kind.startswith(("qwen3", "gemma3")),
        norms=4 if kind.startswith(("gemma2", "gemma3")) else 2,
    )
