"""Metrics and facts of runs for the displays' tests, and a clock that is set by hand."""

from __future__ import annotations

from dataclasses import replace

from groupwise.training.display import RunFacts

FACTS = RunFacts(
    name="quiz [bold]x[/]",
    model="smollm2-135m",
    parameters=134_515_008,
    device="cpu",
    algorithm="dapo",
    steps=300,
    metric="accuracy",
    folder="runs/quiz",
    goal=0.8,
)

METRICS = {
    "reward": 0.4123,
    "reward_std": 0.31,
    "entropy": 1.234,
    "kl": 0.0004,
    "clip_ratio/region_mean": 0.0123,
    "frac_reward_zero_std": 0.125,
    "completions/mean_length": 1205.34,
    "completions/clipped_ratio": 0.0712,
    "grad_norm": 0.77,
    "learning_rate": 1e-6,
    "tokens_per_second": 1830.4,
    "memory/sample": 3.0,
    "memory/train": 61.25,
    "step_time": 0.9,
}


OFFLINE = {  # a step of DPO on a data set, without sampling
    "preference/weight": 1.0,
    "preference/pairs": 16.0,
    "preference/margin": 0.5231,
    "preference/accuracy": 0.71,
    "grad_norm": 6.2,
    "learning_rate": 1e-6,
    "tokens_per_second": 0.0,
    "num_tokens": 0.0,
    "step_time": 1.5,
}
DPO = replace(FACTS, algorithm="dpo", steps=36, metric="preference_accuracy", goal=None)


class ManualClock:
    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


def evaluation(value, width=0.04):
    return {"accuracy": value, "accuracy_low": value - width, "accuracy_high": value + width, "length": 5}
