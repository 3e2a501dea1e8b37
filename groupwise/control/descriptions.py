"""The meaning of every metric that a control run logs. docs/metrics.md is made from it."""

from __future__ import annotations

UPDATE_METRICS = {
    "step": "number of the update, from 1",
    "env_steps": "environment steps so far",
    "train_return": "mean return of the episodes that ended since the last update",
    "episode_length": "mean length of these episodes",
    "loss": "the loss of the last optimizer step",
    "entropy": "entropy of the policy; of continuous actions the differential one, which may be negative",
    "clip_fraction": "share of steps whose ratio was clipped",
    "approx_kl": "k3 estimate of KL(π_old ‖ π_θ)",
    "kl": "KL to the initial policy (GRPO with `kl_coef`)",
    "group_spread": "mean standard deviation of the returns in a group (GRPO)",
    "zero_spread_groups": "share of groups whose returns are all equal, so that they have no learning signal (GRPO)",
    "value_loss": "loss of the critic (PPO)",
}
"""In metrics.jsonl, one row per update."""

EVALUATION_METRICS = {
    "update": "number of updates so far",
    "env_steps": "environment steps so far",
    "cpu_seconds": "CPU seconds of training so far, without evaluations",
    "greedy_return": "mean return over the held-out first states, with the most likely action",
    "sampled_return": "the same with sampled actions",
}
"""In progress.csv, one row per evaluation, followed by the means of the update metrics since the last one."""
