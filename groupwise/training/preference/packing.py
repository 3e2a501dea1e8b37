"""The pairs of each pack of an update, arranged so that the gradient does not depend on the packs.

If both completions of every pair are in one pack, a pack's share of the loss is that of its pairs. If a pair is split
over two packs, or the loss couples pairs (`core.preference.BATCH_KINDS`), the loss is first computed from log-probs
without gradient. It is a function of one number per completion, so its gradient with respect to these numbers is all
that a pack needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.preference import BATCH_KINDS
from groupwise.errors import InputError
from groupwise.model.handle import ModelHandle
from groupwise.model.packing import pack_members
from groupwise.training.preference.reference_cache import pair_lengths
from groupwise.training.update.minibatch import MiniBatch, MiniBatchPairs
from groupwise.training.update.objective import PackedPairs, PairGradients, pairs_loss


@dataclass(frozen=True)
class PrecomputedPairLoss:
    """A pair loss that was computed before the packs, and its gradient with respect to the summed log-probs."""

    grads: Tensor  # (n, 2)
    value: float
    statistics: dict[str, float] = field(default_factory=dict)

    def select(self, pairs: slice, *, with_value: bool) -> PrecomputedPairLoss:
        """Some of the pairs. The value must be counted once, so only one selection has it."""
        if with_value:
            return PrecomputedPairLoss(self.grads[pairs], self.value, self.statistics)
        return PrecomputedPairLoss(self.grads[pairs], 0.0)


@dataclass(frozen=True)
class PairIndex:
    """Pairs by the rows of their completions."""

    rows: Tensor  # (n, 2), chosen first
    reference: Tensor  # (n, 2)
    precomputed: PrecomputedPairLoss | None = None  # if pairs are split over packs, or the loss couples them

    def for_pack(self, pack_rows: Tensor) -> PackedPairs | PairGradients | None:
        """The pairs of a pack with these rows ``(b,)``; None if it has none."""
        place = {row: at for at, row in enumerate(pack_rows.tolist())}
        members = [(number, pair) for number, pair in enumerate(self.rows.tolist()) if place.keys() & set(pair)]
        if not members:
            return None
        if self.precomputed is None:
            numbers = [number for number, _ in members]
            chosen, rejected = (torch.tensor([place[pair[side]] for _, pair in members]) for side in (0, 1))
            return PackedPairs(chosen, rejected, self.reference[numbers])
        grads = self.precomputed.grads.new_zeros(len(pack_rows))
        for number, pair in members:
            for side, row in enumerate(pair):
                if row in place:
                    grads[place[row]] += self.precomputed.grads[number, side]
        if self.rows[0, 0].item() in place:  # the pack with the first chosen completion has the value
            return PairGradients(grads, self.precomputed.value, self.precomputed.statistics)
        return PairGradients(grads)


@dataclass(frozen=True)
class PairLayout:
    """The pairs of an update: those of the samples, and those of a data set; None if there are none."""

    sampled: PairIndex | None
    dataset: PairIndex | None


def plan_pair_layout(
    handle: ModelHandle,
    minibatch: MiniBatch,
    step_recipe: Recipe,
    token_budget: int,
    compute_logps: Callable[[], Tensor],
) -> PairLayout | None:
    """The layout of a mini-batch's pairs; None if it has no pairs.

    compute_logps: computes the policy's summed log-probs ``(n, 2)`` of the pairs; called only if they are needed.
    """
    pairs = minibatch.pairs
    if pairs is None:
        return None
    reference = pairs.reference
    if reference is None:
        raise InputError("a preference loss needs the reference's log-probs of the pairs, which were not computed")
    sampled, dataset = pairs.rows, torch.arange(2 * len(pairs.dataset.pairs)).view(-1, 2)
    completions = pairs.dataset_completions
    separable = (
        not BATCH_KINDS.intersection(step_recipe.preference.kinds)
        and _unsplit(sampled, pack_members(handle, minibatch.prompts, minibatch.completions, token_budget))
        and _unsplit(dataset, pack_members(handle, completions.prompts, completions.completions, token_budget))
    )
    loss = None if separable else _precompute(step_recipe, compute_logps(), reference, _lengths(minibatch, pairs))
    count = len(sampled)
    return PairLayout(
        PairIndex(sampled, reference[:count], loss and loss.select(slice(count), with_value=True)) if count else None,
        PairIndex(dataset, reference[count:], loss and loss.select(slice(count, None), with_value=not count))
        if len(dataset)
        else None,
    )


def _unsplit(pairs: Tensor, packs: Iterable[Sequence[int]]) -> bool:
    """Whether the two rows of each pair are in the same pack."""
    pack_of = {row: number for number, members in enumerate(packs) for row in members}
    return all(pack_of[chosen] == pack_of[rejected] for chosen, rejected in pairs.tolist())


def _precompute(step_recipe: Recipe, logps: Tensor, reference: Tensor, lengths: Tensor) -> PrecomputedPairLoss:
    logps = logps.detach().requires_grad_()
    value, statistics = pairs_loss(step_recipe, logps, reference.to(logps), lengths, len(logps))
    (grads,) = torch.autograd.grad(value, logps)
    return PrecomputedPairLoss(
        grads, float(value.detach()), {name: float(number) for name, number in statistics.items()}
    )


def _lengths(minibatch: MiniBatch, pairs: MiniBatchPairs) -> Tensor:
    """Tokens of each completion, ``(n, 2)``."""
    return torch.cat([minibatch.mask.sum(1)[pairs.rows].view(-1, 2), pair_lengths(pairs.dataset.pairs)])
