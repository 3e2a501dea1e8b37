"""What one update works on: the samples of a mini-batch that have to be computed, and its preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.filters import KeptSets
from groupwise.core.ragged import Ragged, RaggedGroups
from groupwise.training.preference.reference_cache import TokenPair
from groupwise.training.rollout.batch import Batch, GroupAdvantages
from groupwise.training.update.correction import CorrectionCounts, masks_by_sampler
from groupwise.training.update.objective import Totals, active_terms
from groupwise.training.update.teacher import TeacherLogps


class CompletionBatch(NamedTuple):
    """Completions to compute log-probs of: prompts, the completions of each, and the token sets kept at sampling."""

    prompts: Ragged
    completions: RaggedGroups
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

    rows: Tensor  # (g, 2) rows of the mini-batch, chosen first
    dataset: DatasetPairs
    reference: Tensor | None = None  # (g + d, 2): summed log-probs under the reference, the samples' pairs first

    def __len__(self) -> int:
        return len(self.rows) + len(self.dataset.pairs)


@dataclass
class MiniBatch:
    """The samples of a mini-batch that have to be computed; row i is sample ``samples[i]`` of the batch."""

    samples: list[int]
    prompts: Ragged  # the ids of the prompts they belong to
    completions: RaggedGroups  # by prompt
    kept: KeptSets | None
    advantages: Tensor  # (n,)
    token_advantages: Tensor | None  # (n, T) in place of them in the policy loss, if turns have their own
    prompt_tokens: Tensor  # (n,) of all completions of a row's prompt in the mini-batch, computed or not
    allowed: Tensor  # (n,) bool
    sampler_logps: Tensor  # (n, T)
    mask: Tensor  # (n, T)
    totals: Totals
    pairs: MiniBatchPairs
    teacher_prompts: Ragged  # `prompts` as a teacher sees them
    old_logps: Tensor | None = None  # (n, T)
    ref_logps: Tensor | None = None  # (n, T)
    teacher: TeacherLogps | None = None  # what was computed before the first update
    weights: Tensor | None = None  # (n, T) importance weights of the tokens
    local_batch: Tensor | None = None  # (n,) the local batch of each sample, with train.local_batch_size
    local_lengths: Tensor | None = None  # (n,) float64: the mean length of all completions of that batch
    correction: CorrectionCounts | None = None  # what these weights change

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def has_advantage(self) -> Tensor:
        """Which tokens have an advantage, ``(n, T)``."""
        if self.token_advantages is not None:
            return self.token_advantages != 0
        return (self.advantages != 0)[:, None] & self.mask

    @property
    def empty(self) -> bool:
        """Whether there is nothing to learn from, so that no update is made."""
        return not self.samples and not len(self.pairs)

    def select(self, chosen: Tensor) -> CompletionBatch:
        """The completions of the rows ``chosen`` ``(n,)`` bool, with their prompts."""
        sizes, kept = self.completions.sum(chosen), self.kept
        if kept is not None:
            kept = kept.select((chosen[:, None] & self.mask)[self.mask].nonzero().squeeze(1))
        completions = self.completions.choose(chosen, sizes[sizes > 0])
        return CompletionBatch(self.prompts.take(sizes > 0), completions, kept)


def split_minibatches(
    batch: Batch, group_advantages: GroupAdvantages, step_recipe: Recipe, dataset_pairs: DatasetPairs, seed: int
) -> list[MiniBatch]:
    """The batch in ``train.mini_batches`` parts of complete prompts, or of completions (``train.mini_batch_by``).

    They are shuffled by ``seed`` if there are several parts, completions also if there are local batches.
    """
    train = step_recipe.train
    count, by_samples = train.mini_batches, train.mini_batch_by == "samples"
    size = len(batch) if by_samples else len(batch.prompts)
    order = list(range(size))
    if count > 1 or (by_samples and train.local_batch_size is not None):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    cuts = [order[size * part // count : size * (part + 1) // count] for part in range(count)]
    build = build_from_samples if by_samples else build_minibatch
    return [
        build(batch, group_advantages, cut, step_recipe, dataset_pairs.split(part, count))
        for part, cut in enumerate(cuts)
    ]


def build_minibatch(
    batch: Batch,
    group_advantages: GroupAdvantages,
    prompts: Sequence[int],
    step_recipe: Recipe,
    dataset_pairs: DatasetPairs | None = None,
) -> MiniBatch:
    """The mini-batch of these prompts, with the samples that contribute, or all samples if a term needs them."""
    return build_from_samples(batch, group_advantages, batch.samples_of(prompts), step_recipe, dataset_pairs)


def build_from_samples(
    batch: Batch,
    group_advantages: GroupAdvantages,
    members: Sequence[int] | Tensor,
    step_recipe: Recipe,
    dataset_pairs: DatasetPairs | None = None,
) -> MiniBatch:
    """The mini-batch of these samples; consecutive ones form the local batches.

    Those that masks.drop_equal_rewards drops are left out of every number.
    """
    members = torch.as_tensor(members, dtype=torch.long)
    dropped = group_advantages.masked_out.get("equal_rewards")
    if dropped is not None:
        members = members[~dropped[members]]
    allowed, lengths, computed = group_advantages.allowed, batch.lengths, members
    if not _needs_all_samples(step_recipe):
        computed = computed[group_advantages.contributes[computed]]
    if step_recipe.masks.drop_truncated:
        cut = torch.tensor([reason == "length" for reason in batch.stop_reasons], dtype=torch.bool)
        lengths, computed = torch.where(cut, 0, lengths), computed[~cut[computed]]
    computed = _by_prompt(computed, batch)
    divided_by = members
    if step_recipe.loss.denominator == "policy_mask":
        divided_by = members[allowed[members]]
    prompt_tokens = torch.zeros(len(batch.prompts), dtype=torch.long)
    prompt_tokens.index_add_(0, members // batch.samples, lengths[members])
    prompts, completions = batch.by_prompt(computed)
    prompt_ids = batch.prompt_ids.take(prompts)
    samples: list[int] = computed.tolist()
    by_token = group_advantages.token_advantages
    pairs = _pairs(group_advantages, samples, dataset_pairs or DatasetPairs())
    local_batch, local_lengths = _local_batches(members, computed, lengths, step_recipe.train.local_batch_size)
    return MiniBatch(
        samples=samples,
        prompts=prompt_ids,
        completions=completions,
        kept=None if batch.kept is None else batch.kept.select(batch.token_indices(computed)),
        advantages=group_advantages.advantages[computed],
        token_advantages=None if by_token is None else by_token.take(computed).padded(),
        prompt_tokens=prompt_tokens[computed // batch.samples],
        allowed=allowed[computed],
        sampler_logps=batch.sampler_logps.take(computed).padded(),
        mask=completions.rows.mask,
        totals=Totals(
            tokens=int(lengths[members].sum()),
            sequences=len(members),
            policy_tokens=int(lengths[divided_by].sum()),
            policy_sequences=len(divided_by),
            computed_tokens=len(completions.rows.values),
            computed_sequences=len(computed),
            pairs=len(pairs),
            prompts=int((prompt_tokens > 0).sum()),
            token_scale=_token_scale(lengths, members) if step_recipe.train.mini_batch_by == "samples" else 1.0,
        ),
        pairs=pairs,
        local_batch=local_batch,
        local_lengths=local_lengths,
        teacher_prompts=prompt_ids if batch.teacher_ids is None else batch.teacher_ids.take(prompts),
    )


def _by_prompt(samples: Tensor, batch: Batch) -> Tensor:
    """The samples of each prompt together, the prompts in the order in which they occur."""
    prompt_of = samples // batch.samples
    first = torch.zeros(len(batch.prompts), dtype=torch.long)
    first.scatter_reduce_(0, prompt_of, torch.arange(len(samples)), "amin", include_self=False)
    return samples[first[prompt_of].argsort(stable=True)]


def _token_scale(lengths: Tensor, members: Tensor) -> float:
    """The mini-batch's tokens per completion, relative to the batch's."""
    everywhere = float(lengths.double().mean()) if len(lengths) else 0.0
    return float(lengths[members].double().mean()) / everywhere if everywhere and len(members) else 1.0


def _local_batches(
    members: Tensor, computed: Tensor, lengths: Tensor, size: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """The local batch of each computed sample, and the mean length of all completions of that batch."""
    if size is None:
        return None, None
    means = torch.stack([part.double().mean() for part in torch.split(lengths[members], size)])
    batch_of = torch.zeros(len(lengths), dtype=torch.long)
    batch_of[members] = torch.arange(len(members)) // size
    return batch_of[computed], means[batch_of[computed]]


def longest_sequence(batch: MiniBatch | CompletionBatch) -> int:
    """Tokens of the longest completion to be computed, with its prompt; a data set's pairs included."""
    sampled: list[int] = (batch.prompts.lengths + batch.completions.longest).tolist()
    pairs = batch.pairs.dataset.pairs if isinstance(batch, MiniBatch) else ()
    return max([0, *sampled, *(pair.longest for pair in pairs)])


