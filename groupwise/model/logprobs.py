"""Log-probs of completions, with each prompt computed once per group.

A group's prompt and its completions form one packed row (`groupwise.model.attention`). Only the positions that predict
a completion token reach the head (`core.selective_logps`); a completion's last token predicts nothing and is not
computed. The result and its gradient equal those of the plain computation with padded rows, which serves models that
cannot share prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.core.filters import KeptSets, keep_sampling_mask
from groupwise.core.logps import logps_from_logits, selective_logps
from groupwise.core.ragged import Ragged, RaggedGroups
from groupwise.core.sequences import TokenSequence
from groupwise.model.attention import PackedLayout, to_device
from groupwise.model.handle import ModelHandle, prepare
from groupwise.model.packing import Completion, Ids, PackInputs, split_into_packs
from groupwise.model.tree import pack_trees
from groupwise.model.tree_attention import TreeLayout


class TokenLogps(NamedTuple):
    """For ``b`` samples of up to ``T`` tokens; zero where the mask is false."""

    logps: Tensor  # (b, T)
    mask: Tensor  # (b, T), bool
    entropy: Tensor | None  # (b, T)
    states: Tensor | None = None  # (tokens, D) or (tokens, V), see `iter_pack_states`


def completion_logps(
    model: Any,
    prompts: Sequence[Ids],
    completions: Sequence[Sequence[Completion]],
    *,
    temperature: float = 1.0,
    kept: KeptSets | None = None,
    with_entropy: bool = False,
    token_budget: int | None = None,
) -> TokenLogps:
    """Log-probs ``(B, T)`` of all completions, in order; ``completions[i]`` belong to ``prompts[i]``.

    Pass the handle that `prepare` returns: a bare model is inspected again in every call. Call it under torch.no_grad()
    for old or reference log-probs. With gradients, all packs stay in memory until the backward pass; a training loop
    uses `iter_packs` instead.
    """
    packs = list(
        iter_packs(
            model,
            prompts,
            completions,
            temperature=temperature,
            kept=kept,
            with_entropy=with_entropy,
            token_budget=token_budget,
        )
    )
    order = torch.cat([samples for samples, _ in packs]).argsort()
    width = max(result.logps.shape[1] for _, result in packs) if len(order) else 0

    def joined(pieces: list[Tensor]) -> Tensor:
        wide = [torch.nn.functional.pad(piece, (0, width - piece.shape[1])) for piece in pieces]
        return torch.cat(wide)[order.to(wide[0].device)]

    return TokenLogps(
        joined([result.logps for _, result in packs]),
        joined([result.mask for _, result in packs]),
        joined([result.entropy for _, result in packs if result.entropy is not None]) if with_entropy else None,
    )


def iter_packs(
    model: Any,
    prompts: Sequence[Ids],
    completions: Sequence[Sequence[Completion]],
    *,
    temperature: float = 1.0,
    kept: KeptSets | None = None,
    with_entropy: bool = False,
    with_states: bool = False,
    token_budget: int | None = None,
) -> Iterator[tuple[Tensor, TokenLogps]]:
    """Pack by pack: the samples ``(b,)`` and their log-probs ``(b, T)``, on request also their states.

    Compute the loss and the backward pass of a pack before taking the next one: memory is then that of one pack, at
    most ``token_budget`` tokens (by default `default_token_budget`, or the longest sample).
    ``kept`` holds a set for every token of every completion, in order.

    If the weights are sharded, every rank gets the same number of packs, some without samples, and must run the
    backward pass of all of them.
    """
    handle = prepare(model)
    for pack in split_into_packs(handle, prompts, completions, kept, token_budget):
        compute = partial(_pack_logps, handle, pack, temperature, with_entropy, with_states)
        result: TokenLogps = handle.run(compute)
        if not len(pack.samples):  # run for other ranks only; its (empty) result takes part in the backward pass, too
            result = TokenLogps._make(None if part is None else part[:0] for part in result)
        yield pack.samples, result


def _pack_logps(
    handle: ModelHandle, pack: PackInputs, temperature: float, with_entropy: bool, with_states: bool
) -> TokenLogps:
    rows, head = pack.completions.rows, handle.head
    tokens = to_device(rows.values, handle.device)
    states = _predicting_states(handle, pack)
    if head is None:
        result = _logps_of_logits(states, tokens, temperature, pack.kept, with_entropy)
    else:
        result = selective_logps(
            states,
            head.weight,
            tokens,
            bias=head.bias,
            softcap=head.softcap,
            scale=head.scale,
            temperature=temperature,
            kept=pack.kept,
            with_entropy=with_entropy,
            float32=head.float32,
        )
    logps, entropy = result if with_entropy else (result, None)
    mask = rows.mask.to(logps.device)
    padded = flat_to_rows(logps, mask), mask, None if entropy is None else flat_to_rows(entropy, mask)
    return TokenLogps(*padded, states if with_states else None)


def iter_pack_states(
    model: Any, prompts: Sequence[Ids], completions: Sequence[Sequence[Completion]], *, token_budget: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each pack of `iter_packs`, its samples, and what predicts their tokens, sample after sample.

    These are the hidden states ``(tokens, D)`` that enter the head, or on the plain path the logits ``(tokens, V)``.
    """
    handle = prepare(model)
    for pack in split_into_packs(handle, prompts, completions, None, token_budget):
        states = handle.run(partial(_predicting_states, handle, pack))
        yield pack.samples, states if len(pack.samples) else states[:0]


