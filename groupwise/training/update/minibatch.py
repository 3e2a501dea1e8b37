"""What one update works on: the samples of a mini-batch that have to be computed, and its preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.filters import KeptSets
from groupwise.model.logprobs import flat_to_rows
from groupwise.training.preference.reference_cache import TokenPair
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.update.objective import Totals, active_terms


class CompletionBatch(NamedTuple):
    """Completions to compute log-probs of: prompts, the completions of each, and the token sets kept at sampling."""

    prompts: list[tuple[int, ...]]
    completions: list[list[Tensor]]
    kept: KeptSets | None


class DatasetPairs(NamedTuple):
    """Pairs of a data set, and if known the reference's summed log-probs ``(n, 2)``."""

    pairs: Sequence[TokenPair] = ()
    reference: Tensor | None = None

    def split(self, index: int, count: int) -> DatasetPairs:
        """Split number ``index`` of ``count`` splits of nearly equal size."""
        members = slice(len(self.pairs) * index // count, len(self.pairs) * (index + 1) // count)
        return DatasetPairs(self.pairs[members], None if self.reference is None else self.reference[members])


@dataclass
class MiniBatchPairs:
    """The pairs of a mini-batch: pairs of its samples, by their rows, and pairs of a data set."""

    chosen: Tensor  # (g,) rows of the mini-batch
    rejected: Tensor  # (g,)
    dataset: DatasetPairs
    reference: Tensor | None = None  # (g + d, 2): summed log-probs under the reference, the samples' pairs first

    def __len__(self) -> int:
        return len(self.chosen) + len(self.dataset.pairs)

    @property
    def rows(self) -> Tensor:
        """The rows of the samples' pairs, ``(g, 2)``."""
        return torch.stack([self.chosen, self.rejected], 1)

    @property
    def dataset_completions(self) -> CompletionBatch:
        """The completions of the data set's pairs, chosen and rejected in turn."""
        pairs = self.dataset.pairs
        return CompletionBatch([pair.prompt for pair in pairs], [[pair.chosen, pair.rejected] for pair in pairs], None)


@dataclass
class MiniBatch:
    """The samples of a mini-batch that have to be computed; row i is sample ``samples[i]`` of the batch."""

    samples: list[int]
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
    weights: Tensor | None = None  # (n, T) importance weights of the tokens
    pairs: MiniBatchPairs | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to learn from, so that no update is made."""
        return not self.samples and self.pairs is None

    def select(self, chosen: Tensor) -> CompletionBatch:
        """The completions of the rows ``chosen`` ``(n,)`` bool, with their prompts."""
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
    step_recipe: Recipe,
    dataset_pairs: DatasetPairs | None = None,
) -> MiniBatch:
    """The mini-batch of these prompts, with the samples that contribute, or all samples if a term needs them."""
    members = [prompt * batch.samples + sample for prompt in prompts for sample in range(batch.samples)]
    contributes, allowed = group_advantages.contributes.tolist(), group_advantages.allowed.tolist()
    compute_all = _needs_all_samples(step_recipe)
    computed = [i for i in members if compute_all or contributes[i]]
    by_prompt: dict[int, list[int]] = {}
    for sample in computed:
        by_prompt.setdefault(sample // batch.samples, []).append(sample)
    divided_by = members
    if step_recipe.loss.denominator == "policy_mask":
        divided_by = [i for i in members if allowed[i]]
    lengths = batch.lengths
    mask = _mask(lengths[computed])
    pairs = _pairs(group_advantages, computed, dataset_pairs or DatasetPairs())
    return MiniBatch(
        samples=computed,
        prompts=[batch.prompts[prompt].ids for prompt in by_prompt],
        completions=[[batch.ids[i] for i in samples] for samples in by_prompt.values()],
        kept=None if batch.kept is None else batch.kept.select(batch.token_indices(computed)),
        advantages=group_advantages.advantages[computed],
        allowed=group_advantages.allowed[computed],
        sampler_logps=_pad([batch.sampler_logps[i] for i in computed], mask),
        mask=mask,
        totals=Totals(
            tokens=int(lengths[members].sum()),
            sequences=len(members),
            policy_tokens=int(lengths[divided_by].sum()),
            policy_sequences=len(divided_by),
            computed_tokens=int(mask.sum()),
            computed_sequences=len(computed),
            pairs=0 if pairs is None else len(pairs),
        ),
        pairs=pairs,
    )


def longest_sequence(batch: MiniBatch | CompletionBatch) -> int:
    """Tokens of the longest completion to be computed, with its prompt; a data set's pairs included."""
    sampled = max(
        (
            len(prompt) + max(ids.shape[0] for ids in members)
            for prompt, members in zip(batch.prompts, batch.completions, strict=True)
        ),
        default=0,
    )
    pairs = batch.pairs.dataset.pairs if isinstance(batch, MiniBatch) and batch.pairs is not None else ()
    return max([sampled, *(pair.longest for pair in pairs)])


def _needs_all_samples(step_recipe: Recipe) -> bool:
    # The reference_drift mask may mask any sample, which changes this denominator.
    masked_denominator = (
        step_recipe.loss.denominator == "policy_mask" and step_recipe.masks.off_policy == "reference_drift"
    )
    needed = any(term.needs_all_samples for term in active_terms(step_recipe))
    return needed or masked_denominator or not step_recipe.train.skip_equal_rewards


def _pairs(group_advantages: GroupAdvantages, samples: Sequence[int], dataset: DatasetPairs) -> MiniBatchPairs | None:
    """The pairs of these samples and those of the data set; None if there are neither."""
    rows = {sample: row for row, sample in enumerate(samples)}
    group_pairs, sampled = group_advantages.pairs, []
    if group_pairs is not None:
        # A mini-batch has all samples of its prompts, so it has both samples of a pair or neither.
        numbers = zip(group_pairs.chosen.tolist(), group_pairs.rejected.tolist(), strict=True)
        sampled = [pair for pair in numbers if pair[0] in rows]
    if not sampled and not dataset.pairs:
        return None
    chosen, rejected = (torch.tensor([rows[pair[side]] for pair in sampled], dtype=torch.long) for side in (0, 1))
    return MiniBatchPairs(chosen, rejected, dataset)


def _mask(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]


def _pad(rows: Sequence[Tensor], mask: Tensor) -> Tensor:
    return flat_to_rows(torch.cat(list(rows)), mask) if rows else torch.zeros(mask.shape)