def _needs_all_samples(step_recipe: Recipe) -> bool:
    denominator, off_policy = step_recipe.loss.denominator, step_recipe.masks.off_policy
    return (
        not step_recipe.train.skip_equal_rewards
        or step_recipe.loss.importance_normalize  # its mean is over all samples
        # The tokens of a local batch are ranked together, those without an advantage too.
        or (step_recipe.masks.high_entropy is not None and step_recipe.train.local_batch_size is not None)
        or any(term.needs_all_samples for term in active_terms(step_recipe))
        or step_recipe.loss.entropy_target is not None  # its weight may be 0 now, but the entropy is measured
        # These may mask any sample, which changes this denominator.
        or (denominator == "policy_mask" and (off_policy == "reference_drift" or masks_by_sampler(step_recipe)))
    )


def _pairs(group_advantages: GroupAdvantages, samples: Sequence[int], dataset: DatasetPairs) -> MiniBatchPairs:
    """The pairs of these samples and those of the data set."""
    row_of = {sample: row for row, sample in enumerate(samples)}
    rows: list[list[int]] = []
    if group_advantages.pairs is not None:
        # A mini-batch has all samples of its prompts, so it has both samples of a pair or neither.
        numbers = zip(group_advantages.pairs.chosen.tolist(), group_advantages.pairs.rejected.tolist(), strict=True)
        rows = [[row_of[chosen], row_of[rejected]] for chosen, rejected in numbers if chosen in row_of]
    return MiniBatchPairs(torch.tensor(rows, dtype=torch.long).view(-1, 2), dataset)
