"""Which pairs each pack of an update computes, so that the gradient does not depend on the packs.

Where both answers of every pair are in one pack, a pack's share of the loss is that of its pairs. Where a pair is in
two packs, or the loss looks across pairs (`core.preference.BATCH_KINDS`), log-probs without a gradient come first: the
loss is a function of one number per answer, so its slopes are all that a pack needs to know.
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
from groupwise.model.logprobs import samples_together
from groupwise.training.preference.reference_cache import pair_lengths
from groupwise.training.update.minibatch import MiniBatch, MiniBatchPairs
from groupwise.training.update.objective import PackedPairs, PairGradients, pairs_loss


@dataclass(frozen=True)
class PrecomputedPairLoss:
    """A loss that is known before the packs are computed: how much it grows with each answer's log-prob."""

    slopes: Tensor  # (n, 2)
    value: float
    statistics: dict[str, float] = field(default_factory=dict)

    def part(self, pairs: slice, *, tells: bool) -> PrecomputedPairLoss:
        """Some of the pairs; only one part tells what the loss comes to."""
        return (
            PrecomputedPairLoss(self.slopes[pairs], self.value, self.statistics)
            if tells
            else PrecomputedPairLoss(self.slopes[pairs], 0.0)
        )


@dataclass(frozen=True)
class PairIndex:
    """Pairs by the rows of their answers among what is computed; ``spread``: as much of the loss as is known."""

    rows: Tensor  # (n, 2), the chosen first
    reference: Tensor  # (n, 2)
    spread: PrecomputedPairLoss | None = None

    def part(self, computed: Tensor) -> PackedPairs | PairGradients | None:
        """What a pack of these rows ``(b,)`` has to do with the pairs."""
        place = {row: at for at, row in enumerate(computed.tolist())}
        own = [(number, pair) for number, pair in enumerate(self.rows.tolist()) if place.keys() & set(pair)]
        if not own:
            return None
        if self.spread is None:
            numbers = [number for number, _ in own]
            chosen, rejected = (torch.tensor([place[pair[side]] for _, pair in own]) for side in (0, 1))
            return PackedPairs(chosen, rejected, self.reference[numbers])
        slopes = self.spread.slopes.new_zeros(len(computed))
        for number, pair in own:
            for side, row in enumerate(pair):
                if row in place:
                    slopes[place[row]] += self.spread.slopes[number, side]
        if self.rows[0, 0].item() in place:  # the pack of the first pair's better answer tells of the whole
            return PairGradients(slopes, self.spread.value, self.spread.statistics)
        return PairGradients(slopes)


@dataclass(frozen=True)
class PairLayout:
    """The pairs of an update: those among the samples, and those of a data set; None where there are none."""

    sampled: PairIndex | None
    fixed: PairIndex | None


def plan_pair_layout(
    handle: ModelHandle, minibatch: MiniBatch, now: Recipe, token_budget: int, sums: Callable[[], Tensor]
) -> PairLayout | None:
    """The plan for a mini-batch. ``sums`` gives the policy's summed log-probs ``(n, 2)`` of its pairs, where needed."""
    pairs = minibatch.pairs
    if pairs is None:
        return None
    reference = pairs.reference
    if reference is None:
        raise InputError("pairs are learned from relative to a reference, whose log-probs are not known here")
    sampled, fixed = pairs.rows, torch.arange(2 * len(pairs.fixed.pairs)).view(-1, 2)
    answers = pairs.fixed_answers
    whole = (
        not BATCH_KINDS.intersection(now.preference.kinds)
        and _together(sampled, samples_together(handle, minibatch.prompts, minibatch.completions, token_budget))
        and _together(fixed, samples_together(handle, answers.prompts, answers.completions, token_budget))
    )
    spread = None if whole else _spread(now, sums(), reference, _lengths(minibatch, pairs))
    cut = len(sampled)
    return PairLayout(
        PairIndex(sampled, reference[:cut], spread and spread.part(slice(cut), tells=True)) if cut else None,
        PairIndex(fixed, reference[cut:], spread and spread.part(slice(cut, None), tells=not cut))
        if len(fixed)
        else None,
    )


def _together(pairs: Tensor, packs: Iterable[Sequence[int]]) -> bool:
    """Whether each pair's two rows are in one pack."""
    pack_of = {row: number for number, members in enumerate(packs) for row in members}
    return all(pack_of[chosen] == pack_of[rejected] for chosen, rejected in pairs.tolist())


def _spread(now: Recipe, logps: Tensor, reference: Tensor, lengths: Tensor) -> PrecomputedPairLoss:
    logps = logps.detach().requires_grad_()
    value, statistics = pairs_loss(now, logps, reference.to(logps), lengths, len(logps))
    (slopes,) = torch.autograd.grad(value, logps)
    return PrecomputedPairLoss(
        slopes, float(value.detach()), {name: float(number) for name, number in statistics.items()}
    )


def _lengths(minibatch: MiniBatch, pairs: MiniBatchPairs) -> Tensor:
    """Tokens of each answer, ``(n, 2)``."""
    return torch.cat([minibatch.mask.sum(1)[pairs.rows].view(-1, 2), pair_lengths(pairs.fixed.pairs)])
