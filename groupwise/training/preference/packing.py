"""The pairs of each pack of an update, arranged so that the gradient does not depend on the packs.

If both completions of every pair are in one pack, a pack's share of the loss is that of its pairs. If a pair is split
over two packs, or the loss couples pairs (`core.preference.BATCH_KINDS`), the loss is first computed from log-probs
without gradient. It is a function of one number per completion, so its gradient with respect to these numbers is all
that a pack needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.core.preference import BATCH_KINDS
from groupwise.distributed.ranks import Ranks
from groupwise.errors import InputError
from groupwise.model.handle import ModelHandle
from groupwise.model.packing import pack_members
from groupwise.training.preference.reference_cache import pair_completions, pair_lengths
from groupwise.training.update.minibatch import MiniBatch
from groupwise.training.update.objective import PackedPairs, PairGradients, pairs_loss
from groupwise.training.update.shares import Share


@dataclass(frozen=True)
class PairIndex:
    """Pairs by the rows of their completions."""

    rows: Tensor  # (n, 2), chosen first
    reference: Tensor  # (n, 2)
    precomputed: PairGradients | None  # if pairs are split over packs, or the loss couples them

    def for_pack(self, pack_rows: Tensor, device: torch.device) -> PackedPairs | PairGradients | None:
        """The pairs of a pack with these rows ``(b,)``; None if it has none."""
        place = {row: at for at, row in enumerate(pack_rows.tolist())}
        numbers = [number for number, pair in enumerate(self.rows.tolist()) if place.keys() & set(pair)]
        if not numbers:
            return None
        if self.precomputed is None:
            rows = torch.tensor([[place[row] for row in pair] for pair in self.rows[numbers].tolist()], device=device)
            return PackedPairs(rows, self.reference[numbers].to(device))
        grads = self.precomputed.grads[pack_rows].to(device)
        has_first = self.rows[0, 0].item() in place  # the pack with the first chosen completion has the value
        return replace(self.precomputed, grads=grads) if has_first else PairGradients(grads)


PairLayout = tuple[PairIndex, PairIndex]
"""The pairs of an update: those of the samples, and those of a data set."""


def plan_pair_layout(
    handle: ModelHandle,
    minibatch: MiniBatch,
    share: Share,
    step_recipe: Recipe,
    token_budget: int,
    compute_logps: Callable[[MiniBatch, Recipe], Tensor],
    ranks: Ranks,
) -> PairLayout:
    """The layout of the pairs of a rank's share of a mini-batch.

    ``compute_logps`` gives the policy's ``(n, 2)`` of all pairs, and is called, on all ranks, if needed.
    """
    pairs, reference = minibatch.pairs, minibatch.pairs.reference
    if reference is None:
        if len(pairs):
            raise InputError("a preference loss needs the reference's log-probs of the pairs, which were not computed")
        reference = torch.zeros(0, 2, dtype=torch.float64)
    part, own = share.minibatch, share.minibatch.pairs
    sampled, dataset = own.rows, torch.arange(2 * len(own.dataset.pairs)).view(-1, 2)
    coupled = bool(BATCH_KINDS.intersection(step_recipe.preference.kinds)) or not (
        (not len(sampled) or _unsplit(sampled, pack_members(handle, part.prompts, part.completions, token_budget)))
        and _unsplit(dataset, pack_members(handle, *pair_completions(own.dataset.pairs), token_budget))
    )
    count, of_samples, of_dataset = len(pairs.rows), None, None
    if len(pairs) and ranks.any(coupled):
        loss = _precompute(minibatch, step_recipe, compute_logps(minibatch, step_recipe), reference)
        by_row = loss.grads.new_zeros(len(minibatch)).index_add(0, pairs.rows.flatten(), loss.grads[:count].flatten())
        rest = loss.grads[count:][share.dataset_pairs].flatten()
        # The value is counted once, by the share with the first pair.
        of_samples, of_dataset = PairGradients(by_row[share.rows]), PairGradients(rest)
        if count and 0 in share.pairs:
            of_samples = replace(loss, grads=of_samples.grads)
        elif not count and 0 in share.dataset_pairs:
            of_dataset = replace(loss, grads=rest)
    numbers = [*share.pairs, *(count + number for number in share.dataset_pairs)]
    reference, count = reference[numbers], len(sampled)
    return PairIndex(sampled, reference[:count], of_samples), PairIndex(dataset, reference[count:], of_dataset)


def _unsplit(pairs: Tensor, packs: Iterable[Sequence[int]]) -> bool:
    """Whether the two rows of each pair are in the same pack."""
    pack_of = {row: number for number, members in enumerate(packs) for row in members}
    return all(pack_of[chosen] == pack_of[rejected] for chosen, rejected in pairs.tolist())


def _precompute(minibatch: MiniBatch, step_recipe: Recipe, logps: Tensor, reference: Tensor) -> PairGradients:
    pairs = minibatch.pairs
    lengths = torch.cat([minibatch.mask.sum(1)[pairs.rows], pair_lengths(pairs.dataset.pairs)])
    logps = logps.detach().requires_grad_()
    value, statistics = pairs_loss(step_recipe, logps, reference.to(logps), lengths, len(logps))
    (grads,) = torch.autograd.grad(value, logps)
    return PairGradients(grads, float(value.detach()), {name: float(number) for name, number in statistics.items()})
