"""The rollout of a step: rows to prompts, completions, clusters of similar completions, and rewards.

With train.resample_rounds, prompts whose completions have no learning signal (such as equal rewards) are replaced by
fresh prompts, for a limited number of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from groupwise.config import Recipe
from groupwise.data import DecodedCompletions, Order, Prompt, decode_completions, reward_inputs, where_of
from groupwise.data.rows import name_completion
from groupwise.errors import ConfigError
from groupwise.generate.engine import watched
from groupwise.generate.types import Generator, Rollout, Sampling, Stop
from groupwise.grouping.grouper import SimilarityGrouper
from groupwise.grouping.labels import LABELS, compute_single_member_mask, similarity_group_labels
from groupwise.rewards import RewardFunction, Scorer, Scores
from groupwise.tasks.base import TaskRow
from groupwise.text import Say, plural
from groupwise.training.display.base import Display
from groupwise.training.errors import retry_with_less_memory
from groupwise.training.rollout.advantages import OVERLONG, add_overlong_penalty
from groupwise.training.rollout.batch import Batch, GroupAdvantages, join
from groupwise.training.seeds import derive_seed

Timer = Callable[[str], AbstractContextManager[None]]


@dataclass
class RolloutResult:
    """A batch and what it cost."""

    batch: Batch
    tokens: int = 0  # sampled, in all rounds
    prompts: int = 0  # sampled, in all rounds
    rounds: int = 0  # of resampling
    replaced: int = 0  # prompts without a learning signal that were replaced
    failures: list[str] = field(default_factory=list)  # rewards that failed and were dropped
    metrics: dict[str, float] = field(default_factory=dict)  # logged by rewards
    skipped: int = 0  # completions that were not scored, because they are alone in their cluster
    left_out: list[Batch] = field(default_factory=list)  # prompts that were sampled but are not in the batch


class RolloutCollector:
    """Draws rows in their order, samples completions and scores them."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Any,
        rows: Sequence[TaskRow],
        prompts: Sequence[Prompt],
        scorer: Scorer | None,
        order: Order,
        compute_advantages: Callable[[Batch, Recipe], GroupAdvantages],
        *,
        prompt_column: str,
        seed: int,
        stop: Stop | None = None,
        overlong: bool = False,
        grouper: SimilarityGrouper | None = None,
        say: Say = lambda text: None,
        display: Display | None = None,
    ) -> None:
        self.generator, self.tokenizer, self.scorer, self.order = generator, tokenizer, scorer, order
        self.rows, self.prompts, self.compute_advantages = rows, prompts, compute_advantages
        self.prompt_column, self.seed, self.stop, self.overlong, self.say = prompt_column, seed, stop, overlong, say
        self.grouper, self.display = grouper, display or Display()

    @property
    def names(self) -> list[str]:
        """The names of the rewards, the overlong penalty included."""
        return [function.name for function in self._functions] + ([OVERLONG] if self.overlong else [])

    @property
    def weights(self) -> list[float]:
        return [function.weight for function in self._functions] + ([1.0] if self.overlong else [])

    @property
    def _functions(self) -> tuple[RewardFunction, ...]:
        return () if self.scorer is None else self.scorer.functions

    def collect(self, step: int, step_recipe: Recipe, trainer_state: Any, timer: Timer) -> RolloutResult:
        """The batch of a step: batch_size × accumulation prompts. ``trainer_state`` is passed on to the rewards."""
        train = step_recipe.train
        result = self._round(step, 0, train.prompts_per_step, step_recipe, trainer_state, timer)
        for number in range(1, train.resample_rounds + 1):
            no_signal = self._prompts_without_signal(result.batch, step_recipe)
            if not no_signal:
                break
            fresh = self._round(step, number, len(no_signal), step_recipe, trainer_state, timer)
            useless = self._prompts_without_signal(fresh.batch, step_recipe)
            useful = [prompt for prompt in range(len(fresh.batch.prompts)) if prompt not in useless]
            replaced = no_signal[: len(useful)]
            kept = [prompt for prompt in range(len(result.batch.prompts)) if prompt not in replaced]
            left_out = [(result.batch, replaced), (fresh.batch, useless)]
            result = RolloutResult(
                batch=join([result.batch.take(kept), fresh.batch.take(useful)]) if useful else result.batch,
                tokens=result.tokens + fresh.tokens,
                prompts=result.prompts + fresh.prompts,
                rounds=number,
                replaced=result.replaced + len(useful),
                failures=result.failures + fresh.failures,
                metrics=_pool_metrics(result, fresh),
                skipped=result.skipped + fresh.skipped,
                left_out=result.left_out + [batch.take(prompts) for batch, prompts in left_out if prompts],
            )
        return result

    def _round(
        self, step: int, number: int, prompt_count: int, step_recipe: Recipe, trainer_state: Any, timer: Timer
    ) -> RolloutResult:
        rows = self.order.take(prompt_count)
        prompts = [self.prompts[row] for row in rows]
        settings, samples = step_recipe.sampling, step_recipe.sampling.samples_per_prompt
        sampling = Sampling(
            max_new_tokens=settings.max_new_tokens,
            min_new_tokens=settings.min_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k or None,
            top_p=settings.top_p,
            min_p=settings.min_p or None,
            order=settings.order,
            seed=derive_seed("sampling", self.seed, step, number),
            keep_sets=step_recipe.masks.keep_sampling_mask,
        )
        activity = "sampling" if not number else f"sampling other prompts, round {number}"
        self.display.stage(activity)

        def progress(done: float, total: int, tokens: int) -> None:
            detail = plural(tokens, "token")
            self.display.progress(activity, done, total, "completions", estimated=False, detail=detail)

        with timer("generate"), watched(self.generator, progress):
            rollout = self._generate(prompts, samples, sampling)
            completions = decode_completions(self.tokenizer, rollout.ids, rollout.lengths)
        similarity, labels, skipped = None, {}, [False] * len(completions.ids)
        if self.grouper is not None:
            self.display.stage("clustering similar completions")
            with timer("group"):
                texts = completions.texts
                similarity = self.grouper.group([texts[i : i + samples] for i in range(0, len(texts), samples)])
            uids = [f"{step + 1}.{number}.{place}" for place in range(len(prompts))]
            labels = {LABELS: similarity_group_labels(uids, similarity.labels)}
            if step_recipe.grouping.skip_single_members and step_recipe.advantages.grouping == "similarity":
                skipped = compute_single_member_mask(labels[LABELS]).tolist()
        self.display.stage("scoring")
        with timer("reward"):
            scores = self._score(rows, completions, skipped, step_recipe, trainer_state)
        logps = rollout.filtered_logps if rollout.kept is not None else rollout.logps
        batch = Batch(
            rows=[self.rows[row] for row in rows],
            row_numbers=rows,
            prompts=prompts,
            samples=samples,
            ids=list(torch.split(rollout.ids[rollout.mask], completions.lengths)),
            texts=completions.texts,
            stop_reasons=list(rollout.stop_reasons),
            sampler_logps=list(torch.split(logps[rollout.mask], completions.lengths)),
            versions=list(torch.split(rollout.versions[rollout.mask], completions.lengths)),
            kept=rollout.kept,
            rewards=scores.rewards,
            dropped=scores.dropped,
            extra={**scores.extra, **labels},
            filtered_probability=_filtered_probability(rollout) if rollout.kept is not None else None,
            similarity=similarity,
        )
        return RolloutResult(
            batch,
            tokens=sum(completions.lengths),
            prompts=len(prompts),
            failures=[f"{failure.function}: {failure.reason}" for failure in scores.failures],
            metrics=dict(scores.metrics),
            skipped=sum(skipped),
        )

    def _generate(self, prompts: list[Prompt], samples: int, sampling: Sampling) -> Rollout:
        """Sample; if memory runs out, with half as many completions at once, which does not change them."""
        generator = self.generator

        def shrink() -> None:
            generator.max_num_seqs //= 2
            generator.release()
            torch.cuda.empty_cache()
            self.say(
                f"memory ran out while sampling: repeated with {plural(generator.max_num_seqs, 'completion')} at once"
            )

        return retry_with_less_memory(
            lambda: generator.generate([prompt.ids for prompt in prompts], samples, sampling, stop=self.stop),
            can_shrink=lambda: generator.max_num_seqs > samples,
            shrink=shrink,
        )

    def _score(
        self,
        rows: list[int],
        completions: DecodedCompletions,
        skipped: list[bool],
        step_recipe: Recipe,
        trainer_state: Any,
    ) -> Scores:
        """The rewards of all completions; skipped ones get none."""
        if self.scorer is None:
            raise ConfigError("completions were sampled, but there is no reward to score them with; add [[rewards]]")
        samples = step_recipe.sampling.samples_per_prompt
        scored = [place for place, skip in enumerate(skipped) if not skip]
        numbers = [rows[place // samples] for place in scored]
        data = [self.rows[number] for number in numbers]
        scores = self.scorer.score(
            *reward_inputs(data, [completions.texts[place] for place in scored], self.prompt_column),
            completion_ids=[completions.ids[place] for place in scored],
            trainer_state=trainer_state,
            places=[
                name_completion(where_of(row, number), place % samples, samples)
                for row, number, place in zip(data, numbers, scored, strict=True)
            ],
        )
        if self.overlong:
            lengths = [completions.lengths[place] for place in scored]
            scores = replace(scores, rewards=add_overlong_penalty(scores.rewards, lengths, step_recipe))
        rewards = torch.full((len(skipped), scores.rewards.shape[1]), torch.nan, dtype=torch.float64)
        rewards[scored] = scores.rewards
        dropped = torch.zeros(len(skipped), dtype=torch.bool)
        dropped[scored] = scores.dropped
        by_place = {name: dict(zip(scored, values, strict=True)) for name, values in scores.extra.items()}
        extra = {name: [values.get(place) for place in range(len(skipped))] for name, values in by_place.items()}
        return replace(scores, rewards=rewards, dropped=dropped, extra=extra)

    def _prompts_without_signal(self, batch: Batch, step_recipe: Recipe) -> list[int]:
        """The prompts without a sample that contributes."""
        contributes = self.compute_advantages(batch, step_recipe).contributes.view(-1, batch.samples).any(1)
        return (~contributes).nonzero().flatten().tolist()


def _filtered_probability(rollout: Rollout) -> Tensor:
    """The probability that the sampling filters removed, summed over the tokens of each completion, ``(B,)``."""
    left = (rollout.logps.double() - rollout.filtered_logps.double()).exp()
    return torch.where(rollout.mask, 1 - left, 0.0).clamp(min=0.0).sum(1)


def _pool_metrics(result: RolloutResult, fresh: RolloutResult) -> dict[str, float]:
    """The metrics logged by rewards in all rounds: means weighted by each round's number of prompts."""
    pooled = {**result.metrics, **fresh.metrics}
    for name in result.metrics.keys() & fresh.metrics.keys():
        total = result.metrics[name] * result.prompts + fresh.metrics[name] * fresh.prompts
        pooled[name] = total / (result.prompts + fresh.prompts)
    return pooled
