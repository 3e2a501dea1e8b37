"""The algorithms by name: each is a preset of settings, never a branch in the trainer.

A preset is the layer below a recipe: the recipe's keys override it, key by key. The defaults of the recipe's sections
are those of TRL, which is `dapo`; a preset holds its differences. Two of TRL's defaults are adapted: bfloat16 is used
only where the hardware supports it (``model.dtype = "auto"``), and the batch of 4 with accumulation 4 counts prompts,
so a step has 16 groups.

`enhanced_grpo` uses the unbiased KL, the off-policy mask and the keep sampling mask of DeepSeek-V3.2 (arXiv
2512.02556). `enhanced_grpo_literal` replaces each by a variant with a similar name: the exact KL times the mean over
the vocabulary of π_θ/π_ref, which can be large or near 0; a mask on completions that became more likely than under
the reference, good or bad; and a mask on completions that are too short, repetitive or without an answer, which
removes the penalty on them too.

`similarity_group_grpo` compares a completion only with similar completions of the same prompt (``[grouping]``). Its
loss is the mean over all tokens, as in verl. Clusters are made by average linkage; its source uses Ward's linkage over
the rows of the distance matrix, which is ``grouping.method = "ward_rows"`` (docs/creative.md says why).

`maxrl`, `dppo` and `scalerl` are papers of 2025 and 2026. Of ScaleRL (arXiv 2510.13786) the preset has the objective:
CISPO's loss, the mean over each prompt's tokens and then over prompts, advantages divided by their standard deviation
over the batch, no prompts with equal rewards, and logits in float32. Rows by pass rate and asynchronous rollouts are
settings beside it. `dppo` takes the ratio to the sampler and caps it at 20, as verl does.

`pg_grpo` combines GRPO and DPO (arXiv 2305.18290): L = L_clip + w₁·KL + w₂·L_DPO is minimized. w₁ = 0.04 is that of
DeepSeekMath. w₂ = 0.1 makes both gradients about equally large for completions of some 200 tokens (docs/preference.md).
`dpo` is the preference term alone, on a dataset of pairs, without sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from groupwise.errors import ConfigError, check_choice


@dataclass(frozen=True)
class Algorithm:
    """A preset of dotted settings. ``metrics`` maps additional names of logged metrics to those of groupwise."""

    settings: Mapping[str, Any]
    metrics: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""  # one line, for docs/settings.md

    def __post_init__(self) -> None:
        for name in ("settings", "metrics"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))


_ENHANCED_GRPO = {
    "sampling.samples_per_prompt": 16,
    "sampling.top_k": 40,
    "sampling.max_new_tokens": 512,
    "train.batch_size": 16,
    "train.accumulation": 1,
    "train.epochs": 2.0,
    "optimizer.learning_rate": 1e-5,
    "optimizer.embedding_learning_rate": 2e-4,
    "loss.name": "reinforce",
    "loss.denominator": "policy_mask",
    "loss.kl_coef": 0.01,
    "loss.kl": "unbiased",
    "loss.kl_aggregation": "token_mean",
    "advantages.scale": "none",
    "masks.off_policy": "v3.2",
    "masks.keep_sampling_mask": True,
    "reference.refresh_every": 100,
    "data.max_prompt_length": 1024,
}
_ENHANCED_GRPO_LITERAL = {
    **_ENHANCED_GRPO,
    "loss.kl": "full_ratio_weighted",
    "masks.off_policy": "reference_drift",
    "masks.validity": True,
    "masks.keep_sampling_mask": False,
}
_ENHANCED_METRICS = {
    "policy_loss": "loss/policy",
    "kl_penalty": "loss/kl",
    "kl_divergence": "kl",
    "avg_reward": "reward",
}
_PG_GRPO = {"loss.name": "grpo", "loss.ratio": "token", "loss.kl_coef": 0.04, "preference.weight": 0.1}
_DPO = {"loss.policy_coef": 0.0, "loss.kl_coef": 0.0, "preference.weight": 1.0, "preference.pairs": "data"}
_PREFERENCE_METRICS = {
    "rewards/chosen": "preference/chosen_reward",
    "rewards/rejected": "preference/rejected_reward",
    "rewards/margins": "preference/margin",
    "rewards/accuracies": "preference/accuracy",
    "logps/chosen": "preference/chosen_logp",
    "logps/rejected": "preference/rejected_logp",
}

ALGORITHMS = {
    "dapo": Algorithm(
        {"loss.name": "dapo"},
        summary="Clipped ratio per token, mean over all tokens of the batch (arXiv 2503.14476), with TRL's defaults.",
    ),
    "grpo": Algorithm(
        {"loss.name": "grpo"},
        summary="Mean over the tokens of each completion, then over completions (DeepSeekMath, arXiv 2402.03300).",
    ),
    "dr_grpo": Algorithm(
        {"loss.name": "dr_grpo", "advantages.scale": "none"},
        summary="No division by the group's standard deviation or by the completion length (arXiv 2503.20783).",
    ),
    "gspo": Algorithm(
        {"loss.name": "gspo", "loss.ratio": "sequence", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
        summary="One ratio per sequence, the geometric mean over its tokens, and a narrower clip range "
        "(arXiv 2507.18071).",
    ),
    "cispo": Algorithm(
        {"loss.name": "cispo", "loss.clip_high": 5.0},
        summary="The ratio is capped and detached, so that clipped tokens keep a gradient (MiniMax-M1, "
        "arXiv 2506.13585).",
    ),
    "maxrl": Algorithm(
        {"advantages.scale": "mean", "advantages.eps": 0.0},
        summary="Advantages divided by the group's mean reward: an estimate of the gradient of the log-likelihood of "
        "success, which gives hard prompts more weight (arXiv 2602.02710).",
    ),
    "dppo": Algorithm(
        {"loss.name": "cispo", "loss.clip_high": 20.0, "masks.divergence": "tv"},
        summary="A limit to the divergence from the sampler, token by token, in place of the clipped ratio "
        "(arXiv 2602.04879).",
    ),
    "scalerl": Algorithm(
        {
            "loss.name": "cispo",
            "loss.clip_high": 5.0,
            "loss.aggregation": "prompt_mean",
            "advantages.scale": "batch_advantages",
            "masks.drop_equal_rewards": True,
            "model.float32_head": True,
        },
        summary="CISPO with the mean over each prompt's tokens, then over prompts, advantages scaled by their standard "
        "deviation over the batch, no prompts with equal rewards, and logits in float32 (ScaleRL, arXiv 2510.13786).",
    ),
    "enhanced_grpo": Algorithm(
        _ENHANCED_GRPO,
        _ENHANCED_METRICS,
        summary="REINFORCE with the unbiased KL, off-policy mask and keep sampling mask of DeepSeek-V3.2 "
        "(arXiv 2512.02556).",
    ),
    "enhanced_grpo_literal": Algorithm(
        _ENHANCED_GRPO_LITERAL,
        _ENHANCED_METRICS | {"kl_divergence": "kl_ratio_weighted"},
        summary="The same with a ratio-weighted exact KL, a mask on drift from the reference, and invalid answers "
        "masked.",
    ),
    "similarity_group_grpo": Algorithm(
        {"loss.name": "dapo", "advantages.grouping": "similarity", "advantages.eps": 1e-6},
        summary="Advantages within clusters of similar completions of a prompt, to keep diversity.",
    ),
    "pg_grpo": Algorithm(
        _PG_GRPO,
        _PREFERENCE_METRICS,
        summary="GRPO plus DPO on the best and worst completion of each group.",
    ),
    "dpo": Algorithm(
        _PG_GRPO | _DPO,
        _PREFERENCE_METRICS,
        summary="DPO on a dataset of pairs, without sampling (arXiv 2305.18290).",
    ),
}


def find_algorithm(name: str) -> Algorithm:
    """The preset of that name; unknown names are an error that lists all."""
    check_choice("algorithm", name, ALGORITHMS, ConfigError)
    return ALGORITHMS[name]
