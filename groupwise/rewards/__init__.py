"""Rewards: the contract of a reward function, loading and calling one, and the built-in rewards."""

from groupwise.rewards.contract import RewardFunction, RowFailure, Scores, named, split_rewards, weighted_total
from groupwise.rewards.judge import judge
from groupwise.rewards.math_equal import math_equal
from groupwise.rewards.registry import BUILTIN, make_reward
from groupwise.rewards.reward_model import reward_model
from groupwise.rewards.scorer import Scorer
from groupwise.rewards.text import format_reward, overlong_penalty, text_of
from groupwise.rewards.writing import distinct_n, keywords, length_band, repetition, words_of

__all__ = [
    "BUILTIN",
    "RewardFunction",
    "RowFailure",
    "Scorer",
    "Scores",
    "distinct_n",
    "format_reward",
    "judge",
    "keywords",
    "length_band",
    "make_reward",
    "math_equal",
    "named",
    "overlong_penalty",
    "repetition",
    "reward_model",
    "split_rewards",
    "text_of",
    "weighted_total",
    "words_of",
]
