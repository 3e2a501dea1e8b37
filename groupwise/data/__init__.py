"""Data: rows from files and the hub, prompts and preference pairs as token ids, and the order of training."""

from groupwise.data.completions import DecodedCompletions, decode_completions
from groupwise.data.order import Order
from groupwise.data.pairs import Pair, PairBuilder
from groupwise.data.pass_rates import DrawShares, PassRateOrder, PassRates
from groupwise.data.prompts import Prompt, PromptBuilder, completion_for_reward, reward_inputs
from groupwise.data.read import read_rows
from groupwise.data.rows import Row, check_prompts, columns_of, where_of

__all__ = [
    "DecodedCompletions",
    "DrawShares",
    "Order",
    "Pair",
    "PairBuilder",
    "PassRateOrder",
    "PassRates",
    "Prompt",
    "PromptBuilder",
    "Row",
    "check_prompts",
    "columns_of",
    "completion_for_reward",
    "decode_completions",
    "read_rows",
    "reward_inputs",
    "where_of",
]
