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
    "cispo with the default bound": {"loss_type": "cispo", "logging_steps": 1, **OFTEN, **REUSED},
    "cispo, sequence ratios": {
        "loss_type": "cispo",
        "importance_sampling_level": "sequence",
        "logging_steps": 2,
        **OFTEN,
    },
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
    assert compare(run_drop_in(folder / "ours" / "out", changes, **options), theirs) == []
    assert theirs.state.log_history


@pytest.mark.filterwarnings("ignore:clip_high is an absolute ceiling")
@pytest.mark.parametrize("name", CASES)
def test_logs_and_events(tmp_path, name):
    check(tmp_path, CASES[name])


ASKED: dict[str, dict[tuple[str, int], Any]] = {
    "flags at the end of steps": {
        ("on_step_end", 1): ["should_save", "should_evaluate"],
        ("on_step_end", 2): ["should_log"],
        ("on_log", 2): ["should_evaluate"],
        ("on_evaluate", 2): ["should_save"],
        ("on_step_end", 4): ["should_training_stop"],
    },
    "flags before and within steps": {
        ("on_step_begin", 1): ["should_log", "should_save"],
        ("on_pre_optimizer_step", 2): ["should_log"],
        ("on_optimizer_step", 3): ["should_evaluate"],
        ("on_pre_optimizer_step", 5): ["should_log"],
        ("on_optimizer_step", 6): ["should_training_stop"],
    },
    "the epoch ends early": {
        ("on_step_end", 2): ["should_epoch_stop"],
        ("on_log", 4): ["should_epoch_stop", "should_save"],
        ("on_epoch_end", 5): ["should_evaluate"],
        ("on_optimizer_step", 6): ["should_epoch_stop"],
    },
}


@pytest.mark.parametrize("name", ASKED)
def test_what_callbacks_ask_for(tmp_path, name):
    changes = {"logging_steps": 2, "num_train_epochs": 3, "max_steps": -1, "eval_strategy": "steps", "eval_steps": 30}
    check(tmp_path, {**changes, "per_device_eval_batch_size": 8}, ask=ASKED[name])


def halve(details):
    for group in details["optimizer"].param_groups:
        group["lr"] /= 2


def lower_bases(details):
    scheduler = details["lr_scheduler"]
    scheduler.base_lrs = [rate / 10 for rate in scheduler.base_lrs]


@pytest.mark.parametrize(
    "event", ["on_train_begin", "on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_save"]
)
def test_a_callback_changes_the_learning_rate(tmp_path, event):
    ask = {(event, step): [halve] for step in (0, 2, 3)} | {("on_step_end", 4): [lower_bases]}
    changes = {"logging_steps": 1, "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 1}
    check(tmp_path, changes, ask=ask)


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_optimizer_of_the_user(tmp_path, scheduled):
    import torch

    def optimizers(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3) if scheduled else None
        return optimizer, scheduler

    changes = {"logging_steps": 1, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    check(tmp_path, changes, ask={("on_step_end", 3): [halve]}, make_optimizers=optimizers)
