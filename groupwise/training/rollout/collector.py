"""The rollout of a step: rows to prompts, completions, clusters of similar completions, and rewards.

With train.resample_rounds, prompts whose completions have no learning signal (such as equal rewards) are replaced by
fresh prompts, for a limited number of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, overload

import torch

from groupwise.config import Recipe
from groupwise.core.ragged import Ragged
from groupwise.data import Order, Prompt, decode_completions, reward_inputs, where_of
from groupwise.data.rows import name_completion
from groupwise.generate.engine import watched
from groupwise.generate.types import Generator, Rollout, Sampling, Stop
from groupwise.grouping.grouper import SimilarityGrouper
from groupwise.grouping.labels import LABELS, compute_single_member_mask, similarity_group_labels
from groupwise.rewards import RewardFunction, Scorer, weighted_total
from groupwise.rewards.contract import no_scores
from groupwise.seeds import derive_seed
from groupwise.tasks.base import TaskRow
from groupwise.text import Say, plural
from groupwise.training.display.base import Display
from groupwise.training.errors import retry_with_less_memory
from groupwise.training.rollout.batch import Batch, GroupAdvantages, filtered_probability, join
from groupwise.training.rollout.episodes import ConversationFacts, ConversationSampler
from groupwise.training.rollout.penalties import penalty_columns

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
    queue: dict[str, float] = field(default_factory=dict)  # metrics of asynchronous rollouts


@dataclass(frozen=True)
class Draw:
    """Rows that are sampled together, and the step and settings that they are sampled with.

    Their random numbers belong to (seed, step, number) and to each row's place in the draw.
    """

    step: int  # finished steps when they were drawn
    number: int  # among the draws of that step
    rows: list[int]
    recipe: Recipe
    trainer_state: Any

    @property
    def samples(self) -> int:
        return self.recipe.sampling.samples_per_prompt


@dataclass(frozen=True)
class CompletionNames(Sequence[str]):
    """The names of completions in errors, made when one is asked for."""

    rows: Sequence[TaskRow]  # of each completion
    row_numbers: Sequence[int]  # of each prompt
    places: Sequence[int]  # of each completion in the batch
    samples: int  # per prompt

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        prompt, sample = divmod(self.places[number], self.samples)
        return name_completion(where_of(self.rows[number], self.row_numbers[prompt]), sample, self.samples)


class RolloutCollector:
    """Draws rows in their order, samples completions and scores them."""

    asynchronous = False

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
        penalties: Sequence[str] = (),
        grouper: SimilarityGrouper | None = None,
        conversations: ConversationSampler | None = None,
        say: Say = lambda text: None,
        display: Display | None = None,
    ) -> None:
        self.generator, self.tokenizer, self.scorer, self.order = generator, tokenizer, scorer, order
        self.rows, self.prompts, self.compute_advantages = rows, prompts, compute_advantages
        self.prompt_column, self.seed, self.stop, self.penalties, self.say = prompt_column, seed, stop, penalties, say
        self.grouper, self.conversations, self.display = grouper, conversations, display or Display()

    @property
    def names(self) -> list[str]:
        """The names of the rewards, penalties on length included."""
        return [*(function.name for function in self._functions), *self.penalties]

    @property
    def weights(self) -> list[float]:
        return [*(function.weight for function in self._functions), *(1.0 for _ in self.penalties)]

    @property
    def reward_weights(self) -> dict[str, float]:
        return dict(zip(self.names, self.weights, strict=True))

    @property
    def _functions(self) -> tuple[RewardFunction, ...]:
        return () if self.scorer is None else self.scorer.functions

    def close(self) -> None:
        """End the environments, if there are any."""
        if self.conversations is not None:
            self.conversations.close()

    def undo_point(self) -> Callable[[], None]:
        """A function that returns to this moment between two steps, after a step that could not be finished."""
        before = self.order.state()
        return lambda: self.order.load_state(before)

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
                metrics=pool_metrics(result.metrics, result.prompts, fresh.metrics, fresh.prompts),
                skipped=result.skipped + fresh.skipped,
                left_out=result.left_out + [batch.take(prompts) for batch, prompts in left_out if prompts],
            )
        return result

    def _round(
        self, step: int, number: int, prompt_count: int, step_recipe: Recipe, trainer_state: Any, timer: Timer
    ) -> RolloutResult:
        draw = Draw(step, number, self.order.take(prompt_count), step_recipe, trainer_state)
        if self.conversations is not None:
            return self._converse(self.conversations, draw, timer)
        batch = self._sample(draw, timer)
        self.display.stage("scoring")
        with timer("reward"):
            return self._score(batch, draw)

    def _converse(self, conversations: ConversationSampler, draw: Draw, timer: Timer) -> RolloutResult:
        """The conversations of these rows with their environments, with rewards."""
        activity = "sampling" if not draw.number else f"sampling other prompts, round {draw.number}"
        self.display.stage(activity)
        with timer("generate"):
            sampled = conversations.sample(
                self.generator,
                [self.rows[row] for row in draw.rows],
                draw.rows,
                [self.prompts[row] for row in draw.rows],
                draw.samples,
                self._sampling(draw),
                self._generate_ids,
                partial(self._show_progress, activity, "conversations"),
            )
        self.display.stage("scoring")
        with timer("reward"):
            result = self._score(sampled.batch, draw, facts=sampled.facts)
        result.metrics |= sampled.metrics
        result.failures += [f"environment: {failure}" for failure in sampled.failures]
        return result

    def _show_progress(self, activity: str, unit: str, done: float, total: int, tokens: int) -> None:
        self.display.progress(activity, done, total, unit, estimated=False, detail=plural(tokens, "token"))

    def _sample(self, draw: Draw, timer: Timer) -> Batch:
        """The completions of these rows, without rewards."""
        activity = "sampling" if not draw.number else f"sampling other prompts, round {draw.number}"
        self.display.stage(activity)

        progress = partial(self._show_progress, activity, "completions")
        prompts, samples = [self.prompts[row] for row in draw.rows], draw.samples
        with timer("generate"), watched(self.generator, progress):
            rollout = self._generate(prompts, samples, self._sampling(draw))
            batch = self._unscored(draw.rows, samples, rollout)
        if self.grouper is not None:
            self.display.stage("clustering similar completions")
            with timer("group"):
                batch = self._cluster(batch, draw)
        return batch

    def _sampling(self, draw: Draw) -> Sampling:
        settings = draw.recipe.sampling
        return Sampling(
            max_new_tokens=settings.max_new_tokens,
            min_new_tokens=settings.min_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k or None,
            top_p=settings.top_p,
            min_p=settings.min_p or None,
            repetition_penalty=settings.repetition_penalty,
            order=settings.order,
            seed=derive_seed("sampling", self.seed, draw.step, draw.number),
            keep_sets=draw.recipe.masks.keep_sampling_mask,
        )

    def _unscored(self, rows: Sequence[int], samples: int, rollout: Rollout) -> Batch:
        completions = decode_completions(self.tokenizer, rollout.ids, rollout.lengths)
        logps = rollout.filtered_logps if rollout.kept is not None else rollout.logps
        return Batch(
            rows=[self.rows[row] for row in rows],
            row_numbers=list(rows),
            prompts=[self.prompts[row] for row in rows],
            samples=samples,
            ids=Ragged.from_padded(rollout.ids, rollout.lengths),
            texts=completions.texts,
            stop_reasons=list(rollout.stop_reasons),
            sampler_logps=Ragged.from_padded(logps, rollout.lengths),
            versions=Ragged.from_padded(rollout.versions, rollout.lengths),
            kept=rollout.kept,
            rewards=torch.zeros(len(completions.ids), 0, dtype=torch.float64),
            dropped=torch.zeros(len(completions.ids), dtype=torch.bool),
            filtered_probability=None
            if rollout.kept is None
            else filtered_probability(rollout.logps, rollout.filtered_logps, rollout.mask),
        )

    def _cluster(self, batch: Batch, draw: Draw, first: int = 0) -> Batch:
        """The batch with clusters of similar completions; its prompts are those of the draw from ``first`` on."""
        if self.grouper is None:
            return batch
        texts, samples = batch.texts, batch.samples
        similarity = self.grouper.group([texts[i : i + samples] for i in range(0, len(texts), samples)])
        uids = [f"{draw.step + 1}.{draw.number}.{first + place}" for place in range(len(batch.prompts))]
        labels = similarity_group_labels(uids, similarity.labels)
        x, y = similarity.positions.flatten(0, 1).unbind(-1)
        extra = {"map_x": x.tolist(), "map_y": y.tolist(), LABELS: labels}  # sorted, as `join` has them
        return replace(batch, extra=extra, similarity=similarity)

    def _generate(self, prompts: list[Prompt], samples: int, sampling: Sampling) -> Rollout:
        return self._generate_ids(self.generator, [prompt.ids for prompt in prompts], samples, sampling)

    def _generate_ids(
        self,
        generator: Generator,
        prompts: Sequence[Sequence[int]],
        samples: int | Sequence[int],
        sampling: Sampling,
        keys: Sequence[int] | None = None,
    ) -> Rollout:
        """Sample; if memory runs out, with half as many completions at once, which does not change them."""
        most = samples if isinstance(samples, int) else max(samples)
        options: dict[str, Any] = {"stop": self.stop} if keys is None else {"stop": self.stop, "keys": keys}

        def shrink() -> None:
            generator.max_num_seqs //= 2
            generator.release()
            torch.cuda.empty_cache()
            self.say(
                f"memory ran out while sampling: repeated with {plural(generator.max_num_seqs, 'completion')} at once"
            )

        return retry_with_less_memory(
            lambda: generator.generate(prompts, samples, sampling, **options),
            can_shrink=lambda: generator.max_num_seqs > most,
            shrink=shrink,
        )

    def _score(
        self,
        batch: Batch,
        draw: Draw,
        scorer: Scorer | None = None,
        facts: Sequence[ConversationFacts] | None = None,
    ) -> RolloutResult:
        """The batch with rewards; completions that are alone in their cluster get none if the recipe says so.

        ``facts``: what rewards get of each completion, if these are conversations.
        """
        scorer = scorer or self.scorer
        samples, grouping = batch.samples, draw.recipe.advantages.grouping
        skipped = [False] * len(batch)
        if self.grouper is not None and draw.recipe.grouping.skip_single_members and grouping == "similarity":
            skipped = compute_single_member_mask(batch.extra[LABELS]).tolist()
        scored = [place for place, skip in enumerate(skipped) if not skip]
        data = [batch.rows[place // samples] for place in scored]
        reward_rows, conversations, ids = data, None, batch.ids.take(scored).tolist()
        if facts is not None:
            reward_rows = [{**row, **facts[place].columns} for row, place in zip(data, scored, strict=True)]
            conversations = [facts[place].messages for place in scored]
            ids = [facts[place].ids for place in scored]
        # Without a scorer the run learns from a teacher alone.
        scores = (
            no_scores(len(scored))
            if scorer is None
            else scorer.score(
                *reward_inputs(
                    reward_rows, [batch.texts[place] for place in scored], self.prompt_column, conversations
                ),
                completion_ids=ids,
                trainer_state=draw.trainer_state,
                places=CompletionNames(data, batch.row_numbers, scored, samples),
            )
        )
        if self.penalties:
            weights = [] if scorer is None else [function.weight for function in scorer.functions]
            total = weighted_total(scores.rewards, weights)
            total = torch.where(scores.dropped, torch.nan, total)
            lengths, prompts = batch.lengths[scored].tolist(), [place // samples for place in scored]
            columns = penalty_columns(
                self.penalties, total, lengths, prompts, draw.recipe, conversations=batch.turns is not None
            )
            scores = replace(scores, rewards=torch.cat([scores.rewards, columns], dim=1))
        rewards = torch.full((len(skipped), scores.rewards.shape[1]), torch.nan, dtype=torch.float64)
        rewards[scored] = scores.rewards
        dropped = torch.zeros(len(skipped), dtype=torch.bool)
        dropped[scored] = scores.dropped
        by_place = {name: dict(zip(scored, values, strict=True)) for name, values in scores.extra.items()}
        extra = {name: [values.get(place) for place in range(len(skipped))] for name, values in by_place.items()}
        return RolloutResult(
            replace(batch, rewards=rewards, dropped=dropped, extra={**extra, **batch.extra}),
            tokens=int(batch.lengths.sum()),
            prompts=len(batch.prompts),
            failures=[f"{failure.function}: {failure.reason}" for failure in scores.failures],
            metrics=dict(scores.metrics),
            skipped=sum(skipped),
        )

    def _prompts_without_signal(self, batch: Batch, step_recipe: Recipe) -> list[int]:
        """The prompts without a sample that contributes."""
        contributes = self.compute_advantages(batch, step_recipe).contributes.view(-1, batch.samples).any(1)
        return (~contributes).nonzero().flatten().tolist()


def pool_metrics(one: dict[str, float], prompts: int, other: dict[str, float], more: int) -> dict[str, float]:
    """The metrics that rewards logged for some prompts and for some more: means weighted by their numbers."""
    pooled = {**one, **other}
    for name in one.keys() & other.keys():
        pooled[name] = (one[name] * prompts + other[name] * more) / (prompts + more)
    return pooled
