"""Tiny models with random weights, one per architecture, computing in true float64."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.logprobs import TokenLogps, completion_logps

VOCABULARY = 97
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_one_head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama_all_heads": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4, "attention_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2_windows": (Qwen2ForCausalLM, Qwen2Config, {**MIXED, "use_sliding_window": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {**MIXED, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, MIXED),
    "gemma3_softcap": (Gemma3ForCausalLM, Gemma3TextConfig, {**MIXED, "final_logit_softcapping": 5.0}),
}


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """``names`` as parameters of a test; all but the chosen ones are slow."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in names]


def tiny(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A model with weights large enough that attention matters; in float64 it computes in float64 throughout."""
    model_class, config_class, extra = ARCHITECTURES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**{**SIZE, **extra}))
        for parameter in model.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.3)
    model = model.to(dtype).eval()
    if dtype == torch.float64:
        exact(model)
    return model


def exact(model: nn.Module) -> None:
    """Make transformers' norms, which always compute in float32, use the model's dtype."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            shift = 1.0 if name.startswith("Gemma") else 0.0
            eps = getattr(module, "variance_epsilon", None) or module.eps
            module.forward = _norm(module, shift, eps)


def _norm(module: Any, shift: float, eps: float) -> Any:
    def forward(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (shift + module.weight)

    return forward


def random_ids(length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (length,), generator=generator)


def random_groups(
    prompts: list[int], completions: list[list[int]], seed: int = 0
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Prompts and completions of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return (
        [random_ids(length, generator) for length in prompts],
        [[random_ids(length, generator) for length in lengths] for lengths in completions],
    )


def padded_logps(handle: ModelHandle, prompts: Any, completions: Any, **options: Any) -> TokenLogps:
    """The log-probs of the plain computation."""
    return completion_logps(prepare(handle.model, plain=True), prompts, completions, **options)
