"""The values that a field of `GRPOConfig` may have here: those with which a run makes sense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
CLIPPED_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")
TOKEN_LOSSES = ("dapo", "cispo", "vespo")  # divided by the tokens of a rollout
CHOICES = {
    "loss_type": LOSSES,
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "mean", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("colocate", "server"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}


class Bounds(NamedTuple):
    """The numbers that a field may have. ``none``: None as well."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False  # more than ``least``
    integer: bool = False
    none: bool = False

    def allow(self, value: Any) -> bool:
        if value is None:
            return self.none
        number = to_number(value)
        if number is None or not math.isfinite(number) or (self.integer and not isinstance(value, Integral)):
            return False
        return self.least <= number <= self.most and not (self.above and number == self.least)

    def __str__(self) -> str:
        parts = []
        if self.least > -math.inf:
            parts.append(f"{'above' if self.above else 'of at least'} {self.least:g}")
        if self.most < math.inf:
            parts.append(f"at most {self.most:g}")
        kind = "an integer" if self.integer else "a finite number"
        return " ".join([kind, " and ".join(parts)]).strip() + (", or None" if self.none else "")


COUNT = Bounds(1, integer=True)
POSITIVE = Bounds(0, above=True)
NUMBERS = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"), COUNT),
    **dict.fromkeys(("generation_batch_size", "num_iterations", "max_completion_length"), COUNT),
    "num_generations": Bounds(2, integer=True),
    "num_generations_eval": Bounds(1, integer=True, none=True),
    "max_tool_calling_iterations": Bounds(0, integer=True, none=True),
    "per_device_eval_batch_size": COUNT,
    "max_steps": Bounds(integer=True),
    "num_train_epochs": Bounds(),
    "temperature": POSITIVE,
    "top_p": Bounds(0, 1, above=True, none=True),
    "top_k": Bounds(-1, integer=True, none=True),
    "min_p": Bounds(0, 1, none=True),
    "repetition_penalty": Bounds(0, above=True, none=True),
    "beta": Bounds(0),
    "epsilon": Bounds(0),
    "epsilon_high": Bounds(0, none=True),
    "delta": Bounds(1, above=True, none=True),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), POSITIVE),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), POSITIVE),
    "top_entropy_quantile": POSITIVE,
    **dict.fromkeys(("entropy_coef", "entropy_coef_min", "entropy_coef_max"), Bounds()),
    "off_policy_mask_threshold": Bounds(0, above=True, none=True),
    "learning_rate": Bounds(0),
    "weight_decay": Bounds(0),
    "adam_beta1": Bounds(0, 1),
    "adam_beta2": Bounds(0, 1),
    "adam_epsilon": POSITIVE,
    "warmup_steps": Bounds(0),
    "ddp_timeout": POSITIVE,
}
# Only looked at with the field that they belong to.
NUMBERS_WITH = {
    "sync_ref_model": {"ref_model_sync_steps": COUNT, "ref_model_mixup_alpha": Bounds(0, 1, above=True)},
    "use_adaptive_entropy": {"entropy_target": POSITIVE, "entropy_coef_delta": POSITIVE},
    "use_vllm": {
        "vllm_gpu_memory_utilization": Bounds(0, 1, above=True),
        "vllm_server_timeout": POSITIVE,
        "vllm_importance_sampling_clip_max": Bounds(0, above=True, none=True),
        "vllm_importance_sampling_clip_min": Bounds(0, none=True),
    },
}


def bounds_of(args: Any) -> Mapping[str, Bounds]:
    """The bounds of the fields that matter with these arguments."""
    bounds = dict(NUMBERS)
    for name, more in NUMBERS_WITH.items():
        bounds |= more if getattr(args, name) else {}
    if args.eval_strategy == "no":
        for name in ("num_generations_eval", "per_device_eval_batch_size"):
            del bounds[name]
    return bounds


def to_number(value: Any) -> float | None:
    """A number as a float, also one in a text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
