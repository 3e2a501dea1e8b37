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
from groupwise.train.batch import Batch, Comparison
from groupwise.train.objective import Totals


class Answers(NamedTuple):
    """What log-probs are computed of: prompts, the answers to each, and the sets that sampling had left."""

    prompts: list[tuple[int, ...]]
    completions: list[list[Tensor]]
    kept: KeptSets | None


@dataclass
class Work:
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

    def __len__(self) -> int:
        return len(self.samples)

    def answers_of(self, chosen: Tensor) -> Answers:
        """The answers of some samples, ``(n,)`` bool, with their prompts."""
        rows, numbers = chosen.tolist(), iter(range(len(self)))
        groups = [[ids for ids in members if rows[next(numbers)]] for members in self.completions]
        kept = self.kept
        if kept is not None:
            kept = kept.select((chosen[:, None] & self.mask)[self.mask].nonzero().squeeze(1))
        prompts = [prompt for prompt, members in zip(self.prompts, groups, strict=True) if members]
        return Answers(prompts, [members for members in groups if members], kept)


def plan_work(batch: Batch, comparison: Comparison, prompts: Sequence[int], now: Recipe) -> Work:
    """What a mini-batch of these prompts needs computed: what teaches, or everything where a term asks for it."""
    members = [prompt * batch.samples + sample for prompt in prompts for sample in range(batch.samples)]
    everything = bool(now.loss.kl_coef or now.loss.entropy_coef) or not now.train.skip_equal
    if now.loss.denominator == "policy_mask" and now.masks.off_policy == "document":
        everything = True  # this mask may silence any sample, and so be felt in the denominator
    teaches, allowed = comparison.teaches.tolist(), comparison.allowed.tolist()
    chosen = [i for i in members if everything or teaches[i]]
    by_prompt: dict[int, list[int]] = {}
    for sample in chosen:
        by_prompt.setdefault(sample // batch.samples, []).append(sample)
    divided_by = members
    if now.loss.denominator == "policy_mask":
        divided_by = [i for i in members if allowed[i]]
    lengths = batch.lengths
    mask = _mask(lengths[chosen])
    return Work(
        samples=chosen,
        prompts=[batch.prompts[prompt].ids for prompt in by_prompt],
        completions=[[batch.ids[i] for i in own] for own in by_prompt.values()],
        kept=None if batch.kept is None else batch.kept.select(batch.places(chosen)),
        advantages=comparison.advantages[chosen],
        allowed=comparison.allowed[chosen],
        sampler_logps=_padded([batch.sampler_logps[i] for i in chosen], mask),
        mask=mask,
        totals=Totals(
            tokens=int(lengths[members].sum()),
            sequences=len(members),
            policy_tokens=int(lengths[divided_by].sum()),
            policy_sequences=len(divided_by),
            computed_tokens=int(mask.sum()),
            computed_sequences=len(chosen),
        ),
    )


def longest(work: Work | Answers) -> int:
    """Tokens of the longest sample, its prompt included."""
    return max(
        len(prompt) + max(ids.shape[0] for ids in members)
        for prompt, members in zip(work.prompts, work.completions, strict=True)
    )


def _mask(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]


def _padded(rows: Sequence[Tensor], mask: Tensor) -> Tensor:
    return in_rows(torch.cat(list(rows)), mask) if rows else torch.zeros(mask.shape)
