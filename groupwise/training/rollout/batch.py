"""The data of one step: prompts, sampled completions, rewards, and advantages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.core.filters import KeptSets
from groupwise.core.ragged import Ragged, RaggedGroups, Rows
from groupwise.core.sequences import TurnGroups, Turns
from groupwise.data import Prompt
from groupwise.grouping.grouper import GroupingResult, join_results
from groupwise.tasks.base import TaskRow
from groupwise.training.preference.group_pairs import GroupPairs

PROMPT_LISTS = ("rows", "row_numbers", "prompts")  # the lists of a batch with an entry per prompt
SAMPLE_LISTS = ("texts", "stop_reasons")  # and per sample
TOKEN_ROWS = ("ids", "sampler_logps", "versions")  # ragged, with a value per sampled token
TURN_DETAILS = "turn_details"  # the column of a rollout file with the turns of a conversation


class TurnFacts(NamedTuple):
    """The turns of a conversation."""

    tokens: tuple[int, ...]  # sampled in each
    rewards: tuple[float, ...]  # of the environment for each; 0 if it gave none
    states: tuple[int | None, ...]  # of the environment before each: a number for equal ones of a prompt, if known

    def as_json(self, advantages: Sequence[float] | None = None) -> str:
        """A table per turn, with the advantages of its tokens, if they have their own."""
        turns = [
            {"tokens": tokens, "reward": reward, "state": state} for tokens, reward, state in zip(*self, strict=True)
        ]
        if advantages is not None:
            firsts = [0, *accumulate(self.tokens)]
            turns = [{**turn, "advantage": advantages[first]} for turn, first in zip(turns, firsts, strict=False)]
        return json.dumps(turns)

    @classmethod
    def from_json(cls, text: str) -> TurnFacts:
        """The turns of `as_json`; a ValueError, TypeError or KeyError if the text is damaged."""
        turns = json.loads(text)
        return cls(*(tuple(turn[name] for turn in turns) for name in ("tokens", "reward", "state")))


@dataclass(frozen=True)
class Batch:
    """``P`` prompts with ``G`` sampled and scored completions each: ``B = P·G`` samples, prompt after prompt.

    Lists of tensors per sample become ragged rows.
    """

    rows: list[TaskRow]  # P
    row_numbers: list[int]  # P: indices into the data
    prompts: list[Prompt]  # P
    samples: int  # G
    ids: Ragged  # B, (t,) each
    texts: list[str]  # B
    stop_reasons: list[str]  # B
    sampler_logps: Ragged  # B, (t,) each: under the distribution that is trained
    versions: Ragged  # B, (t,) int32 each: of the weights that sampled each token
    kept: KeptSets | None  # one token set per sampled token, in order
    rewards: Tensor  # (B, K) float64, NaN where a function gave no reward
    dropped: Tensor  # (B,) bool: a reward failed, so the sample is ignored
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns that rewards add to the record
    filtered_probability: Tensor | None = None  # (B,) removed by the filters, summed over tokens; with ``kept``
    similarity: GroupingResult | None = None  # P: clusters of similar completions
    turns: Turns | None = None  # B: with the given tokens, if these are conversations
    turn_facts: list[TurnFacts] | None = None  # B

    def __post_init__(self) -> None:
        for name in TOKEN_ROWS:
            object.__setattr__(self, name, Ragged.of(getattr(self, name)))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> Tensor:
        return self.ids.lengths

    @cached_property
    def prompt_ids(self) -> Ragged:
        return Ragged.of([prompt.ids for prompt in self.prompts])

    @cached_property
    def teacher_ids(self) -> Ragged | None:
        """The prompts as a teacher sees them, if it is shown more."""
        if all(prompt.teacher_ids is None for prompt in self.prompts):
            return None
        return Ragged.of([prompt.teacher_ids or prompt.ids for prompt in self.prompts])

    @property
    def completions(self) -> RaggedGroups:
        """The sampled ids by prompt."""
        return self.by_prompt(torch.arange(len(self)))[1]

    def by_prompt(self, samples: Tensor) -> tuple[Tensor, RaggedGroups]:
        """The prompts of these samples, adjacent where equal, and their sampled ids; with the given ones, if any."""
        prompts, completions = RaggedGroups.by_row(self.ids.take(samples), samples // self.samples)
        if self.turns is None:
            return prompts, completions
        return prompts, TurnGroups(self.turns.take(samples), completions.sizes)

    @property
    def scored(self) -> Tensor:
        """The rewards ``(B, K)``, NaN for dropped samples."""
        return torch.where(self.dropped[:, None], torch.nan, self.rewards)

    @property
    def prompt_of(self) -> Tensor:
        """The prompt of each sample, ``(B,)``."""
        return torch.arange(len(self.prompts)).repeat_interleave(self.samples)

    def take(self, prompts: Sequence[int]) -> Batch:
        """The batch of these prompts."""
        samples = self.samples_of(prompts).tolist()
        lists: dict[str, Any] = {name: [getattr(self, name)[i] for i in prompts] for name in PROMPT_LISTS}
        lists |= {name: [getattr(self, name)[i] for i in samples] for name in SAMPLE_LISTS}
        lists |= {name: getattr(self, name).take(samples) for name in TOKEN_ROWS}
        return replace(
            self,
            **lists,
            kept=None if self.kept is None else self.kept.select(self.token_indices(samples)),
            rewards=self.rewards[samples],
            dropped=self.dropped[samples],
            extra={name: [values[i] for i in samples] for name, values in self.extra.items()},
            filtered_probability=None if self.filtered_probability is None else self.filtered_probability[samples],
            similarity=None if self.similarity is None else self.similarity.take(prompts),
            turns=None if self.turns is None else self.turns.take(samples),
            turn_facts=None if self.turn_facts is None else [self.turn_facts[i] for i in samples],
        )

    def samples_of(self, prompts: Sequence[int]) -> Tensor:
        """The numbers of these prompts' samples."""
        firsts = self.samples * torch.as_tensor(list(prompts), dtype=torch.long)
        return (firsts[:, None] + torch.arange(self.samples)).flatten()

    def token_indices(self, samples: Rows) -> Tensor:
        """The indices of these samples' tokens in the concatenation of all samples."""
        return self.ids.positions(samples)


