"""The same run in TRL and here, in float64 with the same samples: the losses and all weights of six updates.

The settings here are the translation of TRL's config. Every case has accumulation, local batches and prompts of
different lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "constant_with_warmup": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 2},
}
KL = {"beta": 0.3}
REUSED = {"num_iterations": 2, "steps_per_generation": 4}  # four updates of a rollout
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", **REUSED, **KL},
    "bnpo": {"loss_type": "bnpo", **REUSED, **KL},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", **REUSED},
    "dapo": {"loss_type": "dapo", **REUSED, **KL},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1, **REUSED},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 2.0, "num_iterations": 3},
    "vespo": {"loss_type": "vespo", "vespo_k_neg": 2.0, **REUSED},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", **REUSED},
    "sequence ratio with the unbiased KL": {
        "importance_sampling_level": "sequence",
        "use_bias_correction_kl": True,
        "loss_type": "grpo",
        **REUSED,
        **KL,
    },
    "delta, one micro-batch": {
        "delta": 1.05,
        "epsilon": 0.01,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 8,
        "num_iterations": 3,
        "scale_rewards": "batch",
    },
    "reference that is mixed": {
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "ref_model_mixup_alpha": 0.4,
        **REUSED,
        **KL,
    },
    "two rewards, weight decay, clipped gradients": {
        "reward_weights": [1.0, 0.5],
        "multi_objective_aggregation": "normalize_then_sum",
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,
        "adam_beta1": 0.8,
        "adam_epsilon": 1e-6,
    },
    "masks": {
        "mask_truncated_completions": True,
        "off_policy_mask_threshold": 0.01,
        "top_entropy_quantile": 0.6,
        "num_iterations": 3,
        "temperature": 0.7,
    },
    "truncated completions, KL and entropy": {
        "mask_truncated_completions": True,
        "loss_type": "bnpo",
        "entropy_coef": 0.05,
        "temperature": 0.7,
        **KL,
    },
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.3},
    "adafactor": {"optim": "adafactor"},
    **{
        name: {"lr_scheduler_type": name, "lr_scheduler_kwargs": options or None, "warmup_steps": 2}
        for name, options in SCHEDULES.items()
    },
}


def largest_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def check_same(ours: Any, theirs: Any) -> None:
    assert len(ours.losses) == len(theirs.losses) == len(ours.weights) == len(theirs.weights) == 6
    assert largest_difference(ours.start, theirs.start) == 0
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9, abs=1e-9)
    for step, (mine, other) in enumerate(zip(ours.weights, theirs.weights, strict=True), start=1):
        assert largest_difference(mine, other) <= 1e-9, step
    assert largest_difference(theirs.weights[-1], theirs.start) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights(tmp_path, name):
    from tests.integrations.trl.parity import our_run, trl_run

    check_same(our_run(tmp_path / "ours", CASES[name]), trl_run(tmp_path / "trl", CASES[name]))


@pytest.mark.parametrize("changes", [REUSED, KL], ids=["mini-batches", "KL"])
def test_an_adapter(tmp_path, changes):
    from tests.integrations.trl.parity import our_run, trl_run

    ours = our_run(tmp_path / "ours", changes, lora=True)
    check_same(ours, trl_run(tmp_path / "trl", changes, adapter=ours.start))