def _predicting_states(handle: ModelHandle, pack: PackInputs) -> Tensor:
    if pack.sequences is not None:
        compute = _plain_conversation_logits if handle.fallback_reason else _tree_states
        return compute(handle, pack.prompts, pack.sequences)
    run = _plain_logits if handle.fallback_reason else _packed_states
    return run(handle, pack.prompts, pack.completions)


def _tree_states(handle: ModelHandle, prompts: Ragged, sequences: Sequence[Sequence[TokenSequence]]) -> Tensor:
    """The states of conversations, each distinct beginning computed once."""
    trees = pack_trees(prompts, sequences)
    layout = TreeLayout(prompts.lengths.numpy(), trees.sizes, trees.lengths, trees.parents, handle.device)
    hidden = handle.hidden(to_device(trees.row, handle.device)[None], layout.positions[None], layout)[0]
    return _take(hidden, to_device(trees.sources, handle.device))


def _packed_states(handle: ModelHandle, prompts: Ragged, completions: RaggedGroups) -> Tensor:
    device, chosen = handle.device, completions.rows
    prompt_lengths, sizes, lengths = (x.numpy() for x in (prompts.lengths, completions.sizes, chosen.lengths))
    layout = PackedLayout(prompt_lengths, sizes, lengths - 1, device)
    computed = torch.ones(len(chosen.values), dtype=torch.bool)
    computed[chosen.lengths.cumsum(0) - 1] = False  # the last token of each predicts nothing
    row = to_device(torch.cat([prompts.values, chosen.values[computed]]), device)
    hidden = handle.hidden(row[None], layout.positions[None], layout)[0]
    return _take(hidden, to_device(_sources(prompt_lengths, sizes, lengths), device))


def _take(hidden: Tensor, positions: Tensor) -> Tensor:
    """The hidden states at ``positions``, which may repeat, with a reproducible gradient.

    Gradients of a repeated position are summed in order: on a CPU by index_select, whose backward pass is sequential
    (that of indexing is parallel, in any order); on a GPU by indexing, which sorts first.
    """
    return hidden[positions] if hidden.is_cuda else hidden.index_select(0, positions)


def _sources(prompt_lengths: np.ndarray, sizes: np.ndarray, lengths: np.ndarray) -> Tensor:
    """Which position of the packed row predicts each completion token; ``sizes`` are the groups'.

    A completion's first token is predicted by its prompt's last token, every other by the token before it.
    """
    prompt_ends = prompt_lengths.cumsum()
    ends, row_ends = lengths.cumsum(), (lengths - 1).cumsum()
    within = np.arange(ends[-1]) - (ends - lengths).repeat(lengths)
    previous = (prompt_ends[-1] + row_ends - lengths).repeat(lengths) + within
    return torch.from_numpy(np.where(within == 0, (prompt_ends.repeat(sizes) - 1).repeat(lengths), previous))


def _plain_logits(handle: ModelHandle, prompts: Ragged, completions: RaggedGroups) -> Tensor:
    """The plain computation: each sample is a row with its prompt, padded on the right, through the model's forward.

    A causal model does not look ahead, so the contents of the padding do not matter.
    """
    prompts, chosen, device = prompts.take(completions.group_of), completions.rows, handle.device
    starts, ends = prompts.lengths[:, None], (prompts.lengths + chosen.lengths)[:, None]
    at = torch.arange(int(ends.max()))
    rows = torch.zeros(len(chosen), len(at), dtype=torch.long)
    rows.masked_scatter_(at < starts, prompts.values).masked_scatter_((at >= starts) & (at < ends), chosen.values)
    attention_mask = (at < ends).long()
    logits = handle.model(input_ids=rows.to(device), attention_mask=attention_mask.to(device), use_cache=False).logits
    predicting = ((at >= starts - 1) & (at < ends - 1)).flatten().nonzero().squeeze(1)
    return _take(logits.flatten(0, 1), to_device(predicting, device))


def _plain_conversation_logits(
    handle: ModelHandle, prompts: Ragged, sequences: Sequence[Sequence[TokenSequence]]
) -> Tensor:
    """`_plain_logits` for conversations, of which only the sampled tokens are predicted."""
    everything = RaggedGroups.of([[sequence.ids for sequence in members] for members in sequences])
    sampled = torch.cat([sequence.sampled for members in sequences for sequence in members])
    return _plain_logits(handle, prompts, everything)[sampled.to(handle.device)]


def _logps_of_logits(logits: Tensor, ids: Tensor, temperature: float, kept: KeptSets | None, with_entropy: bool) -> Any:
    if kept is None:
        return logps_from_logits(logits, ids, temperature=temperature, with_entropy=with_entropy)
    logps = keep_sampling_mask(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, kept)
    chosen = logps.gather(-1, ids[:, None]).squeeze(-1)
    if not with_entropy:
        return chosen
    prob = logps.exp()
    return chosen, -(prob * torch.where(prob > 0, logps, 0.0)).sum(-1)


def flat_to_rows(flat: Tensor, mask: Tensor) -> Tensor:
    """Values per token, sample after sample, as rows ``(n, T)``; zero where the mask is false."""
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)
