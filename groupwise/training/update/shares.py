"""Dividing a mini-batch among the ranks: complete prompts with their samples and pairs, even in tokens.

Denominators stay those of the complete mini-batch, so the gradients of all shares add up to that of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from groupwise.distributed.ranks import Ranks
from groupwise.distributed.split import split_by_cost
from groupwise.model.logprobs import TokenLogps
from groupwise.training.update.minibatch import CompletionBatch, DatasetPairs, MiniBatch, MiniBatchPairs


@dataclass(frozen=True)
class Share:
    """A rank's part of a mini-batch, and where that is in it."""

    minibatch: MiniBatch
    rows: Tensor  # (n,) rows of the complete mini-batch
    pairs: list[int]  # numbers of the samples' pairs
    dataset_pairs: list[int]  # numbers of the data set's pairs


def share_of(minibatch: MiniBatch, ranks: Ranks) -> Share:
    """This rank's share."""
    pairs, count = minibatch.pairs, len(minibatch.pairs.rows)
    if ranks.size == 1:
        numbers = list(range(count)), list(range(len(pairs.dataset.pairs)))
        return Share(minibatch, torch.arange(len(minibatch)), *numbers)
    prompts = split_by_cost(_costs(minibatch), ranks.size)[ranks.rank]
    part, rows = _take_prompts(minibatch, prompts)
    lengths = [pair.longest for pair in pairs.dataset.pairs]
    from_data = split_by_cost(lengths, ranks.size)[ranks.size - 1 - ranks.rank]  # the first share is the largest
    place = {row: at for at, row in enumerate(rows.tolist())}
    sampled = [number for number, (chosen, _) in enumerate(pairs.rows.tolist()) if chosen in place]

    def taken(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[rows]

    dataset = DatasetPairs(
        [pairs.dataset.pairs[number] for number in from_data],
        None if pairs.dataset.reference is None else pairs.dataset.reference[from_data],
    )
    reference = pairs.reference
    return Share(
        replace(
            minibatch,
            samples=[minibatch.samples[row] for row in rows.tolist()],
            prompts=part.prompts,
            completions=part.completions,
            kept=part.kept,
            advantages=minibatch.advantages[rows],
            token_advantages=taken(minibatch.token_advantages),
            prompt_tokens=minibatch.prompt_tokens[rows],
            allowed=minibatch.allowed[rows],
            sampler_logps=minibatch.sampler_logps[rows],
            mask=minibatch.mask[rows],
            old_logps=taken(minibatch.old_logps),
            ref_logps=taken(minibatch.ref_logps),
            teacher_prompts=minibatch.teacher_prompts.take(prompts),
            teacher=None if minibatch.teacher is None else minibatch.teacher.take(rows),
            weights=taken(minibatch.weights),
            local_batch=taken(minibatch.local_batch),
            local_lengths=taken(minibatch.local_lengths),
            pairs=MiniBatchPairs(
                torch.tensor([[place[row] for row in pairs.rows[n].tolist()] for n in sampled]).view(-1, 2),
                dataset,
                None if reference is None else reference[[*sampled, *(count + number for number in from_data)]],
            ),
        ),
        rows,
        sampled,
        from_data,
    )


def divide_logps(
    ranks: Ranks,
    batch: MiniBatch | CompletionBatch,
    compute: Callable[[MiniBatch | CompletionBatch], TokenLogps],
    *,
    sharded: bool = False,
) -> TokenLogps:
    """The log-probs of all completions, on every rank; each computes those of its share of the prompts.

    sharded: the weights are, so all ranks compute, even with an empty share.
    """
    if ranks.size == 1:
        return compute(batch)

    def work(prompts: list[int]) -> list[list[Tensor | None]]:
        part, _ = _take_prompts(batch, prompts)
        result = compute(part)
        sizes = part.completions.sizes.tolist()
        entropy = [None] * len(sizes) if result.entropy is None else torch.split(result.entropy, sizes)
        return [
            list(values)
            for values in zip(torch.split(result.logps, sizes), torch.split(result.mask, sizes), entropy, strict=True)
        ]

    columns = zip(*ranks.divide("computing log-probs", _costs(batch), work, exchanges=sharded), strict=True)
    logps, mask, entropy = (_joined(pieces) for pieces in columns)
    if logps is None or mask is None:
        raise ValueError("log-probs of no completion")
    return TokenLogps(logps, mask, entropy)


def _joined(pieces: Sequence[Tensor | None]) -> Tensor | None:
    rows = [piece for piece in pieces if piece is not None]
    width = max((piece.shape[1] for piece in rows), default=0)
    return torch.cat([pad(piece, (0, width - piece.shape[1])) for piece in rows]) if rows else None


def _costs(batch: MiniBatch | CompletionBatch) -> list[float]:
    """The tokens of each prompt with its completions."""
    costs: list[float] = (batch.prompts.lengths + batch.completions.totals).tolist()
    return costs


def _take_prompts(batch: MiniBatch | CompletionBatch, prompts: Sequence[int]) -> tuple[CompletionBatch, Tensor]:
    """The completions of these prompts, and their rows."""
    rows = batch.completions.row_numbers(prompts)
    kept = None if batch.kept is None else batch.kept.select(batch.completions.rows.positions(rows))
    return CompletionBatch(batch.prompts.take(prompts), batch.completions.take(prompts), kept), rows
