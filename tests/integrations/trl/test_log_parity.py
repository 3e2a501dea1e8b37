"""The same run in TRL's trainer and in the drop-in, in float64 with the same samples: the events that a callback sees
with its arguments, the state and the flags, all logs, checkpoints, and the weights."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow

REUSED = {"num_iterations": 2, "steps_per_generation": 2}
OFTEN = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "save_strategy": "steps"}
BEST = {"metric_for_best_model": "eval_reward", "greater_is_better": True}
CASES: dict[str, dict[str, Any]] = {
    "logs of two steps": {"logging_steps": 2, "max_steps": 5},
    "reused rollouts, KL": {"loss_type": "grpo", "beta": 0.1, "learning_rate": 1e-2, "logging_steps": 2, **REUSED},
    "best at the end": {
        **OFTEN,
        **BEST,
        "save_steps": 2,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "logging_steps": 2,
        "num_iterations": 2,
        "num_generations_eval": 2,
    },
    "epochs": {
        "max_steps": -1,
        "num_train_epochs": 2,
        **{f"{name}_strategy": "epoch" for name in ("logging", "eval", "save")},
        "per_device_eval_batch_size": 8,
        "steps_per_generation": 6,
        "gradient_accumulation_steps": 3,
    },
    "only the best is saved": {
        **OFTEN,
        **BEST,
        "eval_steps": 1,
        "save_strategy": "best",
        "eval_on_start": True,
        "logging_steps": 1,
        "logging_first_step": True,
        "per_device_eval_batch_size": 8,
    },
    "shares of a run, small micro-batches": {
        "max_steps": -1,
        "num_train_epochs": 0.5,
        "logging_steps": 0.3,
        "save_strategy": "steps",
        "save_steps": 0.25,
        "per_device_train_batch_size": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "loss_type": "bnpo",
        "epsilon": 0.05,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
    },
    "sequence ratios, delta": {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "epsilon": 0.01,
        "epsilon_high": 0.5,
        "delta": 1.2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        **REUSED,
        "steps_per_generation": 4,
    },
    "truncated completions are left out": {
        "mask_truncated_completions": True,
        "epsilon": 0.05,
        "logging_steps": 3,
        **REUSED,
        "per_device_train_batch_size": 2,
        "steps_per_generation": 4,
        "lr_scheduler_type": "cosine",
    },
    "masks": {"top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.01, "epsilon": 0.05, **REUSED},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.01, "logging_steps": 2, **REUSED},
    "entropy bonus": {"entropy_coef": 0.01, "beta": 0.1, "logging_steps": 2, **REUSED},
    "entropy bonus of grpo": {"entropy_coef": 0.01, "loss_type": "grpo", "beta": 0.1, **REUSED, "logging_steps": 1},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 4.0, "logging_steps": 1, **REUSED},
    "warm-up": {"warmup_steps": 2, "lr_scheduler_type": "linear", "logging_steps": 1, "weight_decay": 0.1},
    "no logs": {"logging_strategy": "no", "save_strategy": "steps", "save_steps": 4},
    "counted tokens": {"include_num_input_tokens_seen": "all", "logging_steps": 2},
}


def check(folder: Any, changes: dict[str, Any], **options: Any) -> None:
    from tests.integrations.trl.log_parity import compare, run_drop_in, run_trl

    theirs = run_trl(folder / "trl" / "out", changes, **options)
    assert not compare(run_drop_in(folder / "ours" / "out", changes, **options), theirs)
    assert theirs.state.log_history


@pytest.mark.parametrize("name", CASES)
def test_logs_and_events(tmp_path, name):
    check(tmp_path, CASES[name])
