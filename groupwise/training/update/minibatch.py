"""What an update works on: the samples of a mini-batch that have to be computed, and what is known about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.filters import KeptSets
from groupwise.model.logprobs import in_rows
from groupwise.training.preference.reference_cache import TokenPair
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.update.objective import Totals


class CompletionBatch(NamedTuple):
    """What log-probs are computed of: prompts, the answers to each, and the sets that sampling had left."""

    prompts: list[tuple[int, ...]]
    completions: list[list[Tensor]]
    kept: KeptSets | None


class DatasetPairs(NamedTuple):
    """Pairs of a data set, and the reference's summed log-probs of them ``(n, 2)`` where they are known already."""

    pairs: Sequence[TokenPair] = ()
    reference: Tensor | None = None

    def part(self, number: int, components: int) -> DatasetPairs:
        """One of so many parts, as equal as can be."""
        own = slice(len(self.pairs) * number // components, len(self.pairs) * (number + 1) // components)
        return DatasetPairs(self.pairs[own], None if self.reference is None else self.reference[own])


@dataclass
class MiniBatchPairs:
    """The pairs of a mini-batch: those among its samples, by their rows, and those of a data set."""

    chosen: Tensor  # (g,) rows of the work
    rejected: Tensor  # (g,)
    fixed: DatasetPairs
    reference: Tensor | None = None  # (g + f, 2): summed log-probs under the reference, the samples' pairs first

    def __len__(self) -> int:
        return len(self.chosen) + len(self.fixed.pairs)

    @property
    def rows(self) -> Tensor:
        """The rows of the samples' pairs, ``(g, 2)``."""
        return torch.stack([self.chosen, self.rejected], 1)

    @property
    def fixed_answers(self) -> CompletionBatch:
        """The data set's pairs as what log-probs are computed of: the chosen and the rejected answer in turn."""
        pairs = self.fixed.pairs
        return CompletionBatch([pair.prompt for pair in pairs], [[pair.chosen, pair.rejected] for pair in pairs], None)


@dataclass
class MiniBatch:
    """The samples of a mini-batch that have to be computed, and what is known about them. Rows follow ``samples``."""

    samples: list[int]  # which samples of the batch
    prompts: list[tuple[int, ...]]  # of the prompts they belong to
    completions: list[list[Tensor]]  # by prompt
    kept: KeptSets | None
    advantages: Tensor  # (n,)
    allowed: Tensor  # (n,) bool
    sampler_logps: Tensor  # (n, T)
    mask: Tensor  # (n, T)
    totals: Totals
    old_logps: Tensor | None = None  # (n, T)
    ref_logps: Tensor | None = None  # (n, T)
    weights: Tensor | None = None  # (n, T) the importance correction
    pairs: MiniBatchPairs | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute, so that no update is due."""
        return not self.samples and self.pairs is None

    def answers_of(self, chosen: Tensor) -> CompletionBatch:
        """The answers of some samples, ``(n,)`` bool, with their prompts."""
        rows, numbers = chosen.tolist(), iter(range(len(self)))
        groups = [[ids for ids in members if rows[next(numbers)]] for members in self.completions]
        kept = self.kept
        if kept is not None:
            kept = kept.select((chosen[:, None] & self.mask)[self.mask].nonzero().squeeze(1))
        prompts = [prompt for prompt, members in zip(self.prompts, groups, strict=True) if members]
        return CompletionBatch(prompts, [members for members in groups if members], kept)


def build_minibatch(
    batch: Batch,
    group_advantages: GroupAdvantages,
    prompts: Sequence[int],
    now: Recipe,
    fixed: DatasetPairs | None = None,
) -> MiniBatch:
    """What a mini-batch of these prompts needs computed: what contributes, or everything where a term asks for it.

    ``fixed`` are pairs of a data set that are learned from beside them.
    """
    members = [prompt * batch.samples + sample for prompt in prompts for sample in range(batch.samples)]
    everything = bool(now.loss.kl_coef or now.loss.entropy_coef) or not now.train.skip_equal_rewards
    if now.loss.denominator == "policy_mask" and now.masks.off_policy == "reference_drift":
        everything = True  # this mask may silence any sample, and so be felt in the denominator
    contributes, allowed = group_advantages.contributes.tolist(), group_advantages.allowed.tolist()
    chosen = [i for i in members if everything or contributes[i]]
    by_prompt: dict[int, list[int]] = {}
    for sample in chosen:
        by_prompt.setdefault(sample // batch.samples, []).append(sample)
    divided_by = members
    if now.loss.denominator == "policy_mask":
        divided_by = [i for i in members if allowed[i]]
    lengths = batch.lengths
    mask = _mask(lengths[chosen])
    pairs = _pairs(group_advantages, chosen, fixed or DatasetPairs())
    return MiniBatch(
        samples=chosen,
        prompts=[batch.prompts[prompt].ids for prompt in by_prompt],
        completions=[[batch.ids[i] for i in own] for own in by_prompt.values()],
        kept=None if batch.kept is None else batch.kept.select(batch.places(chosen)),
        advantages=group_advantages.advantages[chosen],
        allowed=group_advantages.allowed[chosen],
        sampler_logps=_padded([batch.sampler_logps[i] for i in chosen], mask),
        mask=mask,
        totals=Totals(
            tokens=int(lengths[members].sum()),
            sequences=len(members),
            policy_tokens=int(lengths[divided_by].sum()),
            policy_sequences=len(divided_by),
            computed_tokens=int(mask.sum()),
            computed_sequences=len(chosen),
            pairs=0 if pairs is None else len(pairs),
        ),
        pairs=pairs,
    )


def _pairs(group_advantages: GroupAdvantages, samples: Sequence[int], fixed: DatasetPairs) -> MiniBatchPairs | None:
    """The pairs among these samples of a batch, and those of a data set; None if there are neither."""
    rows = {sample: row for row, sample in enumerate(samples)}
    known = group_advantages.pairs
    own = [] if known is None else list(zip(known.chosen.tolist(), known.rejected.tolist(), strict=True))
    own = [pair for pair in own if pair[0] in rows]  # both or neither: a mini-batch has whole prompts
    if not own and not fixed.pairs:
        return None
    chosen, rejected = (torch.tensor([rows[pair[side]] for pair in own], dtype=torch.long) for side in (0, 1))
    return MiniBatchPairs(chosen, rejected, fixed)


def longest(minibatch: MiniBatch | CompletionBatch) -> int:
    """Tokens of the longest answer to be computed, its prompt included; a pair's too."""
    own = max(
        (
            len(prompt) + max(ids.shape[0] for ids in members)
            for prompt, members in zip(minibatch.prompts, minibatch.completions, strict=True)
        ),
        default=0,
    )
    pairs = minibatch.pairs.fixed.pairs if isinstance(minibatch, MiniBatch) and minibatch.pairs is not None else ()
    return max([own, *(pair.longest for pair in pairs)])


def _mask(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]


def _padded(rows: Sequence[Tensor], mask: Tensor) -> Tensor:
    return in_rows(torch.cat(list(rows)), mask) if rows else torch.zeros(mask.shape)