def filtered_probability(logps: Tensor, filtered_logps: Tensor, mask: Tensor) -> Tensor:
    """The probability that the sampling filters removed, summed over the tokens of each sample, ``(B,)``."""
    left = (logps.double() - filtered_logps.double()).exp()
    return torch.where(mask, 1 - left, 0.0).clamp(min=0.0).sum(1)


def join(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches with the same number of samples per prompt."""
    lists: dict[str, Any] = {
        name: [value for batch in batches for value in getattr(batch, name)] for name in (*PROMPT_LISTS, *SAMPLE_LISTS)
    }
    lists |= {name: Ragged.join([getattr(batch, name) for batch in batches]) for name in TOKEN_ROWS}
    sets = [batch.kept for batch in batches if batch.kept is not None]
    filtered = [batch.filtered_probability for batch in batches if batch.filtered_probability is not None]
    similarity = [batch.similarity for batch in batches if batch.similarity is not None]
    turns = [batch.turns for batch in batches if batch.turns is not None]
    return replace(
        batches[0],
        **lists,
        kept=KeptSets.join(sets) if sets else None,
        rewards=torch.cat([batch.rewards for batch in batches]),
        dropped=torch.cat([batch.dropped for batch in batches]),
        extra={
            name: [value for batch in batches for value in batch.extra.get(name, [None] * len(batch))]
            for name in sorted({name for batch in batches for name in batch.extra})
        },
        filtered_probability=torch.cat(filtered) if filtered else None,
        similarity=join_results(similarity) if similarity else None,
        turns=Turns.join(turns) if turns else None,
        turn_facts=[facts for batch in batches for facts in batch.turn_facts or ()] if turns else None,
    )


def empty_batch(rewards: int) -> Batch:
    """The batch of a step without sampling; ``rewards`` is the number of reward functions."""
    nothing, rows = torch.zeros(0, dtype=torch.bool), Ragged.of([])
    return Batch([], [], [], 1, rows, [], [], rows, rows, None, torch.zeros(0, rewards, dtype=torch.float64), nothing)


@dataclass(frozen=True)
class GroupAdvantages:
    """The reward, group and advantage of each sample of a batch, and whether the sample contributes to the update."""

    rewards: Tensor  # (B,) float64: the weighted sum, NaN where nothing was scored
    groups: Tensor  # (B,) the samples of a group are compared with each other
    advantages: Tensor  # (B,)
    masked_out: dict[str, Tensor]  # (B,) bool for each reason to exclude samples from the policy loss
    equal: Tensor  # (B,) bool: in a group whose rewards are all equal
    graded: dict[str, list[bool | None]] = field(default_factory=dict)  # the task's grades, which are not rewards
    token_advantages: Ragged | None = None  # B, (t,) each: in place of ``advantages``, if turns have their own
    difficulty: Tensor | None = None  # (B,) the factors of the advantages, if they are weighted by difficulty
    pairs: GroupPairs | None = None  # preference pairs, if the step learns from them
    uses_advantages: bool = True  # whether the policy loss has a weight
    taught: bool = False  # every sample has a learning signal: a teacher's, and no other

    @property
    def allowed(self) -> Tensor:
        """Which samples no mask excludes, ``(B,)``."""
        allowed = torch.ones(len(self.rewards), dtype=torch.bool)
        for reason in self.masked_out.values():
            allowed &= ~reason
        return allowed

    @property
    def contributes(self) -> Tensor:
        """Which samples have a learning signal, ``(B,)``: an advantage that is not masked, or a place in a pair."""
        if self.taught:
            return torch.ones(len(self.rewards), dtype=torch.bool)
        nonzero = self.advantages != 0
        if self.token_advantages is not None:
            nonzero = nonzero | self.token_advantages.padded().ne(0).any(1)
        contributes = self.allowed & nonzero & self.uses_advantages
        return contributes if self.pairs is None else contributes | self.pairs.members(len(contributes))

    def skip_reasons(self) -> list[str | None]:
        """For each sample, the first reason why it does not contribute."""
        last = "no_advantage" if self.uses_advantages else "no_pair"
        reasons = {name: failed.tolist() for name, failed in {**self.masked_out, "equal_rewards": self.equal}.items()}
        return [
            None if contributes else next((name for name, failed in reasons.items() if failed[number]), last)
            for number, contributes in enumerate(self.contributes.tolist())
        ]
