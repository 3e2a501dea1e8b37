"""The health checks by name. They warn while a run trains, and `groupwise doctor` applies them to a recorded run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from groupwise.training.monitor.checks.base import WINDOW, Check, Evaluated, Problem, RecentSteps
from groupwise.training.monitor.checks.completions import (
    answers_alike,
    answers_identical,
    answers_longer,
    answers_scattered,
    answers_unrelated,
    no_answer,
    truncated,
)
from groupwise.training.monitor.checks.policy import (
    entropy_collapsed,
    entropy_exploded,
    kl_high,
    kl_low,
    log_prob_mismatch,
    masked,
    memory,
    not_finite,
    stale,
    teacher_far,
    weights_unchanged,
)
from groupwise.training.monitor.checks.preference import chosen_unlikely, no_pairs, preference_opposed
from groupwise.training.monitor.checks.rewards import (
    no_learning_signal,
    overfitting,
    reward_constant,
    reward_dominates,
    rewards_failed,
    zero_spread,
)

__all__ = ["CHECKS", "EVALUATION_CHECKS", "WINDOW", "Check", "Evaluated", "Problem", "RecentSteps"]

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "kl_high": Check(kl_high, "the policy is far from the reference"),
        "kl_low": Check(kl_low, "the KL has no effect"),
        "entropy_collapsed": Check(entropy_collapsed, "the entropy has collapsed"),
        "entropy_exploded": Check(entropy_exploded, "the entropy runs away"),
        "log_prob_mismatch": Check(log_prob_mismatch, "sampler and trainer disagree", at_once=True),
        "weights_unchanged": Check(weights_unchanged, "the learning rate is lost in rounding"),
        "not_finite": Check(not_finite, "updates are NaN or inf", at_once=True),
        "memory": Check(memory, "memory is short", at_once=True),
        "stale": Check(stale, "the rollouts are too old"),
        "teacher_far": Check(teacher_far, "the student does not approach its teacher"),
        "masked": Check(masked, "the masks remove too much"),
        "truncated": Check(truncated, "completions are cut off"),
        "no_answer": Check(no_answer, "no answer can be read"),
        "answers_longer": Check(answers_longer, "the completions get longer and longer"),
        "answers_identical": Check(answers_identical, "all completions of a prompt are the same"),
        "no_learning_signal": Check(no_learning_signal, "nothing to learn from"),
        "zero_spread": Check(zero_spread, "most groups have equal rewards"),
        "reward_constant": Check(reward_constant, "a reward never varies"),
        "reward_dominates": Check(reward_dominates, "one reward dominates the others"),
        "rewards_failed": Check(rewards_failed, "rewards fail"),
        "answers_alike": Check(answers_alike, "the answers are all alike"),
        "answers_unrelated": Check(answers_unrelated, "the answers form no clusters"),
        "answers_scattered": Check(answers_scattered, "most answers are alone in their cluster"),
        "no_pairs": Check(no_pairs, "no preference pairs"),
        "preference_opposed": Check(preference_opposed, "pairs and rewards pull in opposite directions"),
        "chosen_unlikely": Check(chosen_unlikely, "the chosen answers become unlikely"),
    }
)
"""Looked at after each step."""

EVALUATION_CHECKS: Mapping[str, Check] = MappingProxyType(
    {"overfitting": Check(overfitting, "the reward rises while the held-out metric falls")}
)
"""Looked at after each evaluation."""
