"""The maths of groupwise: tensors in, tensors out, torch only.

Letters: P prompts, G samples per prompt, B = P·G, T completion tokens, V vocabulary, D hidden width. Masks are true
for what is kept. Inputs may be float32, bfloat16 or float64; reductions run in float32, or float64 for float64 inputs.
"""

from groupwise.core.advantages import GroupStatistics, group_advantages, group_index, group_statistics
from groupwise.core.aggregation import PromptTotals, aggregate, aggregation_weights, prompt_totals
from groupwise.core.distillation import NextTokens, reverse_kl, sampled_reverse_kl, top_k_reverse_kl
from groupwise.core.filters import KeptSets, check_sampling, filter_logits, keep_sampling_mask
from groupwise.core.gae import gae, value_loss
from groupwise.core.importance import IMPORTANCE_MODES, importance_weights, rejection_mask
from groupwise.core.kl import full_kl, full_kl_from_hidden, kl_estimate
from groupwise.core.logps import logps_from_logits, selective_logps
from groupwise.core.losses import LOSSES, Loss, LossSettings, Tokens, TokenTerm, log_ratio, policy_loss
from groupwise.core.masks import (
    DivergenceLimit,
    completion_mask,
    high_entropy_mask,
    off_policy_sequence_mask,
    truncated,
    validity,
    validity_reasons,
)
from groupwise.core.preference import KINDS, preference_loss
from groupwise.core.success import adaptive_length_penalty, pass_at_k_advantages

__all__ = [
    "IMPORTANCE_MODES",
    "KINDS",
    "LOSSES",
    "DivergenceLimit",
    "GroupStatistics",
    "KeptSets",
    "Loss",
    "LossSettings",
    "NextTokens",
    "PromptTotals",
    "TokenTerm",
    "Tokens",
    "adaptive_length_penalty",
    "aggregate",
    "aggregation_weights",
    "check_sampling",
    "completion_mask",
    "filter_logits",
    "full_kl",
    "full_kl_from_hidden",
    "gae",
    "group_advantages",
    "group_index",
    "group_statistics",
    "high_entropy_mask",
    "importance_weights",
    "keep_sampling_mask",
    "kl_estimate",
    "log_ratio",
    "logps_from_logits",
    "off_policy_sequence_mask",
    "pass_at_k_advantages",
    "policy_loss",
    "preference_loss",
    "prompt_totals",
    "rejection_mask",
    "reverse_kl",
    "sampled_reverse_kl",
    "selective_logps",
    "top_k_reverse_kl",
    "truncated",
    "validity",
    "validity_reasons",
    "value_loss",
]
