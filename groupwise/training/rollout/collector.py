"""Sampling for a step: rows to prompts, prompts to answers, answers to clusters of similar ones and to rewards.

A batch may be refilled: where none of a prompt's answers contributes, as when all have the same reward, a fresh prompt is
sampled in its place, for a limited number of rounds; what the extra rounds cost and brought is counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.data import Order, Prompt, columns_of, completion_for_reward
from groupwise.errors import ConfigError
from groupwise.generate.types import Generator, Rollout, Sampling, Stop
from groupwise.grouping.grouper import Grouper
from groupwise.grouping.labels import LABELS, compute_single_member_mask, similarity_group_labels
from groupwise.rewards import RewardFunction, Scorer, Scores
from groupwise.tasks.base import Row
from groupwise.training.rollout.advantages import OVERLONG, with_overlong_penalty
from groupwise.training.rollout.batch import Batch, GroupAdvantages, join

Timer = Callable[[str], AbstractContextManager[None]]


@dataclass
class RolloutResult:
    """A batch and what it took."""

    batch: Batch
    tokens: int = 0  # sampled, in all rounds
    prompts: int = 0  # sampled, in all rounds
    rounds: int = 0  # of refilling
    replaced: int = 0  # prompts that taught nothing and gave way to others
    failures: list[str] = field(default_factory=list)  # rewards that failed and were dropped
    metrics: dict[str, float] = field(default_factory=dict)  # what rewards wanted logged
    skipped: int = 0  # answers whose rewards were not computed, because nobody is like them
    left_out: list[Batch] = field(default_factory=list)  # prompts that were sampled and gave way, or came for nothing


class DecodedCompletions(NamedTuple):
    """RolloutResult answers, prompt after prompt."""

    ids: list[list[int]]
    texts: list[str]
    lengths: list[int]  # in tokens


class RolloutCollector:
    """Draws rows in their order and samples answers to them."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Any,
        rows: Sequence[Row],
        prompts: Sequence[Prompt],
        scorer: Scorer | None,
        order: Order,
        compare: Callable[[Batch, Recipe], GroupAdvantages],
        *,
        prompt_column: str,
        seed: int,
        stop: Stop | None = None,
        overlong: bool = False,
        grouper: Grouper | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.generator, self.tokenizer, self.scorer, self.order = generator, tokenizer, scorer, order
        self.rows, self.prompts, self.compare = rows, prompts, compare
        self.prompt_column, self.seed, self.stop, self.overlong, self.say = prompt_column, seed, stop, overlong, say
        self.grouper = grouper

    @property
    def names(self) -> list[str]:
        """The reward functions' names, the soft penalty's among them."""
        return [function.name for function in self._functions] + ([OVERLONG] if self.overlong else [])

    @property
    def weights(self) -> list[float]:
        return [function.weight for function in self._functions] + ([1.0] if self.overlong else [])

    @property
    def _functions(self) -> tuple[RewardFunction, ...]:
        return () if self.scorer is None else self.scorer.functions

    def sample(self, step: int, now: Recipe, state: Any, timer: Timer) -> RolloutResult:
        """The batch of a step: batch_size × accumulation prompts, refilled where that is asked for."""
        wanted = now.train.batch_size * now.train.accumulation
        found = self._round(step, 0, wanted, now, state, timer)
        for number in range(1, now.train.resample_rounds + 1):
            dull = self._dull_prompts(found.batch, now)
            if not dull:
                break
            fresh = self._round(step, number, len(dull), now, state, timer)
            no_better = set(self._dull_prompts(fresh.batch, now))
            better = [prompt for prompt in range(len(fresh.batch.prompts)) if prompt not in no_better]
            gone = set(dull[: len(better)])
            kept = [prompt for prompt in range(len(found.batch.prompts)) if prompt not in gone]
            left_out = [
                own.take(sorted(prompts)) for own, prompts in ((found.batch, gone), (fresh.batch, no_better)) if prompts
            ]
            found = RolloutResult(
                batch=join([found.batch.take(kept), fresh.batch.take(better)]) if better else found.batch,
                tokens=found.tokens + fresh.tokens,
                prompts=found.prompts + fresh.prompts,
                rounds=number,
                replaced=found.replaced + len(better),
                failures=found.failures + fresh.failures,
                metrics=_pooled(found, fresh),
                skipped=found.skipped + fresh.skipped,
                left_out=[*found.left_out, *left_out],
            )
        return found

    def _round(self, step: int, number: int, wanted: int, now: Recipe, state: Any, timer: Timer) -> RolloutResult:
        rows = self.order.take(wanted)
        prompts = [self.prompts[row] for row in rows]
        how = now.sampling
        sampling = Sampling(
            max_new_tokens=how.max_new_tokens,
            min_new_tokens=how.min_new_tokens,
            temperature=how.temperature,
            top_k=how.top_k or None,
            top_p=how.top_p,
            min_p=how.min_p or None,
            seed=derive_seed(self.seed, step, number),
            keep_sets=now.masks.keep_sampling_mask,
        )
        with timer("generate"):
            rollout = self._generate(prompts, how.samples_per_prompt, sampling)
            answers = self._answers(rollout)
        similarity, labels, skipped = None, {}, [False] * len(answers.ids)
        if self.grouper is not None:
            with timer("group"):
                similarity = self.grouper.group(_per_prompt(answers.texts, how.samples_per_prompt))
            uids = [f"{step + 1}.{number}.{place}" for place in range(len(prompts))]
            labels = {LABELS: similarity_group_labels(uids, similarity.labels)}
            if now.grouping.skip_single_members and now.advantages.grouping == "similarity":
                skipped = compute_single_member_mask(labels[LABELS]).tolist()
        with timer("reward"):
            scores = self._scores(rows, answers, skipped, now, state)
        logps = rollout.filtered_logps if rollout.kept is not None else rollout.logps
        batch = Batch(
            rows=[self.rows[row] for row in rows],
            row_numbers=rows,
            prompts=prompts,
            samples=how.samples_per_prompt,
            ids=list(torch.split(rollout.ids[rollout.mask], answers.lengths)),
            texts=answers.texts,
            stop_reasons=list(rollout.stop_reasons),
            sampler_logps=list(torch.split(logps[rollout.mask], answers.lengths)),
            kept=rollout.kept,
            rewards=scores.rewards,
            dropped=scores.dropped,
            extra={**{name: list(values) for name, values in scores.extra.items()}, **labels},
            cut_away=_cut_away(rollout) if rollout.kept is not None else None,
            similarity=similarity,
        )
        return RolloutResult(
            batch,
            tokens=sum(answers.lengths),
            prompts=len(prompts),
            failures=[f"{failure.function}: {failure.reason}" for failure in scores.failures],
            metrics=dict(scores.metrics),
            skipped=sum(skipped),
        )

    def _generate(self, prompts: list[Prompt], samples: int, sampling: Sampling) -> Rollout:
        """Sample; where memory runs out, with half as many answers at once. Each answer's chance stays the same."""
        while True:
            try:
                return self.generator.generate([prompt.ids for prompt in prompts], samples, sampling, stop=self.stop)
            except torch.OutOfMemoryError:
                rows = getattr(self.generator, "max_num_seqs", 1)
                if rows <= samples:
                    raise
                self.generator.max_num_seqs = rows // 2  # type: ignore[attr-defined]
                self.generator.release()  # type: ignore[attr-defined]
                torch.cuda.empty_cache()
                self.say(f"memory ran out while sampling: done again with {rows // 2} answers at once")

    def _answers(self, rollout: Rollout) -> DecodedCompletions:
        lengths = rollout.lengths.tolist()
        ids = [row[:length] for row, length in zip(rollout.ids.tolist(), lengths, strict=True)]
        return DecodedCompletions(ids, self.tokenizer.batch_decode(ids, skip_special_tokens=True), lengths)

    def _scores(
        self, rows: list[int], answers: DecodedCompletions, skipped: list[bool], now: Recipe, state: Any
    ) -> Scores:
        """The rewards of all answers, but for those that are skipped: these are as if no function had scored them."""
        if self.scorer is None:
            raise ConfigError("answers were sampled, but there is no reward to score them with; add [[rewards]]")
        count = now.sampling.samples_per_prompt
        asked = [place for place, skip in enumerate(skipped) if not skip]
        data = [self.rows[rows[place // count]] for place in asked]
        prompts = [row[self.prompt_column] for row in data]
        scores = self.scorer.score(
            prompts,
            [completion_for_reward(prompt, answers.texts[place]) for prompt, place in zip(prompts, asked, strict=True)],
            columns_of(data, without=self.prompt_column),
            completion_ids=[answers.ids[place] for place in asked],
            trainer_state=state,
        )
        if self.overlong:
            lengths = [answers.lengths[place] for place in asked]
            scores = replace(scores, rewards=with_overlong_penalty(scores.rewards, lengths, now))
        return scores if len(asked) == len(skipped) else _among(scores, asked, len(skipped))

    def _dull_prompts(self, batch: Batch, now: Recipe) -> list[int]:
        """The prompts of whose samples none contributes."""
        contributes = self.compare(batch, now).contributes.view(-1, batch.samples).any(1)
        return [prompt for prompt, some in enumerate(contributes.tolist()) if not some]


def _per_prompt(texts: Sequence[str], samples: int) -> list[list[str]]:
    return [list(texts[start : start + samples]) for start in range(0, len(texts), samples)]


def _among(scores: Scores, asked: Sequence[int], number: int) -> Scores:
    """The scores of the answers that functions were asked about, among all: the others are not scored."""
    rewards = torch.full((number, scores.rewards.shape[1]), torch.nan, dtype=torch.float64)
    rewards[asked] = scores.rewards
    dropped = torch.zeros(number, dtype=torch.bool)
    dropped[asked] = scores.dropped
    extra: dict[str, list[Any]] = {}
    for name, values in scores.extra.items():
        known = dict(zip(asked, values, strict=True))
        extra[name] = [known.get(place) for place in range(number)]
    return replace(scores, rewards=rewards, dropped=dropped, extra=extra)


def _cut_away(rollout: Rollout) -> Tensor:
    """The probability that the filters took from each token, summed over an answer, ``(B,)``."""
    left = (rollout.logps.double() - rollout.filtered_logps.double()).exp()
    return torch.where(rollout.mask, 1 - left, 0.0).clamp(min=0.0).sum(1)


def _pooled(found: RolloutResult, fresh: RolloutResult) -> dict[str, float]:
    """What rewards wanted logged in all rounds: means, in which each round weighs as much as it had prompts."""
    pooled = {**found.metrics, **fresh.metrics}
    for name in found.metrics.keys() & fresh.metrics.keys():
        total = found.metrics[name] * found.prompts + fresh.metrics[name] * fresh.prompts
        pooled[name] = total / (found.prompts + fresh.prompts)
    return pooled


def derive_seed(*numbers: int) -> int:
    """One seed from several numbers, the same on every machine."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big")
