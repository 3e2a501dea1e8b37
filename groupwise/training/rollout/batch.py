"""What one step works on: prompts, their sampled answers, the rewards, and who contributes what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from groupwise.core.filters import KeptSets
from groupwise.data import Prompt
from groupwise.grouping.grouper import Grouped, join_grouped
from groupwise.tasks.base import Row
from groupwise.training.preference.group_pairs import GroupPairs


@dataclass(frozen=True)
class Batch:
    """``P`` prompts with ``G`` sampled and scored answers each; the ``B = P·G`` samples stand prompt after prompt."""

    rows: list[Row]  # P
    row_numbers: list[int]  # P: which rows of the data
    prompts: list[Prompt]  # P
    samples: int  # G
    ids: list[Tensor]  # B, (t,) each
    texts: list[str]  # B
    stop_reasons: list[str]  # B
    sampler_logps: list[Tensor]  # B, (t,) each: under the distribution that training computes
    kept: KeptSets | None  # one set per token of every answer, in order
    rewards: Tensor  # (B, K) float64, NaN where a function has nothing to say
    dropped: Tensor  # (B,) bool: a reward failed, and the sample counts nowhere
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns that rewards want recorded
    cut_away: Tensor | None = None  # (B,) probability that the filters took, summed over tokens; known with kept sets
    similarity: Grouped | None = None  # P: which answers are alike, where that was looked at

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def lengths(self) -> Tensor:
        return torch.tensor([ids.shape[0] for ids in self.ids])

    @property
    def scored(self) -> Tensor:
        """The rewards ``(B, K)`` that count: none of a sample that was dropped."""
        return torch.where(self.dropped[:, None], torch.nan, self.rewards)

    @property
    def prompt_of(self) -> Tensor:
        """The prompt of each sample, ``(B,)``."""
        return torch.arange(len(self.prompts)).repeat_interleave(self.samples)

    def take(self, prompts: Sequence[int]) -> Batch:
        """The batch of these prompts alone."""
        chosen = [prompt * self.samples + sample for prompt in prompts for sample in range(self.samples)]
        return Batch(
            rows=[self.rows[i] for i in prompts],
            row_numbers=[self.row_numbers[i] for i in prompts],
            prompts=[self.prompts[i] for i in prompts],
            samples=self.samples,
            ids=[self.ids[i] for i in chosen],
            texts=[self.texts[i] for i in chosen],
            stop_reasons=[self.stop_reasons[i] for i in chosen],
            sampler_logps=[self.sampler_logps[i] for i in chosen],
            kept=None if self.kept is None else self.kept.select(self.places(chosen)),
            rewards=self.rewards[chosen],
            dropped=self.dropped[chosen],
            extra={name: [values[i] for i in chosen] for name, values in self.extra.items()},
            cut_away=None if self.cut_away is None else self.cut_away[chosen],
            similarity=None if self.similarity is None else self.similarity.take(prompts),
        )

    def places(self, samples: Sequence[int]) -> Tensor:
        """Where the tokens of these samples stand among those of all samples, one after another."""
        ends = self.lengths.cumsum(0).tolist()
        components = [torch.arange(ends[i] - len(self.ids[i]), ends[i]) for i in samples]
        return torch.cat(components) if components else torch.zeros(0, dtype=torch.long)


def join(batches: Sequence[Batch]) -> Batch:
    """Several batches as one; all have the same number of samples per prompt."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    sets = [batch.kept for batch in batches if batch.kept is not None]
    cut_away = [batch.cut_away for batch in batches if batch.cut_away is not None]
    similarity = [batch.similarity for batch in batches if batch.similarity is not None]
    names = {name for batch in batches for name in batch.extra}
    return Batch(
        rows=[row for batch in batches for row in batch.rows],
        row_numbers=[number for batch in batches for number in batch.row_numbers],
        prompts=[prompt for batch in batches for prompt in batch.prompts],
        samples=first.samples,
        ids=[ids for batch in batches for ids in batch.ids],
        texts=[text for batch in batches for text in batch.texts],
        stop_reasons=[reason for batch in batches for reason in batch.stop_reasons],
        sampler_logps=[logps for batch in batches for logps in batch.sampler_logps],
        kept=_join_sets(sets) if sets else None,
        rewards=torch.cat([batch.rewards for batch in batches]),
        dropped=torch.cat([batch.dropped for batch in batches]),
        extra={
            name: [value for batch in batches for value in batch.extra.get(name, [None] * len(batch))]
            for name in sorted(names)
        },
        cut_away=torch.cat(cut_away) if cut_away else None,
        similarity=join_grouped(similarity) if similarity else None,
    )


def _join_sets(sets: Sequence[KeptSets]) -> KeptSets:
    offsets, end = [torch.zeros(1, dtype=torch.int64)], 0
    for part in sets:
        offsets.append(part.offsets[1:].cpu() + end)
        end += int(part.offsets[-1])
    return KeptSets(torch.cat([part.ids.cpu() for part in sets]), torch.cat(offsets))


def empty_batch(rewards: int) -> Batch:
    """The batch of a step that samples nothing; ``rewards`` is the number of reward functions."""
    nothing = torch.zeros(0, dtype=torch.bool)
    return Batch([], [], [], 1, [], [], [], [], None, torch.zeros(0, rewards, dtype=torch.float64), nothing)


@dataclass(frozen=True)
class GroupAdvantages:
    """How the samples of a batch compare: the reward of each, its group, its advantage, and whether it may teach."""

    rewards: Tensor  # (B,) float64: the weighted sum, NaN where nothing was scored
    groups: Tensor  # (B,) who is compared with whom
    advantages: Tensor  # (B,)
    masked_out: dict[str, Tensor]  # why a sample may not teach: (B,) bool each
    equal: Tensor  # (B,) bool: in a group whose rewards are all equal
    graded: dict[str, list[bool | None]] = field(default_factory=dict)  # what the task's grades say; it does not teach
    difficulty: Tensor | None = None  # (B,) what the advantages were multiplied by, if anything
    pairs: GroupPairs | None = None  # which answer is preferred to which, where that is learned from
    by_advantage: bool = True  # whether advantages teach: the policy's loss has a weight

    @property
    def allowed(self) -> Tensor:
        """Which samples no mask silences, ``(B,)``."""
        found = torch.ones(len(self.rewards), dtype=torch.bool)
        for reason in self.masked_out.values():
            found &= ~reason
        return found

    @property
    def contributes(self) -> Tensor:
        """Which samples have something to teach, ``(B,)``: a nonzero advantage that no mask silences, or a pair."""
        found = self.allowed & (self.advantages != 0)
        if not self.by_advantage:
            found = torch.zeros_like(found)
        return found if self.pairs is None else found | self.pairs.members(len(found))

    def skip_reasons(self) -> list[str | None]:
        """For each sample, the first reason why it does not teach."""
        last = "no_advantage" if self.by_advantage else "no_pair"
        reasons = {name: failed.tolist() for name, failed in {**self.masked_out, "equal_rewards": self.equal}.items()}
        return [
            None if contributes else next((name for name, failed in reasons.items() if failed[number]), last)
            for number, contributes in enumerate(self.contributes.tolist())
        ]
