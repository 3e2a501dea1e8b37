"""How the tokens of a batch are averaged: one weight per token, such that a loss is ``(weights * values).sum()``.

The weights serve every mean over tokens: policy losses, KL terms, statistics and control's flat data. Denominators may
be those of a mini-batch while the tokens are those of a micro-batch, so that the values of micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.core._checks import check_at_least, check_mask, check_same_shape, check_tensors, working
from groupwise.core.advantages import group_index
from groupwise.errors import InputError, check_choice

AGGREGATIONS = ("sequence_mean", "sequence_sum", "token_mean", "local_token_mean", "prompt_mean", "constant")


class PromptTotals(NamedTuple):
    """The denominators of the aggregation ``"prompt_mean"``, those of the mini-batch."""

    tokens: Tensor  # (B,) tokens of all completions of each row's prompt
    prompts: int | Tensor


def prompt_totals(mask: Tensor, groups: int | Tensor | Sequence[Any]) -> PromptTotals:
    """The totals of a batch that is one mini-batch; ``groups`` names the prompt of each row, as in `group_index`.

    A prompt without any token is not counted.
    """
    check_tensors(mask=mask)
    lengths = check_mask("mask", mask, mask.shape).sum(-1)
    index, number = group_index(groups, len(mask))
    tokens = lengths.new_zeros(number).index_add(0, index.to(mask.device), lengths)
    return PromptTotals(tokens[index.to(mask.device)], (tokens > 0).sum())


def aggregation_weights(
    mask: Tensor,
    aggregation: str,
    *,
    max_length: int | None = None,
    total_tokens: int | Tensor | None = None,
    total_sequences: int | Tensor | None = None,
    prompts: PromptTotals | None = None,
    sequences: int | Tensor | None = None,
    local_lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight ``(B, T)`` of each token, such that the loss is ``(weights * values).sum()``.

    ``"sequence_mean"``: mean over each sequence's tokens, then over sequences (GRPO).
    ``"sequence_sum"``: sum over each sequence's tokens, mean over sequences (LUSPO).
    ``"token_mean"``: mean over all tokens of the mini-batch (DAPO).
    ``"local_token_mean"``: mean over the tokens of a local batch, times its share of ``total_sequences`` (BNPO).
    ``local_lengths`` ``(B,)`` is the mean length of the sequences in each row's local batch; without it, ``mask`` is
    one local batch.
    ``"prompt_mean"``: mean over all tokens of each prompt's completions, then over prompts (ScaleRL, arXiv 2510.13786);
    ``prompts`` has the tokens and the number of prompts.
    ``"constant"``: sum divided by sequences × ``max_length`` (Dr. GRPO).

    ``total_tokens`` and ``total_sequences`` are those of the mini-batch where ``mask`` is a micro-batch of it:
    losses and statistics of the micro-batches then add up to those of the mini-batch. ``sequences`` is the number of
    sequences to count here, by default all rows.
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    check_tensors(mask=mask)
    if mask.dim() != 2:
        raise InputError(f"mask has shape {tuple(mask.shape)}; expected (B, T)")
    present = check_mask("mask", mask, mask.shape).to(dtype)
    here = _total("sequences", sequences, len(mask))
    everywhere = _total("total_sequences", total_sequences, here)
    if aggregation == "sequence_mean":
        return present / present.sum(-1, keepdim=True).clamp(min=1) / everywhere
    if aggregation == "sequence_sum":
        return present / everywhere
    if aggregation == "token_mean":
        return present / _total("total_tokens", total_tokens, present.sum().clamp(min=1))
    if aggregation == "local_token_mean" and local_lengths is not None:
        return present / local_lengths.to(present)[:, None] / everywhere
    if aggregation == "local_token_mean":
        return present / present.sum().clamp(min=1) * (here / everywhere)
    if aggregation == "prompt_mean":
        if prompts is None:
            raise InputError("the aggregation 'prompt_mean' needs prompts: see prompt_totals(mask, groups)")
        if prompts.tokens.shape != (len(mask),):
            shape = tuple(prompts.tokens.shape)
            raise InputError(f"the tokens of prompts have shape {shape}; expected one number per row, ({len(mask)},)")
        return present / prompts.tokens.clamp(min=1)[:, None].to(present) / _total("prompts", prompts.prompts, 1)
    if max_length is None:
        raise InputError("the aggregation 'constant' (loss 'dr_grpo') needs max_length: the longest completion allowed")
    check_at_least("max_length", max_length, 1)
    return present / (everywhere * max_length)


def aggregate(
    values: Tensor,
    mask: Tensor,
    aggregation: str,
    *,
    max_length: int | None = None,
    total_tokens: int | Tensor | None = None,
    total_sequences: int | Tensor | None = None,
    prompts: PromptTotals | None = None,
) -> Tensor:
    """Per-token values ``(B, T)`` as one number, by `aggregation_weights`. Masked values may be NaN."""
    values = working(values)
    weights = aggregation_weights(
        mask,
        aggregation,
        max_length=max_length,
        total_tokens=total_tokens,
        total_sequences=total_sequences,
        prompts=prompts,
        dtype=values.dtype,
    )
    check_same_shape(mask=mask, values=values)
    return (torch.where(mask != 0, values, 0.0) * weights).sum()


def _total(name: str, total: int | Tensor | None, default: int | Tensor) -> int | Tensor:
    if total is None:
        return default
    if isinstance(total, Tensor):
        return total.clamp(min=1)
    check_at_least(name, total, 0)
    return max(total, 1)
