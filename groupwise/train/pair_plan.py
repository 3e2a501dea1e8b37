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
from groupwise.model.logprobs import samples_together
from groupwise.model.prepared import Prepared
from groupwise.train.objective import PairSlopes, WholePairs, pairs_loss
from groupwise.train.pair_logps import pair_lengths
from groupwise.train.work import Work, WorkPairs


@dataclass(frozen=True)
class Spread:
    """A loss that is known before the packs are computed: how much it grows with each answer's log-prob."""

    slopes: Tensor  # (n, 2)
    value: float
    statistics: dict[str, float] = field(default_factory=dict)

    def part(self, pairs: slice, *, tells: bool) -> Spread:
        """Some of the pairs; only one part tells what the loss comes to."""
        return Spread(self.slopes[pairs], self.value, self.statistics) if tells else Spread(self.slopes[pairs], 0.0)


@dataclass(frozen=True)
class PairRows:
    """Pairs by the rows of their answers among what is computed; ``spread``: as much of the loss as is known."""

    rows: Tensor  # (n, 2), the chosen first
    reference: Tensor  # (n, 2)
    spread: Spread | None = None

    def part(self, computed: Tensor) -> WholePairs | PairSlopes | None:
        """What a pack of these rows ``(b,)`` has to do with the pairs."""
        place = {row: at for at, row in enumerate(computed.tolist())}
        own = [(number, pair) for number, pair in enumerate(self.rows.tolist()) if place.keys() & set(pair)]
        if not own:
            return None
        if self.spread is None:
            numbers = [number for number, _ in own]
            chosen, rejected = (torch.tensor([place[pair[side]] for _, pair in own]) for side in (0, 1))
            return WholePairs(chosen, rejected, self.reference[numbers])
        slopes = self.spread.slopes.new_zeros(len(computed))
        for number, pair in own:
            for side, row in enumerate(pair):
                if row in place:
                    slopes[place[row]] += self.spread.slopes[number, side]
        if self.rows[0, 0].item() in place:  # the pack of the first pair's better answer tells of the whole
            return PairSlopes(slopes, self.spread.value, self.spread.statistics)
        return PairSlopes(slopes)


@dataclass(frozen=True)
class PairPlan:
    """The pairs of an update: those among the samples, and those of a data set; None where there are none."""

    sampled: PairRows | None
    fixed: PairRows | None


def plan_pairs(
    prepared: Prepared, work: Work, now: Recipe, token_budget: int, sums: Callable[[], Tensor]
) -> PairPlan | None:
    """The plan for a mini-batch. ``sums`` gives the policy's summed log-probs ``(n, 2)`` of its pairs, where needed."""
    pairs = work.pairs
    if pairs is None:
        return None
    reference = pairs.reference
    if reference is None:
        raise InputError("pairs are learned from relative to a reference, whose log-probs are not known here")
    sampled, fixed = pairs.rows, torch.arange(2 * len(pairs.fixed.pairs)).view(-1, 2)
    answers = pairs.fixed_answers
    whole = (
        not BATCH_KINDS.intersection(now.preference.kinds)
        and _together(sampled, samples_together(prepared, work.prompts, work.completions, token_budget))
        and _together(fixed, samples_together(prepared, answers.prompts, answers.completions, token_budget))
    )
    spread = None if whole else _spread(now, sums(), reference, _lengths(work, pairs))
    cut = len(sampled)
    return PairPlan(
        PairRows(sampled, reference[:cut], spread and spread.part(slice(cut), tells=True)) if cut else None,
        PairRows(fixed, reference[cut:], spread and spread.part(slice(cut, None), tells=not cut))
        if len(fixed)
        else None,
    )


def _together(pairs: Tensor, packs: Iterable[Sequence[int]]) -> bool:
    """Whether each pair's two rows are in one pack."""
    pack_of = {row: number for number, members in enumerate(packs) for row in members}
    return all(pack_of[chosen] == pack_of[rejected] for chosen, rejected in pairs.tolist())


def _spread(now: Recipe, logps: Tensor, reference: Tensor, lengths: Tensor) -> Spread:
    logps = logps.detach().requires_grad_()
    value, statistics = pairs_loss(now, logps, reference.to(logps), lengths, len(logps))
    (slopes,) = torch.autograd.grad(value, logps)
    return Spread(slopes, float(value.detach()), {name: float(number) for name, number in statistics.items()})


def _lengths(work: Work, pairs: WorkPairs) -> Tensor:
    """Tokens of each answer, ``(n, 2)``."""
    return torch.cat([work.mask.sum(1)[pairs.rows].view(-1, 2), pair_lengths(pairs.fixed.pairs)])
