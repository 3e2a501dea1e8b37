"""Rewards: the contract of a reward function, loading and calling one, and the built-in rewards."""

from groupwise.rewards.contract import RewardFunction, RowFailure, Scores, named, weighted_total
from groupwise.rewards.judge import judge
from groupwise.rewards.load import load_function
from groupwise.rewards.math_equal import math_equal
from groupwise.rewards.maths import (
    correct_number,
    gold_number,
    lenient_answer,
    lenient_correct,
    number_format,
    parse_number,
    same_number,
    strict_answer,
)
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
    "correct_number",
    "distinct_n",
    "format_reward",
    "gold_number",
    "judge",
    "keywords",
    "length_band",
    "lenient_answer",
    "lenient_correct",
    "load_function",
    "make_reward",
    "math_equal",
    "named",
    "number_format",
    "overlong_penalty",
    "parse_number",
    "repetition",
    "reward_model",
    "same_number",
    "strict_answer",
    "text_of",
    "weighted_total",
    "words_of",
]
